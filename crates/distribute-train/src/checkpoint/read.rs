//! Reading a checkpoint; every file is compared with the manifest.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::disk::{Disk, Entry, Folder};
use super::folder::{read_manifest, unless_damaged};
use super::manifest::{MANIFEST, Manifest};
use super::snapshot::{Snapshot, tensors_of};
use crate::{Error, Result};

pub(super) const STATE: &str = "state.json";
const TENSORS: &str = ".safetensors";

/// Reads the checkpoint in a folder.
///
/// # Errors
/// [`Error::Damaged`] if it is not whole, [`Error::Format`] for another version, [`Error::File`] if it cannot be read
/// for other reasons.
pub(super) fn read(disk: &Disk, path: &Path) -> Result<Snapshot> {
    Ok(retried(disk, path, |folder| read_in(disk, folder, path))?.0)
}

/// Looks at a checkpoint by `look`, again if another one has taken its place meanwhile; returns its folder too.
pub(super) fn retried<T>(disk: &Disk, path: &Path, look: impl Fn(&Folder) -> Result<T>) -> Result<(T, Folder)> {
    let open = |path: &Path| match disk.open_folder(path) {
        Ok(folder) => Ok(folder),
        Err(error) => {
            let problem = unless_damaged(path, error)?;
            Err(damaged(path, MANIFEST, problem))
        }
    };
    let mut folder = open(path)?;
    for _ in 0..LOOKS {
        let error = match look(&folder) {
            Err(error @ Error::Damaged { .. }) => error,
            outcome => return outcome.map(|found| (found, folder)),
        };
        // A checkpoint of the same step may have replaced it meanwhile, so that the first one's files are gone.
        match open(path) {
            Ok(now) if folder.is_another(&now) => folder = now,
            _ => return Err(error),
        }
    }
    look(&folder).map(|found| (found, folder))
}

/// How often a checkpoint is read again while others replace it.
const LOOKS: usize = 8;

/// Returns the error of a damaged file of a checkpoint.
pub(super) fn damaged(path: &Path, file: &str, problem: String) -> Error {
    Error::Damaged { path: path.join(file), problem }
}

/// Returns the error of a file that cannot be read: damaged, or to be read at another time.
pub(super) fn unreadable(path: &Path, file: &str, error: std::io::Error) -> Error {
    unless_damaged(&path.join(file), error).map_or_else(|error| error, |problem| damaged(path, file, problem))
}

/// Returns the error of a file of another length than that of the manifest.
pub(super) fn of_another_length(path: &Path, file: &str, length: u64, entry: &Entry) -> Error {
    damaged(path, file, format!("it has {length} bytes, and was written with {}", entry.bytes))
}

/// Returns the state in the file of it.
pub(super) fn state_of(text: &[u8]) -> Result<BTreeMap<String, Value>, String> {
    let mut value: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let state = value.get_mut("state").map(Value::take).unwrap_or_default();
    serde_json::from_value(state).map_err(|error| error.to_string())
}

fn read_in(disk: &Disk, folder: &Folder, path: &Path) -> Result<Snapshot> {
    let manifest: Manifest = read_manifest(disk, folder, path)?;
    let mut snapshot = Snapshot { run: Some(manifest.run), ..Snapshot::new(manifest.step) };
    for (name, entry) in &manifest.files {
        let wrong = |error| unreadable(path, name, error);
        // Checked before memory is allocated for it.
        match disk.length(folder, path, name).map_err(wrong)? {
            found if found != entry.bytes => return Err(of_another_length(path, name, found, entry)),
            _ => {}
        }
        let bytes = disk.read(folder, path, name, entry.bytes).map_err(wrong)?;
        if bytes.len() as u64 != entry.bytes {
            return Err(of_another_length(path, name, bytes.len() as u64, entry));
        }
        if crc32c::crc32c(&bytes) != entry.crc32c {
            return Err(damaged(path, name, "its checksum is not the one that was written".to_owned()));
        }
        if name == STATE {
            snapshot.state = state_of(&bytes).map_err(|problem| damaged(path, name, problem))?;
        } else if let Some(file) = group_of(name) {
            let tensors = tensors_of(&bytes).map_err(|problem| damaged(path, name, problem))?;
            snapshot.files.entry(file.to_owned()).or_default().extend(tensors);
        }
    }
    Ok(snapshot)
}

/// Returns the group that a tensor file is a shard of: `model` for `model-00001-of-00003.safetensors`.
pub(super) fn group_of(name: &str) -> Option<&str> {
    let stem = name.strip_suffix(TENSORS)?;
    let number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let file = stem
        .rsplit_once("-of-")
        .filter(|(_, count)| number(count))
        .and_then(|(rest, _)| rest.rsplit_once('-'))
        .filter(|(_, index)| number(index));
    Some(file.map_or(stem, |(file, _)| file))
}

#[cfg(test)]
mod tests {
    use super::group_of;

    #[test]
    fn parts_are_told_by_their_whole_ending() {
        assert_eq!(group_of("model.safetensors"), Some("model"));
        assert_eq!(group_of("model-00001-of-00003.safetensors"), Some("model"));
        assert_eq!(group_of("expert-01.safetensors"), Some("expert-01"));
        assert_eq!(group_of("expert-01-00001-of-00002.safetensors"), Some("expert-01"));
        assert_eq!(group_of("state.json"), None);
    }
}

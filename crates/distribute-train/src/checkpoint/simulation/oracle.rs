//! The contents of a folder, by a look at all bytes: a restored checkpoint is compared with them.

use std::path::{Path, PathBuf};

use super::super::manifest::{MANIFEST, Manifest};
use super::super::run::RunId;
use super::super::stored::Stored;
use super::super::{MODEL, Snapshot};
use super::volume::Volume;
use distribute_device::DType;

/// A checkpoint of a folder that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Whole {
    pub(super) run: RunId,
    pub(super) sequence: u64,
    pub(super) step: u64,
    /// The number that it was saved with, from which all bytes follow.
    pub(super) number: u64,
}

/// The checkpoints of a folder.
#[derive(Clone, Debug, Default)]
pub(super) struct Contents {
    /// The newest first.
    pub(super) whole: Vec<Whole>,
    /// The number of folders with the names of checkpoints.
    pub(super) folders: usize,
    /// Names of what is incomplete, or was moved out of the way.
    pub(super) temporary: Vec<String>,
}

impl Contents {
    pub(super) fn of(volume: &Volume, root: &Path) -> Contents {
        let mut contents = Contents::default();
        let names = volume.find(root).and_then(|id| volume.names(id)).unwrap_or_default();
        for name in names.iter().filter_map(|name| name.to_str()) {
            if name.contains(".tmp-") {
                contents.temporary.push(name.to_owned());
                continue;
            }
            let Some(rest) = name.strip_prefix("step-") else { continue };
            if let Some((digits, _)) = rest.split_once(".old-") {
                contents.temporary.push(name.to_owned());
                if volume.find(&root.join(format!("step-{digits}"))).is_ok() {
                    continue;
                }
            }
            contents.folders += 1;
            contents.whole.extend(whole(volume, &root.join(name)));
        }
        contents.whole.sort_by_key(|whole| std::cmp::Reverse((whole.sequence, whole.step)));
        contents
    }

    pub(super) fn of_run(&self, run: RunId) -> impl Iterator<Item = &Whole> {
        self.whole.iter().filter(move |whole| whole.run == run)
    }
}

fn read(volume: &Volume, path: &Path) -> Option<Vec<u8>> {
    volume.find(path).ok().and_then(|id| volume.bytes(id)).map(<[u8]>::to_vec)
}

/// Returns the checkpoint in a folder, if every file is as its manifest says.
fn whole(volume: &Volume, path: &Path) -> Option<Whole> {
    let manifest = Manifest::from_text(&read(volume, &path.join(MANIFEST))?).ok()?;
    for (name, entry) in &manifest.files {
        let bytes = read(volume, &path.join(name))?;
        if bytes.len() as u64 != entry.bytes || crc32c::crc32c(&bytes) != entry.crc32c {
            return None;
        }
    }
    let state: serde_json::Value = serde_json::from_slice(&read(volume, &path.join("state.json"))?).ok()?;
    let number = state["state"]["program"].as_u64()?;
    let named = path.file_name()?.to_str()?.strip_prefix("step-")?.get(..8)?.parse() == Ok(manifest.step);
    named.then_some(Whole { run: manifest.run, sequence: manifest.sequence, step: manifest.step, number })
}

/// Returns all files in the folders of checkpoints.
pub(super) fn files(volume: &Volume, root: &Path) -> Vec<PathBuf> {
    let names = |path: &Path| volume.find(path).and_then(|id| volume.names(id)).unwrap_or_default();
    let is_checkpoint = |name: &std::ffi::OsString| {
        name.to_str().is_some_and(|name| name.starts_with("step-") && !name.contains(".tmp-"))
    };
    let folders = names(root).into_iter().filter(is_checkpoint).map(|name| root.join(name));
    folders.flat_map(|folder| names(&folder).into_iter().map(move |name| folder.join(name))).collect()
}

/// Returns the tensors of a checkpoint, which follow from its number.
pub(super) fn tensors(number: u64, bytes: usize) -> [(&'static str, Stored); 2] {
    let stored = |bytes: usize, salt: u64| {
        let byte = |place: usize| (number.wrapping_mul(31).wrapping_add(salt) as usize + place / 7) as u8;
        Stored { dtype: DType::U8, shape: vec![bytes], bytes: (0..bytes).map(byte).collect() }
    };
    [("a", stored(bytes, 1)), ("b", stored(40, 2))]
}

/// Returns how a restored checkpoint differs from what was saved with its number.
pub(super) fn differs(snapshot: &Snapshot, number: u64, bytes: usize) -> Option<String> {
    if snapshot.names(MODEL) != ["a", "b"] {
        return Some(format!("it has the tensors {:?}", snapshot.names(MODEL)));
    }
    tensors(number, bytes).iter().find_map(|(name, stored)| {
        let found = snapshot.tensor(MODEL, name).map(|(_, _, bytes)| bytes);
        (found != Some(&stored.bytes[..])).then(|| format!("tensor {name} has other bytes than were saved"))
    })
}

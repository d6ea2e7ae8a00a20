//! Reading a checkpoint; every file is compared with the manifest.

use std::path::Path;

use super::disk::{Disk, Folder};
use super::folder::read_manifest;
use super::manifest::Manifest;
use super::names::{STATE, group_of};
use super::open::{damaged, of_another_length, retried, state_of, unreadable};
use super::origin::Origin;
use super::snapshot::Snapshot;
use super::stored::tensors_of;
use crate::Result;

/// Reads the checkpoint in a folder.
///
/// # Errors
/// [`Error::Damaged`](crate::Error::Damaged) if it is not whole, [`Error::Format`](crate::Error::Format) for
/// another version, [`Error::File`](crate::Error::File) if it cannot be read for other reasons.
pub(super) fn read(disk: &Disk, path: &Path) -> Result<Snapshot> {
    Ok(retried(disk, path, |folder| read_in(disk, folder, path))?.0)
}

fn read_in(disk: &Disk, folder: &Folder, path: &Path) -> Result<Snapshot> {
    let manifest: Manifest = read_manifest(disk, folder, path)?;
    let origin = Some(Origin::of(path, &manifest));
    let mut snapshot = Snapshot { run: Some(manifest.run), origin, ..Snapshot::new(manifest.step) };
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

//! Writing a checkpoint: to a temporary folder, synced, and then moved into place atomically.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::draft::Draft;
use super::folder::{self, Retention};
use super::manifest::is_plain_name;
use super::read::group_of;
use super::run::RunId;
use super::snapshot::{Snapshot, Stored};
use super::tensor_file::Described;
use crate::warning::warn;
use crate::{Error, Result};

/// How a checkpoint is written.
#[derive(Clone, Debug)]
pub(super) struct SaveOptions {
    pub(super) max_shard_bytes: usize,
    pub(super) run: RunId,
    /// Whether it is to be removed at the end of the training.
    pub(super) backup: bool,
    pub(super) stays: bool,
}

/// Writes a snapshot into a folder that its run has claimed, records it as the newest, and removes old ones.
pub(super) fn save(
    disk: &Disk,
    root: &Path,
    snapshot: &Snapshot,
    options: &SaveOptions,
    keep: &Retention,
) -> Result<PathBuf> {
    snapshot.files.keys().try_for_each(|file| check_group(file))?;
    ensure_folder(disk, root, options)?;
    let outcome = write(disk, root, snapshot, options);
    let outcome = match outcome {
        // The folder was removed between two operations.
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound && !disk.exists(root)? => {
            ensure_folder(disk, root, options)?;
            write(disk, root, snapshot, options)
        }
        outcome => outcome,
    };
    let path = outcome?;
    folder::prune(disk, root, keep)?;
    Ok(path)
}

/// Checks that a group of tensors can have this name.
pub(super) fn check_group(group: &str) -> Result<()> {
    let name = format!("{group}.safetensors");
    match is_plain_name(&name) && !group.is_empty() && group_of(&name) == Some(group) {
        true => Ok(()),
        false => Err(Error::FileName { name: group.to_owned() }),
    }
}

/// Creates the folder again if it has been removed, but not its parent: if that is gone too, a disk has most likely
/// been unmounted, and files written in its place would be hidden by the next mount.
pub(super) fn ensure_folder(disk: &Disk, root: &Path, options: &SaveOptions) -> Result<()> {
    if disk.exists(root)? {
        return Ok(());
    }
    let create = || if disk.is_store(root) { Ok(()) } else { disk.create_folder(root) };
    create().map_err(|error| match error {
        Error::File { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            Error::FolderGone { folder: root.to_owned() }
        }
        other => other,
    })?;
    folder::claim(disk, root, Some(options.run), false)?;
    let words =
        "has been removed while the training that saves into it continues; it is made again with the newest checkpoint";
    warn(&format!("the folder {} {words}", root.display()));
    Ok(())
}

fn write(disk: &Disk, root: &Path, snapshot: &Snapshot, options: &SaveOptions) -> Result<PathBuf> {
    Draft::begin(disk, root, snapshot.step, options)?.filled(|draft| {
        for (file, tensors) in &snapshot.files {
            write_tensors(draft, file, tensors, options.max_shard_bytes)?;
        }
        Ok(snapshot.state.clone())
    })
}

fn write_tensors(
    draft: &mut Draft<'_>,
    file: &str,
    tensors: &BTreeMap<String, Stored>,
    max_shard_bytes: usize,
) -> Result<()> {
    let mut shards: Vec<Vec<(Described<'_>, &[u8])>> = vec![Vec::new()];
    let mut bytes = 0;
    for (name, stored) in tensors {
        if bytes > 0 && bytes + stored.bytes.len() > max_shard_bytes {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += stored.bytes.len();
        if let Some(shard) = shards.last_mut() {
            shard.push((stored.described(name), &stored.bytes[..]));
        }
    }
    let count = shards.len();
    let mut files = BTreeMap::new();
    for (index, shard) in (1..).zip(shards) {
        let name = file_name(file, index, count);
        draft.write_tensors(&name, &shard)?;
        files.extend(shard.iter().map(|(described, _)| (described.name.to_owned(), name.clone())));
    }
    if count > 1 {
        let total = tensors.values().map(|stored| stored.bytes.len()).sum();
        draft.write_index(file, &files, total)?;
    }
    Ok(())
}

/// Returns the name of one of a group's files, which are counted from 1.
pub(super) fn file_name(group: &str, index: usize, count: usize) -> String {
    match count {
        1 => format!("{group}.safetensors"),
        _ => format!("{group}-{index:05}-of-{count:05}.safetensors"),
    }
}

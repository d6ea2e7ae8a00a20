//! Writing a checkpoint that is in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::draft::{Draft, SaveOptions, ensure_folder};
use super::folder::{self, Retention};
use super::names::{check_group, file_name};
use super::snapshot::Snapshot;
use super::stored::Stored;
use super::tensor_file::Described;
use crate::{Error, Result};

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

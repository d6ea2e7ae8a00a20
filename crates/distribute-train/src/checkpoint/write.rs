//! Writing a checkpoint: to a temporary folder, synced, and then moved into place atomically.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::disk::{Disk, Entry};
use super::folder::{self, LATEST, Retention};
use super::manifest::{FORMAT, MANIFEST, Manifest, is_plain_name};
use super::read::{STATE, group_of};
use super::run::RunId;
use super::snapshot::{Snapshot, Stored};
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
    for file in snapshot.files.keys() {
        let name = format!("{file}.safetensors");
        if !is_plain_name(&name) || file.is_empty() || group_of(&name) != Some(file) {
            return Err(Error::FileName { name: file.clone() });
        }
    }
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

/// Creates the folder again if it has been removed, but not its parent: if that is gone too, a disk has most likely
/// been unmounted, and files written in its place would be hidden by the next mount.
fn ensure_folder(disk: &Disk, root: &Path, options: &SaveOptions) -> Result<()> {
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
    let found = folder::list(disk, root)?;
    if let Some(other) = found.iter().filter_map(|found| found.run()).find(|run| *run != options.run) {
        let steps =
            format!("step {}", found.iter().find(|found| found.run() == Some(other)).map_or(0, |found| found.step));
        let other = format!("run {other}");
        return Err(Error::OtherRun { folder: root.to_owned(), other, steps, run: options.run });
    }
    let path = folder::path_of(root, snapshot.step);
    // It takes the place of one of the same step, and inherits whether that one is to be kept.
    let before = found.iter().filter(|found| found.is_whole() && found.step == snapshot.step);
    let before = before.filter_map(|found| found.manifest.as_ref()).next();
    let newest = found.iter().filter_map(|found| found.identity()).map(|(_, sequence)| sequence).max();
    let mut manifest = Manifest {
        format: FORMAT,
        run: options.run,
        sequence: newest.map_or(1, |newest| newest.saturating_add(1)),
        step: snapshot.step,
        backup: options.backup && before.is_none_or(|before| before.backup),
        stays: options.stays || before.is_some_and(|before| before.stays),
        files: BTreeMap::new(),
        crc32c: 0,
    };
    let is_store = disk.is_store(root);
    // In a store, where nothing is renamed, it has its name from the start, and the manifest makes it a checkpoint.
    let place = if is_store { folder::take(disk, &path)? } else { folder::temporary(&path) };
    let outcome = (|| {
        if !is_store {
            disk.create_folder(&place)?;
        }
        for (file, tensors) in &snapshot.files {
            write_tensors(disk, &place, file, tensors, options.max_shard_bytes, &mut manifest.files)?;
        }
        let state = json!({ "step": snapshot.step, "state": snapshot.state });
        manifest.files.insert(STATE.to_owned(), write_json(disk, &place.join(STATE), &state)?);
        let text = manifest.to_text().map_err(|source| Error::State { key: MANIFEST.to_owned(), source })?;
        if is_store {
            folder::check_writer(disk, root)?;
            return disk.create(&place.join(MANIFEST), &text);
        }
        disk.write(&place.join(MANIFEST), &text)?;
        disk.sync_folder(&place)?;
        publish(disk, root, &place, &path)
    })();
    if outcome.is_err() {
        drop(disk.remove_folder(&place));
    }
    outcome?;
    let path = if is_store { place } else { path };
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    folder::replace(disk, root, LATEST, &name)?;
    if is_store {
        folder::remove_others(disk, &found, &path, snapshot.step);
    }
    Ok(path)
}

/// Moves the written checkpoint into place. One of the same step is removed only when the new one is in place; at every
/// moment one of the two is whole, under its name or where [`folder::clear`] finds it.
fn publish(disk: &Disk, root: &Path, temporary: &Path, path: &Path) -> Result<()> {
    if !disk.exists(path)? {
        disk.rename(temporary, path)?;
        return disk.sync_folder(root);
    }
    if disk.exchange(temporary, path)? {
        disk.sync_folder(root)?;
        return disk.remove_folder(temporary);
    }
    let old = folder::old(path);
    disk.rename(path, &old)?;
    if let Err(error) = disk.rename(temporary, path) {
        drop(disk.rename(&old, path));
        return Err(error);
    }
    disk.sync_folder(root)?;
    disk.remove_folder(&old)
}

fn write_tensors(
    disk: &Disk,
    folder: &Path,
    file: &str,
    tensors: &BTreeMap<String, Stored>,
    max_shard_bytes: usize,
    files: &mut BTreeMap<String, Entry>,
) -> Result<()> {
    let mut shards: Vec<Vec<(&String, &Stored)>> = vec![Vec::new()];
    let mut bytes = 0;
    for (name, stored) in tensors {
        if bytes > 0 && bytes + stored.bytes.len() > max_shard_bytes {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += stored.bytes.len();
        if let Some(shard) = shards.last_mut() {
            shard.push((name, stored));
        }
    }
    let count = shards.len();
    let mut map = BTreeMap::new();
    for (index, shard) in (1..).zip(shards) {
        let name = match count {
            1 => format!("{file}.safetensors"),
            _ => format!("{file}-{index:05}-of-{count:05}.safetensors"),
        };
        map.extend(shard.iter().map(|(tensor, _)| ((*tensor).clone(), name.clone())));
        let path = folder.join(&name);
        let text = safetensors::serialize(shard, None);
        let text = text.map_err(|error| Error::Damaged { path: path.clone(), problem: error.to_string() })?;
        files.insert(name, disk.write(&path, &text)?);
    }
    if count > 1 {
        let total: usize = tensors.values().map(|stored| stored.bytes.len()).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        let name = format!("{file}.safetensors.index.json");
        files.insert(name.clone(), write_json(disk, &folder.join(name), &index)?);
    }
    Ok(())
}

fn write_json(disk: &Disk, path: &Path, value: &Value) -> Result<Entry> {
    let mut text =
        serde_json::to_vec_pretty(value).map_err(|source| Error::State { key: "state".to_owned(), source })?;
    text.push(b'\n');
    disk.write(path, &text)
}

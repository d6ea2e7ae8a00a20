//! A checkpoint that is being written: to a temporary folder, synced, and then moved into place atomically.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::disk::{Disk, Entry, Writing};
use super::folder::{self, Found, LATEST};
use super::manifest::{FORMAT, MANIFEST, Manifest};
use super::names::STATE;
use super::run::RunId;
use super::tensor_file::{self, Described};
use crate::warning::warn;
use crate::{Error, Result};

/// A checkpoint without a manifest, in a temporary folder; in a store, where nothing is renamed, under its name.
#[derive(Debug)]
pub(super) struct Draft<'a> {
    disk: &'a Disk,
    root: &'a Path,
    /// The name that it gets.
    path: PathBuf,
    /// Where it is written.
    place: PathBuf,
    is_store: bool,
    /// The folder's checkpoints.
    found: Vec<Found>,
    manifest: Manifest,
}

/// How a checkpoint is written.
#[derive(Clone, Debug)]
pub(super) struct SaveOptions {
    pub(super) max_shard_bytes: usize,
    pub(super) run: RunId,
    /// Whether it is to be removed at the end of the training.
    pub(super) backup: bool,
    /// Whether one checkpoint for every interval is kept for good.
    pub(super) keep_every: Option<Interval>,
}

/// The interval of which one checkpoint is kept for good.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval {
    pub(super) length: Duration,
    /// When the first one began, if no earlier checkpoint has the time.
    pub(super) begun: SystemTime,
    /// The time of the save.
    pub(super) now: SystemTime,
}

impl Interval {
    /// Returns whether a checkpoint is kept for good, and the beginning of the interval that is open after it. `since`
    /// is that of the newest checkpoint, in milliseconds since 1970.
    pub(super) fn next(&self, since: Option<u64>) -> (bool, u64) {
        let now = millis(self.now);
        // A clock that was set back begins a new interval.
        let since = since.unwrap_or_else(|| millis(self.begun)).min(now);
        let is_over = u128::from(now - since) >= self.length.as_millis();
        (is_over, if is_over { now } else { since })
    }
}

impl<'a> Draft<'a> {
    /// Chooses the checkpoint's place in a folder that its run has claimed.
    pub(super) fn begin(disk: &'a Disk, root: &'a Path, step: u64, options: &SaveOptions) -> Result<Draft<'a>> {
        folder::clear_own(disk, root);
        let found = folder::list(disk, root)?;
        if let Some(other) = found.iter().filter_map(|found| found.run()).find(|run| *run != options.run) {
            let steps =
                format!("step {}", found.iter().find(|found| found.run() == Some(other)).map_or(0, |found| found.step));
            let other = format!("run {other}");
            return Err(Error::OtherRun { folder: root.to_owned(), other, steps, run: options.run });
        }
        let path = folder::path_of(root, step);
        // It takes the place of one of the same step, and inherits whether that one is to be kept.
        let before = found.iter().filter(|found| found.is_whole() && found.step == step);
        let before = before.filter_map(|found| found.manifest.as_ref()).next();
        let newest = found.iter().filter_map(|found| found.identity()).map(|(_, sequence)| sequence).max().unwrap_or(0);
        // One whose manifest cannot be read now may have a higher number, and be readable again later.
        let is_known = found.iter().all(|found| found.identity().is_some());
        let least = if is_known { 0 } else { beyond_all() };
        // Written checkpoints have the time, so that neither a restart nor a failed save loses an interval.
        let since = || found.iter().find_map(|found| found.manifest.as_ref()?.kept_since);
        let interval = options.keep_every.map(|interval| interval.next(since()));
        let manifest = Manifest {
            format: FORMAT,
            run: options.run,
            sequence: newest.saturating_add(1).max(least),
            step,
            backup: options.backup && before.is_none_or(|before| before.backup),
            stays: interval.is_some_and(|(stays, _)| stays) || before.is_some_and(|before| before.stays),
            // Also one that a manager without intervals writes has it: the others may be removed.
            kept_since: interval.map(|(_, since)| since).or_else(since),
            files: BTreeMap::new(),
            crc32c: 0,
        };
        let is_store = disk.is_store(root);
        // In a store, where nothing is renamed, it has its name from the start, and the manifest makes it a checkpoint.
        let place = if is_store { folder::take(disk, &path)? } else { folder::temporary(&path) };
        Ok(Draft { disk, root, path, place, is_store, found, manifest })
    }

    /// Writes its files by `fill`, which returns the program's state, and publishes it; removes everything if that
    /// fails. Returns where the checkpoint is.
    pub(super) fn filled(
        mut self,
        fill: impl FnOnce(&mut Draft<'a>) -> Result<BTreeMap<String, Value>>,
    ) -> Result<PathBuf> {
        let outcome = self.fill(fill);
        if outcome.is_err() {
            // It may be the one that was to be replaced.
            drop(folder::discard(self.disk, self.root, &self.place));
        }
        outcome?;
        let path = if self.is_store { self.place } else { self.path };
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        folder::replace(self.disk, self.root, LATEST, &name)?;
        if self.is_store {
            folder::remove_others(self.disk, &self.found, &path, self.manifest.step);
        }
        Ok(path)
    }

    /// Writes a file of tensors, given with their bytes.
    pub(super) fn write_tensors(&mut self, name: &str, tensors: &[(Described<'_>, &[u8])]) -> Result<()> {
        let path = self.place.join(name);
        let described: Vec<Described<'_>> = tensors.iter().map(|(described, _)| *described).collect();
        let (header, order) =
            tensor_file::header(&described).map_err(|problem| Error::Damaged { path: path.clone(), problem })?;
        let bytes = order.into_iter().map(|index| tensors[index].1);
        let pieces: Vec<&[u8]> = std::iter::once(&header[..]).chain(bytes).collect();
        let entry = self.disk.write_pieces(&path, &pieces)?;
        self.add(name, entry);
        Ok(())
    }

    /// Begins a file whose bytes come in pieces; [`Draft::add`] adds it to the checkpoint.
    pub(super) fn begin_file(&self, name: &str) -> Result<Writing<'a>> {
        self.disk.begin_file(&self.place.join(name))
    }

    /// Adds a file that was written.
    pub(super) fn add(&mut self, name: &str, entry: Entry) {
        self.manifest.files.insert(name.to_owned(), entry);
    }

    /// Writes the index of a group of tensors in several files, from the file of each, in Hugging Face's format.
    pub(super) fn write_index(&mut self, group: &str, files: &BTreeMap<String, String>, bytes: usize) -> Result<()> {
        let index = json!({ "metadata": { "total_size": bytes }, "weight_map": files });
        self.write_json(format!("{group}.safetensors.index.json"), &index)
    }

    /// Gives a file that was written another name.
    pub(super) fn rename(&mut self, from: &str, to: String) -> Result<()> {
        self.disk.rename_file(&self.place.join(from), &self.place.join(&to))?;
        if let Some(entry) = self.manifest.files.remove(from) {
            self.manifest.files.insert(to, entry);
        }
        Ok(())
    }

    fn fill(&mut self, fill: impl FnOnce(&mut Draft<'a>) -> Result<BTreeMap<String, Value>>) -> Result<()> {
        if !self.is_store {
            self.disk.create_folder(&self.place)?;
        }
        let state = fill(self)?;
        self.publish(&state)
    }

    fn write_json(&mut self, name: String, value: &Value) -> Result<()> {
        let mut text =
            serde_json::to_vec_pretty(value).map_err(|source| Error::State { key: "state".to_owned(), source })?;
        text.push(b'\n');
        let entry: Entry = self.disk.write(&self.place.join(&name), &text)?;
        self.manifest.files.insert(name, entry);
        Ok(())
    }

    /// Writes the state and the manifest, and makes it a checkpoint.
    fn publish(&mut self, state: &BTreeMap<String, Value>) -> Result<()> {
        self.write_json(STATE.to_owned(), &json!({ "step": self.manifest.step, "state": state }))?;
        let text = self.manifest.to_text().map_err(|source| Error::State { key: MANIFEST.to_owned(), source })?;
        if self.is_store {
            folder::check_writer(self.disk, self.root)?;
            return self.disk.create(&self.place.join(MANIFEST), &text);
        }
        self.disk.write(&self.place.join(MANIFEST), &text)?;
        self.disk.sync_folder(&self.place)?;
        self.move_into_place()
    }

    /// Moves the written checkpoint into place. One of the same step is removed only when the new one is in place; at
    /// every moment one of the two is whole, under its name or where [`folder::clear`] finds it.
    fn move_into_place(&self) -> Result<()> {
        let Draft { disk, root, place: temporary, path, .. } = self;
        if !disk.exists(path)? {
            disk.rename(temporary, path)?;
            return disk.sync_folder(root);
        }
        // Another run may have begun at the same time, when neither found a checkpoint of the other.
        folder::check_run(disk, root, path, (self.manifest.step, self.manifest.run))?;
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
}

/// Returns a sequence number above those of all earlier checkpoints, which are counted from 1, or from the time at
/// which this was called: the time in microseconds.
fn beyond_all() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Returns a time in milliseconds since 1970.
fn millis(time: SystemTime) -> u64 {
    let time = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
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

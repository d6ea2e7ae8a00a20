//! A folder of checkpoints: its contents, the run it belongs to, and the removal of old checkpoints.

use std::path::{Path, PathBuf};

use super::disk::{Disk, Folder, is_damage};
use super::manifest::{MANIFEST, MANIFEST_BYTES, Manifest, ManifestError};
use super::run::{RunId, process_suffix, temporary_suffix};
use crate::warning::warn;
use crate::{Error, Result};

/// The file with the name of the newest checkpoint.
pub(super) const LATEST: &str = "latest";
/// The file with the run that the folder belongs to, for a run that was stopped before its first checkpoint.
const RUN: &str = "run";
/// The object with the name of the process that writes into a folder of a store.
const WRITER: &str = "writer";
const PREFIX: &str = "step-";
const TEMPORARY: &str = ".tmp-";
/// Precedes a number in the name of a checkpoint in a store whose step has been saved before.
const AGAIN: &str = ".";
/// The number of names of one step that may be taken: by what killed processes have left, and by checkpoints that are
/// about to be replaced.
const MOST_AGAIN: u32 = 1000;
/// Marks a checkpoint that another one of the same step was about to replace.
const OLD: &str = ".old-";

/// A checkpoint in a folder, before its tensors are read.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// The step given by its name.
    pub(super) step: u64,
    pub(super) path: PathBuf,
    /// The manifest, if it can be read.
    pub(super) manifest: Option<Manifest>,
    /// A problem that is visible without reading all files: a file is missing, or has another length.
    problem: Option<String>,
}

impl Found {
    pub(super) fn is_whole(&self) -> bool {
        self.problem.is_none()
    }

    /// Returns its run and its sequence number in it.
    pub(super) fn identity(&self) -> Option<(RunId, u64)> {
        self.manifest.as_ref().map(|manifest| (manifest.run, manifest.sequence))
    }

    pub(super) fn run(&self) -> Option<RunId> {
        self.manifest.as_ref().map(|manifest| manifest.run)
    }

    /// Returns the sort key: those without a readable manifest sort as newest, since they may be newer than all others.
    fn order(&self) -> (u64, u64) {
        (self.manifest.as_ref().map_or(u64::MAX, |manifest| manifest.sequence), self.step)
    }

    fn damaged(&self) -> Option<Error> {
        let problem = self.problem.clone()?;
        Some(Error::Damaged { path: self.path.clone(), problem })
    }
}

pub(super) fn path_of(root: &Path, step: u64) -> PathBuf {
    root.join(format!("{PREFIX}{step:08}"))
}

/// Returns a name next to a path's that readers do not take for a checkpoint.
pub(super) fn temporary(path: &Path) -> PathBuf {
    suffixed(path, TEMPORARY)
}

/// Returns a name next to a checkpoint's, for the time while it is being replaced.
pub(super) fn old(path: &Path) -> PathBuf {
    suffixed(path, OLD)
}

fn suffixed(path: &Path, kind: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("{kind}{}", temporary_suffix()));
    PathBuf::from(name)
}

/// Lists the checkpoints of a folder, including damaged ones, the newest first.
///
/// # Errors
/// [`Error::Format`] for checkpoints of another version; [`Error::File`] if the folder cannot be read.
pub(super) fn list(disk: &Disk, root: &Path) -> Result<Vec<Found>> {
    for _ in 0..LOOKS {
        // One that is gone may be there under another name, since the writer is replacing it.
        if let (found, false) = list_once(disk, root)? {
            return Ok(found);
        }
    }
    Ok(list_once(disk, root)?.0)
}

/// Returns also whether one was gone before it was looked at.
fn list_once(disk: &Disk, root: &Path) -> Result<(Vec<Found>, bool)> {
    let names = disk.names(root)?;
    let names: Vec<&str> = names.iter().filter_map(|name| name.to_str()).collect();
    let (mut found, mut is_gone, is_store) = (Vec::new(), false, disk.is_store(root));
    for name in &names {
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        let (digits, is_old) = match rest.split_once(OLD) {
            Some((digits, _)) => (digits, true),
            None if is_store => (rest.split_once(AGAIN).map_or(rest, |(digits, _)| digits), false),
            None => (rest, false),
        };
        let Some(step) = digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit())) else {
            continue;
        };
        // A checkpoint that was moved out of the way counts only as long as no other has taken its place.
        if is_old && names.iter().any(|name| name.strip_prefix(PREFIX) == Some(digits)) {
            continue;
        }
        let path = root.join(name);
        match look_at(disk, &path, step)? {
            Some((manifest, problem)) => found.push(Found { step, path, manifest, problem }),
            None => is_gone |= !is_store,
        }
    }
    found.sort_by_key(|found| std::cmp::Reverse(found.order()));
    Ok((found, is_gone))
}

/// Returns the manifest and the problem, if any; `None` if the checkpoint has been removed meanwhile.
fn look_at(disk: &Disk, path: &Path, step: u64) -> Result<Option<(Option<Manifest>, Option<String>)>> {
    let folder = match disk.open_folder(path) {
        Ok(folder) => folder,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return unless_damaged(path, error).map(|problem| Some((None, Some(problem)))),
    };
    if folder.is_unpublished() {
        return Ok(None);
    }
    let manifest = match read_manifest(disk, &folder, path) {
        Ok(manifest) => manifest,
        Err(Error::Damaged { problem, .. }) => return Ok(Some((None, Some(format!("{MANIFEST}: {problem}"))))),
        Err(error) => return Err(error),
    };
    let mut problem = wrong_name(&manifest, step);
    for (name, entry) in &manifest.files {
        match disk.length(&folder, path, name) {
            Ok(length) if length == entry.bytes => {}
            Ok(length) => {
                problem = Some(format!("{name}: it has {length} bytes, and was written with {}", entry.bytes))
            }
            Err(error) => problem = Some(format!("{name}: {}", unless_damaged(&path.join(name), error)?)),
        }
    }
    Ok(Some((Some(manifest), problem)))
}

fn wrong_name(manifest: &Manifest, step: u64) -> Option<String> {
    (manifest.step != step).then(|| format!("it is named after step {step}, and is of step {}", manifest.step))
}

/// Returns the problem of a checkpoint of which a file cannot be read. Returns an error if the checkpoint may be whole
/// nevertheless, for example if the permission to read it is missing, so that no earlier one is used in its place.
pub(super) fn unless_damaged(path: &Path, error: std::io::Error) -> Result<String> {
    if is_damage(&error) { Ok(error.to_string()) } else { Err(Error::File { path: path.to_owned(), source: error }) }
}

pub(super) fn read_manifest(disk: &Disk, folder: &Folder, path: &Path) -> Result<Manifest> {
    let file = path.join(MANIFEST);
    let text = match disk.read(folder, path, MANIFEST, MANIFEST_BYTES) {
        Ok(text) => text,
        Err(error) => {
            let problem = unless_damaged(&file, error)?;
            return Err(Error::Damaged { path: file, problem });
        }
    };
    Manifest::from_text(&text).map_err(|unreadable| match unreadable {
        ManifestError::Damaged(problem) => Error::Damaged { path: file, problem },
        ManifestError::Format(found) => Error::Format { path: file, found },
    })
}

/// Returns the run of these checkpoints; `None` if there are none whose run is known.
///
/// # Errors
/// [`Error::SeveralRuns`] if they belong to several runs.
pub(super) fn run_of(root: &Path, found: &[Found]) -> Result<Option<RunId>> {
    let mut runs: Vec<RunId> = found.iter().filter_map(Found::run).collect();
    runs.sort_unstable();
    runs.dedup();
    match runs.as_slice() {
        [] => Ok(None),
        [run] => Ok(Some(*run)),
        _ => {
            let steps = |run: &RunId| steps_of(found.iter().filter(|found| found.run() == Some(*run)));
            let runs = runs.iter().map(|run| format!("{run} ({})", steps(run))).collect::<Vec<_>>().join(", ");
            Err(Error::SeveralRuns { folder: root.to_owned(), runs })
        }
    }
}

/// Formats steps, the lowest first.
fn steps_of<'a>(found: impl Iterator<Item = &'a Found>) -> String {
    let mut steps: Vec<u64> = found.map(|found| found.step).collect();
    steps.sort_unstable();
    let word = if steps.len() == 1 { "step" } else { "steps" };
    let shown: Vec<String> = steps.iter().take(4).map(u64::to_string).collect();
    let more = if steps.len() > 4 { format!(", … {}", steps[steps.len() - 1]) } else { String::new() };
    format!("{word} {}{more}", shown.join(", "))
}

/// Returns the run that has claimed the folder, if any.
pub(super) fn claimed_by(disk: &Disk, root: &Path) -> Option<RunId> {
    let folder = disk.open_folder(root).ok()?;
    let text = disk.read(&folder, root, RUN, 64).ok()?;
    std::str::from_utf8(&text).ok()?.trim_end().parse().ok()
}

/// Claims a folder for `run`, or, if it is `None`, for a new run. Other runs' checkpoints are set aside, or are an
/// error.
pub(super) fn claim(disk: &Disk, root: &Path, run: Option<RunId>, sets_aside: bool) -> Result<RunId> {
    clear(disk, root)?;
    let is_store = disk.is_store(root);
    let found = list(disk, root)?;
    let is_other = |found: &Found| match (found.run(), run) {
        (Some(of), Some(run)) => of != run,
        // A checkpoint that cannot be read may belong to another run, unless this one has claimed the folder.
        (None, Some(_)) => false,
        (_, None) => true,
    };
    let others: Vec<&Found> = found.iter().filter(|found| is_other(found)).collect();
    let run = run.unwrap_or_else(RunId::draw);
    match others.first() {
        None => {}
        Some(_) if sets_aside => set_aside(disk, root, &others)?,
        Some(other) => {
            let other = other.run();
            let of_other = others.iter().copied().filter(|found| found.run() == other);
            return Err(Error::OtherRun {
                folder: root.to_owned(),
                other: other.map_or_else(|| "an unknown run".to_owned(), |other| format!("run {other}")),
                steps: steps_of(of_other),
                run,
            });
        }
    }
    disk.create_folders(root)?;
    if claimed_by(disk, root) != Some(run) {
        replace(disk, root, RUN, &run.to_string())?;
    }
    if is_store {
        // From here on, an earlier writer publishes nothing any more, and what it has not published can go.
        replace(disk, root, WRITER, &process_suffix())?;
        clear_unpublished(disk, root)?;
    }
    Ok(run)
}

/// Checks that a checkpoint of a step, which is to be replaced, is of this run, as far as its manifest can be read.
///
/// # Errors
/// [`Error::OtherRun`] if it is of another one.
pub(super) fn check_run(disk: &Disk, root: &Path, path: &Path, (step, run): (u64, RunId)) -> Result<()> {
    let found = look_at(disk, path, step)?.and_then(|(manifest, _)| manifest);
    match found.filter(|manifest| manifest.run != run) {
        None => Ok(()),
        Some(Manifest { run: other, .. }) => {
            let (folder, other, steps) = (root.to_owned(), format!("run {other}"), format!("step {step}"));
            Err(Error::OtherRun { folder, other, steps, run })
        }
    }
}

/// Checks that no other process has claimed a folder of a store after this one. On a disk, the job's launcher sees to
/// that.
///
/// # Errors
/// [`Error::OtherWriter`] if one has.
pub(super) fn check_writer(disk: &Disk, root: &Path) -> Result<()> {
    let path = root.join(WRITER);
    if !disk.is_store(root) {
        return Ok(());
    }
    let folder = disk.open_folder(root).map_err(|source| Error::File { path: root.to_owned(), source })?;
    let text = disk.read(&folder, root, WRITER, 64).map_err(|source| Error::File { path, source })?;
    match std::str::from_utf8(&text).is_ok_and(|text| text.trim_end() == process_suffix()) {
        true => Ok(()),
        false => Err(Error::OtherWriter { folder: root.to_owned() }),
    }
}

/// Removes folders of a store that no manifest makes a checkpoint.
fn clear_unpublished(disk: &Disk, root: &Path) -> Result<()> {
    for name in disk.names(root)? {
        let path = root.join(&name);
        let is_step = name.to_str().is_some_and(|name| name.starts_with(PREFIX));
        if is_step && disk.open_folder(&path).is_ok_and(|folder| folder.is_unpublished()) {
            // Objects that cannot be removed do no harm.
            drop(disk.remove_folder(&path));
        }
    }
    Ok(())
}

/// Takes a name for a checkpoint in a store that no other has had: that of the step, or with a number.
pub(super) fn take(disk: &Disk, path: &Path) -> Result<PathBuf> {
    let again = (2..=MOST_AGAIN).map(|number| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!("{AGAIN}{number}"));
        PathBuf::from(name)
    });
    for place in std::iter::once(path.to_owned()).chain(again) {
        match disk.create_folder(&place) {
            Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::AlreadyExists => {}
            outcome => return outcome.map(|()| place),
        }
    }
    Err(Error::OtherWriter { folder: path.to_owned() })
}

/// Removes other checkpoints of a step from a store, after one has been published.
pub(super) fn remove_others(disk: &Disk, found: &[Found], published: &Path, step: u64) {
    for other in found.iter().filter(|found| found.step == step && found.path != published) {
        if let Err(error) = disk.remove_folder(&other.path) {
            warn(&format!("an old checkpoint cannot be removed: {error}"));
        }
    }
}

/// Moves checkpoints into folders named after their runs.
fn set_aside(disk: &Disk, root: &Path, others: &[&Found]) -> Result<()> {
    let mut left: Vec<&Found> = others.to_vec();
    while let Some(run) = left.first().map(|found| found.run()) {
        let (these, rest): (Vec<&Found>, Vec<&Found>) = left.iter().partition(|found| found.run() == run);
        left = rest;
        let name = run.map_or_else(|| "run-unknown".to_owned(), |run| format!("run-{run}"));
        // A number is added if one has already been set aside, or part of it.
        let names = std::iter::once(name.clone()).chain((2..).map(|number| format!("{name}-{number}")));
        for folder in names.map(|name| root.join(name)) {
            let mut taken = false;
            for found in &these {
                taken |= disk.exists(&path_of(&folder, found.step))?;
            }
            if taken {
                continue;
            }
            disk.create_folders(&folder)?;
            for found in &these {
                let place = path_of(&folder, found.step);
                let place = if disk.is_store(root) { take(disk, &place)? } else { place };
                disk.rename(&found.path, &place)?;
            }
            disk.sync_folder(&folder)?;
            let (steps, folder) = (steps_of(these.iter().copied()), folder.display());
            warn(&format!("checkpoints of an earlier run ({steps}) have been moved to {folder}; a new run begins"));
            break;
        }
    }
    drop(disk.remove_file(&root.join(LATEST)));
    disk.sync_folder(root)
}

/// Writes a small file in a folder, replacing one of the same name.
pub(super) fn replace(disk: &Disk, root: &Path, name: &str, text: &str) -> Result<()> {
    let path = root.join(name);
    if disk.is_store(root) {
        return disk.write(&path, format!("{text}\n").as_bytes()).map(drop);
    }
    let temporary = temporary(&path);
    let outcome = disk.write(&temporary, format!("{text}\n").as_bytes()).and_then(|_| disk.rename(&temporary, &path));
    if outcome.is_err() {
        drop(disk.remove_file(&temporary));
    }
    outcome?;
    disk.sync_folder(root)
}

/// Restores checkpoints that a killed process had moved out of the way, and removes its incomplete files. In a store,
/// only [`claim`] removes what is incomplete: an earlier writer may still be at work.
pub(super) fn clear(disk: &Disk, root: &Path) -> Result<()> {
    clear_of(disk, root, |process| process != process_suffix())
}

/// Does the same with what operations of this process have left that failed, before the next one writes: only one works
/// in a folder at a time.
pub(super) fn clear_own(disk: &Disk, root: &Path) {
    // What cannot be removed now is removed later.
    drop(clear_of(disk, root, |process| process == process_suffix()));
}

/// Clears what processes have left for which `is_over` returns true.
fn clear_of(disk: &Disk, root: &Path, is_over: impl Fn(&str) -> bool) -> Result<()> {
    if disk.is_store(root) {
        return Ok(());
    }
    let is_over = |suffix: &str| is_over(suffix.get(..process_suffix().len()).unwrap_or(suffix));
    for name in disk.names(root)? {
        let Some(name) = name.to_str().filter(|name| [PREFIX, LATEST, RUN].iter().any(|own| name.starts_with(own)))
        else {
            continue;
        };
        let path = root.join(name);
        if let Some((whole, suffix)) = name.split_once(OLD)
            && is_over(suffix)
        {
            let place = root.join(whole);
            match disk.exists(&place)? {
                true => discard(disk, root, &path)?,
                false => disk.rename(&path, &place)?,
            }
        } else if let Some((_, suffix)) = name.split_once(TEMPORARY)
            && is_over(suffix)
        {
            // Files that cannot be removed do no harm.
            drop(if name.starts_with(PREFIX) { discard(disk, root, &path) } else { disk.remove_file(&path) });
        }
    }
    Ok(())
}

/// Removes what has been moved out of the way: once the disk holds its new name, since a crash could otherwise bring
/// the old name back, with a part of its files.
pub(super) fn discard(disk: &Disk, root: &Path, path: &Path) -> Result<()> {
    disk.sync_folder(root)?;
    disk.remove_folder(path)
}

/// The checkpoints that [`prune`] keeps.
#[derive(Clone, Debug)]
pub(super) struct Retention {
    pub(super) run: RunId,
    pub(super) backup: bool,
    pub(super) count: usize,
    /// Sequence numbers in the run of checkpoints whose tensors were found damaged.
    pub(super) damaged: Vec<u64>,
}

/// Removes checkpoints older than the newest whole ones of a run. Only these count: a damaged one takes no place, and
/// is removed when there are enough newer ones. The newest whole one always stays, and so do checkpoints whose manifest
/// cannot be read.
pub(super) fn prune(disk: &Disk, root: &Path, keep: &Retention) -> Result<()> {
    let mut whole = 0;
    for found in list(disk, root)? {
        let Some(manifest) = &found.manifest else { continue };
        if manifest.run != keep.run || manifest.backup != keep.backup {
            continue;
        }
        let is_whole = found.is_whole() && !keep.damaged.contains(&manifest.sequence);
        let goes = whole >= keep.count.max(1);
        whole += usize::from(is_whole);
        if goes
            && !manifest.stays
            && let Err(error) = remove(disk, &found.path)
        {
            warn(&format!("an old checkpoint cannot be removed: {error}"));
        }
    }
    Ok(())
}

/// Removes a checkpoint atomically for readers, who never see half of one.
fn remove(disk: &Disk, path: &Path) -> Result<()> {
    if disk.is_store(path) {
        return disk.remove_folder(path);
    }
    let temporary = temporary(path);
    match disk.rename(path, &temporary) {
        // Another process has removed it first.
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.and_then(|()| discard(disk, path.parent().unwrap_or(path), &temporary)),
    }
}

/// Removes the checkpoints of a run, or of all runs, the oldest first, and the folder if it is then empty. If `backups`
/// is set, removes only those that are to be removed at the end.
pub(super) fn remove_all(disk: &Disk, root: &Path, run: Option<RunId>, backups: bool) -> Result<()> {
    clear(disk, root)?;
    let goes = |found: &Found| match &found.manifest {
        Some(manifest) => run.is_none_or(|run| manifest.run == run) && (manifest.backup || !backups),
        None => run.is_none(),
    };
    let (going, staying): (Vec<Found>, Vec<Found>) = list(disk, root)?.into_iter().partition(goes);
    if let Some(newest) = staying.iter().find(|found| found.is_whole()) {
        if let Some(name) = newest.path.file_name() {
            replace(disk, root, LATEST, &name.to_string_lossy())?;
        }
    } else if disk.exists(&root.join(LATEST))? {
        disk.remove_file(&root.join(LATEST))?;
    }
    for found in going.iter().rev() {
        remove(disk, &found.path)?;
    }
    if staying.is_empty() && disk.exists(root)? {
        drop(disk.remove_file(&root.join(RUN)));
        if disk.is_store(root) {
            clear_unpublished(disk, root)?;
            drop(disk.remove_file(&root.join(WRITER)));
        }
        disk.remove_empty_folder(root);
    }
    Ok(())
}

/// Reads the newest whole checkpoint of a folder by `read`, and returns it with the sequence numbers of those that were
/// found damaged. Damaged ones are named in a warning and skipped.
///
/// # Errors
/// [`Error::NoneWhole`] if there are checkpoints and all are damaged; [`Error::SeveralRuns`] if they belong to several
/// runs; the errors of [`list`].
pub(super) fn newest<T>(disk: &Disk, root: &Path, read: impl Fn(&Path) -> Result<T>) -> Result<(Option<T>, Vec<u64>)> {
    newest_of(disk, root, |_| true, read)
}

/// Reads the newest whole checkpoint of those that are wanted, like [`newest`].
pub(super) fn newest_of<T>(
    disk: &Disk,
    root: &Path,
    is_wanted: impl Fn(&Found) -> bool,
    read: impl Fn(&Path) -> Result<T>,
) -> Result<(Option<T>, Vec<u64>)> {
    let wanted = |mut found: Vec<Found>| {
        found.retain(&is_wanted);
        found
    };
    let mut looks = 1;
    loop {
        let found = list(disk, root)?;
        run_of(root, &found)?;
        let found = wanted(found);
        let (mut damaged, mut value): (Vec<(&Found, Error)>, _) = (Vec::new(), None);
        for found in &found {
            match found.damaged().map_or_else(|| read(&found.path), Err) {
                Ok(read) => {
                    value = Some((found.step, read));
                    break;
                }
                Err(error @ Error::Damaged { .. }) => damaged.push((found, error)),
                Err(error) => return Err(error),
            }
        }
        // The writer may have removed or replaced one while it was read, and there is another one then.
        if !damaged.is_empty() && looks < LOOKS && names(&wanted(list(disk, root)?)) != names(&found) {
            looks += 1;
            continue;
        }
        return match (value, damaged.first()) {
            (Some((step, value)), _) => {
                for (_, error) in &damaged {
                    warn(&format!("{error}; the checkpoint of step {step} is used"));
                }
                let sequences = damaged.iter().filter_map(|(found, _)| found.identity());
                Ok((Some(value), sequences.map(|(_, sequence)| sequence).collect()))
            }
            (None, None) => Ok((None, Vec::new())),
            (None, Some((_, error))) => {
                let (folder, count, problem) = (root.to_owned(), found.len(), error.to_string());
                Err(Error::NoneWhole { folder, count, problem })
            }
        };
    }
}

/// Returns what tells whether the contents of a folder have changed.
fn names(found: &[Found]) -> Vec<(&Path, Option<(RunId, u64)>)> {
    found.iter().map(|found| (found.path.as_path(), found.identity())).collect()
}

/// How often a folder is listed again while a checkpoint of it is being replaced.
const LOOKS: usize = 16;

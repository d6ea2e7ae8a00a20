//! A folder of checkpoints: which are in it, of which run, and which go.

use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::manifest::{MANIFEST, MANIFEST_BYTES, Manifest, Unreadable};
use super::run::{RunId, process_suffix, temporary_suffix};
use crate::warning::warn;
use crate::{Error, Result};

/// The name of the newest checkpoint.
pub(super) const LATEST: &str = "latest";
/// The run that the folder belongs to, for one that was stopped before its first checkpoint.
const RUN: &str = "run";
const PREFIX: &str = "step-";
const TEMPORARY: &str = ".tmp-";
/// A checkpoint whose place another one of the same step was about to take.
const OLD: &str = ".old-";

/// A checkpoint as it is found, before its tensors are read.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// As its name says.
    pub(super) step: u64,
    pub(super) path: PathBuf,
    /// Where it can be read.
    pub(super) manifest: Option<Manifest>,
    /// What can be seen without reading it all: a file is missing, or has another length.
    problem: Option<String>,
}

impl Found {
    pub(super) fn is_whole(&self) -> bool {
        self.problem.is_none()
    }

    /// Its run and its place in it.
    pub(super) fn identity(&self) -> Option<(RunId, u64)> {
        self.manifest.as_ref().map(|manifest| (manifest.run, manifest.sequence))
    }

    pub(super) fn run(&self) -> Option<RunId> {
        self.manifest.as_ref().map(|manifest| manifest.run)
    }

    /// Those whose manifest cannot be read come first: they may be newer than all others.
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

/// A name beside a path's that no reader takes for a checkpoint.
pub(super) fn beside(path: &Path) -> PathBuf {
    suffixed(path, TEMPORARY)
}

/// A name beside a checkpoint's for the time in which it has none.
pub(super) fn old(path: &Path) -> PathBuf {
    suffixed(path, OLD)
}

fn suffixed(path: &Path, kind: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("{kind}{}", temporary_suffix()));
    PathBuf::from(name)
}

/// The checkpoints of a folder, damaged ones among them, the newest first.
///
/// # Errors
/// [`Error::Format`] for checkpoints of another version; [`Error::File`] where the folder cannot be read.
pub(super) fn list(disk: &Disk, root: &Path) -> Result<Vec<Found>> {
    let names = disk.names(root)?;
    let names: Vec<&str> = names.iter().filter_map(|name| name.to_str()).collect();
    let mut found = Vec::new();
    for name in &names {
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        let (digits, is_old) = rest.split_once(OLD).map_or((rest, false), |(digits, _)| (digits, true));
        let Some(step) = digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit())) else {
            continue;
        };
        // One that was moved out of the way counts as long as nothing has come in its place.
        if is_old && names.iter().any(|name| name.strip_prefix(PREFIX) == Some(digits)) {
            continue;
        }
        let path = root.join(name);
        if let Some((manifest, problem)) = look_at(disk, &path, step)? {
            found.push(Found { step, path, manifest, problem });
        }
    }
    found.sort_by_key(|found| std::cmp::Reverse(found.order()));
    Ok(found)
}

/// The manifest, and what is wrong with the rest; `None` where the checkpoint has gone meanwhile.
fn look_at(disk: &Disk, path: &Path, step: u64) -> Result<Option<(Option<Manifest>, Option<String>)>> {
    let folder = match disk.open_folder(path) {
        Ok(folder) => folder,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return unless_damaged(path, error).map(|problem| Some((None, Some(problem)))),
    };
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

/// What is wrong with a checkpoint of which a file cannot be read; an error where the checkpoint may be whole all the same, such
/// as without permission to read it, so that no earlier one is used in its place.
pub(super) fn unless_damaged(path: &Path, error: std::io::Error) -> Result<String> {
    use rustix::io::Errno;
    // A bad sector is damage, as is what was removed by another machine; a network that is away is none.
    let known = [Errno::NOENT, Errno::NOTDIR, Errno::ISDIR, Errno::LOOP, Errno::STALE, Errno::IO];
    let damaged = error.kind() == std::io::ErrorKind::InvalidData
        || Errno::from_io_error(&error).is_some_and(|errno| known.contains(&errno));
    if damaged { Ok(error.to_string()) } else { Err(Error::File { path: path.to_owned(), source: error }) }
}

pub(super) fn read_manifest(disk: &Disk, folder: &impl std::os::fd::AsFd, path: &Path) -> Result<Manifest> {
    let file = path.join(MANIFEST);
    let text = match disk.read(folder, path, MANIFEST, MANIFEST_BYTES) {
        Ok(text) => text,
        Err(error) => {
            let problem = unless_damaged(&file, error)?;
            return Err(Error::Damaged { path: file, problem });
        }
    };
    Manifest::from_text(&text).map_err(|unreadable| match unreadable {
        Unreadable::Damaged(problem) => Error::Damaged { path: file, problem },
        Unreadable::Format(found) => Error::Format { path: file, found },
    })
}

/// The run whose checkpoints these are; `None` where there are none of which this is known.
///
/// # Errors
/// [`Error::SeveralRuns`].
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

/// Steps in words, the lowest first.
fn steps_of<'a>(found: impl Iterator<Item = &'a Found>) -> String {
    let mut steps: Vec<u64> = found.map(|found| found.step).collect();
    steps.sort_unstable();
    let word = if steps.len() == 1 { "step" } else { "steps" };
    let shown: Vec<String> = steps.iter().take(4).map(u64::to_string).collect();
    let more = if steps.len() > 4 { format!(", … {}", steps[steps.len() - 1]) } else { String::new() };
    format!("{word} {}{more}", shown.join(", "))
}

/// The run that a folder without checkpoints belongs to, if one has claimed it.
pub(super) fn claimed_by(disk: &Disk, root: &Path) -> Option<RunId> {
    let folder = disk.open_folder(root).ok()?;
    let text = disk.read(&folder, root, RUN, 64).ok()?;
    std::str::from_utf8(&text).ok()?.trim_end().parse().ok()
}

/// Makes a folder the run's: `run`, or where it is `None` that of a run that begins. Other runs' checkpoints are an error, or are
/// set aside.
pub(super) fn claim(disk: &Disk, root: &Path, run: Option<RunId>, sets_aside: bool) -> Result<RunId> {
    clear(disk, root)?;
    let found = list(disk, root)?;
    let is_other = |found: &Found| match (found.run(), run) {
        (Some(of), Some(run)) => of != run,
        // What cannot be read may be another run's, unless this one has been here.
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
    Ok(run)
}

/// Moves checkpoints into folders named after their runs.
fn set_aside(disk: &Disk, root: &Path, others: &[&Found]) -> Result<()> {
    let mut left: Vec<&Found> = others.to_vec();
    while let Some(run) = left.first().map(|found| found.run()) {
        let (these, rest): (Vec<&Found>, Vec<&Found>) = left.iter().partition(|found| found.run() == run);
        left = rest;
        let name = run.map_or_else(|| "run-unknown".to_owned(), |run| format!("run-{run}"));
        // Where an earlier one has been set aside already, or half of it.
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
                disk.rename(&found.path, &path_of(&folder, found.step))?;
            }
            disk.sync_folder(&folder)?;
            warn(&format!(
                "{} of an earlier run have been moved to {}; this run begins anew",
                steps_of(these.iter().copied()),
                folder.display()
            ));
            break;
        }
    }
    drop(disk.remove_file(&root.join(LATEST)));
    disk.sync_folder(root)
}

/// Writes a small file in a folder, in place of one of the same name.
pub(super) fn replace(disk: &Disk, root: &Path, name: &str, text: &str) -> Result<()> {
    let path = root.join(name);
    let beside = beside(&path);
    let outcome = disk.write(&beside, format!("{text}\n").as_bytes()).and_then(|_| disk.rename(&beside, &path));
    if outcome.is_err() {
        drop(disk.remove_file(&beside));
    }
    outcome?;
    disk.sync_folder(root)
}

/// Puts back what a process that was killed had moved out of the way, and removes what it has left half-written.
pub(super) fn clear(disk: &Disk, root: &Path) -> Result<()> {
    for name in disk.names(root)? {
        let Some(name) = name.to_str().filter(|name| [PREFIX, LATEST, RUN].iter().any(|own| name.starts_with(own)))
        else {
            continue;
        };
        let path = root.join(name);
        if let Some((whole, suffix)) = name.split_once(OLD)
            && !suffix.starts_with(process_suffix())
        {
            let place = root.join(whole);
            match disk.exists(&place)? {
                true => disk.remove_folder(&path)?,
                false => disk.rename(&path, &place)?,
            }
        } else if let Some((_, suffix)) = name.split_once(TEMPORARY)
            && !suffix.starts_with(process_suffix())
        {
            // What cannot be removed is in nobody's way.
            drop(if name.starts_with(PREFIX) { disk.remove_folder(&path) } else { disk.remove_file(&path) });
        }
    }
    Ok(())
}

/// Which checkpoints [`prune`] keeps.
#[derive(Clone, Debug)]
pub(super) struct Keep {
    pub(super) run: RunId,
    pub(super) backup: bool,
    pub(super) count: usize,
    /// Places in the run of those whose tensors were found damaged.
    pub(super) damaged: Vec<u64>,
}

/// Removes what is older than the newest whole ones of a run. These alone count: one that is damaged takes no place, and goes
/// when there are enough newer ones. The newest whole one stays, whatever is asked for, and so does what nobody can read.
pub(super) fn prune(disk: &Disk, root: &Path, keep: &Keep) -> Result<()> {
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

/// Removes a checkpoint: at once for readers, who never see half of one.
fn remove(disk: &Disk, path: &Path) -> Result<()> {
    let beside = beside(path);
    match disk.rename(path, &beside) {
        // Somebody else has been faster.
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.and_then(|()| disk.remove_folder(&beside)),
    }
}

/// Removes the checkpoints of a run, or of all of them, the oldest first; and the folder if it is empty then. `backups`: those
/// alone that are to be removed at the end.
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
        disk.remove_empty_folder(root);
    }
    Ok(())
}

/// What a folder's newest whole checkpoint is, by `read`, and the places in the run of those that were found damaged. Damaged
/// ones are named and passed over.
///
/// # Errors
/// [`Error::NoneWhole`] where there are checkpoints and all are damaged; [`Error::SeveralRuns`]; those of [`list`].
pub(super) fn newest<T>(disk: &Disk, root: &Path, read: impl Fn(&Path) -> Result<T>) -> Result<(Option<T>, Vec<u64>)> {
    for _ in 0..LOOKS {
        let found = list(disk, root)?;
        run_of(root, &found)?;
        let mut damaged: Vec<(&Found, Error)> = Vec::new();
        for found in &found {
            match found.damaged().map_or_else(|| read(&found.path), Err) {
                Ok(value) => {
                    for (_, error) in &damaged {
                        warn(&format!("{error}; the checkpoint of step {} is used", found.step));
                    }
                    let sequences = damaged.iter().filter_map(|(found, _)| found.identity());
                    return Ok((Some(value), sequences.map(|(_, sequence)| sequence).collect()));
                }
                Err(error @ Error::Damaged { .. }) => damaged.push((found, error)),
                Err(error) => return Err(error),
            }
        }
        // Whoever trains may have removed one while it was read, and has written a newer one then.
        let mut gone = false;
        for (found, _) in &damaged {
            gone |= !disk.exists(&found.path)?;
        }
        match damaged.into_iter().next() {
            None => return Ok((None, Vec::new())),
            Some(_) if gone => {}
            Some((_, error)) => {
                let (folder, count, problem) = (root.to_owned(), found.len(), error.to_string());
                return Err(Error::NoneWhole { folder, count, problem });
            }
        }
    }
    Ok((None, Vec::new()))
}

/// How often a folder is looked at anew while somebody else replaces its only checkpoint.
const LOOKS: usize = 16;

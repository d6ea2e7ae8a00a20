//! When checkpoints are written, which are kept, and which is read.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use distribute_strategy::Strategy;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::disk::Disk;
use super::folder::{self, Keep};
use super::lock::exclusively;
use super::read;
use super::run::RunId;
use super::snapshot::Snapshot;
use super::task::{TIMEOUT, Task};
use super::write::{self, How};
use crate::chief::{bytes_from_chief, from_chief};
use crate::warning::warn;
use crate::{BoxError, Error, Result};

/// What checkpoints hold: models, optimizers, and whatever implements this.
pub trait Checkpointed {
    /// Adds what it needs to go on. Every worker calls this, outside of `run`, in the same order.
    ///
    /// # Errors
    /// Whatever the library refuses.
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError>;

    /// Takes it back, under whatever strategy. Every worker calls this, with the same snapshot.
    ///
    /// # Errors
    /// Where the snapshot is one of something else.
    fn load(&self, strategy: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError>;
}

/// Writes checkpoints of a run into a folder, keeps the newest, and restores from them.
///
/// Every worker makes one and calls the same functions; the chief writes, on a thread of its own while training goes on, and
/// reads for all, so the others need no access to its files.
///
/// # Runs
/// A folder belongs to one run, whose [`RunId`] is in every checkpoint. [`restore`](CheckpointManager::restore) continues the run
/// of the checkpoint it finds. A manager that saves without having restored begins a run; where the folder then holds another
/// run's checkpoints, the error [`Error::OtherRun`] says how to continue from them or begin anew, and nothing is written. To
/// continue, call `restore`; for a second folder of the same run, [`continue_run`](CheckpointManager::continue_run). To begin
/// anew, choose another folder, or have the others moved out of the way by
/// [`set_aside_other_runs`](CheckpointManager::set_aside_other_runs).
///
/// # Waiting
/// Work on the disk is waited for as long as the disk makes progress. Where one operation takes longer than
/// [`write_timeout`](CheckpointManager::write_timeout), five minutes by default, [`Error::DiskHangs`] says what is still being
/// written and for how long.
///
/// # Source
/// `tf.train.CheckpointManager`.
#[derive(Debug)]
pub struct CheckpointManager {
    root: PathBuf,
    keep: usize,
    keep_every: Option<Duration>,
    /// When the last one was written that stays for good.
    kept: Instant,
    max_shard_bytes: usize,
    write_timeout: Duration,
    sets_aside: bool,
    /// Whether what is saved is to be removed at the end of the training.
    backup: bool,
    /// Once it is known: the same on all workers.
    run: Option<RunId>,
    /// Whether the folder is known to be the run's.
    claimed: bool,
    /// Places in the run of checkpoints that were found damaged.
    damaged: Vec<u64>,
    writing: Option<Task<()>>,
    disk: Disk,
}

/// What the chief has found in a folder.
struct Restored {
    snapshot: Option<Snapshot>,
    run: Option<RunId>,
    damaged: Vec<u64>,
}

/// The key of the program's own state.
const PROGRAM: &str = "program";

impl Snapshot {
    /// The program's own state, as [`CheckpointManager::save`] has kept it.
    ///
    /// # Errors
    /// [`Error::Restore`] where there is none, [`Error::State`] where it is no `S`.
    pub fn program<S: DeserializeOwned>(&self) -> Result<S> {
        self.get_state(PROGRAM)?.ok_or_else(|| Error::Restore {
            name: PROGRAM.to_owned(),
            problem: "the checkpoint has no state of a program".to_owned(),
        })
    }
}

impl CheckpointManager {
    /// Of a folder, which is made with the first checkpoint. Keeps five.
    pub fn new(root: impl Into<PathBuf>) -> CheckpointManager {
        CheckpointManager {
            root: root.into(),
            keep: 5,
            keep_every: None,
            kept: Instant::now(),
            max_shard_bytes: 5_000_000_000,
            write_timeout: TIMEOUT,
            sets_aside: false,
            backup: false,
            run: None,
            claimed: false,
            damaged: Vec::new(),
            writing: None,
            disk: Disk::default(),
        }
    }

    /// Keeps the newest `count` whole checkpoints, at least one. Damaged ones do not count, and the newest whole one is never
    /// removed.
    pub fn keep(mut self, count: usize) -> CheckpointManager {
        self.keep = count.max(1);
        self
    }

    /// Besides those, one for every so much time stays, also after a restart.
    pub fn keep_every(mut self, time: Duration) -> CheckpointManager {
        self.keep_every = Some(time);
        self
    }

    /// Cuts files of tensors at this size. Default: 5 GB.
    pub fn max_shard_bytes(mut self, bytes: usize) -> CheckpointManager {
        self.max_shard_bytes = bytes.max(1);
        self
    }

    /// Sets how long one operation on the disk may take, such as writing or syncing 64 MiB, before the disk is taken to hang.
    /// Default: five minutes.
    pub fn write_timeout(mut self, time: Duration) -> CheckpointManager {
        self.write_timeout = time;
        self
    }

    /// Moves other runs' checkpoints into folders `run-ID` inside the folder when a run begins there, instead of refusing it.
    /// It changes nothing for a run that continues, so a program that restores may set it always.
    pub fn set_aside_other_runs(mut self) -> CheckpointManager {
        self.sets_aside = true;
        self
    }

    /// What is saved is to be removed at the end.
    pub(crate) fn of_backups(mut self) -> CheckpointManager {
        self.backup = true;
        self
    }

    /// Makes operations on the disk fail as a test says.
    #[cfg(test)]
    pub(super) fn with_disk(mut self, disk: Disk) -> CheckpointManager {
        self.disk = disk;
        self
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The run that checkpoints are saved for; `None` until one was restored, claimed or saved. The same on all workers.
    pub fn run(&self) -> Option<RunId> {
        self.run
    }

    /// Saves for this run from now on: that of another manager of the same training, or of a checkpoint that
    /// [`restore_from`](CheckpointManager::restore_from) has read. Every worker calls this with the same run.
    pub fn continue_run(&mut self, run: RunId) {
        if self.run != Some(run) {
            (self.run, self.claimed) = (Some(run), false);
        }
    }

    /// Makes the folder this run's, and begins a run where none was restored. [`save`](CheckpointManager::save) does this by
    /// itself; call it before the first step to learn early that the folder belongs to another run. Every worker calls this.
    ///
    /// # Errors
    /// [`Error::OtherRun`] for a folder with another run's checkpoints; [`Error::File`] and [`Error::DiskHangs`] where it cannot
    /// be read or written; the collective's.
    pub fn claim(&mut self, strategy: &Strategy) -> Result<RunId> {
        if let Some(run) = self.run.filter(|_| self.claimed) {
            return Ok(run);
        }
        let (root, run, sets_aside) = (self.root.clone(), self.run, self.sets_aside);
        let work = move |disk: &Disk| exclusively(disk, &root, || folder::claim(disk, &root, run, sets_aside));
        let task = self.on_chief(strategy, "making the folder this run's", work);
        let claimed = Task::wait_everywhere(strategy, task)?;
        // Others know it only from the chief.
        let run = from_chief(strategy, Ok::<_, Error>(claimed.or(run)))?.ok_or_else(|| Error::Damaged {
            path: self.root.clone(),
            problem: "the chief has not said which run it belongs to".to_owned(),
        })?;
        (self.run, self.claimed) = (Some(run), true);
        Ok(run)
    }

    /// Takes a snapshot of all parts and has it written; returns as soon as it is taken. Every worker calls this.
    ///
    /// Where the folder has been removed meanwhile, it is made again, with a warning. Where the folder that it was in has gone
    /// too, as if a disk had been unmounted, the save fails with [`Error::FolderGone`].
    ///
    /// # Errors
    /// What a part refuses; on every worker, what went wrong with writing the one before; with the first save, those of
    /// [`claim`](CheckpointManager::claim). The collective's: workers that do not take part are named.
    pub fn save(
        &mut self,
        strategy: &Strategy,
        step: u64,
        parts: &[&dyn Checkpointed],
        program: &impl Serialize,
    ) -> Result<()> {
        let run = self.claim(strategy)?;
        let mut snapshot = Snapshot { run: Some(run), ..Snapshot::new(step) };
        for part in parts {
            part.save(strategy, &mut snapshot).map_err(Error::Part)?;
        }
        snapshot.put_state(PROGRAM, program)?;
        self.finish_everywhere(strategy)?;
        if strategy.is_chief() {
            self.write(snapshot, run)?;
        }
        Ok(())
    }

    fn write(&mut self, snapshot: Snapshot, run: RunId) -> Result<()> {
        let stays = self.keep_every.is_some_and(|time| self.kept.elapsed() >= time);
        if stays {
            self.kept = Instant::now();
        }
        let how = How { max_shard_bytes: self.max_shard_bytes, run, backup: self.backup, stays };
        let keep = Keep { run, backup: self.backup, count: self.keep, damaged: self.damaged.clone() };
        let (root, place) = (self.root.clone(), self.root.clone());
        let what = format!("the checkpoint of step {}", snapshot.step);
        let save = move |disk: &Disk| write::save(disk, &root, &snapshot, &how, &keep).map(drop);
        let work = move |disk: &Disk| exclusively(disk, &place, || save(disk));
        self.writing = Some(Task::start(&self.disk, what, self.write_timeout, work)?);
        Ok(())
    }

    /// Begins work on the chief's disk; others have none to do.
    fn on_chief<T: Send + 'static>(
        &self,
        strategy: &Strategy,
        what: &str,
        work: impl FnOnce(&Disk) -> Result<T> + Send + 'static,
    ) -> Result<Option<Task<T>>> {
        let what = format!("{what} ({})", self.root.display());
        let start = || Task::start(&self.disk, what, self.write_timeout, work);
        if strategy.is_chief() { start().map(Some) } else { Ok(None) }
    }

    /// Waits until what was saved is written.
    ///
    /// # Errors
    /// What went wrong with it; [`Error::DiskHangs`] where an operation on the disk takes longer than
    /// [`write_timeout`](CheckpointManager::write_timeout).
    pub fn finish(&mut self) -> Result<()> {
        self.writing.take().map_or(Ok(()), Task::wait)
    }

    /// Removes all checkpoints of this run, or of all runs where this manager has none yet; and the folder if nothing else is
    /// in it. The chief calls this.
    ///
    /// # Errors
    /// Where they cannot be removed.
    pub fn remove(&mut self) -> Result<()> {
        self.remove_of(self.run, false)
    }

    /// Removes this run's backups; checkpoints that others keep in the same folder stay.
    pub(crate) fn remove_backups(&mut self) -> Result<()> {
        if self.run.is_some() { self.remove_of(self.run, true) } else { self.finish() }
    }

    fn remove_of(&mut self, run: Option<RunId>, backups: bool) -> Result<()> {
        self.finish()?;
        self.claimed = false;
        let root = self.root.clone();
        let what = format!("removing the checkpoints of {}", root.display());
        let work = move |disk: &Disk| exclusively(disk, &root, || folder::remove_all(disk, &root, run, backups));
        Task::start(&self.disk, what, self.write_timeout, work)?.wait()
    }

    /// As [`finish`](CheckpointManager::finish), on every worker: after it each of them finds what the chief has written, and
    /// knows what went wrong with it. A worker that leaves must wait for this, since the others may be stopped as soon as it
    /// has left.
    ///
    /// # Errors
    /// What went wrong with it; the collective's.
    pub fn finish_everywhere(&mut self, strategy: &Strategy) -> Result<()> {
        Task::wait_everywhere(strategy, Ok(self.writing.take()))?;
        Ok(())
    }

    /// The whole checkpoints of the folder, as steps and paths, the newest first. Those with missing or cut files are left out;
    /// checksums of tensors are compared when a checkpoint is read. It changes nothing, so a process that only reads them may
    /// call it while another writes.
    ///
    /// # Errors
    /// Where the folder cannot be read; one that is not there has none. [`Error::SeveralRuns`] where they are of several runs.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>> {
        let found = folder::list(&self.disk, &self.root)?;
        folder::run_of(&self.root, &found)?;
        Ok(found.into_iter().filter(|found| found.is_whole()).map(|found| (found.step, found.path)).collect())
    }

    /// Reads the newest checkpoint that is whole; `None` where there is none. For a process that has no strategy; it changes
    /// nothing in the folder.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] where all are damaged, [`Error::SeveralRuns`] where they are of several runs, and where the folder
    /// cannot be read.
    pub fn read_newest(&self) -> Result<Option<Snapshot>> {
        Ok(folder::newest(&self.disk, &self.root, |path| read::read(&self.disk, path))?.0)
    }

    /// Restores all parts from one checkpoint, which the chief reads, and gives what it holds. Every worker calls this. It
    /// changes nothing in the folder. To save after it, for the same run, call [`continue_run`](CheckpointManager::continue_run)
    /// with the snapshot's [`run`](Snapshot::run).
    ///
    /// # Errors
    /// Where it is not whole, or of something else.
    pub fn restore_from(
        &self,
        strategy: &Strategy,
        checkpoint: &Path,
        parts: &[&dyn Checkpointed],
    ) -> Result<Snapshot> {
        let path = checkpoint.to_owned();
        let task = self.on_chief(strategy, "reading a checkpoint", move |disk| read::read(disk, &path));
        let found = Task::wait_everywhere(strategy, task)?;
        // The chief has found it, or all have been told why not.
        loaded(strategy, found, parts)?.ok_or_else(|| Error::Damaged {
            path: checkpoint.to_owned(),
            problem: "the chief has not read it".to_owned(),
        })
    }

    /// As [`restore_from`](CheckpointManager::restore_from), from the newest checkpoint that is whole; `None` where there is none.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] where there are checkpoints and all are damaged; [`Error::SeveralRuns`]; where the folder cannot be
    /// read, or the checkpoint is one of something else.
    pub fn restore_newest(&self, strategy: &Strategy, parts: &[&dyn Checkpointed]) -> Result<Option<Snapshot>> {
        let root = self.root.clone();
        let work = move |disk: &Disk| Ok(folder::newest(disk, &root, |path| read::read(disk, path))?.0);
        let task = self.on_chief(strategy, "reading the newest checkpoint", work);
        loaded(strategy, Task::wait_everywhere(strategy, task)?.flatten(), parts)
    }

    /// Restores all parts from the newest checkpoint that is whole; its step, and the program's own state. `None` where there is
    /// none. What is saved afterwards continues its run. Every worker calls this.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] where there are checkpoints and all are damaged: nothing begins anew without being told to;
    /// [`Error::SeveralRuns`]; where the folder cannot be read, or the checkpoint is one of something else.
    pub fn restore<S: DeserializeOwned>(
        &mut self,
        strategy: &Strategy,
        parts: &[&dyn Checkpointed],
    ) -> Result<Option<(u64, S)>> {
        self.finish_everywhere(strategy)?;
        let root = self.root.clone();
        let work = move |disk: &Disk| {
            // What processes that were killed have left; no other process writes.
            exclusively(disk, &root, || folder::clear(disk, &root))?;
            let (snapshot, damaged) = folder::newest(disk, &root, |path| read::read(disk, path))?;
            let run = snapshot.as_ref().map_or_else(|| folder::claimed_by(disk, &root), Snapshot::run);
            Ok(Restored { snapshot, run, damaged })
        };
        let task = self.on_chief(strategy, "restoring the newest checkpoint", work);
        let restored = Task::wait_everywhere(strategy, task)?;
        let (snapshot, run, damaged) =
            restored.map_or((None, None, Vec::new()), |Restored { snapshot, run, damaged }| (snapshot, run, damaged));
        let snapshot = loaded(strategy, snapshot, parts)?;
        self.damaged = damaged;
        // A run that was stopped before its first checkpoint is the same one when it starts again.
        if let Some(run) = from_chief(strategy, Ok::<_, Error>(run))? {
            self.continue_run(run);
        }
        let Some(snapshot) = snapshot else { return Ok(None) };
        Ok(Some((snapshot.step(), snapshot.program()?)))
    }
}

impl Drop for CheckpointManager {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            warn(&format!("the last checkpoint was not written: {error}"));
        }
    }
}

/// Gives every worker what the chief has read, and has the parts take it.
fn loaded(strategy: &Strategy, found: Option<Snapshot>, parts: &[&dyn Checkpointed]) -> Result<Option<Snapshot>> {
    let found = shared(strategy, found)?;
    if let Some(snapshot) = &found {
        for part in parts {
            part.load(strategy, snapshot).map_err(Error::Part)?;
        }
    }
    Ok(found)
}

/// Gives every worker what the chief has read.
fn shared(strategy: &Strategy, found: Option<Snapshot>) -> Result<Option<Snapshot>> {
    if strategy.topology().workers == 1 {
        return Ok(found);
    }
    let bytes = found.as_ref().map_or_else(|| Ok(Vec::new()), Snapshot::to_bytes);
    let bytes = bytes_from_chief(strategy, bytes)?;
    if bytes.is_empty() { Ok(None) } else { Snapshot::from_bytes(&bytes).map(Some) }
}

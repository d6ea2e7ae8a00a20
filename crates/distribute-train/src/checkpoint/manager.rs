//! Writing, keeping and restoring checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use distribute_strategy::Strategy;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::disk::Disk;
use super::draft::{Interval, SaveOptions};
use super::folder::{self, Retention};
use super::inflow;
use super::lock::{Turn, exclusively};
use super::manifest::Manifest;
use super::outflow::{self, Inlet, Sink};
use super::restore::{newest, streams};
use super::run::RunId;
use super::snapshot::Snapshot;
use super::survey::Survey;
use super::task::{Awaited, TIMEOUT, Task, everywhere};
use super::write;
use crate::chief::from_chief;
use crate::objects;
use crate::warning::warn;
use crate::{BoxError, Error, Result};

/// The parts of a checkpoint: models, optimizers, and other types that implement this.
pub trait Checkpointed {
    /// Makes the state complete before any part is saved, for example what replicas have not yet exchanged. Every
    /// worker calls this, outside `run`. Default: does nothing.
    ///
    /// # Errors
    /// If the state cannot be completed; nothing is then saved.
    fn prepare(&self, strategy: &Strategy) -> Result<(), BoxError> {
        let _ = strategy;
        Ok(())
    }

    /// Returns whether the part's tensors may be larger than the memory of this process. If one part says so, a
    /// checkpoint is saved and restored as under a strategy that shards: tensors are written as they are added, and
    /// read when they are asked for. Every worker returns the same. Default: `false`.
    fn streams(&self) -> bool {
        false
    }

    /// Adds the state to a snapshot. Every worker calls this, outside `run`, in the same order. Under a strategy that
    /// shards, tensors are written as they are added: pass those that are gathered to
    /// [`put_whole`](Snapshot::put_whole), which tells all workers if they cannot be.
    ///
    /// # Errors
    /// The tensor library's error if the state cannot be read.
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError>;

    /// Restores the state, under any strategy. Every worker calls this, with the same snapshot. Under a strategy that
    /// shards, tensors are read when they are asked for, which every worker must do in the same order.
    ///
    /// # Errors
    /// If the snapshot does not fit.
    fn load(&self, strategy: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError>;
}

/// Writes checkpoints of a run into a folder, keeps the newest, and restores from them.
///
/// Every worker creates one and calls the same methods. The chief writes, on a thread of its own while training
/// continues, and reads for all workers, so the others need no access to its files.
///
/// # Runs
/// A folder belongs to one run, whose [`RunId`] is in every checkpoint. [`restore`](CheckpointManager::restore)
/// continues the run of the checkpoint it finds. A manager that saves without having restored starts a new run; if the
/// folder then holds another run's checkpoints, nothing is written, and the error [`Error::OtherRun`] names the ways to
/// continue that run or to start another. To continue, call `restore`; for a second folder of the same run,
/// [`continue_run`](CheckpointManager::continue_run). To start anew, choose another folder, or let
/// [`set_aside_other_runs`](CheckpointManager::set_aside_other_runs) move the others out of the way.
///
/// # Waiting
/// Operations on the disk are waited for as long as the disk makes progress. If one operation takes longer than
/// [`write_timeout`](CheckpointManager::write_timeout), five minutes by default, [`Error::DiskHangs`] names it and how
/// long it has taken.
///
/// # Ordering
/// Managers of one process may share a folder: their checkpoints are written in the order of the calls of
/// [`save`](CheckpointManager::save), so the newest is that of the last call.
///
/// # Source
/// `tf.train.CheckpointManager`.
#[derive(Debug)]
pub struct CheckpointManager {
    pub(super) root: PathBuf,
    /// Tells this manager from others.
    pub(super) identity: Arc<()>,
    pub(super) keep: usize,
    keep_every: Option<Duration>,
    /// When this manager was created, from which the first interval of a run counts.
    begun: SystemTime,
    /// `None` for the default, which depends on the strategy.
    max_shard_bytes: Option<usize>,
    pub(super) write_timeout: Duration,
    sets_aside: bool,
    /// Whether the checkpoints are to be removed at the end of the training.
    pub(super) backup: bool,
    /// The run, once it is known: the same on all workers.
    run: Option<RunId>,
    /// The strategy's [changes](Strategy::changes) when its processes found that the folder belongs to the run.
    claimed: Option<u64>,
    /// Sequence numbers in the run of checkpoints that were found damaged.
    pub(super) damaged: Vec<u64>,
    writing: Option<Task<()>>,
    pub(super) disk: Disk,
}

/// The key of the program's own state.
const PROGRAM: &str = "program";

impl Snapshot {
    /// Returns the program's own state, as passed to [`CheckpointManager::save`].
    ///
    /// # Errors
    /// [`Error::Restore`] if there is none, [`Error::State`] if it is not an `S`.
    pub fn program<S: DeserializeOwned>(&self) -> Result<S> {
        self.get_state(PROGRAM)?.ok_or_else(|| Error::Restore {
            name: PROGRAM.to_owned(),
            problem: "the checkpoint has no state of a program".to_owned(),
        })
    }
}

impl CheckpointManager {
    /// Creates a manager of a folder, which is created with the first checkpoint. Keeps five checkpoints.
    ///
    /// With the feature `object-store`, the folder may be a URL: `s3://bucket/folder`, `gs://…`, `az://…`, or
    /// `file:///folder`. Settings and credentials come from the environment.
    pub fn new(root: impl Into<PathBuf>) -> CheckpointManager {
        CheckpointManager {
            root: objects::resolved(root.into()),
            identity: Arc::default(),
            keep: 5,
            keep_every: None,
            begun: SystemTime::now(),
            max_shard_bytes: None,
            write_timeout: TIMEOUT,
            sets_aside: false,
            backup: false,
            run: None,
            claimed: None,
            damaged: Vec::new(),
            writing: None,
            disk: Disk::default(),
        }
    }

    /// Keeps the newest `count` whole checkpoints, at least one. Damaged ones do not count, and the newest whole one is
    /// never removed.
    pub fn keep(mut self, count: usize) -> CheckpointManager {
        self.keep = count.max(1);
        self
    }

    /// Additionally keeps one checkpoint for every interval of this length for good: the first that is saved when the
    /// interval is over. Intervals continue over restarts, since each checkpoint has the time of the last one that is
    /// kept for good.
    pub fn keep_every(mut self, time: Duration) -> CheckpointManager {
        self.keep_every = Some(time);
        self
    }

    /// Sets the maximum size of a tensor file, beyond which it is split. A larger tensor has a file of its own.
    /// Default: 5 GB; 1 GB for tensors of a strategy that shards, where the chief holds one file in memory.
    pub fn max_shard_bytes(mut self, bytes: usize) -> CheckpointManager {
        self.max_shard_bytes = Some(bytes.max(1));
        self
    }

    /// Sets how long one operation on the disk may take, such as writing or syncing 64 MiB, before the disk is assumed
    /// to hang. Default: five minutes.
    pub fn write_timeout(mut self, time: Duration) -> CheckpointManager {
        self.write_timeout = time;
        self
    }

    /// Moves other runs' checkpoints into folders `run-ID` inside the folder when a new run starts there, instead of
    /// returning an error. It has no effect on a run that continues, so a program that restores may always set it.
    pub fn set_aside_other_runs(mut self) -> CheckpointManager {
        self.sets_aside = true;
        self
    }

    /// Marks the checkpoints for removal at the end.
    pub(crate) fn of_backups(mut self) -> CheckpointManager {
        self.backup = true;
        self
    }

    /// Makes operations on the disk fail as a test determines.
    #[cfg(test)]
    pub(super) fn with_disk(mut self, disk: Disk) -> CheckpointManager {
        self.disk = disk;
        self
    }

    /// Returns the folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the run that checkpoints are saved for; `None` until one was restored, claimed or saved. The same on all
    /// workers.
    pub fn run(&self) -> Option<RunId> {
        self.run
    }

    /// Saves for this run from now on: the run of another manager of the same training, or of a checkpoint that
    /// [`restore_from`](CheckpointManager::restore_from) has read. Every worker must call this with the same run.
    pub fn continue_run(&mut self, run: RunId) {
        if self.run != Some(run) {
            (self.run, self.claimed) = (Some(run), None);
        }
    }

    /// Claims the folder for this run, and starts a new run if none was restored. [`save`](CheckpointManager::save)
    /// does this by itself; call it before the first step to learn early that the folder belongs to another run. Every
    /// worker must call this.
    ///
    /// # Errors
    /// [`Error::OtherRun`] if the folder holds another run's checkpoints; [`Error::File`] or [`Error::DiskHangs`] if it
    /// cannot be read or written; [`Error::Chief`] or [`Error::ChiefsDisk`] on the other workers; [`Error::Collective`]
    /// if a worker is missing or fails.
    pub fn claim(&mut self, strategy: &Strategy) -> Result<RunId> {
        self.claim_if(strategy, Ok(()))
    }

    /// Claims the folder like [`claim`](CheckpointManager::claim), or returns an error of this worker on every worker.
    pub(super) fn claim_if(&mut self, strategy: &Strategy, allowed: Result<()>) -> Result<RunId> {
        let changes = strategy.changes();
        if let Some(run) = self.run.filter(|_| self.claimed == Some(changes) && allowed.is_ok()) {
            return Ok(run);
        }
        let (root, run, sets_aside) = (self.root.clone(), self.run, self.sets_aside);
        let work = move |disk: &Disk| exclusively(disk, &root, || folder::claim(disk, &root, run, sets_aside));
        let task = allowed.map(|()| self.on_chief(strategy, "making the folder this run's", work));
        let claimed = everywhere(strategy, task)?;
        // The other workers learn it from the chief.
        let run = from_chief(strategy, Ok::<_, Error>(claimed.or(run)))?.ok_or_else(|| Error::Damaged {
            path: self.root.clone(),
            problem: "the chief has not said which run it belongs to".to_owned(),
        })?;
        (self.run, self.claimed) = (Some(run), Some(changes));
        Ok(run)
    }

    /// Takes a snapshot of all parts and starts writing it; returns as soon as the snapshot is taken. Every worker must
    /// call this.
    ///
    /// Under a strategy that shards, or if a part [`streams`](Checkpointed::streams), tensors are written while the
    /// snapshot is taken, and the last file afterwards: the chief never holds more than
    /// [`max_shard_bytes`](CheckpointManager::max_shard_bytes) and about three variables, other workers one variable.
    /// The chief holds about three pieces of tensors that are [put in pieces](Snapshot::put_in_pieces).
    ///
    /// If the folder has been removed meanwhile, it is created again, with a warning. If its parent folder is also
    /// gone, for example because a disk has been unmounted, the save fails with [`Error::FolderGone`].
    ///
    /// # Errors
    /// - [`Error::Part`] if a part cannot be read, and [`Error::State`] if `program` cannot be written as JSON; on the
    ///   other workers [`Error::Chief`] or [`Error::OnWorker`].
    /// - [`Error::PutTwice`] if two parts have tensors or values of one name, such as two models whose variables have
    ///   equal names; nothing is written.
    /// - On every worker, the error of writing the previous checkpoint; under a strategy that shards, also that of
    ///   writing this one so far.
    /// - [`Error::OtherWriter`], with the next save, if another process has claimed a folder of a store meanwhile.
    /// - With the first save, the errors of [`claim`](CheckpointManager::claim).
    /// - [`Error::Collective`] if a worker is missing or fails; it names the missing ones.
    pub fn save(
        &mut self,
        strategy: &Strategy,
        step: u64,
        parts: &[&dyn Checkpointed],
        program: &impl Serialize,
    ) -> Result<()> {
        let run = self.claim(strategy)?;
        let mut snapshot = Snapshot { run: Some(run), ..Snapshot::new(step) };
        if streams(strategy, parts) {
            self.finish_everywhere(strategy)?;
            snapshot.sink = Some(self.sink(strategy, step, run).boxed());
        }
        let filled = fill(strategy, &mut snapshot, parts, program);
        if let Some(sink) = snapshot.sink.take() {
            self.writing = (*sink).into_inner().end(strategy, filled.map(|()| snapshot.state))?;
            return Ok(());
        }
        everywhere(strategy, filled.map(|()| self.writing.take()))?;
        if strategy.is_chief() {
            self.write(snapshot, run);
        }
        Ok(())
    }

    fn write(&mut self, snapshot: Snapshot, run: RunId) {
        let (options, keep) = self.settings(run, MAX_FILE_BYTES);
        let (root, turn) = (self.root.clone(), Turn::take(&self.root));
        let what = named(snapshot.step);
        let save = move |disk: &Disk| write::save(disk, &root, &snapshot, &options, &keep).map(drop);
        let work = move |disk: &Disk| turn.work(disk, || save(disk));
        self.writing = Some(Task::start(&self.disk, what, self.write_timeout, work));
    }

    /// Starts to write a checkpoint whose tensors come one by one; workers other than the chief drop theirs.
    fn sink(&mut self, strategy: &Strategy, step: u64, run: RunId) -> Sink {
        if !strategy.is_chief() {
            return Sink::default();
        }
        let (options, keep) = self.settings(run, MAX_SHARDED_FILE_BYTES);
        let (root, most_bytes) = (self.root.clone(), self.max_shard_bytes.unwrap_or(MAX_FILE_BYTES));
        let turn = Turn::take(&self.root);
        let work = move |disk: &Disk, inlet: &Inlet| {
            turn.work(disk, || outflow::save(disk, &root, inlet, (step, &options), &keep))
        };
        Sink::start(&self.disk, named(step), (self.write_timeout, most_bytes), work)
    }

    fn settings(&self, run: RunId, max_shard_bytes: usize) -> (SaveOptions, Retention) {
        let (begun, now) = (self.begun, SystemTime::now());
        let keep_every = self.keep_every.map(|length| Interval { length, begun, now });
        let max_shard_bytes = self.max_shard_bytes.unwrap_or(max_shard_bytes);
        let options = SaveOptions { max_shard_bytes, run, backup: self.backup, keep_every };
        (options, Retention { run, backup: self.backup, count: self.keep, damaged: self.damaged.clone() })
    }

    /// Starts work on the chief's disk; other workers have none.
    pub(super) fn on_chief<T: Send + 'static>(
        &self,
        strategy: &Strategy,
        what: &str,
        work: impl FnOnce(&Disk) -> Result<T> + Send + 'static,
    ) -> Option<Task<T>> {
        let what = format!("{what} ({})", self.root.display());
        strategy.is_chief().then(|| Task::start(&self.disk, what, self.write_timeout, work))
    }

    /// Works on the disk in this process alone, as long as the disk makes progress.
    pub(super) fn alone<T: Send + 'static>(
        &self,
        what: &str,
        work: impl FnOnce(&Disk, &Path) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (what, root) = (format!("{what} {}", self.root.display()), self.root.clone());
        Task::start(&self.disk, what, self.write_timeout, move |disk| work(disk, &root)).wait()
    }

    /// Waits until the last checkpoint is written.
    ///
    /// # Errors
    /// The error of writing it; [`Error::DiskHangs`] if an operation on the disk takes longer than
    /// [`write_timeout`](CheckpointManager::write_timeout).
    pub fn finish(&mut self) -> Result<()> {
        self.writing.take().map_or(Ok(()), Task::wait)
    }

    /// Removes all checkpoints of this run, or of all runs if this manager has none yet, and the folder if it is then
    /// empty. Called on the chief.
    ///
    /// # Errors
    /// [`Error::File`] or [`Error::DiskHangs`] if they cannot be removed, and the error of writing the last checkpoint.
    pub fn remove(&mut self) -> Result<()> {
        self.finish()?;
        let remove = self.remover(false);
        self.alone("removing the checkpoints of", remove)
    }

    /// Removes this run's backups, once the last one is written; checkpoints that others keep in the same folder stay.
    /// Every worker must call this.
    pub(crate) fn remove_backups(&mut self, strategy: &Strategy) -> Result<()> {
        self.finish_everywhere(strategy)?;
        if self.run.is_none() {
            return Ok(());
        }
        let (root, remove) = (self.root.clone(), self.remover(true));
        let task = self.on_chief(strategy, "removing the backups", move |disk| remove(disk, &root));
        everywhere(strategy, Ok(task)).map(drop)
    }

    /// Returns the work that removes the run's backups, or all of its checkpoints. The folder is then to be claimed
    /// again.
    fn remover(&mut self, backups: bool) -> impl FnOnce(&Disk, &Path) -> Result<()> + Send + use<> {
        let (run, was_claimed) = (self.run, self.claimed.take().is_some());
        move |disk, root| {
            exclusively(disk, root, || {
                if was_claimed && disk.exists(root)? {
                    folder::check_writer(disk, root)?;
                }
                folder::remove_all(disk, root, run, backups)
            })
        }
    }

    /// Waits on every worker until the chief has written the last checkpoint. Afterwards each of them can read it, or
    /// knows the error. A worker that leaves must wait for this, since the others may be stopped as soon as it has
    /// left.
    ///
    /// # Errors
    /// The error of writing the checkpoint on the chief, and [`Error::Chief`] or [`Error::ChiefsDisk`] on the others;
    /// [`Error::Collective`] if a worker is missing or fails.
    pub fn finish_everywhere(&mut self, strategy: &Strategy) -> Result<()> {
        everywhere(strategy, Ok(self.writing.take()))?;
        Ok(())
    }

    /// Returns this run's whole checkpoints on every worker, once the last one is written; either those that are to be
    /// removed at the end, or the others, as this manager's are. Every worker must call this.
    pub(crate) fn held_everywhere(&mut self, strategy: &Strategy) -> Result<Vec<Held>> {
        self.finish_everywhere(strategy)?;
        let (root, run, backup) = (self.root.clone(), self.run, self.backup);
        let list = move |disk: &Disk| {
            let found = folder::list(disk, &root)?;
            let is_own = |manifest: &&Manifest| Some(manifest.run) == run && manifest.backup == backup;
            let held = found.iter().filter(|found| found.is_whole()).filter_map(|found| {
                let manifest = found.manifest.as_ref().filter(is_own)?;
                Some(Held { step: found.step, sequence: manifest.sequence })
            });
            Ok(held.collect::<Vec<Held>>())
        };
        let task = self.on_chief(strategy, "listing the checkpoints", list);
        let held = everywhere(strategy, Ok(task))?;
        from_chief(strategy, Ok(held.unwrap_or_default()))
    }

    /// Returns the whole checkpoints of the folder, as steps and paths, the newest first. Those with missing or
    /// truncated files are left out; checksums of tensors are compared when a checkpoint is read. Nothing is changed,
    /// so a process that only reads may call this while another writes.
    ///
    /// # Errors
    /// [`Error::File`] or [`Error::DiskHangs`] if the folder cannot be read (a missing folder has no checkpoints);
    /// [`Error::Format`] for checkpoints of another version; [`Error::SeveralRuns`] if they belong to several runs.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>> {
        let found = self.alone("listing", |disk, root| {
            let found = folder::list(disk, root)?;
            folder::run_of(root, &found)?;
            Ok(found)
        })?;
        Ok(found.into_iter().filter(|found| found.is_whole()).map(|found| (found.step, found.path)).collect())
    }

    /// Reads the newest whole checkpoint; `None` if there are none. For a process without a strategy; nothing in the
    /// folder is changed.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] if all are damaged, [`Error::SeveralRuns`] if they belong to several runs,
    /// [`Error::Format`] for another version, and [`Error::File`] or [`Error::DiskHangs`] if the folder cannot be read.
    pub fn read_newest(&self) -> Result<Option<Snapshot>> {
        self.alone("reading the newest checkpoint of", newest)
    }

    /// Opens the newest whole checkpoint like [`read_newest`](CheckpointManager::read_newest), without its tensors: all
    /// files are compared with their checksums, and a tensor, or a [piece](Snapshot::pieces) of one, is read when it is
    /// asked for. The files stay in use as long as the snapshot.
    ///
    /// # Errors
    /// The errors of [`read_newest`](CheckpointManager::read_newest) occur in the same cases.
    ///
    /// # Examples
    /// ```
    /// use distribute_train::checkpoint::CheckpointManager;
    /// # let folder = tempfile::tempdir()?;
    /// let checkpoints = CheckpointManager::new(folder.path());
    /// assert!(checkpoints.open_newest()?.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_newest(&self) -> Result<Option<Snapshot>> {
        let open = |disk: &Disk, root: &Path| Ok(folder::newest(disk, root, |path| Survey::of(disk, path))?.0);
        let survey = self.alone("opening the newest checkpoint of", open)?;
        Ok(survey.map(|survey| inflow::alone(survey, &self.disk, self.write_timeout).into()))
    }
}

/// Adds all parts and the program's own state to a snapshot. The other workers do not know this worker's error yet.
fn fill(
    strategy: &Strategy,
    snapshot: &mut Snapshot,
    parts: &[&dyn Checkpointed],
    program: &impl Serialize,
) -> Result<()> {
    for part in parts {
        part.prepare(strategy).map_err(of_part)?;
    }
    for part in parts {
        part.save(strategy, snapshot).map_err(of_part)?;
    }
    snapshot.put_state(PROGRAM, program)?;
    snapshot.check_put_once()
}

/// A checkpoint in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Held {
    pub(crate) step: u64,
    /// Its number among all of the folder, since a step may be written again.
    pub(crate) sequence: u64,
}

impl Drop for CheckpointManager {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            warn(&format!("the last checkpoint was not written: {error}"));
        }
    }
}

/// Returns an error with which a part has ended: one of reading or writing the checkpoint as it is, so that it keeps
/// its class, and others as those of the part.
pub(super) fn of_part(error: BoxError) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => match *error {
            own @ (Error::Restore { .. } | Error::Values(_) | Error::State { .. }) => Error::Part(Box::new(own)),
            of_checkpoint => of_checkpoint,
        },
        Err(error) => Error::Part(error),
    }
}

/// Returns the name of a checkpoint that is being written.
fn named(step: u64) -> String {
    format!("the checkpoint of step {step}")
}

/// The most bytes of a file of tensors; Hugging Face's default at the time of writing.
const MAX_FILE_BYTES: usize = 5_000_000_000;

/// The same under a strategy that shards: a second or so of a disk's time, and little compared with a model that needs
/// to be sharded.
const MAX_SHARDED_FILE_BYTES: usize = 1_000_000_000;

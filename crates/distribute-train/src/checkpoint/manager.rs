//! When checkpoints are written, which are kept, and which is read.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use distribute_strategy::Strategy;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::files;
use super::snapshot::Snapshot;
use crate::chief::{bytes_from_chief, from_chief};
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
    writing: Option<JoinHandle<Result<()>>>,
    /// Checkpoints that stay, whatever their number.
    for_good: Vec<PathBuf>,
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
            writing: None,
            for_good: Vec::new(),
        }
    }

    /// Keeps the newest `count`, at least one.
    pub fn keep(mut self, count: usize) -> CheckpointManager {
        self.keep = count.max(1);
        self
    }

    /// Besides those, one for every so much time stays.
    pub fn keep_every(mut self, time: Duration) -> CheckpointManager {
        self.keep_every = Some(time);
        self
    }

    /// Cuts files of tensors at this size. Default: 5 GB.
    pub fn max_shard_bytes(mut self, bytes: usize) -> CheckpointManager {
        self.max_shard_bytes = bytes.max(1);
        self
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Takes a snapshot of all parts and has it written; returns as soon as it is taken. Every worker calls this.
    ///
    /// # Errors
    /// What a part refuses; on every worker, what went wrong with writing the one before. The collective's: workers that do not
    /// take part are named.
    pub fn save(
        &mut self,
        strategy: &Strategy,
        step: u64,
        parts: &[&dyn Checkpointed],
        program: &impl Serialize,
    ) -> Result<()> {
        let mut snapshot = Snapshot::new(step);
        for part in parts {
            part.save(strategy, &mut snapshot).map_err(Error::Part)?;
        }
        snapshot.put_state(PROGRAM, program)?;
        self.finish_everywhere(strategy)?;
        if strategy.is_chief() {
            self.write(snapshot)?;
        }
        Ok(())
    }

    fn write(&mut self, snapshot: Snapshot) -> Result<()> {
        let stays = self.keep_every.is_some_and(|time| self.kept.elapsed() >= time);
        if stays {
            self.kept = Instant::now();
            self.for_good.push(self.root.join(format!("step-{:08}", snapshot.step())));
        }
        let (root, max_shard_bytes, keep) = (self.root.clone(), self.max_shard_bytes, self.keep);
        let for_good = self.for_good.clone();
        let write = move || {
            files::write(&root, &snapshot, max_shard_bytes)?;
            for (_, path) in files::list(&root)?.into_iter().skip(keep).filter(|(_, path)| !for_good.contains(path)) {
                // Somebody else may have been faster.
                drop(std::fs::remove_dir_all(path));
            }
            Ok(())
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        self.writing = Some(thread.map_err(|source| Error::File { path: self.root.clone(), source })?);
        Ok(())
    }

    /// Waits until what was saved is written.
    ///
    /// # Errors
    /// What went wrong with it.
    pub fn finish(&mut self) -> Result<()> {
        match self.writing.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(Error::Damaged { path: self.root.clone(), problem: "its writer panicked".to_owned() }),
        }
    }

    /// Removes all checkpoints, and the folder if nothing else is in it. The chief calls this.
    ///
    /// # Errors
    /// Where they cannot be removed.
    pub fn remove(&mut self) -> Result<()> {
        self.finish()?;
        files::remove_all(&self.root)
    }

    /// As [`finish`](CheckpointManager::finish), on every worker: after it each of them finds what the chief has written, and
    /// knows what went wrong with it. A worker that leaves must wait for this, since the others may be stopped as soon as it
    /// has left.
    ///
    /// # Errors
    /// What went wrong with it; the collective's.
    pub fn finish_everywhere(&mut self, strategy: &Strategy) -> Result<()> {
        let outcome = if strategy.is_chief() { self.finish() } else { Ok(()) };
        from_chief(strategy, outcome)
    }

    /// The checkpoints of the folder, as steps and paths, the newest first. It changes nothing, so a process that only reads
    /// them may call it while another writes.
    ///
    /// # Errors
    /// Where the folder cannot be read; one that is not there has none.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>> {
        files::list(&self.root)
    }

    /// Restores all parts from one checkpoint, which the chief reads, and gives what it holds. Every worker calls this. It
    /// changes nothing in the folder.
    ///
    /// # Errors
    /// Where it is not whole, or of something else.
    pub fn restore_from(
        &self,
        strategy: &Strategy,
        checkpoint: &Path,
        parts: &[&dyn Checkpointed],
    ) -> Result<Snapshot> {
        let found = if strategy.is_chief() { files::read(checkpoint).map(Some) } else { Ok(None) };
        // The chief has found it, or all have been told why not.
        loaded(strategy, found, parts)?.ok_or_else(|| Error::Damaged {
            path: checkpoint.to_owned(),
            problem: "the chief has not read it".to_owned(),
        })
    }

    /// As [`restore_from`](CheckpointManager::restore_from), from the newest checkpoint that is whole; `None` where there is none.
    ///
    /// # Errors
    /// Where the folder cannot be read, or the checkpoint is one of something else.
    pub fn restore_newest(&self, strategy: &Strategy, parts: &[&dyn Checkpointed]) -> Result<Option<Snapshot>> {
        let found = if strategy.is_chief() { self.newest() } else { Ok(None) };
        loaded(strategy, found, parts)
    }

    /// Restores all parts from the newest checkpoint that is whole; its step, and the program's own state. `None` where there is
    /// none. Every worker calls this.
    ///
    /// # Errors
    /// Where the folder cannot be read, or the checkpoint is one of something else.
    pub fn restore<S: DeserializeOwned>(
        &mut self,
        strategy: &Strategy,
        parts: &[&dyn Checkpointed],
    ) -> Result<Option<(u64, S)>> {
        let found = if strategy.is_chief() { self.finish().and_then(|()| self.cleared().newest()) } else { Ok(None) };
        let Some(snapshot) = loaded(strategy, found, parts)? else { return Ok(None) };
        Ok(Some((snapshot.step(), snapshot.program()?)))
    }

    /// Without what processes that were killed have left; nobody else writes.
    fn cleared(&self) -> &CheckpointManager {
        files::remove_temporary(&self.root);
        self
    }

    /// The newest that is whole; damaged ones are named.
    fn newest(&self) -> Result<Option<Snapshot>> {
        for (_, path) in files::list(&self.root)? {
            match files::read(&path) {
                Ok(snapshot) => return Ok(Some(snapshot)),
                Err(error) => tracing::warn!("{error}; the checkpoint before it is used"),
            }
        }
        Ok(None)
    }
}

impl Drop for CheckpointManager {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::warn!("the last checkpoint was not written: {error}");
        }
    }
}

/// Gives every worker what the chief has read, and has the parts take it.
fn loaded(
    strategy: &Strategy,
    found: Result<Option<Snapshot>>,
    parts: &[&dyn Checkpointed],
) -> Result<Option<Snapshot>> {
    let found = shared(strategy, found)?;
    if let Some(snapshot) = &found {
        for part in parts {
            part.load(strategy, snapshot).map_err(Error::Part)?;
        }
    }
    Ok(found)
}

/// Gives every worker what the chief has read.
fn shared(strategy: &Strategy, found: Result<Option<Snapshot>>) -> Result<Option<Snapshot>> {
    if strategy.topology().workers == 1 {
        return found;
    }
    let bytes = found.and_then(|found| found.as_ref().map_or_else(|| Ok(Vec::new()), Snapshot::to_bytes));
    let bytes = bytes_from_chief(strategy, bytes)?;
    if bytes.is_empty() { Ok(None) } else { Snapshot::from_bytes(&bytes).map(Some) }
}

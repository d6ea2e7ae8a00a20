//! Restoring from checkpoints.

use std::path::Path;
use std::sync::Arc;

use distribute_strategy::Strategy;
use serde::de::DeserializeOwned;

use super::disk::Disk;
use super::inflow::{self, Inflow};
use super::lock::exclusively;
use super::manager::of_part;
use super::run::RunId;
use super::survey::Survey;
use super::task::everywhere;
use super::{CheckpointManager, Checkpointed, Snapshot, folder, read};
use crate::chief::{agreed, bytes_from_chief, from_chief};
use crate::objects;
use crate::{Error, Result};

/// A checkpoint that the chief has found to be whole.
enum Found {
    InMemory(Snapshot),
    /// Its tensors are read one by one.
    OnDisk(Survey),
}

/// The chief's result of reading a folder.
#[derive(Default)]
struct Restored {
    found: Option<Found>,
    run: Option<RunId>,
    damaged: Vec<u64>,
}

impl CheckpointManager {
    /// Restores all parts from one checkpoint, which the chief reads, and returns its contents. Every worker must call
    /// this. Nothing in the folder is changed. To save for the same run afterwards, call
    /// [`continue_run`](CheckpointManager::continue_run) with the snapshot's [`run`](Snapshot::run).
    ///
    /// Under a strategy that shards, or if a part [`streams`](Checkpointed::streams), the chief checks all files before
    /// anything is overwritten, and then reads and sends one tensor, or one [piece](Snapshot::pieces), at a time; the
    /// returned snapshot has no tensors. If the disk fails between two of them, the parts are restored in part: restore
    /// again.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the checkpoint is not whole, [`Error::Format`] for another version, [`Error::File`] or
    /// [`Error::DiskHangs`] if it cannot be read; [`Error::Part`] if it does not fit a part; [`Error::LoadOrder`] if
    /// workers read tensors in different orders under a strategy that shards; [`Error::Chief`],
    /// [`Error::ChiefsDisk`] or [`Error::OnWorker`] on the other workers; [`Error::Collective`] if a worker is missing
    /// or fails.
    pub fn restore_from(
        &self,
        strategy: &Strategy,
        checkpoint: &Path,
        parts: &[&dyn Checkpointed],
    ) -> Result<Snapshot> {
        let path = objects::resolved(checkpoint.to_owned());
        let read = reader(strategy, parts);
        let task = self.on_chief(strategy, "reading a checkpoint", move |disk| read(disk, &path));
        let found = everywhere(strategy, Ok(task))?;
        // The chief has read it, or all workers have got its error.
        self.loaded(strategy, found, parts)?.ok_or_else(|| Error::Damaged {
            path: checkpoint.to_owned(),
            problem: "the chief has not read it".to_owned(),
        })
    }

    /// Restores all parts from the newest whole checkpoint, which the chief reads, and returns its contents; `None` if
    /// there are no checkpoints. Every worker must call this. Nothing in the folder is changed.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] if there are checkpoints and all are damaged; [`Error::SeveralRuns`] if they belong to
    /// several runs; otherwise the errors of [`restore_from`](CheckpointManager::restore_from).
    pub fn restore_newest(&self, strategy: &Strategy, parts: &[&dyn Checkpointed]) -> Result<Option<Snapshot>> {
        let (root, read) = (self.root.clone(), reader(strategy, parts));
        let work = move |disk: &Disk| Ok(folder::newest(disk, &root, |path| read(disk, path))?.0);
        let task = self.on_chief(strategy, "reading the newest checkpoint", work);
        self.loaded(strategy, everywhere(strategy, Ok(task))?.flatten(), parts)
    }

    /// Restores all parts from the newest whole checkpoint, and returns its step and the program's own state; `None` if
    /// there are no checkpoints. Checkpoints saved afterwards continue its run. Every worker must call this.
    ///
    /// # Errors
    /// [`Error::NoneWhole`] if there are checkpoints and all are damaged, since a run is never silently started anew;
    /// [`Error::SeveralRuns`] if they belong to several runs; [`Error::State`] if the program's state is not an `S`;
    /// otherwise the errors of [`restore_from`](CheckpointManager::restore_from).
    pub fn restore<S: DeserializeOwned>(
        &mut self,
        strategy: &Strategy,
        parts: &[&dyn Checkpointed],
    ) -> Result<Option<(u64, S)>> {
        self.finish_everywhere(strategy)?;
        let (root, read) = (self.root.clone(), reader(strategy, parts));
        let work = move |disk: &Disk| {
            // Remove what killed processes have left; no other process writes.
            exclusively(disk, &root, || folder::clear(disk, &root))?;
            let (found, damaged) = folder::newest(disk, &root, |path| read(disk, path))?;
            let run = found.as_ref().map_or_else(|| folder::claimed_by(disk, &root), Found::run);
            Ok(Restored { found, run, damaged })
        };
        let task = self.on_chief(strategy, "restoring the newest checkpoint", work);
        let restored = everywhere(strategy, Ok(task))?;
        let Restored { found, run, damaged } = restored.unwrap_or_default();
        let snapshot = self.loaded(strategy, found, parts)?;
        self.damaged = damaged;
        // A run that was stopped before its first checkpoint keeps its identity when restarted.
        if let Some(run) = from_chief(strategy, Ok::<_, Error>(run))? {
            self.continue_run(run);
        }
        let Some(snapshot) = snapshot else { return Ok(None) };
        Ok(Some((snapshot.step(), snapshot.program()?)))
    }

    /// Loads what the chief has read into the parts of every worker.
    fn loaded(
        &self,
        strategy: &Strategy,
        found: Option<Found>,
        parts: &[&dyn Checkpointed],
    ) -> Result<Option<Snapshot>> {
        let snapshot = match found {
            Some(Found::InMemory(snapshot)) => shared(strategy, Some(snapshot))?,
            Some(Found::OnDisk(survey)) => self.lazy(strategy, Some(survey))?,
            None if streams(strategy, parts) => self.lazy(strategy, None)?,
            None => shared(strategy, None)?,
        };
        let Some(snapshot) = snapshot else { return Ok(None) };
        let outcome = parts.iter().try_for_each(|part| {
            let outcome = part.load(strategy, &snapshot).map_err(of_part);
            let failure = snapshot.source.as_ref().and_then(|source| source.failure());
            failure.map_or(outcome, Err)
        });
        if let Some(source) = &snapshot.source {
            source.close();
        }
        // A worker that has loaded its own must not train on without the one that has not.
        agreed(strategy, outcome).map(|()| Some(snapshot))
    }

    /// Returns a snapshot whose tensors are read when they are asked for.
    fn lazy(&self, strategy: &Strategy, survey: Option<Survey>) -> Result<Option<Snapshot>> {
        Ok(inflow::begin(strategy, survey, &self.disk, self.write_timeout)?.map(Snapshot::from))
    }
}

impl From<Inflow> for Snapshot {
    fn from(Inflow { step, run, origin, state, source }: Inflow) -> Snapshot {
        let (run, origin, source) = (Some(run), Some(origin), Some(Arc::new(source)));
        Snapshot { run, origin, state, source, ..Snapshot::new(step) }
    }
}

impl Found {
    fn run(&self) -> Option<RunId> {
        match self {
            Found::InMemory(snapshot) => snapshot.run,
            Found::OnDisk(survey) => Some(survey.found.run),
        }
    }
}

pub(super) fn newest(disk: &Disk, root: &Path) -> Result<Option<Snapshot>> {
    Ok(folder::newest(disk, root, |path| read::read(disk, path))?.0)
}

/// Returns whether tensors are read and written one by one under this strategy, or because of these parts.
pub(super) fn streams(strategy: &Strategy, parts: &[&dyn Checkpointed]) -> bool {
    strategy.sharding().is_some() || parts.iter().any(|part| part.streams())
}

/// Returns how the chief reads a checkpoint.
fn reader(strategy: &Strategy, parts: &[&dyn Checkpointed]) -> fn(&Disk, &Path) -> Result<Found> {
    match streams(strategy, parts) {
        true => |disk, path| Survey::of(disk, path).map(Found::OnDisk),
        false => |disk, path| read::read(disk, path).map(Found::InMemory),
    }
}

/// Sends every worker what the chief has read.
pub(super) fn shared(strategy: &Strategy, found: Option<Snapshot>) -> Result<Option<Snapshot>> {
    if strategy.topology().workers() == 1 {
        return Ok(found);
    }
    let bytes = found.as_ref().map_or_else(|| Ok(Vec::new()), Snapshot::to_bytes);
    let bytes = bytes_from_chief(strategy, bytes)?;
    if bytes.is_empty() { Ok(None) } else { Snapshot::from_bytes(&bytes).map(Some) }
}

//! The best epochs of a training, and whether their checkpoints are in a folder.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::watch::{Seen, Watch, Watched};
use super::{Training, state};
use crate::Result;
use crate::checkpoint::{CheckpointManager, Held};

/// The best value so far, and the epochs that were the best.
#[derive(Clone, Debug)]
pub(super) struct Best {
    watch: Watch,
    /// Whether the epoch that has just ended is the best so far.
    pub(super) is_best: bool,
    /// The last epochs that were the best, the newest last.
    epochs: Vec<BestEpoch>,
    /// Whether the newest may be missing in the folder: it is written while training continues, and the process that
    /// wrote it may have been stopped before it was done.
    is_unchecked: bool,
    /// Checkpoints that the folder held at the last look, if there was one.
    found: Vec<Held>,
}

/// An epoch that was the best.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct BestEpoch {
    /// Its last step.
    step: u64,
    /// Its value; `None` for an infinite one, which JSON does not have.
    value: Option<f64>,
    /// Checkpoints that were in the folder before this epoch, of later epochs that a restart has undone: they are not
    /// better ones that have replaced this one. Empty in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    undone: Vec<Held>,
}

impl BestEpoch {
    /// Returns whether a checkpoint is that of this epoch, or of a better one that has replaced it.
    fn is_covered_by(&self, held: &Held) -> bool {
        held.step >= self.step && !self.undone.contains(held)
    }
}

/// The state that is kept in checkpoints.
#[derive(Serialize, Deserialize)]
struct Kept {
    watch: Watched,
    #[serde(default)]
    is_best: bool,
    /// Empty in checkpoints of earlier versions.
    #[serde(default)]
    epochs: Vec<BestEpoch>,
}

impl Best {
    pub(super) fn new(monitor: &str, rises: Option<bool>) -> Best {
        let watch = Watch { rises, ..Watch::new(monitor) };
        Best { watch, is_best: false, epochs: Vec::new(), is_unchecked: false, found: Vec::new() }
    }

    /// Sets whether the value should rise.
    pub(super) fn rises(mut self, rises: bool) -> Best {
        self.watch.rises = Some(rises);
        self
    }

    /// Returns the settings that decide which epochs are the best.
    pub(super) fn settings(&self) -> Vec<String> {
        self.watch.settings()
    }

    /// Finds whether the value should rise, if the program has not set it.
    pub(super) fn settle(&mut self, training: &Training<'_>) -> Result<()> {
        self.watch.settle(training)
    }

    /// Looks at the values of an epoch.
    pub(super) fn see(&mut self, training: &Training<'_>) -> Result<()> {
        let value = self.watch.value(training)?;
        self.is_best = value.is_some_and(|value| self.watch.is_best(value));
        if self.is_best {
            let undone = self.found.iter().filter(|held| held.step >= training.step).copied().collect();
            self.epochs.push(BestEpoch { step: training.step, value, undone });
            let more = self.epochs.len().saturating_sub(REMEMBERED);
            self.epochs.drain(..more);
        }
        Ok(())
    }

    /// Looks for the newest best before the next step. Other members of an elastic job do the same.
    pub(super) fn check_again(&mut self) {
        self.is_unchecked = true;
    }

    /// Takes the newest epoch for the best whose checkpoint is in the folder, or was and has been replaced by a better
    /// one that this state does not know. Every worker calls this.
    pub(super) fn check(&mut self, checkpoints: &mut CheckpointManager, training: &Training<'_>) -> Result<()> {
        if !std::mem::take(&mut self.is_unchecked) {
            return Ok(());
        }
        let held = checkpoints.held_everywhere(training.strategy)?;
        let mut missing = None;
        while let Some(newest) = self.epochs.pop_if(|newest| !held.iter().any(|held| newest.is_covered_by(held))) {
            missing.get_or_insert(newest);
        }
        self.found.clone_from(&held);
        let Some(missing) = missing else { return Ok(()) };
        self.watch.seen = self.epochs.last().map_or_else(Seen::default, |epoch| Seen { best: epoch.value, waited: 0 });
        if training.is_chief() {
            let (folder, monitor) = (checkpoints.root().display(), &self.watch.monitor);
            let next = match self.epochs.last() {
                Some(epoch) if held.iter().any(|held| held.step == epoch.step) => {
                    format!("the best is now that of step {}, which is there", epoch.step)
                }
                Some(epoch) => {
                    format!("the best is now that of step {}, or the better one that has replaced it there", epoch.step)
                }
                None => "the next epoch counts as the best".to_owned(),
            };
            distribute_notice::warn!(
                "the model with the best {monitor}, of step {}, is not in {folder}: it was removed, or the program was \
                 stopped before it was written; {next}",
                missing.step
            );
        }
        Ok(())
    }

    pub(super) fn state(&self, callback: &str) -> Value {
        let Best { watch, is_best, epochs, .. } = self;
        state::of(callback, Kept { watch: watch.watched(), is_best: *is_best, epochs: epochs.clone() })
    }

    pub(super) fn set_state(&mut self, callback: &str, given: &Value) {
        let earlier = |given: &Value| {
            // The oldest versions saved the watch alone.
            let watch = || Some(Kept { watch: Watched::deserialize(given).ok()?, is_best: false, epochs: Vec::new() });
            Kept::deserialize(given).ok().or_else(watch)
        };
        let Some(kept) = state::read(callback, given, earlier) else { return };
        if self.watch.adopt(callback, kept.watch) {
            (self.is_best, self.epochs, self.is_unchecked) = (kept.is_best, kept.epochs, true);
        }
    }
}

/// A checkpoint is written before the next one of the same folder is begun, so at most the newest is missing, unless
/// someone removes others.
const REMEMBERED: usize = 4;

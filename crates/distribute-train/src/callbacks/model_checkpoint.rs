//! Callbacks that save checkpoints.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::watch::Watch;
use super::{Callback, Occasion, Training};
use crate::Result;
use crate::checkpoint::CheckpointManager;

/// Saves the model, its optimizer and everything else that is needed to resume training, periodically or when it is
/// best.
///
/// It does not restore; [`BackupAndRestore`] does, from the same folder or another, and the checkpoints that this
/// callback then saves belong to the restored run. A training run that starts anew in a folder with another run's
/// checkpoints ends before its first step with [`Error::OtherRun`](crate::Error::OtherRun), unless
/// [`set_aside_other_runs`](ModelCheckpoint::set_aside_other_runs) is set.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::ModelCheckpoint;
/// let last_three = ModelCheckpoint::new("runs/1/checkpoints").every_steps(500).keep(3);
/// let best = ModelCheckpoint::new("runs/1/best").best("val_accuracy");
/// ```
///
/// # Source
/// `tf.keras.callbacks.ModelCheckpoint`.
#[derive(Debug)]
pub struct ModelCheckpoint {
    checkpoints: CheckpointManager,
    every: Every,
    best: Option<Watch>,
    /// Whether the epoch that has just ended is the best so far.
    is_best: bool,
}

/// When to save, besides at the end.
#[derive(Clone, Copy, Debug)]
enum Every {
    Epochs(u32),
    /// After every `count` steps and after each epoch.
    Steps(Steps),
}

#[derive(Clone, Copy, Debug)]
struct Steps {
    count: u64,
    /// The step after which a checkpoint was last saved.
    last: u64,
}

impl Steps {
    fn new(count: u64) -> Steps {
        Steps { count: count.max(1), last: 0 }
    }

    /// Returns whether a multiple of the count has been passed, by one step or by several that were run at once.
    fn is_due(&mut self, step: u64) -> bool {
        let due = step / self.count > self.last / self.count;
        if due {
            self.last = step;
        }
        due
    }
}

impl ModelCheckpoint {
    /// Saves into this folder after each epoch and keeps the newest five.
    pub fn new(folder: impl Into<PathBuf>) -> ModelCheckpoint {
        ModelCheckpoint::with(CheckpointManager::new(folder))
    }

    /// Saves with a manager's options.
    pub fn with(checkpoints: CheckpointManager) -> ModelCheckpoint {
        ModelCheckpoint { checkpoints, every: Every::Epochs(1), best: None, is_best: false }
    }

    /// Sets the number of checkpoints to keep.
    pub fn keep(mut self, count: usize) -> ModelCheckpoint {
        self.checkpoints = self.checkpoints.keep(count);
        self
    }

    /// Moves other runs' checkpoints into folders `run-ID` inside the folder when a run starts there. A restored
    /// training continues with its own. See [`CheckpointManager::set_aside_other_runs`].
    pub fn set_aside_other_runs(mut self) -> ModelCheckpoint {
        self.checkpoints = self.checkpoints.set_aside_other_runs();
        self
    }

    /// Saves after every `epochs` epochs.
    pub fn every_epochs(mut self, epochs: u32) -> ModelCheckpoint {
        self.every = Every::Epochs(epochs.max(1));
        self
    }

    /// Saves after every `steps` steps, and after each epoch.
    pub fn every_steps(mut self, steps: u64) -> ModelCheckpoint {
        self.every = Every::Steps(Steps::new(steps));
        self
    }

    /// Saves only after epochs that are the best so far by a value, such as `val_loss`, and keeps only the best. Values
    /// whose names end in `loss`, `error`, `cross_entropy` and `perplexity` should fall, others rise.
    pub fn best(mut self, monitor: &str) -> ModelCheckpoint {
        self.best = Some(Watch::new(monitor));
        self.keep(1)
    }

    fn is_due(&mut self, training: &Training<'_>, occasion: Occasion) -> bool {
        match (&mut self.every, occasion) {
            (_, Occasion::Epoch) if self.best.is_some() => self.is_best,
            _ if self.best.is_some() => false,
            (Every::Epochs(epochs), Occasion::Epoch) => training.epoch.is_multiple_of(*epochs),
            (Every::Steps(steps), Occasion::Step) => steps.is_due(training.step),
            (Every::Steps(_), Occasion::Epoch) => true,
            _ => false,
        }
    }
}

impl Callback for ModelCheckpoint {
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        if let Every::Steps(steps) = &mut self.every {
            // The same on processes that have joined others, or were restarted, as on those that have counted so far.
            steps.last = steps.last.max(training.step);
        }
        // Not earlier, since another callback may restore; not later, since a whole epoch could be lost.
        training.run.claim(&mut self.checkpoints)
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if let Some(watch) = &mut self.best {
            self.is_best = training.monitored(&watch.monitor)?.is_some_and(|value| watch.is_best(value));
        }
        Ok(())
    }

    fn save(&mut self, training: &mut Training<'_>, occasion: Occasion) -> Result<bool> {
        let due = self.is_due(training, occasion);
        if due {
            training.run.save(&mut self.checkpoints)?;
        }
        if occasion == Occasion::Leaving {
            // The first worker to leave may cause the others to be stopped.
            self.checkpoints.finish_everywhere(training.strategy)?;
        }
        Ok(due)
    }

    fn train_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.checkpoints.finish_everywhere(training.strategy)
    }

    fn state(&self) -> Value {
        self.best.as_ref().map_or(Value::Null, |watch| json!({ "watch": watch.state(), "is_best": self.is_best }))
    }

    fn set_state(&mut self, state: &Value) {
        if let Some(watch) = &mut self.best {
            // Earlier versions saved the watch alone.
            watch.set_state(state.get("watch").unwrap_or(state));
            self.is_best = state.get("is_best").and_then(Value::as_bool).unwrap_or(false);
        }
    }
}

/// Saves the training after each epoch, optionally every few steps, and when the machine is about to be preempted. The
/// restarted program resumes from there, even in the middle of an epoch. The backups are removed at the end of the
/// training; checkpoints that [`ModelCheckpoint`] keeps in the same folder stay.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::BackupAndRestore;
/// let backup = BackupAndRestore::new("runs/1/backup").every_steps(500);
/// ```
///
/// # Source
/// `tf.keras.callbacks.BackupAndRestore`.
#[derive(Debug)]
pub struct BackupAndRestore {
    checkpoints: CheckpointManager,
    every: Option<Steps>,
    removes: bool,
}

impl BackupAndRestore {
    /// Saves in this folder.
    pub fn new(folder: impl Into<PathBuf>) -> BackupAndRestore {
        BackupAndRestore::with(CheckpointManager::new(folder).keep(2))
    }

    /// Saves with a manager's options.
    pub fn with(checkpoints: CheckpointManager) -> BackupAndRestore {
        BackupAndRestore { checkpoints: checkpoints.of_backups(), every: None, removes: true }
    }

    /// Also saves after every `steps` steps.
    pub fn every_steps(mut self, steps: u64) -> BackupAndRestore {
        self.every = Some(Steps::new(steps));
        self
    }

    /// Keeps the backups at the end; if restarted, the program then finds that nothing is left to do.
    pub fn keep_at_end(mut self) -> BackupAndRestore {
        self.removes = false;
        self
    }
}

impl Callback for BackupAndRestore {
    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        if let Some(step) = training.run.restore(&mut self.checkpoints)? {
            if let Some(every) = &mut self.every {
                every.last = step;
            }
            if training.is_chief() {
                tracing::info!("resuming after step {step}, from {}", self.checkpoints.root().display());
            }
        }
        // The run is known from the start, so that one stopped before its first backup keeps its identity when
        // restarted.
        training.run.claim(&mut self.checkpoints)
    }

    fn save(&mut self, training: &mut Training<'_>, occasion: Occasion) -> Result<bool> {
        let due = match occasion {
            Occasion::Step => self.every.as_mut().is_some_and(|every| every.is_due(training.step)),
            Occasion::Epoch | Occasion::Notice | Occasion::Leaving => true,
        };
        if due {
            training.run.save(&mut self.checkpoints)?;
        }
        if occasion == Occasion::Leaving {
            // The first worker to leave may cause the others to be stopped.
            self.checkpoints.finish_everywhere(training.strategy)?;
        }
        Ok(due)
    }

    fn train_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.checkpoints.finish_everywhere(training.strategy)?;
        if self.removes && training.is_chief() { self.checkpoints.remove_backups() } else { Ok(()) }
    }
}

//! Callbacks that save checkpoints.

use std::path::PathBuf;

use serde_json::Value;

use super::best::Best;
use super::steps::Steps;
use super::{Callback, Occasion, Training, settings};
use crate::checkpoint::CheckpointManager;
use crate::{Error, Result};

/// Saves the model, its optimizer and everything else that is needed to resume training, periodically or when it is
/// best.
///
/// It does not restore; [`BackupAndRestore`] does, from the same folder or another, and the checkpoints that this
/// callback then saves belong to the restored run. A training run that starts anew in a folder with another run's
/// checkpoints ends before its first step with [`Error::OtherRun`](crate::Error::OtherRun), unless
/// [`set_aside_other_runs`](ModelCheckpoint::set_aside_other_runs) is set. Two of these callbacks with one folder end
/// the training before its first step with [`Error::SharedFolder`]: each would remove the other's checkpoints.
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
    /// As the program has set it.
    every: Option<Every>,
    /// Whether the program has set how many are kept.
    keeps: bool,
    best: Option<Best>,
    /// Whether the value of `best` should rise, as the program has set it.
    rises: Option<bool>,
}

/// When to save, besides at the end.
#[derive(Clone, Copy, Debug)]
enum Every {
    Epochs(u32),
    /// After every `count` steps and after each epoch.
    Steps(Steps),
}

impl ModelCheckpoint {
    /// Saves into this folder after each epoch and keeps the newest five.
    pub fn new(folder: impl Into<PathBuf>) -> ModelCheckpoint {
        ModelCheckpoint::with(CheckpointManager::new(folder))
    }

    /// Saves with a manager's options.
    pub fn with(checkpoints: CheckpointManager) -> ModelCheckpoint {
        ModelCheckpoint { checkpoints, every: None, keeps: false, best: None, rises: None }
    }

    /// Sets the number of checkpoints to keep. Default: five, and one with [`best`](ModelCheckpoint::best).
    pub fn keep(mut self, count: usize) -> ModelCheckpoint {
        (self.checkpoints, self.keeps) = (self.checkpoints.keep(count), true);
        self
    }

    /// Moves other runs' checkpoints into folders `run-ID` inside the folder when a run starts there. A restored
    /// training continues with its own. See [`CheckpointManager::set_aside_other_runs`].
    pub fn set_aside_other_runs(mut self) -> ModelCheckpoint {
        self.checkpoints = self.checkpoints.set_aside_other_runs();
        self
    }

    /// Saves after every `epochs` epochs. Default: 1.
    pub fn every_epochs(mut self, epochs: u32) -> ModelCheckpoint {
        self.every = Some(Every::Epochs(epochs.max(1)));
        self
    }

    /// Saves after every `steps` steps, and after each epoch.
    pub fn every_steps(mut self, steps: u64) -> ModelCheckpoint {
        self.every = Some(Every::Steps(Steps::new(steps)));
        self
    }

    /// Saves only after epochs that are the best so far by a value, such as `val_loss`, and keeps only the best, unless
    /// [`keep`](ModelCheckpoint::keep) sets another number. Whether the value should rise is found as by
    /// [`EarlyStopping`](super::EarlyStopping::new), unless [`rises`](ModelCheckpoint::rises) sets it. Together with
    /// [`every_epochs`](ModelCheckpoint::every_epochs) or [`every_steps`](ModelCheckpoint::every_steps) it is an error,
    /// [`Error::WithoutEffect`], before the first step.
    ///
    /// If the best model is missing in the folder after a restart, because the program was stopped before it was
    /// written, there is a warning, and epochs are compared with the best one that is there.
    pub fn best(mut self, monitor: &str) -> ModelCheckpoint {
        self.best = Some(Best::new(monitor, self.rises));
        if !self.keeps {
            self.checkpoints = self.checkpoints.keep(1);
        }
        self
    }

    /// Sets whether the value of [`best`](ModelCheckpoint::best) should rise. Default: as its metric or its name tells.
    /// Without [`best`](ModelCheckpoint::best) it is an error, [`Error::WithoutEffect`], before the first step.
    pub fn rises(mut self, rises: bool) -> ModelCheckpoint {
        self.rises = Some(rises);
        self.best = self.best.map(|best| best.rises(rises));
        self
    }

    fn is_due(&mut self, training: &Training<'_>, occasion: Occasion) -> bool {
        if let Some(best) = &self.best {
            return occasion == Occasion::Epoch && best.is_best;
        }
        match (self.every.get_or_insert(Every::Epochs(1)), occasion) {
            (Every::Epochs(epochs), Occasion::Epoch) => training.epoch.is_multiple_of(*epochs),
            (Every::Steps(steps), Occasion::Step) => steps.is_due(training.step),
            (Every::Steps(_), Occasion::Epoch) => true,
            _ => false,
        }
    }
}

impl Callback for ModelCheckpoint {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_collective(&self) -> bool {
        true
    }

    fn settings(&self) -> String {
        let every = match self.every {
            Some(Every::Steps(steps)) => Some(format!("every_steps {}", steps.count())),
            Some(Every::Epochs(epochs)) if epochs > 1 => Some(format!("every_epochs {epochs}")),
            _ => None,
        };
        settings::of(NAME, self.best.iter().flat_map(Best::settings).chain(every))
    }

    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        let Some(best) = &mut self.best else {
            let why = "only ModelCheckpoint::best compares values; call it, or leave rises out";
            let error = |rises| Error::WithoutEffect { setting: "rises", given: usize::from(rises), why };
            return self.rises.map_or(Ok(()), |rises| Err(error(rises)));
        };
        let (setting, given) = match self.every {
            None => return best.settle(training),
            Some(Every::Epochs(epochs)) => ("every_epochs", u64::from(epochs)),
            Some(Every::Steps(steps)) => ("every_steps", steps.count()),
        };
        let why = "ModelCheckpoint::best saves after the best epochs alone; leave one of them out, or add another \
                   ModelCheckpoint with a folder of its own";
        Err(Error::WithoutEffect { setting, given: usize::try_from(given).unwrap_or(usize::MAX), why })
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        if let Some(Every::Steps(steps)) = &mut self.every {
            steps.continue_after(training.step);
        }
        // Not earlier, since another callback may restore; not later, since a whole epoch could be lost.
        training.run.claim(&mut self.checkpoints)?;
        self.best.as_mut().map_or(Ok(()), |best| best.check(&mut self.checkpoints, training))
    }

    fn members_changed(&mut self, _: &mut Training<'_>) -> Result<()> {
        // The chief may have been lost while it was writing.
        if let Some(best) = &mut self.best {
            best.check_again();
        }
        Ok(())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.best.as_mut().map_or(Ok(()), |best| best.see(training))
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
        self.best.as_ref().map_or(Value::Null, |best| best.state(NAME))
    }

    fn set_state(&mut self, state: &Value) {
        if let Some(best) = &mut self.best {
            best.set_state(NAME, state);
        }
    }
}

/// The name in checkpoints.
const NAME: &str = "ModelCheckpoint";

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
    fn name(&self) -> &'static str {
        "BackupAndRestore"
    }

    fn is_collective(&self) -> bool {
        true
    }

    fn settings(&self) -> String {
        let every = self.every.map(|every| format!("every_steps {}", every.count()));
        let keeps = (!self.removes).then(|| "keep_at_end".to_owned());
        settings::of(self.name(), every.into_iter().chain(keeps))
    }

    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        if let Some(step) = training.run.restore(&mut self.checkpoints)? {
            if let Some(every) = &mut self.every {
                every.continue_after(step);
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
        match self.removes {
            true => self.checkpoints.remove_backups(training.strategy),
            false => self.checkpoints.finish_everywhere(training.strategy),
        }
    }
}

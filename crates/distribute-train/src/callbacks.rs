//! What happens during a training besides training.
//!
//! Callbacks run on every worker. At the end of an epoch they see the same values everywhere, those of all replicas together, so
//! what they decide is agreed. Those that write files do so on the chief alone.

use distribute_strategy::Strategy;
use serde_json::Value;

use crate::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use crate::{Error, Result};

mod csv_logger;
mod learning_rate;
mod model_checkpoint;
#[cfg(feature = "prometheus")]
mod prometheus;
mod stopping;
#[cfg(feature = "tensorboard")]
mod tensor_board;
mod watch;

pub use csv_logger::CsvLogger;
pub use learning_rate::{LearningRateSchedule, ReduceLrOnPlateau, ScaleByReplicas};
pub use model_checkpoint::{BackupAndRestore, ModelCheckpoint};
#[cfg(feature = "prometheus")]
pub use prometheus::Prometheus;
pub use stopping::{EarlyStopping, TerminateOnNan};
#[cfg(feature = "tensorboard")]
pub use tensor_board::TensorBoard;

/// A training as callbacks see it, and what they may change.
pub struct Training<'a> {
    /// The epoch under way or just ended, from 1; 0 before the first.
    pub epoch: u32,
    /// Steps done, of all epochs.
    pub step: u64,
    /// Examples seen by all replicas since the program began.
    pub examples: u64,
    /// Losses and metrics. After an epoch those of all replicas, those of the validation under names that begin with `val_`;
    /// after a step the mean loss of the epoch so far, of this process's replicas alone.
    pub values: &'a [(String, f64)],
    /// Of the next step.
    pub learning_rate: &'a mut f64,
    /// Set it to end the training on all workers, with the reason: after this epoch, or after the next step.
    pub stop: &'a mut Option<String>,
    /// The strategy.
    pub strategy: &'a Strategy,
    /// What is trained.
    pub run: &'a mut dyn Run,
}

/// What is trained, for callbacks that keep it. Every worker calls these, after the same step.
pub trait Run {
    /// The model.
    fn model(&self) -> &dyn Checkpointed;

    /// Makes a folder of checkpoints this training's, all of whose folders belong to one run.
    ///
    /// # Errors
    /// Those of [`CheckpointManager::claim`].
    fn claim(&mut self, checkpoints: &mut CheckpointManager) -> Result<()>;

    /// Saves all that the training needs to go on, for the training's run.
    ///
    /// # Errors
    /// Those of [`CheckpointManager::save`].
    fn save(&mut self, checkpoints: &mut CheckpointManager) -> Result<()>;

    /// Goes on from the newest checkpoint, if there is one, and continues its run; the step it was taken after.
    ///
    /// # Errors
    /// Those of [`CheckpointManager::restore`].
    fn restore(&mut self, checkpoints: &mut CheckpointManager) -> Result<Option<u64>>;
}

/// When callbacks may save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// After a step.
    Step,
    /// After an epoch.
    Epoch,
    /// After a step, since this process will be stopped soon.
    Notice,
    /// After the last step before this process leaves: what is saved has to be on disk when the callback returns.
    Leaving,
}

impl Training<'_> {
    /// A value by its name.
    ///
    /// # Errors
    /// [`Error::Monitor`] where there is none of this name.
    pub fn value(&self, name: &str) -> Result<f64> {
        let found = self.values.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        found.ok_or_else(|| Error::Monitor {
            name: name.to_owned(),
            known: self.values.iter().map(|(known, _)| known.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    /// Whether this process writes what must be written once.
    pub fn is_chief(&self) -> bool {
        self.strategy.is_chief()
    }

    /// A copy of the model; every worker calls this.
    ///
    /// # Errors
    /// Those of the model's variables.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = Snapshot::new(self.step);
        self.run.model().save(self.strategy, &mut snapshot).map_err(Error::Part)?;
        Ok(snapshot)
    }
}

/// Something that happens during a training.
///
/// # Examples
/// ```
/// use distribute_train::Result;
/// use distribute_train::callbacks::{Callback, Training};
///
/// /// Ends the training once it is good enough.
/// struct GoodEnough(f64);
///
/// impl Callback for GoodEnough {
///     fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
///         if training.value("val_accuracy")? >= self.0 {
///             *training.stop = Some("it is good enough".to_owned());
///         }
///         Ok(())
///     }
/// }
/// ```
///
/// # Source
/// `tf.keras.callbacks.Callback`.
#[expect(unused_variables, reason = "the names say what a callback gets")]
pub trait Callback: Send {
    /// Before the first step.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Before an epoch's first step.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// After a step, or after as many as are run at once.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// After an epoch and its validation.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// After all callbacks have seen a step or an epoch, and when the machine is about to go away: saves the training, if this
    /// callback does. Whether it has.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn save(&mut self, training: &mut Training<'_>, occasion: Occasion) -> Result<bool> {
        Ok(false)
    }

    /// After the last epoch of a training that came to its end.
    ///
    /// # Errors
    /// Whatever the training is to return in place of its history.
    fn train_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// What it needs to go on as if the program had not been stopped; kept in checkpoints.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Takes that back. A state that is not its own is ignored.
    fn set_state(&mut self, state: &Value) {}
}

#[cfg(test)]
mod tests;

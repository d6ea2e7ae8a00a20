//! Callbacks: code that runs at fixed points of training.
//!
//! Callbacks run on every worker. At the end of an epoch they get the same values everywhere, those of all replicas
//! together, so all workers come to the same decision. Callbacks that write files do so on the chief only.

use distribute_strategy::Strategy;
use serde_json::Value;

use crate::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use crate::{Error, Result};

mod best;
mod csv_logger;
#[cfg(feature = "kubeflow")]
mod kubeflow;
mod learning_rate;
mod model_checkpoint;
#[cfg(feature = "tensorboard")]
mod profile;
#[cfg(feature = "prometheus")]
mod prometheus;
mod settings;
mod state;
#[cfg(feature = "status")]
mod status_page;
mod steps;
mod stopping;
#[cfg(feature = "tensorboard")]
mod tensor_board;
mod watch;

pub use csv_logger::CsvLogger;
#[cfg(feature = "kubeflow")]
pub use kubeflow::KubeflowStatus;
pub use learning_rate::{LearningRateSchedule, ReduceLrOnPlateau, ScaleByReplicas};
pub use model_checkpoint::{BackupAndRestore, ModelCheckpoint};
#[cfg(feature = "tensorboard")]
pub use profile::Profile;
#[cfg(feature = "prometheus")]
pub use prometheus::Prometheus;
#[cfg(feature = "status")]
pub use status_page::StatusPage;
pub use stopping::{EarlyStopping, TerminateOnNan};
#[cfg(feature = "tensorboard")]
pub use tensor_board::TensorBoard;

/// The state of training as callbacks see it, with the parts that they may change.
pub struct Training<'a> {
    /// The current or just finished epoch, from 1; 0 before the first.
    pub epoch: u32,
    /// The number of epochs, which callbacks may end earlier.
    pub epochs: u32,
    /// Steps per epoch, if known before its end.
    pub steps_per_epoch: Option<u64>,
    /// Completed steps, over all epochs.
    pub step: u64,
    /// Examples of all replicas since the program began: steps times the global batch, so a shorter last batch of a
    /// pass counts as a whole one.
    pub examples: u64,
    /// Losses and metrics. After an epoch, those of all replicas, with the validation's under names that begin with
    /// `val_`; after a step, the mean loss of the epoch so far over this process's replicas only.
    pub values: &'a [(String, f64)],
    /// Whether the epoch ends without the validation that there is after others.
    pub without_validation: bool,
    /// Whether the epoch ends without losses and metrics of training: in an elastic job, the processes that made its
    /// steps may be lost before these are added up.
    pub without_training: bool,
    /// The learning rate of the next step.
    pub learning_rate: &'a mut f64,
    /// Set this to end the training on all workers, with the reason: after this epoch, or after the next step.
    pub stop: &'a mut Option<String>,
    /// The strategy.
    pub strategy: &'a Strategy,
    /// The training itself, for callbacks that save it.
    pub run: &'a mut dyn Run,
}

/// A training run that callbacks can save and restore. Every worker calls these methods, after the same step.
pub trait Run {
    /// Returns the model.
    fn model(&self) -> &dyn Checkpointed;

    /// Claims a folder of checkpoints for this run; all folders of a training run belong to one
    /// [`RunId`](crate::checkpoint::RunId).
    ///
    /// # Errors
    /// [`Error::SharedFolder`] if another manager keeps checkpoints there for this training; the errors of
    /// [`CheckpointManager::claim`].
    fn claim(&mut self, checkpoints: &mut CheckpointManager) -> Result<()>;

    /// Saves everything that is needed to resume the training, for its run.
    ///
    /// # Errors
    /// The errors of [`CheckpointManager::save`].
    fn save(&mut self, checkpoints: &mut CheckpointManager) -> Result<()>;

    /// Restores the newest checkpoint, if there is one, and continues its run; returns the step after which it was
    /// saved.
    ///
    /// # Errors
    /// The errors of [`CheckpointManager::restore`].
    fn restore(&mut self, checkpoints: &mut CheckpointManager) -> Result<Option<u64>>;

    /// Returns whether the metric of this name should rise, as [`Metric::rises`](crate::metrics::Metric::rises) tells.
    /// Default: `None`, unknown.
    fn rises(&self, metric: &str) -> Option<bool> {
        let _ = metric;
        None
    }
}

/// The occasion on which callbacks may save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// After a step.
    Step,
    /// After an epoch.
    Epoch,
    /// After a step, because this process will be stopped soon.
    Notice,
    /// After the last step before this process leaves: the checkpoint must be on disk when the callback returns.
    Leaving,
}

impl Training<'_> {
    /// Returns a value by its name.
    ///
    /// # Errors
    /// [`Error::Monitor`] if there is no value of this name, also if only this epoch has none, because it is
    /// [without validation](Training::without_validation) or [without values of training](Training::without_training);
    /// [`monitored`](Training::monitored) returns `None` then.
    pub fn value(&self, name: &str) -> Result<f64> {
        let found = self.values.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        found.ok_or_else(|| Error::Monitor {
            name: name.to_owned(),
            known: self.values.iter().map(|(known, _)| known.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    /// Returns a value by its name after an epoch, or `None` if the epoch has none: if it is one of the validation, and
    /// there is [none after this epoch](crate::trainer::Fit::validation_every), or if the values of training are
    /// [lost](Training::without_training).
    ///
    /// # Errors
    /// [`Error::Monitor`] if there is no value of this name.
    pub fn monitored(&self, name: &str) -> Result<Option<f64>> {
        match self.value(name) {
            Err(_) if self.without_training => Ok(None),
            Err(_) if self.without_validation && name.starts_with("val_") => Ok(None),
            found => found.map(Some),
        }
    }

    /// Returns whether a value should rise, as its metric or else its name tells; `None` if neither does. A value of
    /// the validation should rise if that of training should.
    pub fn rises(&self, name: &str) -> Option<bool> {
        let of_training = name.strip_prefix("val_").unwrap_or(name);
        self.run.rises(of_training).or_else(|| watch::rises_by_name(of_training))
    }

    /// Returns whether this process writes what must be written once.
    pub fn is_chief(&self) -> bool {
        self.strategy.is_chief()
    }

    /// Returns a copy of the model; every worker must call this. Under a strategy that shards, the chief's is whole,
    /// and those of other workers have only the variables of which each replica has the whole.
    ///
    /// # Errors
    /// [`Error::Part`] if the model's variables cannot be read, or two have one name; [`Error::PutTwice`] if the bytes
    /// of one are put twice.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = Snapshot::new(self.step);
        self.run.model().save(self.strategy, &mut snapshot).map_err(Error::Part)?;
        snapshot.check_put_once()?;
        Ok(snapshot)
    }
}

/// Code that runs at fixed points of training.
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
///         // `None` after an epoch without validation.
///         if training.monitored("val_accuracy")?.is_some_and(|accuracy| accuracy >= self.0) {
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
    /// Returns the name by which [`fit`](crate::trainer::fit()) compares [collective](Callback::is_collective)
    /// callbacks, and finds the [state](Callback::state) of each callback in a checkpoint. Default: the name of its
    /// type.
    fn name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Returns whether this callback makes calls that every worker must make: those of [`Training::run`],
    /// [`Training::snapshot`], and the strategy's operations over replicas. All workers must have the same callbacks of
    /// this kind in the same order, with the same [`settings`](Callback::settings), which
    /// [`fit`](crate::trainer::fit()) compares before the first step; others may be added on some workers only.
    /// Default: false.
    fn is_collective(&self) -> bool {
        false
    }

    /// Returns the settings that must be equal on all workers, which [`fit`](crate::trainer::fit()) compares if the
    /// callback is [collective](Callback::is_collective): the name, and what decides when it makes collective calls.
    /// Default: the [`name`](Callback::name).
    fn settings(&self) -> String {
        self.name().to_owned()
    }

    /// Called before the first step.
    ///
    /// # Errors
    /// An error ends the training.
    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Called when training resumes from a checkpoint, after [`set_state`](Callback::set_state) of all callbacks and
    /// before any `epoch_begin`; also of a callback that the checkpoint does not have, which begins anew. It is not
    /// called where an earlier version saved the checkpoint with another number of callbacks: all of them begin anew
    /// then, with a warning. A process that joins an elastic job gets [`members_changed`](Callback::members_changed)
    /// instead.
    ///
    /// # Errors
    /// An error ends the training.
    fn resumed(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Called before an epoch's first step, and again if training resumes within the epoch.
    ///
    /// # Errors
    /// An error ends the training.
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Called in an elastic job when its members have met, and again whenever processes have joined or were lost: to
    /// change the learning rate, for example, which must be set to the same value everywhere. `epoch_begin` is called
    /// next, also within an epoch. Other members' callbacks have got the [`state`](Callback::state) of the one whose
    /// process was furthest; decisions that must be the same everywhere may rest on nothing else.
    ///
    /// # Errors
    /// An error ends training.
    fn members_changed(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Called after a step, or after several that are run at once.
    ///
    /// # Errors
    /// An error ends the training.
    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Called after an epoch and its validation.
    ///
    /// # Errors
    /// An error ends the training.
    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Called after all callbacks have seen a step or an epoch, and when the machine is about to be preempted, to save
    /// the training. Returns whether this callback has saved it.
    ///
    /// # Errors
    /// An error ends the training.
    fn save(&mut self, training: &mut Training<'_>, occasion: Occasion) -> Result<bool> {
        Ok(false)
    }

    /// Called after the last epoch if training was not interrupted.
    ///
    /// # Errors
    /// The training returns an error in place of its history.
    fn train_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        Ok(())
    }

    /// Returns the state to keep in checkpoints, so that a restarted program resumes as if it had not been stopped. The
    /// chief's is kept, and every worker gets it.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Restores the state: that of the callback with the same [`name`](Callback::name) in the checkpoint, or, of
    /// several with that name, the one at the same place among them. A state of another callback must be ignored, as it
    /// is given from a checkpoint of an earlier version, which has no names, if the callbacks are others or in another
    /// order: let a state name its callback.
    fn set_state(&mut self, state: &Value) {}
}

/// A callback that is there or not, such as one that depends on the environment. Without it nothing is done.
impl<C: Callback> Callback for Option<C> {
    fn name(&self) -> &'static str {
        self.as_ref().map_or("None", |callback| callback.name())
    }

    fn is_collective(&self) -> bool {
        self.as_ref().is_some_and(|callback| callback.is_collective())
    }

    fn settings(&self) -> String {
        self.as_ref().map_or_else(|| self.name().to_owned(), |callback| callback.settings())
    }

    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.as_mut().map_or(Ok(()), |callback| callback.train_begin(training))
    }

    fn resumed(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.as_mut().map_or(Ok(()), |callback| callback.resumed(training))
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.as_mut().map_or(Ok(()), |callback| callback.epoch_begin(training))
    }

    fn members_changed(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.as_mut().map_or(Ok(()), |callback| callback.members_changed(training))
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.as_mut().map_or(Ok(()), |callback| callback.step_end(training))
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.as_mut().map_or(Ok(()), |callback| callback.epoch_end(training))
    }

    fn save(&mut self, training: &mut Training<'_>, occasion: Occasion) -> Result<bool> {
        self.as_mut().map_or(Ok(false), |callback| callback.save(training, occasion))
    }

    fn train_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.as_mut().map_or(Ok(()), |callback| callback.train_end(training))
    }

    fn state(&self) -> Value {
        self.as_ref().map_or(Value::Null, |callback| callback.state())
    }

    fn set_state(&mut self, state: &Value) {
        if let Some(callback) = self {
            callback.set_state(state);
        }
    }
}

/// Returns an error for what an elastic job cannot do, if it was asked for.
fn refuse_elastic(training: &Training<'_>, asked: bool, what: &'static str, why: &'static str) -> Result<()> {
    match asked && training.strategy.elastic().is_some() {
        true => Err(Error::Elastic { what, why }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;

//! The settings of a training run.

use super::TrainingData;
use crate::callbacks::Callback;
use crate::preemption::TerminationConfig;

/// The settings of a training run: its length, validation data and callbacks.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::{BackupAndRestore, EarlyStopping, TensorBoard};
/// use distribute_train::trainer::Fit;
/// // The adapter of a library has an alias with its types: `distribute_candle::Fit`.
/// let fit: Fit<(), distribute_train::Error> = Fit::epochs(20)
///     .callback(EarlyStopping::new("loss").patience(2))
///     .callback(TensorBoard::new("runs/1"))
///     .callback(BackupAndRestore::new("runs/1/backup"));
/// ```
pub struct Fit<B, E> {
    pub(super) epochs: u32,
    pub(super) steps_per_epoch: Option<u64>,
    pub(super) steps_per_execution: usize,
    pub(super) batch_size: Option<usize>,
    pub(super) class_weights: Vec<f32>,
    pub(super) validation: Option<Box<dyn TrainingData<B, E>>>,
    pub(super) validation_steps: Option<usize>,
    pub(super) validation_every: u32,
    pub(super) callbacks: Vec<Box<dyn Callback>>,
    pub(super) termination: Option<TerminationConfig>,
    pub(super) title: Option<String>,
}

/// The numbers that a [`Fit`] was given, for trainers that cannot act on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// The number of epochs.
    pub epochs: u32,
    /// The number of steps per epoch, if it is independent of passes over the data.
    pub steps_per_epoch: Option<u64>,
    /// The limit of a validation, in batches.
    pub validation_steps: Option<usize>,
}

/// The default global batch for tensors that are given instead of a dataset.
pub const BATCH_SIZE: usize = 32;

impl<B, E> Fit<B, E> {
    /// Trains for `epochs` passes over the data.
    pub fn epochs(epochs: u32) -> Fit<B, E> {
        Fit {
            epochs,
            steps_per_epoch: None,
            steps_per_execution: 1,
            batch_size: None,
            class_weights: Vec::new(),
            validation: None,
            validation_steps: None,
            validation_every: 1,
            callbacks: Vec::new(),
            termination: None,
            title: None,
        }
    }

    /// Sets the number of steps per epoch, independent of passes over the data, for infinite or very large datasets.
    /// Passes follow one another.
    pub fn steps_per_epoch(mut self, steps: u64) -> Fit<B, E> {
        self.steps_per_epoch = Some(steps.max(1));
        self
    }

    /// Runs this many steps between calls of callbacks and progress, for models whose steps are very short. Default: 1.
    pub fn steps_per_execution(mut self, steps: usize) -> Fit<B, E> {
        self.steps_per_execution = steps.max(1);
        self
    }

    /// Sets the global batch for tensors that are given instead of a dataset, which has one of its own. Default: 32.
    pub fn batch_size(mut self, examples: usize) -> Fit<B, E> {
        self.batch_size = Some(examples);
        self
    }

    /// Sets weights that multiply the losses of examples in training, by their class. Classes without a weight have
    /// weight 1.
    ///
    /// # Examples
    /// ```
    /// use distribute_train::trainer::Fit;
    /// // The second class is rare.
    /// let fit: Fit<(), distribute_train::Error> = Fit::epochs(5).class_weights([0.5, 5.0]);
    /// ```
    ///
    /// # Source
    /// `class_weight` of `tf.keras.Model.fit`.
    pub fn class_weights(mut self, weights: impl Into<Vec<f32>>) -> Fit<B, E> {
        self.class_weights = weights.into();
        self
    }

    /// Evaluates these data after each epoch; the values' names begin with `val_`.
    pub fn validation(mut self, data: &(impl TrainingData<B, E> + Clone + 'static)) -> Fit<B, E> {
        self.validation = Some(Box::new(data.clone()));
        self
    }

    /// Limits validation to this many batches. Default: all.
    pub fn validation_steps(mut self, steps: usize) -> Fit<B, E> {
        self.validation_steps = Some(steps);
        self
    }

    /// Validates after each epoch whose number is a multiple of this one. Default: 1. Callbacks that monitor a value of
    /// the validation count these epochs alone.
    ///
    /// # Source
    /// `validation_freq` of `tf.keras.Model.fit`.
    pub fn validation_every(mut self, epochs: u32) -> Fit<B, E> {
        self.validation_every = epochs.max(1);
        self
    }

    /// Adds a callback; callbacks are called in the order in which they were added. Those that are
    /// [collective](Callback::is_collective) must be added on all workers, in the same order; `fit` compares them.
    pub fn callback(mut self, callback: impl Callback + 'static) -> Fit<B, E> {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Makes all workers stop after the same step when one of them is told to stop, after callbacks have saved
    /// checkpoints. [`fit`](super::fit) then returns [`Preempted`](crate::Error::Preempted), or
    /// [`Unsaved`](crate::Error::Unsaved) if no callback has saved. All workers must call this, or none.
    ///
    /// If one is told after the last step, and a callback such as
    /// [`BackupAndRestore`](crate::callbacks::BackupAndRestore) saves at the request, [`fit`](super::fit) returns
    /// [`Preempted`](crate::Error::Preempted) too, before [`train_end`](Callback::train_end): started again, it finds
    /// all epochs done. Without such a callback, or once [`train_end`](Callback::train_end) is called, it ends as
    /// usual, with a warning; a later call of [`fit`](super::fit) with `stop_on` under the same strategy then ends
    /// after its first step.
    ///
    /// A process of an elastic job leaves the others instead, which have its state:
    /// [`Left`](crate::Error::Left). If fewer than the job's smallest number would remain, all save before.
    pub fn stop_on(mut self, config: TerminationConfig) -> Fit<B, E> {
        self.termination = Some(config);
        self
    }

    /// Shows progress under this title.
    pub fn progress(mut self, title: impl Into<String>) -> Fit<B, E> {
        self.title = Some(title.into());
        self
    }

    /// Returns the numbers that were set, or their defaults.
    pub fn settings(&self) -> Settings {
        Settings { epochs: self.epochs, steps_per_epoch: self.steps_per_epoch, validation_steps: self.validation_steps }
    }
}

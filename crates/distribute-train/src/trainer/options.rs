//! What a training does, and for how long.

use super::TrainingData;
use crate::callbacks::Callback;
use crate::preemption::TerminationConfig;

/// How long to train, on what, and what happens meanwhile.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::{BackupAndRestore, EarlyStopping, TensorBoard};
/// use distribute_train::trainer::Fit;
/// // The adapter of a library names the types: `distribute_candle::Fit`.
/// let fit: Fit<(), distribute_train::Error> = Fit::epochs(20)
///     .callback(EarlyStopping::new("loss").patience(2))
///     .callback(TensorBoard::new("runs/1"))
///     .callback(BackupAndRestore::new("runs/1/backup"));
/// ```
pub struct Fit<B, E> {
    pub(super) epochs: u32,
    pub(super) steps_per_epoch: Option<u64>,
    pub(super) steps_per_execution: usize,
    pub(super) batch_size: usize,
    pub(super) class_weights: Vec<f32>,
    pub(super) validation: Option<Box<dyn TrainingData<B, E>>>,
    pub(super) validation_steps: Option<usize>,
    pub(super) callbacks: Vec<Box<dyn Callback>>,
    pub(super) termination: Option<TerminationConfig>,
    pub(super) title: Option<String>,
}

/// Examples of a step, where tensors are given in place of a dataset.
pub const BATCH_SIZE: usize = 32;

impl<B, E> Fit<B, E> {
    /// Trains for `epochs` passes over the data.
    pub fn epochs(epochs: u32) -> Fit<B, E> {
        Fit {
            epochs,
            steps_per_epoch: None,
            steps_per_execution: 1,
            batch_size: BATCH_SIZE,
            class_weights: Vec::new(),
            validation: None,
            validation_steps: None,
            callbacks: Vec::new(),
            termination: None,
            title: None,
        }
    }

    /// Makes an epoch `steps` steps long, wherever that ends in a pass over the data: for datasets without an end, or very long
    /// ones. Passes follow one another.
    pub fn steps_per_epoch(mut self, steps: u64) -> Fit<B, E> {
        self.steps_per_epoch = Some(steps.max(1));
        self
    }

    /// Runs `steps` steps between two looks at callbacks and progress: for models whose steps are very short. Default: 1.
    pub fn steps_per_execution(mut self, steps: usize) -> Fit<B, E> {
        self.steps_per_execution = steps.max(1);
        self
    }

    /// The global batch, where tensors are given in place of a dataset. Default: 32.
    pub fn batch_size(mut self, examples: usize) -> Fit<B, E> {
        self.batch_size = examples;
        self
    }

    /// How much the loss of an example of each class counts, in training. Classes beyond the last weight count 1.
    ///
    /// # Examples
    /// ```
    /// use distribute_train::trainer::Fit;
    /// let fit: Fit<(), distribute_train::Error> = Fit::epochs(5).class_weights([0.5, 5.0]);      // the second class is rare
    /// ```
    ///
    /// # Source
    /// `class_weight` of `tf.keras.Model.fit`.
    pub fn class_weights(mut self, weights: impl Into<Vec<f32>>) -> Fit<B, E> {
        self.class_weights = weights.into();
        self
    }

    /// Evaluates this after each epoch, under names that begin with `val_`.
    pub fn validation(mut self, data: &(impl TrainingData<B, E> + Clone + 'static)) -> Fit<B, E> {
        self.validation = Some(Box::new(data.clone()));
        self
    }

    /// At most so many batches of the validation. Default: all.
    pub fn validation_steps(mut self, steps: usize) -> Fit<B, E> {
        self.validation_steps = Some(steps);
        self
    }

    /// One more callback; they are called in the order in which they were given.
    pub fn callback(mut self, callback: impl Callback + 'static) -> Fit<B, E> {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// When a worker is told to stop, all stop after the same step, after callbacks that keep checkpoints have saved.
    /// [`fit`](super::fit) then returns [`Preempted`](crate::Error::Preempted).
    pub fn stop_on(mut self, config: TerminationConfig) -> Fit<B, E> {
        self.termination = Some(config);
        self
    }

    /// Shows progress under this title.
    pub fn progress(mut self, title: impl Into<String>) -> Fit<B, E> {
        self.title = Some(title.into());
        self
    }
}

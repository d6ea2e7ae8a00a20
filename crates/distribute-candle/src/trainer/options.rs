//! How a training goes.

use distribute_train::callbacks::Callback;
use distribute_train::preemption::TerminationConfig;

use super::TrainingData;

/// How long to train, on what, and what happens meanwhile.
///
/// # Examples
/// ```
/// use distribute_candle::Fit;
/// use distribute_train::callbacks::{BackupAndRestore, EarlyStopping, TensorBoard};
/// let fit = Fit::epochs(20)
///     .callback(EarlyStopping::new("loss").patience(2))
///     .callback(TensorBoard::new("runs/1"))
///     .callback(BackupAndRestore::new("runs/1/backup"));
/// ```
pub struct Fit {
    pub(super) epochs: u32,
    pub(super) steps_per_epoch: Option<u64>,
    pub(super) steps_per_execution: usize,
    pub(super) batch_size: usize,
    pub(super) class_weights: Vec<f32>,
    pub(super) validation: Option<Box<dyn TrainingData>>,
    pub(super) validation_steps: Option<usize>,
    pub(super) callbacks: Vec<Box<dyn Callback>>,
    pub(super) termination: Option<TerminationConfig>,
    pub(super) title: Option<String>,
}

/// Examples of a step, where tensors are given in place of a dataset.
pub(super) const BATCH_SIZE: usize = 32;

impl Fit {
    /// So many passes over the data.
    pub fn epochs(epochs: u32) -> Fit {
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

    /// An epoch is so many steps, wherever that is in a pass over the data: for datasets without an end, or very long ones.
    /// Passes follow one another.
    pub fn steps_per_epoch(mut self, steps: u64) -> Fit {
        self.steps_per_epoch = Some(steps.max(1));
        self
    }

    /// Runs so many steps before callbacks and progress are looked at: for models whose steps are very short. Default: 1.
    pub fn steps_per_execution(mut self, steps: usize) -> Fit {
        self.steps_per_execution = steps.max(1);
        self
    }

    /// The global batch, where tensors are given in place of a dataset. Default: 32.
    pub fn batch_size(mut self, examples: usize) -> Fit {
        self.batch_size = examples;
        self
    }

    /// How much the loss of an example of each class counts, in training. Classes beyond the last weight count 1.
    ///
    /// # Examples
    /// ```
    /// use distribute_candle::Fit;
    /// let fit = Fit::epochs(5).class_weights([0.5, 5.0]);      // the second class is rare
    /// ```
    ///
    /// # Source
    /// `class_weight` of `tf.keras.Model.fit`.
    pub fn class_weights(mut self, weights: impl Into<Vec<f32>>) -> Fit {
        self.class_weights = weights.into();
        self
    }

    /// Evaluates this after each epoch, under names that begin with `val_`.
    pub fn validation(mut self, data: &(impl TrainingData + Clone + 'static)) -> Fit {
        self.validation = Some(Box::new(data.clone()));
        self
    }

    /// At most so many batches of the validation. Default: all.
    pub fn validation_steps(mut self, steps: usize) -> Fit {
        self.validation_steps = Some(steps);
        self
    }

    /// One more callback; they are called in the order in which they were given.
    pub fn callback(mut self, callback: impl Callback + 'static) -> Fit {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// When a worker is told to stop, all stop after the same step, after callbacks that keep checkpoints have saved.
    /// [`fit`](super::Trainer::fit) then returns [`Preempted`](distribute_train::Error::Preempted).
    pub fn stop_on(mut self, config: TerminationConfig) -> Fit {
        self.termination = Some(config);
        self
    }

    /// Shows progress under this title.
    pub fn progress(mut self, title: impl Into<String>) -> Fit {
        self.title = Some(title.into());
        self
    }
}

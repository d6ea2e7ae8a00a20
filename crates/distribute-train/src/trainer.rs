//! The training loop for the trainers of all tensor libraries.
//!
//! A library's adapter implements [`Trainee`], which runs forward and backward on batches. Epochs, callbacks,
//! checkpoints, progress, preemption and the agreement of workers are implemented here, in [`fit`] and [`evaluate`].

use std::sync::atomic::AtomicU64;

use distribute_collectives::ReduceOp;
use distribute_optim::MemoryReport;
use distribute_strategy::{DistributedDataset, Strategy};
use distribute_types::ErrorClass;
use distribute_values::{Axis, HostTensor, PerReplica, TensorStorage};

use crate::checkpoint::Checkpointed;
use crate::metrics::Metrics;
use crate::{BoxError, Result};

mod fit;
mod options;
mod settings;

pub use fit::fit;
pub use options::{BATCH_SIZE, Fit, Settings};
pub use settings::compare_settings;

/// A model with an optimizer, a loss and metrics that a training loop can drive.
pub trait Trainee: Sync {
    /// The examples of one replica in one step.
    type Examples: Clone + Send + 'static;

    /// The error type of the library's adapter.
    type Error: From<crate::Error> + From<distribute_strategy::Error> + ErrorClass;

    /// Returns the strategy under which the model was built.
    fn strategy(&self) -> &Strategy;

    /// Describes the place of training, for the title of the progress. Default: the strategy's description.
    fn describe(&self) -> String {
        self.strategy().describe()
    }

    /// Returns the model, for checkpoints.
    fn model(&self) -> &dyn Checkpointed;

    /// Returns the optimizer, for checkpoints.
    fn optimizer(&self) -> &dyn Checkpointed;

    /// Returns the learning rate of the next step.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate of the next step; every worker must set the same value.
    fn set_learning_rate(&self, learning_rate: f64);

    /// Returns the number of elements of all trainable variables, for the title of the progress.
    fn num_parameters(&self) -> usize;

    /// Returns the sizes of what the first replica of this process holds for training, if they are known. Default:
    /// `None`.
    fn memory(&self) -> Option<MemoryReport> {
        None
    }

    /// Makes the variables of all replicas equal before they are read: before evaluations and checkpoints, and at the
    /// end of each epoch. Every worker calls this. Default: does nothing, since steps leave them equal.
    ///
    /// # Errors
    /// The library's error if a variable cannot be read or written, and the collective's if a replica is missing or
    /// fails.
    fn synchronize(&self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Returns the number of passes over training data that earlier calls of [`fit`] have begun, which [`fit`] keeps: a
    /// later call shuffles, and augments, as no earlier one did.
    fn passes(&self) -> &AtomicU64;

    /// Returns the metrics, whose sums follow those of the loss.
    fn metrics(&self) -> &Metrics;

    /// Makes a step on each of the batches, one after another, in one run. `class_weights` has the factors of the
    /// losses of examples, by class; it is empty if there are none. Returns each local replica's [`sums`] over the
    /// batches.
    ///
    /// # Errors
    /// The library's error if the model fails, and the collective's if a replica is missing or fails.
    fn train_on(
        &self,
        batches: PerReplica<Vec<Part<Self::Examples>>>,
        batch_size: usize,
        class_weights: &[f32],
    ) -> Result<PerReplica<Vec<f64>>, Self::Error>;

    /// Waits for steps that [`train_on`](Trainee::train_on) has started and whose sums it has not returned, and returns
    /// each local replica's [`sums`] over them. The loop calls it before an epoch ends and before a checkpoint is
    /// saved. Default: there are no such steps.
    ///
    /// # Errors
    /// The errors of [`train_on`](Trainee::train_on).
    fn settle(&self) -> Result<PerReplica<Vec<f64>>, BoxError> {
        Ok(PerReplica::new(vec![sums(self.metrics()); self.strategy().num_local_replicas()]))
    }

    /// Returns how many steps the model's variables have made, where they outlive the process that trains, such as on
    /// parameter servers; `known` is the number that the loop knows, of a restored checkpoint or 0. The loop calls it
    /// before the first step and continues after these steps, if they are of the same epoch. Default: `known`.
    ///
    /// # Errors
    /// [`Error::Part`](crate::Error::Part) if the variables are of another training.
    fn steps_made(&self, known: u64) -> crate::Result<u64> {
        Ok(known)
    }

    /// Lets the checkpoint that is restored next replace what the variables have made since, because the loop cannot
    /// continue after that. Default: a checkpoint always does.
    fn prefer_checkpoint(&self) {}

    /// Computes the loss and the metrics of a batch, without a step. Returns each local replica's [`sums`].
    ///
    /// # Errors
    /// The library's error if the model fails, and the collective's if a replica is missing or fails.
    fn evaluate_on(&self, batch: PerReplica<Self::Examples>) -> Result<PerReplica<Vec<f64>>, Self::Error>;
}

/// One replica's part of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Part<E> {
    /// The examples; for a replica without any, some that its results do not count.
    pub examples: E,
    /// Whether the replica has examples in this batch, for
    /// [`begin_batch`](distribute_strategy::ReplicaContext::begin_batch).
    pub has_examples: bool,
}

/// The way in which tensors in memory are divided into batches; datasets are batched already.
#[derive(Clone, Copy, Debug)]
pub struct Batching {
    /// The global batch: examples per step, over all replicas.
    pub batch_size: usize,
    /// Whether the program has set that size for these data, on which it must then have an effect.
    pub is_set: bool,
    /// Whether each pass is shuffled in a different order.
    pub shuffle: bool,
}

impl Batching {
    /// Checks that the size was not set, for data that are batched already.
    ///
    /// # Errors
    /// [`Error::WithoutEffect`](crate::Error::WithoutEffect) if it was.
    pub fn of_batched(self) -> Result<()> {
        if !self.is_set {
            return Ok(());
        }
        let why = "a dataset has batches of its own; call batch on the dataset, and leave batch_size out";
        Err(crate::Error::WithoutEffect { setting: "batch_size", given: self.batch_size, why })
    }
}

/// Training data: batched datasets, and tensors in memory whose rows are examples.
pub trait TrainingData<B, E> {
    /// Distributes the data over the replicas. Returns their batches and the size of the global batch.
    ///
    /// # Errors
    /// The library's error if the data cannot be read or distributed.
    fn distribute(&self, strategy: &Strategy, batching: Batching) -> Result<(DistributedDataset<B>, usize), E>;
}

/// Returns the class that a target names, for class weights.
///
/// # Errors
/// [`Error::NotAClass`](crate::Error::NotAClass) for a target that is negative or not a whole number.
pub fn class_of(target: f32) -> Result<usize> {
    match target >= 0.0 && target.fract() == 0.0 {
        true => Ok(target as usize),
        false => Err(crate::Error::NotAClass { target }),
    }
}

/// The number of sums that precede those of metrics: of losses, and of examples.
pub const LOSS_SUMS: usize = 2;

/// Returns zeros for one replica's sums: of losses, of examples, and of the metrics.
pub fn sums(metrics: &Metrics) -> Vec<f64> {
    vec![0.0; LOSS_SUMS + metrics.zeros().len()]
}

/// Adds the sums of all replicas of all processes, in one operation.
///
/// # Errors
/// [`Error::Strategy`](crate::Error::Strategy) if a replica is missing or fails.
pub fn sums_of_all(strategy: &Strategy, replicas: &[Vec<f64>]) -> Result<Vec<f64>> {
    let tensors: Result<Vec<HostTensor>, _> =
        replicas.iter().map(|sums| HostTensor::new(&[sums.len()], sums.clone())).collect();
    let whole: HostTensor = strategy.reduce(ReduceOp::Sum, &PerReplica::new(tensors?), Axis::None)?;
    Ok(whole.to_elements::<f64>()?)
}

/// Adds the sums of a step to the accumulated ones.
fn add(sums: &mut [Vec<f64>], of_step: PerReplica<Vec<f64>>) {
    for (sums, more) in sums.iter_mut().zip(of_step.into_values()) {
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
}

/// Computes the mean loss and the metrics from the [`sums`] of all replicas, and returns them with their names.
pub fn results(metrics: &Metrics, sums: &[f64]) -> Vec<(String, f64)> {
    let loss = if sums[1] == 0.0 { 0.0 } else { sums[0] / sums[1] };
    [("loss".to_owned(), loss)].into_iter().chain(metrics.results(&sums[LOSS_SUMS..])).collect()
}

/// Evaluates a model on data. Returns the loss and the metrics, in that order. Every worker must call this, with the
/// same metrics, whose names are compared.
///
/// # Errors
/// [`Error::NoExamples`](crate::Error::NoExamples) if the data have none; [`Error::Metric`](crate::Error::Metric) if
/// metrics have equal names; the library's error if the model fails or the data cannot be read, and the strategy's if
/// the names of metrics differ between workers, or a replica is missing or fails.
pub fn evaluate<T: Trainee>(
    trainer: &T,
    data: &dyn TrainingData<T::Examples, T::Error>,
) -> Result<Vec<(String, f64)>, T::Error> {
    trainer.metrics().check_names()?;
    compare_settings(trainer.strategy(), &[format!("evaluate, metrics: [{}]", trainer.metrics().names().join(", "))])?;
    trainer.synchronize()?;
    let batching = Batching { batch_size: BATCH_SIZE, is_set: false, shuffle: false };
    evaluate_distributed(trainer, &data.distribute(trainer.strategy(), batching)?.0, None, 0)
}

/// Returns the parts of each replica in batches that follow each other.
fn by_replica<E>(batches: Vec<PerReplica<E>>, replicas: usize) -> PerReplica<Vec<Part<E>>> {
    let mut all: Vec<Vec<Part<E>>> = (0..replicas).map(|_| Vec::with_capacity(batches.len())).collect();
    for batch in batches {
        let has_examples: Vec<bool> = (0..batch.len()).map(|local| batch.has_examples(local)).collect();
        let parts = batch.into_values().into_iter().zip(has_examples);
        let parts = parts.map(|(examples, has_examples)| Part { examples, has_examples });
        all.iter_mut().zip(parts).for_each(|(of_replica, part)| of_replica.push(part));
    }
    PerReplica::new(all)
}

fn evaluate_distributed<T: Trainee>(
    trainer: &T,
    data: &DistributedDataset<T::Examples>,
    steps: Option<usize>,
    pass: u64,
) -> Result<Vec<(String, f64)>, T::Error> {
    let mut all = vec![sums(trainer.metrics()); trainer.strategy().num_local_replicas()];
    for batch in data.iter_epoch(pass).take(steps.unwrap_or(usize::MAX)) {
        add(&mut all, trainer.evaluate_on(batch?)?);
    }
    let whole = sums_of_all(trainer.strategy(), &all)?;
    if whole[1] == 0.0 {
        return Err(crate::Error::NoExamples { what: "evaluate" }.into());
    }
    Ok(results(trainer.metrics(), &whole))
}

//! burn's own learner under a strategy: [`SupervisedTraining`] on several replicas and workers.
//!
//! A program that trains by burn's learner changes one line: [`distributed`](DistributedTraining::distributed), as the
//! last call on the builder. Metrics, renderer, early stopping, checkpoints, accumulation of gradients, interruption
//! and learning-rate schedulers remain burn's.
//!
//! # What is shared
//! - **Items.** Each replica has a contiguous [slice](burn::data::dataloader::DataLoader::slice) of the training
//!   loader's items, and shuffles within it. The loader's batch is a replica's batch, as in burn's own strategies for
//!   several devices: the global batch is `num_replicas_in_sync` times as large.
//!   [`own_loaders`](DataParallel::own_loaders) is for workers that have different data already.
//! - **Gradients.** Losses are taken as means over the rows of a batch, as burn's losses are by default. The gradients
//!   of a step are the mean over all rows of the global batch: each replica's are multiplied by its share of the rows
//!   and summed over replicas, so that batches may be of different sizes. A loss that is a sum over rows is weighed
//!   the same way, which is not its sum. The number of rows of a batch is what
//!   [`progress`](burn::data::dataloader::DataLoaderIterator::progress) has advanced by.
//! - **Initial state.** Parameters, and the states of optimizer and scheduler, are the chief's on all workers. After
//!   equal gradients every replica makes the same step with the same learning rate, so all parameters remain equal bit
//!   for bit. The learning rates of all parameters are compared in the first step. Each worker keeps the ids of its own
//!   parameters, so that [groups](burn::module::ParamGroup) by id act on all workers.
//! - **Random numbers,** such as those of dropout, are each process's own: of workers that have set equal seeds, each
//!   but the chief sets another one when training begins, if the model has dropout.
//! - **The number of steps.** Before each step workers exchange the number of their rows; an epoch ends when no replica
//!   has any. A replica without rows contributes nothing to a step, and does not call the model.
//! - **The optimizer's state,** under a strategy that shards: each large parameter is updated by one replica of a shard
//!   group, whose optimizer has its state, and sent to the others. Parameters and gradients are whole on all replicas.
//! - **Running statistics,** such as those of batch normalization, are averaged over replicas after each epoch.
//!
//! # What the chief does alone
//! - Validation, on all of its validation loader, by its first replica; the other workers wait, with the deadline of a
//!   collective for each batch.
//! - Events: training metrics are those of the chief's replicas, and the other workers have none.
//! - Files: logs and checkpoints are written, and restored, by the chief. The other workers need no directory.
//! - Early stopping, whose decision all workers follow.
//!
//! # Failures
//! An [`Interrupter`](burn::train::Interrupter) that is stopped on one worker stops all of them before the same step. A
//! failure (a step that panics, data that cannot be read, an event or a checkpoint that fails, a worker that is gone)
//! ends training on all workers, with an error in [`LearningResult::error`] that names the replica or worker. The model
//! of a failed result is that of the first local replica; resume from a checkpoint instead.
//!
//! # Limits
//! - Models are on burn's Flex backend. For recomputation of activations, build the model on a device with
//!   `gradient_checkpointing`: the builder's method of this name has an effect on burn's own strategies only.
//! - Gradients are reduced while backward runs, from the second step on, if [`TrainStep::step`](burn::train::TrainStep)
//!   gives back those of its backward as they are. If it changes them, or leaves some out, they are reduced after it
//!   instead, as are those of parameters of 16 bits and of models with LoRA. A step that begins to change them later is
//!   an error: see [`DataParallel::reduce_after_backward`].
//! - Strategies with tensor groups (`tensor_parallel`) are refused: the learner's models are not split. So are those of
//!   [local updates](distribute_strategy::LocalUpdates).
//! - Clones of a parameter have one id, and burn's optimizer makes one update for each id: it applies the gradient of
//!   the last trained clone to the first parameter, and leaves the clones as they are. Training under a strategy gives
//!   the same values, and the chief warns. To tie weights, keep one parameter and use its
//!   [`val`](burn::module::Param::val) in both places. Clones of a batch normalization share their running statistics,
//!   and are refused if a process has several replicas.
//! - Under a strategy that shards, [`TrainStep::optimize`](burn::train::TrainStep::optimize) sees new values only of
//!   the parameters that its replica updates. It may change each of these by itself. If it changes a parameter that the
//!   optimizer does not update, training ends with an error.
//! - A checkpoint of burn restores the ids of parameters, on one device as well, so groups of an optimizer or of a
//!   scheduler by id have no effect in a training that another process resumes. Choose parameters by their paths there.
//! - Tensors that are not in a [`Param`](burn::module::Param), and other fields of the model, are each worker's own:
//!   burn's records do not have them. Build them equal on all workers.
//! - Parameters are not sharded: burn's [`Learner`] holds its model. [`Trainer`](crate::Trainer) and
//!   [`Model::optimizer`](crate::Model::optimizer) shard them.
//! - With LoRA or another reparameterization, running statistics are not averaged: they are the first local replica's.
//!
//! # Examples
//! ```
//! use std::sync::Arc;
//!
//! use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
//! use burn::data::dataset::InMemDataset;
//! use burn::module::Module;
//! use burn::nn::loss::{MseLoss, Reduction};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn::train::metric::LossMetric;
//! use burn::train::{InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
//! use distribute_burn::learner::DistributedTraining;
//! use distribute_strategy::MirroredStrategy;
//!
//! #[derive(Module, Debug)]
//! struct Line {
//!     layer: Linear,
//! }
//!
//! impl Line {
//!     fn forward(&self, (x, targets): (Tensor<2>, Tensor<2>)) -> RegressionOutput {
//!         let output = self.layer.forward(x);
//!         let loss = MseLoss::new().forward(output.clone(), targets.clone(), Reduction::Mean);
//!         RegressionOutput::new(loss, output, targets)
//!     }
//! }
//!
//! impl TrainStep for Line {
//!     type Input = (Tensor<2>, Tensor<2>);
//!     type Output = RegressionOutput;
//!
//!     fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
//!         let output = self.forward(batch);
//!         TrainOutput::new(self, output.loss.backward(), output)
//!     }
//! }
//!
//! impl InferenceStep for Line {
//!     type Input = (Tensor<2>, Tensor<2>);
//!     type Output = RegressionOutput;
//!
//!     fn step(&self, batch: Self::Input) -> RegressionOutput {
//!         self.forward(batch)
//!     }
//! }
//!
//! /// Batches of numbers and their doubles.
//! struct Doubles;
//!
//! impl Batcher<f32, (Tensor<2>, Tensor<2>)> for Doubles {
//!     fn batch(&self, items: Vec<f32>, device: &Device) -> (Tensor<2>, Tensor<2>) {
//!         let x = Tensor::<1>::from_floats(items.as_slice(), device).reshape([items.len(), 1]);
//!         (x.clone(), x.mul_scalar(2.0))
//!     }
//! }
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let loader = |count: u16| {
//!     let numbers = (0..count).map(|number| f32::from(number) / f32::from(count)).collect();
//!     DataLoaderBuilder::new(Doubles).batch_size(8).build(InMemDataset::new(numbers))
//! };
//! let folder = std::env::temp_dir().join(format!("distribute-learner-{}", std::process::id()));
//! let model = Line { layer: LinearConfig::new(1, 1).init(&Device::flex().autodiff()) };
//! let training = SupervisedTraining::new(&folder, loader(50), loader(10))
//!     .metrics((LossMetric::new(),))
//!     .num_epochs(20)
//!     .distributed(&strategy);
//! let result = training.launch(Learner::new(model, SgdConfig::new().init(), 0.3));
//! assert!(result.error.is_none());
//! let weight = result.model.layer.weight.val().into_scalar::<f32>();
//! assert!((weight - 2.0).abs() < 0.1, "{weight}");
//! # std::fs::remove_dir_all(folder).ok();
//! # Ok::<(), distribute_burn::Error>(())
//! ```
//!
//! # Source
//! `SupervisedLearningStrategy` of burn-train; `tf.keras.Model.fit` under `tf.distribute`.

mod agreement;
mod chief;
mod data;
mod fit;
mod gradients;
mod ids;
mod owners;
mod replica;
mod start;
mod values;
mod watch;

use std::sync::Arc;

use burn::train::{
    Learner, LearnerModel, LearningResult, SupervisedLearningStrategy, SupervisedTraining,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingStrategy, ValidLoader,
};
use distribute_strategy::Strategy;

/// Training by burn's learner under a strategy.
pub trait DistributedTraining {
    /// Trains on all replicas of a strategy. Call it last: on workers other than the chief it replaces the renderer,
    /// the application's logger, the metric logger and the checkpointers, so that they write no files and print
    /// nothing.
    #[must_use]
    fn distributed(self, strategy: &Strategy) -> Self;

    /// Trains on all replicas of a strategy, with options. Call it last, as
    /// [`distributed`](DistributedTraining::distributed).
    #[must_use]
    fn distributed_with(self, training: DataParallel) -> Self;
}

impl<M: LearnerModel> DistributedTraining for SupervisedTraining<M> {
    fn distributed(self, strategy: &Strategy) -> Self {
        self.distributed_with(DataParallel::new(strategy))
    }

    fn distributed_with(self, training: DataParallel) -> Self {
        let own = if training.strategy.is_chief() { self } else { chief::silenced(self) };
        own.with_training_strategy(training.into())
    }
}

/// Returns a strategy for [`SupervisedTraining::with_training_strategy`], for programs that configure the workers other
/// than the chief themselves: without [`distributed`](DistributedTraining::distributed) these have burn's renderer and
/// loggers, although no events reach them, and restore a checkpoint from files of their own.
pub fn strategy<M: LearnerModel>(strategy: &Strategy) -> TrainingStrategy<M> {
    DataParallel::new(strategy).into()
}

/// Data-parallel training of burn's learner over the replicas of a strategy, with options.
#[derive(Clone, Debug)]
pub struct DataParallel {
    strategy: Strategy,
    has_own_loaders: bool,
    reduces_after_backward: bool,
}

impl DataParallel {
    /// Creates the training with default options: every worker passes the same training loader, of which each replica
    /// gets a part.
    pub fn new(strategy: &Strategy) -> DataParallel {
        DataParallel { strategy: strategy.clone(), has_own_loaders: false, reduces_after_backward: false }
    }

    /// Declares that the training loaders of the workers hold different items, such as those of different files: each
    /// is shared by the replicas of its process only. They may have different numbers of items.
    ///
    /// # Source
    /// `tf.data.experimental.AutoShardPolicy.OFF`.
    #[must_use]
    pub fn own_loaders(self) -> DataParallel {
        DataParallel { has_own_loaders: true, ..self }
    }

    /// Reduces gradients after each backward, and not while it runs. For models whose
    /// [`step`](burn::train::TrainStep::step) changes gradients, or leaves some out, in some steps and not in the
    /// first: one that does so in the first step needs no option.
    #[must_use]
    pub fn reduce_after_backward(self) -> DataParallel {
        DataParallel { reduces_after_backward: true, ..self }
    }
}

impl<M: LearnerModel> From<DataParallel> for TrainingStrategy<M> {
    fn from(training: DataParallel) -> TrainingStrategy<M> {
        TrainingStrategy::Custom(Arc::new(training))
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for DataParallel {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.strategy.is_chief() {
            chief::Chief(self).train(learner, train, valid, components)
        } else {
            chief::train_silently(self, learner, train, valid, components)
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        fit::fit(self, components, learner, train, valid, starting_epoch)
    }
}

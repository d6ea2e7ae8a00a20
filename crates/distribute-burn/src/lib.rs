//! Distributed training of burn models, which stay plain burn modules.
//!
//! - [`BurnStrategy::scope`] builds a [`Model`]: a module that is built once per replica, with equal initial values on
//!   all replicas.
//! - [`Sgd`], [`Adam`], [`AdamW`], [`Adagrad`], [`RmsProp`], [`Lamb`], [`Adadelta`], [`Adamax`], [`Nadam`] and [`Ftrl`]
//!   are descriptions; `build(&model)` makes the [`Optimizer`]. [`ReplicaOptimizer::minimize`] runs backward,
//!   reduces gradients in buckets meanwhile, and updates every replica's copy in place.
//! - [`Model::optimizer`] makes the same of one of burn's own optimizers.
//! - [`Optimizer`] also clips, compresses, scales losses ([`LossScale`]), accumulates, and shards its state; [`Ema`]
//!   averages parameters; [`Model::freeze`] excludes parameters from training.
//! - [`cast_module`] makes a model of 16 bits, which is trained in mixed precision.
//! - [`Model::to_module`] and [`Model::load_module`] exchange values with modules outside a strategy.
//! - `learner`, with the feature of this name, trains by burn's own `SupervisedTraining` under a strategy.
//! - [`BurnContext::average_loss`] scales a loss by the global batch.
//! - Data are datasets of arrays, which become tensors on a replica's device by [`BurnContext::tensor`], or [`Items`]
//!   of a dataset and a batcher of burn.
//! - [`ColumnParallelLinear`], [`RowParallelLinear`] and [`VocabParallelEmbedding`] are split among the ranks of a
//!   tensor group (`tensor_parallel` of a strategy's builder).
//! - [`Trainer`] has fit, evaluate and predict, with [losses](Loss), metrics, callbacks and checkpoints.
//!
//! Models run on CPUs, on burn's Flex backend.
//!
//! # Examples
//! ```
//! use burn::nn::LinearConfig;
//! use burn::tensor::Tensor;
//! use distribute_burn::{Adam, BurnContext, BurnStrategy, Error};
//! use distribute_strategy::MirroredStrategy;
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let model = strategy.scope(|device| LinearConfig::new(3, 1).init(device))?;
//! let optimizer = Adam::new(0.1).build(&model)?;
//! strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
//!     let y: Tensor<2> = model.forward(Tensor::<2>::ones([2, 3], &context.burn_device()?));
//!     optimizer.minimize(context, &context.average_loss(y.square(), 4))
//! })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Invariants
//! - After a step all replicas' parameters are equal bit for bit; a step that fails is applied on none of them.
//! - A parameter that got no gradient on any replica keeps its value, and a warning names it once.

mod backend;
mod checkpoint;
mod context;
mod data;
mod error;
mod extract;
mod gather;
mod hook;
// Optimised crates share nothing.
#[cfg(all(debug_assertions, not(test)))]
mod instances;
mod integers;
mod items;
#[cfg(feature = "learner")]
pub mod learner;
mod library;
mod losses;
mod model;
mod optimizer;
#[cfg(feature = "pjrt")]
mod pjrt;
mod precision;
mod spare;
mod statistics;
mod tensor;
mod tensor_parallel;
mod trainer;
mod visit;

pub use context::BurnContext;
pub use data::{FromElement, ToArray};
pub use distribute_optim::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Clip, ColumnParallelOptions, Ftrl, Lamb, LossScale, MemoryReport, Nadam,
    RmsProp, RowParallelOptions, Sgd, StepTimes,
};
pub use error::{Error, Result};
pub use items::Items;
pub use losses::{
    BinaryCrossentropy, FromProbabilities, Loss, MeanSquaredError, SparseCategoricalCrossentropy,
    cross_entropy_per_example,
};
pub use model::{BurnStrategy, Model};
pub use precision::cast_module;
pub use tensor::{Burn, BurnTensor};
pub use tensor_parallel::{
    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, column_parallel_linear, copy_to_tensor_group,
    gather_from_tensor_group, row_parallel_linear, scatter_to_tensor_group, sum_over_tensor_group,
    vocab_parallel_cross_entropy_per_example, vocab_parallel_embedding, vocab_parallel_embedding_with,
};
pub use trainer::{Examples, Fit, HostTargets, Inputs, PredictionData, Targets, TensorMap, Trainer, TrainingData};

/// A variable of a burn model.
pub type Variable = distribute_optim::backend::Variable<Burn>;

/// An optimizer of this project over a burn model.
pub type Optimizer = distribute_optim::Optimizer<Burn>;

/// One replica's view of an [`Optimizer`].
pub type ReplicaOptimizer<'a> = distribute_optim::ReplicaOptimizer<'a, Burn>;

/// Moving averages of a burn model's parameters.
pub type Ema = distribute_optim::Ema<Burn>;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

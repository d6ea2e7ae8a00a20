//! Distributed training of candle models, which stay plain candle models.
//!
//! - [`CandleStrategy::scope`] builds a [`Model`]: a candle model that is built once per replica through a
//!   `VarBuilder`, with equal initial values on all replicas.
//! - [`Sgd`], [`Adam`], [`AdamW`], [`Adagrad`], [`RmsProp`], [`Lamb`], [`Adadelta`], [`Adamax`], [`Nadam`] and [`Ftrl`]
//!   are descriptions; `build(&model)` makes the [`Optimizer`], whose slots are distributed variables.
//!   [`ReplicaOptimizer::minimize`] runs backward, reduces gradients in buckets meanwhile, and updates every
//!   replica's copy in place.
//! - [`Optimizer`] also clips, compresses, scales losses ([`LossScale`]), accumulates, and shards its state; [`Ema`]
//!   averages parameters; [`Model::freeze`] excludes parameters from training.
//! - [`Sharded`] is a block whose parameters are gathered while it runs, under a strategy that shards them;
//!   [`Sharded::recompute`] does not keep its intermediate results for backward, but computes them again.
//! - [`Model::load_safetensors`] loads pretrained values; [`Model::save_safetensors`] saves values for other programs.
//! - [`SyncBatchNorm`] normalises over the global batch; [`LayerNorm`], [`RmsNorm`], [`softmax`], [`gelu`], [`relu`]
//!   and [`cross_entropy_per_example`] are fused in host memory, and have the backward that candle's fused operations
//!   lack.
//! - [`Dropout`] has a random stream for each replica, which checkpoints save.
//! - [`Linear`], [`Conv2d`], [`Embedding`], [`max_pool2d`], [`attention`] and [`self_attention`] are candle's layers,
//!   faster in host memory; the names of variables are candle's, so that a model changes its imports alone.
//! - [`sum_over_replicas`], [`mean_over_replicas`] and [`gather_over_replicas`] are differentiable collectives.
//! - [`ColumnParallelLinear`], [`RowParallelLinear`], [`VocabParallelEmbedding`] and
//!   [`vocab_parallel_cross_entropy_per_example`] are layers whose variables are split among the ranks of a tensor
//!   group (`tensor_parallel` of a strategy's builder).
//! - [`Trainer`] has `fit`, `evaluate` and `predict`, for training without a custom loop.
//! - `CandleParameterServer` and `CandleWorker` (feature `parameter-server`) build models whose variables are on
//!   parameter servers; `sharded_embedding` fetches only the rows that it needs. `ServedTraining` has `fit`, `evaluate`
//!   and `predict` on them, and under any other strategy.
//! - [`CandleContext::average_loss`] scales a loss by the global batch.
//!
//! # Examples
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::linear;
//! use distribute_candle::{Adam, CandleContext, CandleStrategy, Error};
//! use distribute_strategy::MirroredStrategy;
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let model = strategy.scope(|vb| linear(3, 1, vb.pp("fc")))?;
//! let optimizer = Adam::new(0.1).build(&model)?;
//! strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
//!     let loss = model.forward(&Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?.sqr()?;
//!     optimizer.minimize(context, &context.average_loss(&loss, 4)?)?;
//!     Ok::<_, Error>(())
//! })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Invariants
//! - After a step all replicas' parameters are equal bit for bit; a step that fails is applied on none of them.
//! - A parameter that got no gradient on any replica keeps its value, and a warning names it once.

mod all_reduce;
mod attention;
#[doc(hidden)]
pub mod backend;
mod batch_norm;
mod checkpoint;
mod context;
mod convolution;
mod device;
mod dropout;
mod element;
mod embedding;
mod error;
mod exchange;
mod fused;
mod gpu;
mod hook;
mod host;
mod initial;
// Optimised crates share nothing.
#[cfg(all(debug_assertions, not(test)))]
mod instances;
mod library;
mod linear;
mod losses;
mod model;
mod norms;
#[cfg(feature = "parameter-server")]
mod parameter_server;
mod pretrained;
mod relay;
mod rows;
mod sharded;
mod short;
mod statistics;
mod sums;
mod table;
mod tensor;
mod tensor_parallel;
mod trainer;
#[cfg(feature = "data-service")]
mod transfer;

pub use all_reduce::{gather_over_replicas, mean_over_replicas, sum_over_replicas};
pub use attention::{AttentionMask, attention, self_attention};
pub use batch_norm::{SyncBatchNorm, sync_batch_norm};
pub use context::{CandleContext, cross_entropy_per_example, nll_per_example};
pub use convolution::{Conv2d, conv2d, conv2d_no_bias, max_pool2d, max_pool2d_with_stride};
pub use distribute_optim::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Clip, ColumnParallelOptions, Ftrl, Lamb, LossScale, MemoryReport, Nadam,
    RmsProp, RowParallelOptions, Sgd, StepTimes,
};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, embedding, embedding_with};
pub use error::{Error, Result};
pub use linear::{Linear, linear, linear_no_bias};
pub use losses::{
    BinaryCrossentropy, CategoricalCrossentropy, FromProbabilities, Hinge, Huber, KlDivergence, Loss,
    MeanAbsoluteError, MeanSquaredError, SparseCategoricalCrossentropy,
};
pub use model::{CandleStrategy, Model, ScopeOptions};
pub use norms::{LayerNorm, RmsNorm, layer_norm, rms_norm};
#[cfg(feature = "parameter-server")]
pub use parameter_server::{
    CandleParameterServer, CandleWorker, ModelReplica, ReplicatedModel, ServedBatch, ServedData, ServedFit,
    ServedTrainer, ServedTraining, ShardedEmbedding, WorkerModel, sharded_embedding, sharded_embedding_with,
};
pub use pretrained::Loaded;
pub use rows::{add, gelu, relu, softmax};
pub use sharded::Sharded;
pub use tensor::Candle;
pub use tensor_parallel::{
    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, column_parallel_linear, copy_to_tensor_group,
    gather_from_tensor_group, row_parallel_linear, scatter_to_tensor_group, sum_over_tensor_group,
    vocab_parallel_cross_entropy_per_example, vocab_parallel_embedding, vocab_parallel_embedding_with,
};
pub use trainer::{Examples, Fit, PredictionData, Trainer, TrainingData};

/// A variable of a candle model.
pub type Variable = distribute_optim::backend::Variable<Candle>;

/// An optimizer of a candle model.
pub type Optimizer = distribute_optim::Optimizer<Candle>;

/// One replica's view of an [`Optimizer`].
pub type ReplicaOptimizer<'a> = distribute_optim::ReplicaOptimizer<'a, Candle>;

/// Moving averages of a candle model's parameters.
pub type Ema = distribute_optim::Ema<Candle>;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

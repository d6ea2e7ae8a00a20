//! Optimizers over all replicas of a model, for any tensor library.
//!
//! Gradients are reduced in buckets while backward runs, and applied in place to every replica's copy. The crate names
//! no tensor library: an adapter implements [`TensorLibrary`] for its own marker type, passes a model's variables as
//! [`Parameters`], and has each variable report its gradient to a [`Tape`](backend::Tape): see [`backend`].
//!
//! - [`Sgd`], [`Adam`], [`AdamW`], [`Adagrad`], [`RmsProp`], [`Lamb`], [`Adadelta`], [`Adamax`], [`Nadam`] and [`Ftrl`]
//!   are descriptions; `build(&model)` makes the [`Optimizer`], whose slots are distributed variables.
//!   [`ReplicaOptimizer::minimize`] is one step.
//! - [`Optimizer`] also clips ([`Clip`]), compresses, scales losses ([`LossScale`]), accumulates, audits, and shards
//!   its state; [`Ema`] averages parameters.
//! - [`UpdateRule`] is the arithmetic of an optimizer on slices, [`OptimizerDescription`] a rule and its learning rate,
//!   and [`AdamFactors`] are the factors of one step, for kernels: those of [`distribute_rules`].
//! - [`ColumnParallelOptions`] and [`RowParallelOptions`] are options of the adapters' tensor-parallel layers.
//! - [`backend`] is for the adapters of tensor libraries.
//!
//! # Examples
//! Gradients that the program computes itself, on host tensors:
//! ```
//! use distribute_optim::{HostError, HostLoss, HostModel, Sgd};
//! use distribute_strategy::MirroredStrategy;
//! use distribute_values::HostTensor;
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let model = HostModel::new(&strategy, [("slope", HostTensor::new(&[1], vec![0.0])?)])?;
//! let optimizer = Sgd::new(0.5).build(&model)?;
//! strategy.run_with(&optimizer, |context, optimizer| {
//!     // Each replica's share of the gradient.
//!     let gradient = HostTensor::new(&[1], vec![-1.0 - context.replica_id() as f32])?;
//!     optimizer.minimize(context, &HostLoss(vec![Some(gradient)]))
//! })?;
//! assert_eq!(model.values()?, [[1.5]]);
//! # Ok::<(), HostError>(())
//! ```
//!
//! # Invariants
//! - After a step all replicas' parameters are equal bit for bit; a step that fails is applied on none of them.
//! - A parameter that got no gradient on any replica keeps its value, and a warning names it once.

mod agreement;
pub mod backend;
mod clip;
mod ema;
mod error;
mod exchange;
#[cfg(feature = "cuda")]
mod gpu;
mod gradient;
// Optimised crates share nothing.
#[cfg(all(debug_assertions, not(test)))]
mod instances;
mod layer_options;
mod library;
mod optimizer;
mod parameters;
mod plan;
mod row_share;
mod settings;
mod shard_layout;
mod sharding;
mod step_counts;
mod tape;
mod tensor_split;

pub use agreement::audit;
pub use clip::Clip;
pub use distribute_rules::{AdamFactors, Float, OptimizerDescription, Real, UpdateRule};
pub use ema::Ema;
pub use error::{Error, Result};
pub use gradient::LossScale;
pub use layer_options::{ColumnParallelOptions, RowParallelOptions};
pub use library::{HostError, HostLoss, HostModel};
pub use optimizer::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Ftrl, Lamb, MemoryReport, Nadam, Optimizer, OptimizerState,
    ReplicaOptimizer, RmsProp, Sgd, StepTimes,
};
pub use parameters::Trainable;
pub use row_share::SparseGradients;

use backend::{
    DeviceExchange, DeviceStep, DeviceUpdate, Parameters, ShardLayout, StepCounts, TensorLibrary, Variable, is_short,
};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

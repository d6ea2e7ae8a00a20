//! Optimizers over all replicas of a model, for any tensor library.
//!
//! Gradients are reduced in buckets while backward runs, and applied in place to every replica's copy. The crate names no tensor
//! library: an adapter implements [`TensorLibrary`] for a marker type of its own, hands a model's variables over as
//! [`Parameters`], and has each variable report its gradient to a [`Tape`].
//!
//! - [`Sgd`], [`Adam`], [`AdamW`], [`Adagrad`], [`RmsProp`] and [`Lamb`] are descriptions; `build(&model)` makes the
//!   [`Optimizer`], whose slots are distributed variables. [`ReplicaOptimizer::minimize`] is one step.
//! - [`Optimizer`] also clips ([`Clip`]), compresses, scales losses ([`LossScale`]), accumulates, audits, and shards its state;
//!   [`Ema`] averages parameters.
//! - [`UpdateRule`]: the arithmetic, on slices, for whoever holds the elements: parameter servers too.
//!   [`OptimizerDescription`]: the rule and how fast; [`AdamFactors`]: the factors of a step, for kernels.
//! - [`DeviceExchange`]: how a library's gradients are reduced and applied in an accelerator's memory.
//!
//! # Examples
//! Gradients by hand, of tensors without a library:
//! ```
//! use std::sync::Arc;
//!
//! use distribute_optim::{HostError, HostLoss, Parameters, Sgd, Trainable, Variable};
//! use distribute_strategy::MirroredStrategy;
//! use distribute_values::{Host, HostTensor, TensorStorage};
//!
//! struct Line(Arc<Parameters<Host>>);
//!
//! impl Trainable for Line {
//!     type Library = Host;
//!     fn parameters(&self) -> &Arc<Parameters<Host>> {
//!         &self.0
//!     }
//! }
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let mut slope = Variable::new("slope", false);
//! for _ in 0..strategy.num_local_replicas() {
//!     slope.push(HostTensor::new(&[1], vec![0.0])?);
//! }
//! let model = Line(Arc::new(Parameters::new(&strategy, vec![slope], Vec::new(), None)));
//! let optimizer = Sgd::new(0.5).build(&model)?;
//! strategy.run_with(&optimizer, |context, optimizer| {
//!     // Each replica's share of the gradient.
//!     let gradient = HostTensor::new(&[1], vec![-1.0 - context.replica_id() as f32])?;
//!     optimizer.minimize(context, &HostLoss(vec![Some(gradient)]))
//! })?;
//! for component in model.0.variables()[0].components() {
//!     assert_eq!(component.to_elements::<f32>()?, [1.5]);
//! }
//! # Ok::<(), HostError>(())
//! ```
//!
//! # Invariants
//! - After a step all replicas' parameters are equal bit for bit; a step that fails is made on none of them.
//! - A parameter that got no gradient on any replica is left alone, and named once in a warning.

mod agreement;
mod ema;
mod error;
mod exchange;
mod gradient;
mod library;
mod optimizer;
mod parameters;
mod plan;
mod rule;
mod tape;

pub use agreement::{audit, check_and_share, share};
pub use ema::Ema;
pub use error::{Error, Result};
pub use exchange::{DeviceExchange, DeviceUpdate, NoDevices};
pub use gradient::{Clip, LossScale, Reduced};
pub use library::{HostError, HostLoss, TensorLibrary, Trainable, is_short};
pub use optimizer::{
    Adagrad, Adam, AdamW, Lamb, Optimizer, OptimizerState, ReplicaOptimizer, RmsProp, Sgd, StepCounts, StepTimes,
};
pub use parameters::{Parameters, Variable, overwrite};
pub use plan::{Plan, warn_untrained};
pub use rule::{AdamFactors, OptimizerDescription, Real, UpdateRule};
pub use tape::{Sink, Tape};

/// A poisoned lock only means that some thread panicked; what these locks hold is whole at all times.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

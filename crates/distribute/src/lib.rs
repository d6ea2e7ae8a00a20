//! Distributed training for Rust: choose a strategy, keep the model.
//!
//! A model that runs on one device trains on several devices and machines without changes: only the line that creates
//! the [`Strategy`] differs. This crate re-exports the others; programs import [`prelude`].
//!
//! # Examples
//! ```
//! use candle_core::{DType, Device, Module, Result as CandleResult, Tensor};
//! use candle_nn::{Linear, VarBuilder, linear};
//! use distribute::prelude::*;
//!
//! struct Mlp { fc1: Linear, fc2: Linear }                        // independent of distribution
//!
//! impl Mlp {
//!     fn new(vb: VarBuilder) -> CandleResult<Self> {
//!         Ok(Mlp { fc1: linear(4, 8, vb.pp("fc1"))?, fc2: linear(8, 2, vb.pp("fc2"))? })
//!     }
//!     fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
//!         self.fc2.forward(&self.fc1.forward(x)?.relu()?)
//!     }
//! }
//!
//! fn train(strategy: &Strategy) -> distribute::Result<()> {      // one function for every strategy
//!     let global_batch = 4 * strategy.num_replicas_in_sync();
//!     let images = Tensor::ones((20, 4), DType::F32, &Device::Cpu)?;
//!     let labels = Tensor::zeros(20, DType::U32, &Device::Cpu)?;
//!     let data = Dataset::from_tensor_slices((images, labels)).shuffle(20, 42).batch(global_batch).prefetch(AUTOTUNE);
//!     let model = strategy.scope(Mlp::new)?;
//!     let optimizer = Adam::new(1e-3).build(&model)?;
//!     for batch in strategy.distribute_dataset(&data)? {
//!         let losses = strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
//!             let loss = ctx.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, global_batch)?;
//!             optimizer.minimize(ctx, &loss)?;                   // backward, all-reduce, apply
//!             Ok(loss)
//!         })?;
//!         assert!(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()? > 0.0);
//!     }
//!     Ok(())
//! }
//!
//! train(&MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?)?;
//! # Ok::<(), distribute::Error>(())
//! ```

pub mod backend;
#[cfg(feature = "burn")]
pub mod burn;
pub mod derive;
mod error;
mod exit;
#[cfg(feature = "logging")]
mod logging;
pub mod prelude;

#[cfg(feature = "candle")]
pub use distribute_candle as candle;
pub use distribute_cluster as cluster;
pub use distribute_collectives as collectives;
#[cfg(feature = "data-service")]
pub use distribute_data_service as data_service;
pub use distribute_device as device;
#[cfg(feature = "estimator")]
pub use distribute_estimator as estimator;
pub use distribute_input as input;
pub use distribute_optim as optim;
#[cfg(feature = "parameter-server")]
pub use distribute_parameter_server as parameter_server;
pub use distribute_strategy as strategy;
pub use distribute_strategy::Strategy;
pub use distribute_train as train;
pub use distribute_types as types;
pub use distribute_values as values;
pub use error::{Error, Result};
pub use exit::exit;
#[cfg(feature = "logging")]
pub use logging::init_logging;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

//! Evaluates programs of `distribute-hlo` on the host, for tests.
//!
//! It is written from the definitions of the StableHLO specification, one loop over indices each, and shares no code
//! with the builder's checks of sizes. It is slow.
//!
//! - [`evaluate`] runs a program for all its replicas in lock step.
//! - `CpuPlugin`, with the feature `plugin`, runs programs on XLA's plugin for CPUs.
//! - [`Tensor`] is a value, [`Data`] its elements.
//!
//! # Accuracy
//! Integers are exact. Floating-point functions are computed in f64 and rounded once; sums and products too, so that
//! they are more exact than those of a device. Random bits are those of XLA.
//!
//! # Examples
//! ```
//! use distribute_hlo::{Builder, CollectiveGroups, ElementType, Reducer, TensorType};
//! use hlo_evaluator::{Tensor, evaluate};
//!
//! let mut b = Builder::new("sum").replicas(2);
//! let x = b.parameter(TensorType::new(ElementType::F32, [2]));
//! let sum = b.all_reduce(x, Reducer::Sum, &CollectiveGroups::All)?;
//! let program = b.finish(&[sum])?;
//!
//! let inputs = [vec![Tensor::new([2], vec![1.0f32, 2.0])], vec![Tensor::new([2], vec![3.0f32, 4.0])]];
//! let outputs = evaluate(&program, &inputs)?;
//! assert_eq!(outputs[1], [Tensor::new([2], vec![4.0f32, 6.0])]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod collectives;
mod contraction;
#[cfg(feature = "plugin")]
mod cpu_plugin;
mod elementwise;
mod error;
mod indexing;
mod movement;
mod number;
mod random;
mod reduction;
mod run;
mod tensor;

#[cfg(feature = "plugin")]
pub use cpu_plugin::CpuPlugin;
pub use error::{Error, Result};
pub use run::evaluate;
pub use tensor::{Data, Tensor};

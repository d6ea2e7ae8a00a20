//! Properties that must hold on GPUs, checked with the CUDA of the machine, and benchmarks.
//!
//! The checks are a program, so that they can be copied to a machine with a GPU and nothing else, and tests of this
//! crate, which run them on simulated GPUs everywhere. Kernels are compared with a reference in float64 (integers:
//! exactly) on random inputs, whose seed a failure names.
//!
//! - [`checks`]: every check; [`Check::run`] runs one.
//! - [`mod@bench`]: bandwidth of kernels and copies relative to a copy, latencies, collectives.
//! - [`Report`]: both as text and as JSON.

pub mod bench;
mod check;
mod checks;
mod error;
mod gpu;
mod report;
mod values;

pub use check::{Check, Outcome};
pub use checks::checks;
pub use error::{Error, Result};
pub use gpu::Gpus;
pub use report::Report;

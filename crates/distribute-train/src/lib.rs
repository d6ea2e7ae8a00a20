//! Training loops: progress, metrics, checkpoints and event files.
//!
//! [`callbacks`] save, stop, log and change the learning rate during training; [`history`] holds its values by epoch.
//!
//! [`checkpoint`] saves the state from which a run resumes, in safetensors files that a crash at any moment leaves
//! whole.
//!
//! [`progress`] reports the progress of a run in the form that suits the destination: a bar on a terminal, `key=value`
//! or JSON lines in a file or pipe, messages to the launcher that draws one bar for all tasks.
//!
//! [`elastic`] continues a training loop when processes join it or are lost.
//!
//! [`metrics`] are sums over examples, whose values are the same under any number of replicas.
//!
//! [`preemption`] ends a run on all workers after the same step when one of them is told to stop.
//!
//! `status` shows the state of a running job as a page, as JSON and for Prometheus (feature `status`).
//!
//! [`tensorboard`] writes event files for TensorBoard.
//!
//! [`trainer`] is the training loop, which a tensor library's trainer implements [`trainer::Trainee`] for.
//!
//! The crate depends on no tensor library: a loop reports numbers, and tensors in checkpoints enter through
//! [`distribute_values::TensorStorage`].
//!
//! # Examples
//!
//! ```
//! use distribute_train::progress::{Form, Options, Progress, Summary};
//!
//! let options = Options { title: "mnist".into(), epochs: 2, steps_per_epoch: Some(3), ..Options::default() };
//! let mut progress = Progress::new(options, Form::Plain)?;
//! for epoch in 1..=2 {
//!     progress.epoch(epoch);
//!     for step in 1..=3 {
//!         progress.step(step, 64, &[("loss", 1.0 / step as f64)]);
//!     }
//!     progress.end_epoch(&[("val_loss", 0.4)]);
//! }
//! progress.finish(&Summary { test_accuracy: Some(0.97), ..Summary::default() });
//! # Ok::<(), distribute_train::Error>(())
//! ```

#[cfg(feature = "checkpoint")]
pub mod callbacks;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
#[cfg(feature = "checkpoint")]
mod chief;
#[cfg(feature = "checkpoint")]
pub mod elastic;
mod environment;
mod error;
#[cfg(any(feature = "kubeflow", feature = "status"))]
mod event_loop;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
pub mod history;
pub mod metrics;
#[cfg(any(feature = "checkpoint", feature = "tensorboard"))]
#[cfg_attr(not(feature = "object-store"), path = "no_objects.rs")]
#[cfg_attr(not(feature = "checkpoint"), allow(dead_code, unused_imports, reason = "TensorBoard uses a part of it"))]
mod objects;
#[cfg(feature = "checkpoint")]
pub mod preemption;
pub mod progress;
#[cfg(feature = "status")]
pub mod status;
#[cfg(feature = "tensorboard")]
pub mod tensorboard;
#[cfg(feature = "checkpoint")]
pub mod trainer;
#[cfg(any(feature = "checkpoint", feature = "tensorboard"))]
mod warning;

#[cfg(feature = "checkpoint")]
pub use chief::from_chief;
pub use error::{BoxError, Error, Result};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

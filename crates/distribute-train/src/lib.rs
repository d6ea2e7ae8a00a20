//! Training loops: progress, metrics and summaries.
//!
//! [`progress`] reports how a run goes, in the form that suits where it goes: a bar on a terminal, `key=value` or JSON
//! lines in a file or pipe, messages to the launcher that draws one bar for all tasks.
//!
//! The crate knows no tensor library, no cluster and no strategy: a loop tells it numbers.
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

mod error;
pub mod progress;

pub use error::Error;

//! Datasets that are read and transformed in other processes, for all workers of a training job.
//!
//! Reading, decoding and augmenting may take longer than the training step that consumes the result. Here other
//! processes do it, on the same machine or on others, and as many as are needed. Every example of a pass reaches the
//! training job exactly once and in an order that depends neither on the number of those processes nor on their loss.
//!
//! - [`DataWorker`]: a process of the user's program that serves named datasets. It is stateless.
//! - [`Dispatcher`]: knows which data workers live; `distribute data-service` as a program.
//! - [`dataset`]: the elements as a [`Dataset`](distribute_input::Dataset) of the training program, which is batched,
//!   distributed and resumed as any other; [`ServiceOptions`] are its options.
//! - [`Transfer`]: elements that can be sent, by their [`Components`].
//!
//! A pass is divided into numbered splits. A split yields the same elements in the same order on every data worker, so
//! that a consumer that loses a data worker reads on from another one, at the element that it needs.
//!
//! The crate does not know strategies, devices or models.
//!
//! # Examples
//! ```
//! use distribute_data_service::{DataWorker, Dispatcher, DispatcherOptions, ServiceOptions, dataset};
//! use distribute_input::{Array, Dataset};
//!
//! let dispatcher = Dispatcher::start(DispatcherOptions::default())?;   // or: distribute data-service
//! let address = dispatcher.address().to_string();
//!
//! // In a process of its own:
//! let squares = Dataset::range(0..100).map(|x| Ok(Array::scalar(x.as_slice()[0].pow(2))));
//! let worker = DataWorker::builder().dispatcher(&address).dataset("squares", &squares).start()?;
//!
//! // In the training program:
//! let data: Dataset<Array<i64>> = dataset(ServiceOptions::new("squares").dispatcher(&address))?;
//! let sum = data.reduce(0, |sum, x| Ok(sum + x.as_slice()[0]))?;
//! assert_eq!(sum, (0..100).map(|x| x * x).sum::<i64>());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Invariants
//! - What a consumer yields is a function of the dataset, its options, the pass and the share of the training worker.
//! - A call of another data service, version or dataset is refused before its body is used.
//! - Every wait has a deadline. A consumer that is dropped ends its streams, and with them the threads that serve them.

mod consumer;
mod data_worker;
mod dispatcher;
mod environment;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod options;
mod registry;
mod transfer;
mod wire;

pub use consumer::dataset;
pub use data_worker::{DataWorker, DataWorkerBuilder};
pub use dispatcher::{Dispatcher, DispatcherOptions};
pub use error::{Error, Result};
pub use options::ServiceOptions;
pub use transfer::{Component, Components, Form, Kind, Transfer};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

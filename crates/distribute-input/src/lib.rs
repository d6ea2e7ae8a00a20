//! Input pipelines and their distribution over workers and replicas.
//!
//! The crate does not depend on a tensor library or on devices. A library's tensors enter through [`Element`]: a value
//! that can be stacked into a batch and sliced along its leading dimension.
//!
//! - [`Dataset`]: a description of a pipeline (source, map, shuffle, batch, prefetch, …), read lazily, pass by pass.
//! - [`read`]: readers of text, CSV, TFRecord, Parquet, tar and image files, on a disk or in a store of objects.
//! - [`distribute_dataset`]: divides the global batches of a dataset between the replicas of all workers.
//! - [`distribute_datasets_from_function`]: one pipeline per worker, created by a function of its [`InputContext`].
//! - [`WorkerDataset`]: the result of both; yields one element per local replica and step, and prints its
//!   [`DataPlan`].
//! - [`InputPosition`]: the position of a pass, for checkpoints; a pass can be resumed with another number of workers.
//! - [`LookupTable`]: ids of words or numbers, from a list or a file, with buckets for unknown ones.
//! - [`Features`]: named columns of numbers and texts, for tables.
//! - [`Ragged`]: rows that differ in length, without padding; [`Sparse`]: arrays of which most elements are zero.
//! - [`Array`]: a small element in host memory, for scalars, labels, texts and tests.
//!
//! # Examples
//! ```
//! use distribute_input::{AUTOTUNE, Array, Dataset, InputOptions, Topology, distribute_dataset};
//! let images = Array::new([9, 2], (0..18).map(|pixel| pixel as f32).collect())?;
//! let labels = Array::from((0..9).collect::<Vec<u32>>());
//! let data = Dataset::from_tensor_slices((images, labels)).shuffle(9, 42).batch(4).prefetch(AUTOTUNE);
//! let distributed = distribute_dataset(&data, Topology::local(2)?, InputOptions::default())?;
//! println!("{}", distributed.plan());
//! let mut seen = Vec::new();
//! for step in &distributed {
//!     for (images, labels) in step? {
//!         assert_eq!(images.shape()[0], labels.shape()[0]);
//!         seen.extend_from_slice(labels.as_slice());
//!     }
//! }
//! seen.sort();
//! assert_eq!(seen, (0..9).collect::<Vec<_>>());
//! # Ok::<(), distribute_input::Error>(())
//! ```
//!
//! # Invariants
//! - A pass is a function of the pipeline, its seeds and the number of the pass, and of nothing else.
//! - Every example of a distributed dataset reaches exactly one replica in each pass.
//! - The first error ends a pass, unless damaged records are skipped, which are then counted.

mod array;
mod context;
mod dataset;
mod distributed;
mod element;
mod error;
mod features;
mod feed;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod lookup;
#[cfg(feature = "ndarray")]
mod ndarrays;
mod options;
mod plan;
mod position;
mod ragged;
pub mod read;
mod rebatch;
mod sparse;
#[cfg_attr(not(feature = "object-store"), path = "no_store.rs")]
mod store;

pub use array::{Array, Arrays};
pub use context::InputContext;
pub use dataset::{AUTOTUNE, Cardinality, Dataset, DatasetIter, FileShard, Parallel, Sizes, Split};
pub use distribute_types::Topology;
pub use distributed::{More, WorkerDataset, WorkerIterator, distribute_dataset, distribute_datasets_from_function};
pub use element::{Element, ElementSpec, Pad};
pub use error::{BoxError, Error, Result};
pub use features::{Column, Features, Named};
pub use lookup::{LookupKey, LookupTable, UnknownKeys};
#[cfg(feature = "ndarray")]
pub use ndarrays::NdArrays;
pub use options::{AutoShardPolicy, InputOptions, InputReplicationMode, UnequalData};
pub use plan::DataPlan;
pub use position::InputPosition;
pub use ragged::{Ragged, RaggedArrays};
pub use sparse::{Sparse, SparseArrays};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

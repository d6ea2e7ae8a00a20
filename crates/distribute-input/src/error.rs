//! What can go wrong while data are read and divided.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

/// Any error: what closures given to a [`Dataset`](crate::Dataset) may return, so that `?` works on every library's errors.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. Cheap to clone, since every pass over a faulty dataset reports it again.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value without dimensions was used as if it had rows.
    #[error(
        "{action}: the value is a scalar and has no rows; give a value of at least one dimension, or call batch first"
    )]
    Scalar {
        /// What was tried.
        action: &'static str,
    },
    /// An array's shape does not fit its elements.
    #[error("an array of shape {shape:?} needs {} elements, {got} were given", shape.iter().product::<usize>())]
    ArrayShape {
        /// The shape.
        shape: Vec<usize>,
        /// Elements given.
        got: usize,
    },
    /// Values to be joined differ in shape.
    #[error(
        "{action}: value {index} has shape {got:?}, value 0 has {expected:?}; make the shapes equal, for example in a map"
    )]
    UnequalShapes {
        /// What was tried.
        action: &'static str,
        /// The value that differs.
        index: usize,
        /// Its shape.
        got: Vec<usize>,
        /// The shape of value 0.
        expected: Vec<usize>,
    },
    /// The components of a tuple differ in their numbers of rows.
    #[error("the components of a tuple have {rows:?} rows; give every component the same number")]
    UnequalRows {
        /// Rows of each component.
        rows: Vec<usize>,
    },
    /// Nothing was given to join.
    #[error("{action}: no values were given; give at least one, since shape and type come from it")]
    Nothing {
        /// What was tried.
        action: &'static str,
    },
    /// A row outside a value.
    #[error("{action}: rows {start}..{end} were asked of a value that has {rows}; stay within it")]
    OutOfRange {
        /// What was tried.
        action: &'static str,
        /// First row asked.
        start: usize,
        /// One past the last row asked.
        end: usize,
        /// Rows there are.
        rows: usize,
    },
    /// A number that must be positive is zero.
    #[error("{stage} was given 0 as its {parameter}; give at least 1")]
    Zero {
        /// The transformation.
        stage: &'static str,
        /// Its parameter.
        parameter: &'static str,
    },
    /// Options that contradict each other, or the dataset.
    #[error("the dataset cannot be distributed so: {problem}")]
    Options {
        /// What does not go together, and what to do.
        problem: &'static str,
    },
    /// A position that a pass cannot go on from.
    #[error("the pass cannot go on from this position: {problem}; begin a pass instead")]
    Position {
        /// What does not fit.
        problem: String,
    },
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: Arc<io::Error>,
    },
    /// A record of a file cannot be read.
    #[error("{}, record {record} at byte {offset}: {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The record, from 0.
        record: u64,
        /// Where it begins.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// A record is no example, or has no such feature.
    #[error("tf.train.Example: {problem}")]
    Example {
        /// What is wrong.
        problem: String,
    },
    /// A column of a table cannot be used.
    #[error("column {name:?}: {problem}")]
    Column {
        /// The column.
        name: String,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// A list of files is empty.
    #[error(
        "the dataset reads no file: its list is empty; give at least one path, or look at the folder and the suffix"
    )]
    NoFiles,
    /// A shard that does not exist.
    #[error("shard {index} of {count} was asked; give an index below the count")]
    Shard {
        /// The shard.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A dataset was to be distributed before it was batched.
    #[error(
        "the dataset to distribute is not batched (its cardinality is {cardinality}); \
         call .batch(global_batch) on it, or give per-replica batches through distribute_datasets_from_function"
    )]
    NotBatched {
        /// The dataset's cardinality.
        cardinality: crate::Cardinality,
    },
    /// A batch holds more rows than the dataset was batched by.
    #[error(
        "the batch of step {step} has {rows} rows, but the dataset was batched by {global_batch}; \
         keep the leading dimension in maps that follow batch"
    )]
    OversizedBatch {
        /// The step, from 0.
        step: usize,
        /// Rows of the batch.
        rows: usize,
        /// Rows expected at most.
        global_batch: usize,
    },
    /// A global batch cannot be divided evenly.
    #[error(
        "a global batch of {global_batch} cannot be divided evenly by {replicas} replicas; \
         give a multiple of {replicas}, or distribute a dataset batched by {global_batch}, which may be uneven"
    )]
    NotDivisible {
        /// The global batch.
        global_batch: usize,
        /// Replicas in sync.
        replicas: usize,
    },
    /// Workers and replicas that cannot be.
    #[error(
        "worker {worker} of {workers} with {replicas_per_worker} replicas is no place to read data for; \
         give at least one worker and one replica, and a worker below their number"
    )]
    Topology {
        /// Workers.
        workers: usize,
        /// This worker.
        worker: usize,
        /// Replicas of each worker.
        replicas_per_worker: usize,
    },
    /// The library that owns the tensors refused.
    #[error("{action} of dataset elements: {source}")]
    Library {
        /// What was tried.
        action: &'static str,
        /// The library's error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A closure or generator given by the user failed.
    #[error("the {stage} of a dataset failed: {source}")]
    User {
        /// Where the closure was given.
        stage: &'static str,
        /// Its error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// Code of the pipeline panicked on the thread that prefetches.
    #[error("the pipeline panicked on one of its threads; mend the panic, which was printed where it happened")]
    Panicked,
    /// Nothing came for too long.
    #[error(
        "no element came from the pipeline within {} s; look for a source that waits forever, \
         or take prefetch away to see where it stands",
        waited.as_secs()
    )]
    Stalled {
        /// How long was waited.
        waited: Duration,
    },
    /// The thread that prefetches could not be started.
    #[error("the prefetching thread could not be started: {source}; free threads, or take prefetch away")]
    Thread {
        /// The operating system's error.
        source: Arc<io::Error>,
    },
}

impl Error {
    /// Wraps the error of a tensor library, for implementations of [`Element`](crate::Element).
    pub fn library(action: &'static str, source: impl Into<BoxError>) -> Error {
        match source.into().downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Library { action, source: source.into() },
        }
    }

    /// Wraps the error of a user's closure; an error of this crate stays as it is.
    pub(crate) fn user(stage: &'static str, source: BoxError) -> Error {
        match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::User { stage, source: source.into() },
        }
    }
}

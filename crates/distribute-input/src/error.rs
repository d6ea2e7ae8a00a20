//! Errors of reading and distributing data.

use distribute_types::{Class, Classified, ErrorClass};

use std::{io, path::PathBuf, sync::Arc, time::Duration};

/// Any error: the error type of closures that a [`Dataset`](crate::Dataset) calls, so that `?` works with the errors of
/// all libraries.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Library { source, .. } | Error::User { source, .. } | Error::External { source } => {
                Classified::class_of(&**source)
            }
            Error::File { source, .. } => crate::store::class(source).unwrap_or(Class::PERMANENT),
            _ => Class::PERMANENT,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of reading or distributing data. It is cheap to clone because every pass over an invalid dataset reports
/// it.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value without dimensions was used as if it had rows.
    #[error(
        "{action}: the value is a scalar and has no rows; give a value of at least one dimension, or call batch first"
    )]
    Scalar {
        /// The operation.
        action: &'static str,
    },
    /// An array's shape does not match its number of elements.
    #[error("an array of shape {shape:?} needs {} elements, {got} were given", elements_of(shape))]
    ArrayShape {
        /// The shape.
        shape: Vec<usize>,
        /// The number of elements given.
        got: usize,
    },
    /// Values to be joined differ in shape.
    #[error(
        "{action}: value {index} has shape {got:?}, value 0 has {expected:?}; make the shapes equal, for example in a \
         map"
    )]
    UnequalShapes {
        /// The operation.
        action: &'static str,
        /// The index of the value that differs.
        index: usize,
        /// Its shape.
        got: Vec<usize>,
        /// The shape of value 0.
        expected: Vec<usize>,
    },
    /// The components of a tuple differ in their numbers of rows.
    #[error("the components of a tuple have {rows:?} rows; give every component the same number")]
    UnequalRows {
        /// The number of rows of each component.
        rows: Vec<usize>,
    },
    /// No values were given to join.
    #[error("{action}: no values were given; give at least one, since shape and type come from it")]
    Nothing {
        /// The operation.
        action: &'static str,
    },
    /// The rows of a ragged batch do not fit together.
    #[error("a ragged batch: {problem}")]
    Ragged {
        /// The problem, with a remedy.
        problem: String,
    },
    /// The positions and values of a sparse array do not fit together.
    #[error("a sparse array: {problem}")]
    Sparse {
        /// The problem, with a remedy.
        problem: String,
    },
    /// A row is out of range.
    #[error("{action}: rows {start}..{end} were asked of a value that has {rows}; stay within it")]
    OutOfRange {
        /// The operation.
        action: &'static str,
        /// The first row requested.
        start: usize,
        /// One past the last row requested.
        end: usize,
        /// The number of rows of the value.
        rows: usize,
    },
    /// A parameter that must be positive is zero.
    #[error("{stage} was given 0 as its {parameter}; give at least 1")]
    Zero {
        /// The transformation.
        stage: &'static str,
        /// Its parameter.
        parameter: &'static str,
    },
    /// A parameter is larger than any use of it.
    #[error("{stage} was given {given} as its {parameter}; give at most {most}")]
    TooLarge {
        /// The transformation.
        stage: &'static str,
        /// Its parameter.
        parameter: &'static str,
        /// The value given.
        given: usize,
        /// The largest value that is accepted.
        most: usize,
    },
    /// The options contradict each other or do not fit the dataset.
    #[error("the dataset cannot be distributed so: {problem}")]
    Options {
        /// The contradiction, with a remedy.
        problem: &'static str,
    },
    /// A pass cannot be resumed at this position.
    #[error("the pass cannot resume at this position: {problem}; begin a pass instead")]
    Position {
        /// The mismatch.
        problem: String,
    },
    /// A file cannot be read.
    #[error("{}", crate::store::message(source).unwrap_or_else(|| format!("{}: {source}", path.display())))]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system or the store.
        source: Arc<io::Error>,
    },
    /// A record of a file cannot be read.
    #[error("{}, record {record} at byte {offset}: {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The index of the record, from 0.
        record: u64,
        /// The byte offset at which it begins.
        offset: u64,
        /// The problem of the record.
        problem: String,
    },
    /// A record is not a valid `tf.train.Example`, or lacks a feature.
    #[error("tf.train.Example: {problem}")]
    Example {
        /// The problem.
        problem: String,
    },
    /// A column of a table cannot be used.
    #[error("column {name:?}: {problem}")]
    Column {
        /// The name of the column.
        name: String,
        /// The problem of the column, with a remedy.
        problem: String,
    },
    /// A table of ids is invalid, or a key is not in it.
    #[error("a lookup table: {problem}")]
    Lookup {
        /// The problem, with a remedy.
        problem: String,
    },
    /// A list of files is empty.
    #[error(
        "the dataset reads no file: its list is empty; give at least one path, or look at the folder and the suffix"
    )]
    NoFiles,
    /// A shard index is out of range.
    #[error("shard {index} of {count} was asked; give an index below the count")]
    Shard {
        /// The index of the shard.
        index: usize,
        /// The number of shards.
        count: usize,
    },
    /// A dataset was distributed before it was batched.
    #[error(
        "the dataset to distribute is not batched (its cardinality is {cardinality}); \
         call .batch(global_batch) on it, or give per-replica batches through distribute_datasets_from_function"
    )]
    NotBatched {
        /// The dataset's cardinality.
        cardinality: crate::Cardinality,
    },
    /// A batch has more rows than the size that the dataset was batched by.
    #[error(
        "the batch of step {step} has {rows} rows, but the dataset was batched by {global_batch}; \
         keep the leading dimension in maps that follow batch"
    )]
    OversizedBatch {
        /// The step, from 0.
        step: usize,
        /// The number of rows of the batch.
        rows: usize,
        /// The largest number of rows expected.
        global_batch: usize,
    },
    /// A global batch is not a multiple of the number of replicas.
    #[error(
        "a global batch of {global_batch} cannot be divided evenly by {replicas} replicas; \
         give a multiple of {replicas}, or distribute a dataset batched by {global_batch}, which may be uneven"
    )]
    NotDivisible {
        /// The global batch.
        global_batch: usize,
        /// The number of replicas in sync.
        replicas: usize,
    },
    /// A combination of workers and replicas is invalid.
    #[error(transparent)]
    Topology(#[from] distribute_types::InvalidTopology),
    /// An operation of the tensor library failed.
    #[error("{action} of dataset elements: {source}")]
    Library {
        /// The operation.
        action: &'static str,
        /// The library's error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A source of elements outside of this crate failed.
    #[error("{source}")]
    External {
        /// The error of the source.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A closure or generator of the user failed.
    #[error("the {stage} of a dataset failed: {source}")]
    User {
        /// The transformation that the closure was given to.
        stage: &'static str,
        /// The closure's error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// Code of the pipeline panicked on a prefetch thread.
    #[error("the pipeline panicked on one of its threads; fix the panic, which was printed where it happened")]
    Panicked,
    /// The pipeline yielded no element before the deadline.
    #[error(
        "no element came from the pipeline within {} s; look for a source that waits forever, \
         or take prefetch away to see where it stands",
        waited.as_secs()
    )]
    Stalled {
        /// How long the reader waited.
        waited: Duration,
    },
    /// A memory budget does not know the size of the elements that a stage holds.
    #[error("the memory budget does not know the size of {element}, which {stage} holds; give it by Sizes::with")]
    UnknownSize {
        /// The transformation.
        stage: &'static str,
        /// The type of its elements.
        element: &'static str,
    },
    /// The prefetch thread could not be started.
    #[error("the prefetching thread could not be started: {source}; free threads, or take prefetch away")]
    Thread {
        /// The operating system's error.
        source: Arc<io::Error>,
    },
}

/// Returns the number of elements of a shape, which may be larger than a number can be.
fn elements_of(shape: &[usize]) -> usize {
    shape.iter().fold(1, |product: usize, extent| product.saturating_mul(*extent))
}

distribute_types::debug_is_display!(Error);

impl Error {
    /// Wraps the error of a tensor library, for implementations of [`Element`](crate::Element); an error of this crate
    /// is returned unchanged.
    pub fn library(action: &'static str, source: impl Into<BoxError>) -> Error {
        match source.into().downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Library { action, source: source.into() },
        }
    }

    /// Wraps the error of a source of elements that another crate implements, whose text stays as it is; an error of
    /// this crate is returned unchanged.
    pub fn external(source: impl Into<BoxError>) -> Error {
        match source.into().downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::External { source: source.into() },
        }
    }

    /// Wraps the error of a user's closure; an error of this crate is returned unchanged.
    pub(crate) fn user(stage: &'static str, source: BoxError) -> Error {
        match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::User { stage, source: source.into() },
        }
    }
}

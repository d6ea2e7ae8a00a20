//! Errors of dispatchers, data workers and consumers.

use std::time::Duration;

use distribute_types::{Class, ErrorClass, FailureKind, Scope};

/// An error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of its range.
    #[error("{what} is {given}; expected {expected}")]
    Option {
        /// The option.
        what: &'static str,
        /// Its value.
        given: String,
        /// The values that it may have.
        expected: &'static str,
    },
    /// The address of the dispatcher is not known.
    #[error(
        "no address of a dispatcher was given; set DISTRIBUTE_DATA_SERVICE to the host:port that `distribute \
         data-service` prints, or give it as an option"
    )]
    NoAddress,
    /// A data worker has nothing to serve.
    #[error("the data worker serves no dataset; add one with `dataset(name, &dataset)`")]
    NoDataset,
    /// A name is used twice.
    #[error("the data worker serves two datasets named {name:?}; give each a name of its own")]
    Twice {
        /// The name.
        name: String,
    },
    /// A dispatcher or data worker cannot listen at its address.
    #[error("cannot listen at {address}: {source}; give another address, or port 0 for a free one")]
    Listen {
        /// The address.
        address: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Threads or the runtime cannot be started.
    #[error("cannot start threads: {0}; raise the limit of processes (ulimit -u)")]
    Threads(#[source] std::io::Error),
    /// The dispatcher did not answer a data worker in time.
    #[error(
        "no answer of the dispatcher at {address} within {:.0} s: {last}; start `distribute data-service`, or correct \
         DISTRIBUTE_DATA_SERVICE",
        waited.as_secs_f64()
    )]
    NoDispatcher {
        /// The dispatcher's address.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// The last failure.
        last: String,
    },
    /// The dispatcher or a data worker refused a call.
    #[error("{who} refused: {message}")]
    Refused {
        /// The process that refused, with its address.
        who: String,
        /// Its message.
        message: String,
    },
    /// No data worker serves a dataset, or none can be reached.
    #[error(
        "dataset {dataset:?}: no data worker served split {split} within {:.0} s; the dispatcher is {dispatcher}; \
         tried: {tried}; look at the data workers' logs, and start as many as are missing",
        waited.as_secs_f64()
    )]
    NoWorker {
        /// The dispatcher's address.
        dispatcher: String,
        /// The name of the dataset.
        dataset: String,
        /// The split that was to be read.
        split: u64,
        /// How long it was tried.
        waited: Duration,
        /// The last failures of the dispatcher and of the data workers.
        tried: String,
    },
    /// The dispatcher does not know a dataset.
    #[error(
        "dataset {dataset:?}: the dispatcher at {dispatcher} did not know its data within {:.0} s: {problem}; start \
         the data workers that serve it, or correct the name",
        waited.as_secs_f64()
    )]
    Unknown {
        /// The dispatcher's address.
        dispatcher: String,
        /// The name of the dataset.
        dataset: String,
        /// How long it was asked.
        waited: Duration,
        /// The last answer.
        problem: String,
    },
    /// Data workers are alive and yield nothing.
    #[error(
        "dataset {dataset:?}: no element of split {split} came within {:.0} s, although a data worker was at work; \
         tried: {tried}; look for a source that waits for ever, or raise element_timeout",
        waited.as_secs_f64()
    )]
    Stalled {
        /// The name of the dataset.
        dataset: String,
        /// The split that was to be read.
        split: u64,
        /// How long it was waited for.
        waited: Duration,
        /// The last failures of data workers.
        tried: String,
    },
    /// The pipeline of a dataset failed on a data worker.
    #[error("dataset {dataset:?} failed on the data worker at {worker}: {message}")]
    Pipeline {
        /// The name of the dataset.
        dataset: String,
        /// The address of the data worker.
        worker: String,
        /// The error of the pipeline.
        message: String,
    },
    /// The dataset of a name is another one than at the beginning.
    #[error(
        "the dispatcher at {dispatcher} now knows another dataset {dataset:?} than at the beginning of this program; \
         run the data workers that it began with, or start the program again"
    )]
    Changed {
        /// The dispatcher's address.
        dispatcher: String,
        /// The name of the dataset.
        dataset: String,
    },
    /// Elements did not arrive as they were sent, repeatedly.
    #[error(
        "elements of dataset {dataset:?} were damaged on their way from {worker}, {times} times in a row: {problem}; \
         look at the network and the memory of that machine"
    )]
    Damaged {
        /// The name of the dataset.
        dataset: String,
        /// The address of the data worker.
        worker: String,
        /// How often.
        times: u32,
        /// The values that did not match.
        problem: String,
    },
    /// The conversion of an element panicked.
    #[error("the reader of split {split} of dataset {dataset:?} panicked; fix the panic, which was printed there")]
    Panicked {
        /// The name of the dataset.
        dataset: String,
        /// The split that was read.
        split: u64,
    },
    /// An element is of another type than the one that it is to be converted to.
    #[error("{problem}; declare the type that is served")]
    ElementType {
        /// The type that was expected, and the one that came.
        problem: String,
    },
    /// An element cannot be sent, or cannot be read from its bytes.
    #[error("an element cannot be transferred: {problem}")]
    Element {
        /// The problem, with a remedy.
        problem: String,
    },
    /// The secret of the data service cannot be read.
    #[error(transparent)]
    Secret(#[from] distribute_cluster::Error),
    /// A dataset cannot be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::NoDispatcher { .. }
            | Error::NoWorker { .. }
            | Error::Unknown { .. }
            | Error::Stalled { .. }
            | Error::Damaged { .. } => Class::new(Scope::Peer, FailureKind::Retryable),
            Error::Option { .. }
            | Error::NoAddress
            | Error::NoDataset
            | Error::Twice { .. }
            | Error::Refused { .. }
            | Error::ElementType { .. } => Class::CONFIGURATION,
            Error::Input(error) => error.class(),
            Error::Secret(error) => error.class(),
            _ => Class::PERMANENT,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

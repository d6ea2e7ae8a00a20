//! What can go wrong with progress before it is shown, and with checkpoints. Later trouble with progress never reaches the
//! training loop.

use std::path::PathBuf;

/// Any error: what the parts of a checkpoint may return.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `DISTRIBUTE_PROGRESS` names no form.
    #[error(
        "DISTRIBUTE_PROGRESS is {given:?}; set it to auto, bar, plain, json, launcher or off, or unset it for auto"
    )]
    UnknownForm {
        /// The variable's value.
        given: String,
    },
    /// The launcher form was chosen without saying where the launcher listens.
    #[error(
        "DISTRIBUTE_PROGRESS is \"launcher\", but DISTRIBUTE_PROGRESS_ADDR is not set; set it to the host:port where the \
         launcher listens, or set DISTRIBUTE_PROGRESS to plain"
    )]
    MissingAddress,
    /// `DISTRIBUTE_PROGRESS_ADDR` is no address.
    #[error(
        "DISTRIBUTE_PROGRESS_ADDR is {given:?}; expected host:port with a port from 1 to 65535, such as 127.0.0.1:4711"
    )]
    BadAddress {
        /// The variable's value.
        given: String,
    },
    /// The thread that writes progress could not be started.
    #[error("progress: the writer thread cannot be started; raise the process's thread limit")]
    Thread(#[source] std::io::Error),
    /// Predictions and targets do not go together.
    #[error("metrics: {problem}; give a target, and a weight if any, for each example")]
    Predictions {
        /// What does not fit.
        problem: String,
    },
    /// A callback watches a value that there is not.
    #[error("a callback watches {name:?}, but an epoch has {known}; name one of these, or give a validation")]
    Monitor {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file of a checkpoint is not as it was written.
    #[cfg(feature = "checkpoint")]
    #[error("checkpoint {}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A checkpoint does not hold what the program needs.
    #[cfg(feature = "checkpoint")]
    #[error("{name:?} cannot be restored: {problem}; restore into the model and the optimizer that were saved")]
    Restore {
        /// The tensor.
        name: String,
        /// What does not fit.
        problem: String,
    },
    /// Nobody saves any more.
    #[cfg(feature = "checkpoint")]
    #[error(
        "the evaluator has waited {} s for {awaited} in {}; see whether training still runs and writes there, or let it wait \
         longer (limits; RunConfig::wait_for_checkpoints)", waited.as_secs(), folder.display()
    )]
    NoNewCheckpoint {
        /// The first one, or one after a step.
        awaited: String,
        /// The folder.
        folder: PathBuf,
        /// For how long.
        waited: std::time::Duration,
    },
    /// A value of a checkpoint cannot be written or read as JSON.
    #[cfg(feature = "checkpoint")]
    #[error("the checkpoint's state {key:?}: {source}")]
    State {
        /// Its key.
        key: String,
        /// What serde says.
        source: serde_json::Error,
    },
    /// What one of a checkpoint's parts says.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Part(BoxError),
    /// What went wrong on the chief.
    #[cfg(feature = "checkpoint")]
    #[error("on the chief: {0}")]
    Chief(String),
    /// A signal cannot be taken.
    #[cfg(feature = "checkpoint")]
    #[error("signal {signal} cannot be taken: {source}; choose another, such as SIGTERM")]
    Signal {
        /// Its number.
        signal: i32,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The run was told to stop, and has saved.
    #[cfg(feature = "checkpoint")]
    #[error("stopped after step {step}, which is saved; start the program again to go on")]
    Preempted {
        /// The last step.
        step: u64,
        /// The code to exit with.
        exit_code: u8,
    },
    /// An address cannot be listened on.
    #[cfg(feature = "prometheus")]
    #[error("{address:?} cannot be listened on: {source}; give an address of this machine and a free port, or port 0")]
    Listen {
        /// The address.
        address: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A collective failed.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// The strategy failed.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A tensor's library refused.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
}

impl Error {
    /// Whether the same program may succeed when it is started again: a peer was lost or slow.
    pub fn is_retryable(&self) -> bool {
        match self {
            #[cfg(feature = "checkpoint")]
            Error::Collective(error) | Error::Values(distribute_values::Error::Collective(error)) => {
                error.is_retryable()
            }
            #[cfg(feature = "checkpoint")]
            Error::Strategy(error) => error.is_retryable(),
            #[cfg(feature = "checkpoint")]
            Error::NoNewCheckpoint { .. } => true,
            _ => false,
        }
    }
}

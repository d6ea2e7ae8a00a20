//! What can go wrong with distributed candle models.

use distribute_types::{Class, ErrorClass};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The optimizer failed.
    #[error(transparent)]
    Optim(#[from] distribute_optim::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used wrongly.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// Of parameter servers.
    #[cfg(feature = "parameter-server")]
    #[error(transparent)]
    ParameterServer(#[from] distribute_parameter_server::Error),
    /// Of training: callbacks, checkpoints, metrics, progress.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The data could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// There is nothing to train on, to evaluate or to predict.
    #[error("the dataset to {what} has no elements; give at least one")]
    NoExamples {
        /// What was to be done.
        what: &'static str,
    },
    /// A replica was to be on a GPU that candle cannot use.
    #[error("a replica was to be on {device}: {problem}")]
    NoGpu {
        /// The device.
        device: String,
        /// Why it cannot be used, and what to do.
        problem: String,
    },
    /// Weights are not as many as examples.
    #[error("{given:?} weights were given for {examples} examples; give one for each")]
    Weights {
        /// The shape of the weights.
        given: Vec<usize>,
        /// How many examples there are.
        examples: usize,
    },
    /// A model asked for a variable that was never created.
    #[error(
        "variable {name:?} was asked for without a shape, but nobody has created it; use get with a shape and an initial value"
    )]
    UnknownVariable {
        /// The variable.
        name: String,
    },
    /// Variables were to be frozen or unfrozen while an optimizer was there that trains them or does not.
    #[error("the model has an optimizer; freeze and unfreeze variables before one is built, or after it is dropped")]
    FrozenLate,
    /// Values were to be loaded into variables of 16 bits, of which an optimizer keeps master copies.
    #[error(
        "variable {name:?} has 16 bits, and an optimizer keeps its value in 32; load values before an optimizer is built, or \
         after it is dropped"
    )]
    LoadedLate {
        /// The first variable of 16 bits.
        name: String,
    },
    /// A file of values cannot be read or written, or does not fit the model.
    #[error("{}: {problem}", path.display())]
    Pretrained {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        problem: String,
    },
}

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Optim(error) => error.class(),
            Error::Strategy(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Collective(error) => error.class(),
            #[cfg(feature = "parameter-server")]
            Error::ParameterServer(error) => error.class(),
            Error::Train(error) => error.class(),
            Error::Input(error) => error.class(),
            _ => Class::PERMANENT,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

//! Errors of distributed candle models.

use distribute_types::{Class, ErrorClass};

/// The errors of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of candle failed.
    #[error(transparent)]
    Candle(candle_core::Error),
    /// A parameter of a [`Sharded`](crate::Sharded) block was read outside its run.
    #[error("{problem}")]
    NotGathered {
        /// The blocks, and the remedy.
        problem: String,
    },
    /// The optimizer failed.
    #[error(transparent)]
    Optim(#[from] distribute_optim::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used incorrectly.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// An operation on parameter servers failed.
    #[cfg(feature = "parameter-server")]
    #[error(transparent)]
    ParameterServer(#[from] distribute_parameter_server::Error),
    /// A training that may run on parameter servers has no such dataset, or cannot act on a setting.
    #[cfg(feature = "parameter-server")]
    #[error("{problem}")]
    Served {
        /// The dataset or the setting, and the remedy.
        problem: String,
    },
    /// Training failed: callbacks, checkpoints, metrics or progress.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The data could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// There are no examples to train on, to evaluate or to predict.
    #[error("the dataset to {what} has no elements; give at least one")]
    NoExamples {
        /// The operation.
        what: &'static str,
    },
    /// candle cannot use the GPU of a replica.
    #[error("a replica was to be on {device}: {problem}")]
    NoGpu {
        /// The device.
        device: String,
        /// The reason and the remedy.
        problem: String,
    },
    /// The number of weights differs from the number of examples.
    #[error("{given:?} weights were given for {examples} examples; give one for each")]
    Weights {
        /// The shape of the weights.
        given: Vec<usize>,
        /// The number of examples.
        examples: usize,
    },
    /// A target is not a class that metrics and class weights take.
    #[error(
        "target {at} of a batch is {class}, and metrics and class weights take classes from 0 to {most}; give every \
         position a class, or train without metrics and class weights", most = u32::MAX
    )]
    NotClass {
        /// The position of the target among those of its replica's batch, in row-major order.
        at: usize,
        /// The target.
        class: i64,
    },
    /// A model requested a variable without a shape that does not exist.
    #[error(
        "variable {name:?} was asked for without a shape, but it has not been created; use get with a shape and an \
         initial value"
    )]
    UnknownVariable {
        /// The variable's name.
        name: String,
    },
    /// Variables were frozen or unfrozen while the model had an optimizer.
    #[error("the model has an optimizer; freeze and unfreeze variables before one is built, or after it is dropped")]
    FrozenLate,
    /// Values were loaded into variables of 16 bits whose f32 copies an optimizer keeps.
    #[error(
        "variable {name:?} has 16 bits, and an optimizer keeps its value in 32; load values before an optimizer is \
         built, or after it is dropped"
    )]
    LoadedLate {
        /// The name of the first variable of 16 bits.
        name: String,
    },
    /// A file of values cannot be read or written, or does not match the model.
    #[error("{}: {problem}", path.display())]
    Pretrained {
        /// The file's path.
        path: std::path::PathBuf,
        /// The reason.
        problem: String,
    },
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Error {
        match crate::sharded::explain(&error) {
            Some(problem) => Error::NotGathered { problem },
            None => Error::Candle(error),
        }
    }
}

distribute_types::debug_is_display!(Error);

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

//! Errors of distributed burn models.

use distribute_types::{Class, ErrorClass};

/// The errors of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
    /// Training failed: callbacks, checkpoints, metrics or progress.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The data could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// A replica is to be on a device that this crate does not use.
    #[error(
        "a replica was to be on {device}; burn models run on CPUs here, on burn's Flex backend: name CPU:0, CPU:1 …"
    )]
    Device {
        /// The device.
        device: String,
    },
    /// The parameters of a model differ between replicas of one process.
    #[error(
        "the models of the replicas differ: parameter {index} is {first} on the first replica and {other} on replica \
         {replica}; build the same model on every call"
    )]
    ReplicasDiffer {
        /// The index of the first parameter that differs, in visiting order.
        index: usize,
        /// Path, shape and type on the first replica.
        first: String,
        /// Path, shape and type on the other replica.
        other: String,
        /// The other replica's index in its process.
        replica: usize,
    },
    /// A model has parameters with a reparameterization already.
    #[error(
        "parameter {path:?} has a reparameterization, such as LoRA's; a parameter can have only one, and scope needs it: \
         call materialize first"
    )]
    Reparameterized {
        /// The path of the first such parameter.
        path: String,
    },
    /// Parameters were frozen or unfrozen while the model had an optimizer.
    #[error("the model has an optimizer; freeze and unfreeze parameters before one is built, or after it is dropped")]
    FrozenLate,
    /// burn could not serialize or read the state of one of its optimizers.
    #[error("the state of burn's optimizer cannot be {action}: {problem}")]
    OptimizerState {
        /// The operation.
        action: &'static str,
        /// The reason.
        problem: String,
    },
    /// burn's learner cannot continue on this worker.
    #[cfg(feature = "learner")]
    #[error("{what}: {problem}")]
    Learner {
        /// The part that failed.
        what: String,
        /// The reason.
        problem: String,
    },
    /// There are no examples to train on, to evaluate or to predict.
    #[error("the dataset to {what} has no elements; give at least one")]
    NoExamples {
        /// The operation.
        what: &'static str,
    },
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Optim(error) => error.class(),
            Error::Strategy(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Collective(error) => error.class(),
            Error::Train(error) => error.class(),
            Error::Input(error) => error.class(),
            _ => Class::PERMANENT,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

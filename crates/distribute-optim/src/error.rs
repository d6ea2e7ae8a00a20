//! What can go wrong with optimizers.

use distribute_types::{Class, ErrorClass};

/// An error of an optimizer itself. What the tensor library, collectives or the strategy refuse is an error of the
/// library's adapter ([`TensorLibrary::Error`](crate::TensorLibrary::Error)), as is this.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting of an optimizer makes no sense.
    #[error("{what} is {given}; expected {expected}")]
    Setting {
        /// The setting.
        what: &'static str,
        /// Its value.
        given: f64,
        /// What would be right.
        expected: &'static str,
    },
    /// Settings of an optimizer do not go together.
    #[error("{what} does not go with {other}: {why}")]
    Combination {
        /// One setting.
        what: &'static str,
        /// The other.
        other: &'static str,
        /// The reason, and what to do instead.
        why: &'static str,
    },
    /// The model differs between workers.
    #[error(
        "the model differs between workers: variable {index} is {here} on {here_name}, but {there} on {there_name}; build \
         the same model with the same shapes on every worker"
    )]
    ModelDiffers {
        /// The first variable that differs, in order of creation.
        index: usize,
        /// Name, shape and type here.
        here: String,
        /// This worker.
        here_name: String,
        /// Name, shape and type there.
        there: String,
        /// The other worker.
        there_name: String,
    },
    /// The type of a variable cannot be trained.
    #[error("variable {name:?} is of type {dtype}; optimizers train f32, f64, f16 and bf16")]
    UntrainableType {
        /// The variable.
        name: String,
        /// Its type.
        dtype: distribute_device::DType,
    },
    /// An optimizer was given to a replica of another model or strategy.
    #[error(
        "the optimizer was built for {built} replicas, but this strategy has {given}; build it for the model of this strategy"
    )]
    OtherStrategy {
        /// Replicas it was built for.
        built: usize,
        /// Replicas of the strategy.
        given: usize,
    },
    /// A variable got its first gradient too late for the way in which gradients are exchanged.
    #[error(
        "variable {name} got its first gradient after the first step; under ZeRO-1 the first step decides who keeps whose \
         state, and on GPUs which bucket it is in, so let every variable take part in it"
    )]
    LateGradient {
        /// The variable.
        name: String,
    },
    /// Copies of a variable differ.
    #[error(
        "variable {name} of replica {replica} differs from replica 0's; something writes it inside replicas without an \
         aggregation, or computes it from what differs between them; correct that and resume from a checkpoint"
    )]
    Diverged {
        /// The first variable that differs.
        name: String,
        /// The first replica whose copy differs.
        replica: usize,
    },
    /// The loss of a replica without examples was cut off from the model.
    #[error(
        "the loss of a replica without examples was multiplied by the number 0, where backward ends; others wait there for \
         this replica, so multiply it by the context's weigh, such as CandleContext::weigh"
    )]
    CutLoss,
    /// A replica failed in the middle of a step's update, and got another's values.
    #[error("replica {local} of this process failed while it updated its parameters; it gets another replica's")]
    HalfUpdated {
        /// Index of the replica among those of its process.
        local: usize,
    },
    /// A failure in the middle of a step's update has left no replica with whole parameters.
    #[error(
        "a failure has left the model half updated, on every replica that could lend its values; restore the newest \
         checkpoint of model and optimizer, or build them anew"
    )]
    Torn,
    /// No variable of the model got a gradient.
    #[error("no variable of the model got a gradient on any replica; compute the loss from the model's own variables")]
    NoGradient,
    /// Gradients of an accelerator came where those of the host are reduced.
    #[error("tensors on a GPU are reduced there by optimizers of mirrored strategies, without zero1; use those")]
    OnDevice,
}

impl ErrorClass for Error {
    fn class(&self) -> Class {
        Class::PERMANENT
    }
}

/// The result of this crate's operations on settings.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns an error unless a setting fits and is finite.
pub(crate) fn check(what: &'static str, given: f64, fits: bool, expected: &'static str) -> Result<()> {
    if fits && given.is_finite() { Ok(()) } else { Err(Error::Setting { what, given, expected }) }
}

//! Errors of an evaluation.

/// An error of an evaluation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Inputs are not those of the program.
    #[error("{problem}")]
    Inputs {
        /// The difference.
        problem: String,
    },
    /// Only some replicas of a group have reached a collective, so that a device would wait forever.
    #[error("{operation} was reached by replicas {reached:?} only, and group {group:?} needs all of its replicas")]
    Diverged {
        /// The operation.
        operation: &'static str,
        /// The replicas that reached it.
        reached: Vec<usize>,
        /// The group.
        group: Vec<usize>,
    },
    /// A loop did not end.
    #[error("a while loop has run {rounds} times; give it a condition that becomes false")]
    Endless {
        /// The number of rounds.
        rounds: usize,
    },
    /// The program uses a value before it is made.
    #[error("value {value} is used before it is made; build programs by distribute_hlo::Builder")]
    Undefined {
        /// The number of the value.
        value: usize,
    },
    /// The plugin for CPUs failed.
    #[cfg(feature = "plugin")]
    #[error("{0}")]
    Device(String),
}

#[cfg(feature = "plugin")]
impl From<distribute_device::Error> for Error {
    fn from(error: distribute_device::Error) -> Error {
        Error::Device(error.to_string())
    }
}

/// The result of an evaluation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

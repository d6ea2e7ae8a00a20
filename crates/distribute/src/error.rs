//! What can go wrong in a distributed program.

use distribute_cluster::FailureKind;
use distribute_strategy::{FailsWith, Strategy};

#[cfg(feature = "parameter-server")]
mod servers;

/// An error of any of the crates behind this one, or of the program itself.
///
/// Its `Debug` form is its message, so that a program whose `main` returns it ends with a sentence.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A candle model or optimizer failed.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Model(#[from] distribute_candle::Error),
    /// candle refused an operation.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used wrongly, or could not be reduced.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A dataset could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// A collective operation failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// The cluster is described wrongly, or its tasks did not join.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
    /// An estimator failed, with an error of its own; one that it passes on has its variant here.
    #[cfg(feature = "estimator")]
    #[error(transparent)]
    Estimator(distribute_estimator::Error),
    /// A parameter server, or a worker or coordinator that uses one, failed.
    #[cfg(feature = "parameter-server")]
    #[error(transparent)]
    ParameterServer(#[from] distribute_parameter_server::Error),
    /// A device is described wrongly, or cannot be used.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
    /// A checkpoint, a callback, a metric or progress failed.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The program itself failed.
    #[error(transparent)]
    Program(Box<dyn std::error::Error + Send + Sync>),
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl Error {
    /// Wraps an error of the program itself.
    pub fn program(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::Program(error.into())
    }

    /// Returns whether the same program may succeed when it is started again: a peer was lost or slow.
    pub fn is_retryable(&self) -> bool {
        match self {
            #[cfg(feature = "candle")]
            Error::Model(error) => error.is_retryable(),
            Error::Strategy(error) => error.is_retryable(),
            Error::Collective(error) | Error::Values(distribute_values::Error::Collective(error)) => {
                error.is_retryable()
            }
            Error::Cluster(error) => error.is_retryable(),
            Error::Train(error) => error.is_retryable(),
            #[cfg(feature = "parameter-server")]
            Error::ParameterServer(error) => error.is_retryable(),
            _ => false,
        }
    }

    /// Returns the exit code by which job managers know what to do: 138 for lost processes and a slow or broken
    /// network, after which a restart helps; 2 for a wrong description of the cluster or of devices, or processes that
    /// are configured differently; else 1. A process that ends because another has failed ends with a code of the same
    /// kind as that one.
    pub fn exit_code(&self) -> u8 {
        if let Some(distribute_train::Error::Preempted { exit_code, .. }) = self.of_training() {
            return *exit_code;
        }
        #[cfg(feature = "parameter-server")]
        if let Some(code) = servers::exit_code(self) {
            return code;
        }
        match (self.is_configuration(), self.is_retryable()) {
            (true, _) => 2,
            (false, true) => 138,
            (false, false) => 1,
        }
    }

    fn is_configuration(&self) -> bool {
        if let Some(error) = self.of_training() {
            use distribute_train::Error::{BadAddress, MissingAddress, UnknownForm};
            return matches!(error, UnknownForm { .. } | MissingAddress | BadAddress { .. });
        }
        let kind = match self {
            #[cfg(feature = "candle")]
            Error::Model(error) => error.failure_kind(),
            #[cfg(feature = "estimator")]
            Error::Estimator(error) => error.failure_kind(),
            Error::Cluster(error) => error.failure_kind(),
            Error::Collective(error) | Error::Values(distribute_values::Error::Collective(error)) => {
                error.failure_kind()
            }
            Error::Strategy(error) => error.failure_kind(),
            Error::Device(_) => FailureKind::Configuration,
            _ => FailureKind::Permanent,
        };
        kind == FailureKind::Configuration
    }

    /// Returns the error of callbacks, checkpoints or progress that this is, by itself or in a trainer.
    fn of_training(&self) -> Option<&distribute_train::Error> {
        match self {
            Error::Train(error) => Some(error),
            #[cfg(feature = "candle")]
            Error::Model(distribute_candle::Error::Train(error)) => Some(error),
            _ => None,
        }
    }
}

/// Gives an error that an estimator passes on the variant that it has without one.
#[cfg(feature = "estimator")]
impl From<distribute_estimator::Error> for Error {
    fn from(error: distribute_estimator::Error) -> Error {
        use distribute_estimator::Error as Passed;
        match error {
            Passed::Model(error) => Error::Model(error),
            Passed::Candle(error) => Error::Candle(error),
            Passed::Strategy(error) => Error::Strategy(error),
            Passed::Values(error) => Error::Values(error),
            Passed::Train(error) => Error::Train(error),
            Passed::Input(error) => Error::Input(error),
            Passed::Cluster(error) => Error::Cluster(error),
            own => Error::Estimator(own),
        }
    }
}

/// So that `?` in the closure of [`Strategy::run`](crate::Strategy::run) converts to this error, without its being
/// named. A second implementation would leave the compiler in doubt.
impl FailsWith<Error> for Strategy {}

/// The result of distributed programs.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_main_that_returns_an_error_ends_with_its_sentence() {
        let error = Error::from(distribute_train::Error::UnknownForm { given: "loud".to_owned() });
        assert_eq!(format!("{error:?}"), error.to_string());
        assert_eq!(error.exit_code(), 2);
        #[cfg(feature = "candle")]
        {
            let in_fit = distribute_train::Error::UnknownForm { given: "loud".to_owned() };
            assert_eq!(Error::from(distribute_candle::Error::from(in_fit)).exit_code(), 2);
        }
    }

    #[test]
    fn a_full_disk_is_no_wrong_setting_and_being_told_to_stop_has_a_code_of_its_own() {
        let full =
            distribute_train::Error::File { path: "step-1".into(), source: std::io::ErrorKind::StorageFull.into() };
        assert_eq!(Error::from(full).exit_code(), 1);
        assert_eq!(Error::from(distribute_train::Error::Preempted { step: 1, exit_code: 143 }).exit_code(), 143);
    }

    #[cfg(feature = "estimator")]
    #[test]
    fn an_estimator_ends_a_program_as_what_it_passes_on_does() {
        use distribute_estimator::Error as Estimators;
        let preempted = distribute_train::Error::Preempted { step: 1, exit_code: 143 };
        assert_eq!(Error::from(Estimators::from(preempted)).exit_code(), 143);
        let wrong = Estimators::Configuration { what: "RunConfig", problem: "model_dir is empty".to_owned() };
        assert_eq!(Error::from(wrong).exit_code(), 2);
    }
}

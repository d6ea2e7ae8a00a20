//! What can go wrong in a distributed program.

use distribute_cluster::FailureKind;

/// Any error of the crates behind this one, and the program's own.
///
/// Its `Debug` is its sentence, so that a program whose `main` returns it ends with words.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Of a candle model or optimizer.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Model(#[from] distribute_candle::Error),
    /// Of candle itself.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Of a strategy.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// Of a distributed value.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// Of a dataset.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// Of a collective operation.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// Of the cluster's description or its meeting.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
    /// Of parameter servers.
    #[error(transparent)]
    ParameterServer(#[from] distribute_parameter_server::Error),
    /// Of a device.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
    /// Of progress reports.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// Of the handwritten digits.
    #[error(transparent)]
    Digits(#[from] crate::digits::Error),
    /// The program's own.
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

    /// Whether the same program may succeed when it is started again: a peer was lost or slow.
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
            Error::ParameterServer(error) => error.is_retryable(),
            _ => false,
        }
    }

    /// The exit code by which job managers know what to do: 138 for lost processes and a slow or broken network, after
    /// which a restart helps; 2 for a wrong description of the cluster or of devices, or processes that are configured differently;
    /// else 1. A process that ends because another has failed ends with a code of the same kind as that one.
    pub fn exit_code(&self) -> u8 {
        let train = match self {
            Error::Train(error) => Some(error),
            #[cfg(feature = "candle")]
            Error::Model(distribute_candle::Error::Train(error)) => Some(error),
            _ => None,
        };
        if let Some(distribute_train::Error::Preempted { exit_code, .. }) = train {
            return *exit_code;
        }
        let servers = match self {
            Error::ParameterServer(error) => Some(error),
            #[cfg(feature = "candle")]
            Error::Model(distribute_candle::Error::ParameterServer(error)) => Some(error),
            _ => None,
        };
        if let Some(distribute_parameter_server::Error::Stopped { signal, .. }) = servers {
            // As the shell counts those that a signal ends.
            return 128 + u8::try_from(*signal).unwrap_or(0);
        }
        let configuration = match self {
            _ if servers.is_some() => servers.is_some_and(distribute_parameter_server::Error::is_configuration),
            #[cfg(feature = "candle")]
            Error::Model(error) if train.is_none() => error.failure_kind() == FailureKind::Configuration,
            Error::Cluster(error) => error.failure_kind() == FailureKind::Configuration,
            Error::Collective(error) | Error::Values(distribute_values::Error::Collective(error)) => {
                error.failure_kind() == FailureKind::Configuration
            }
            Error::Strategy(error) => error.failure_kind() == FailureKind::Configuration,
            Error::Device(_) => true,
            _ => matches!(
                train,
                Some(
                    distribute_train::Error::UnknownForm { .. }
                        | distribute_train::Error::MissingAddress
                        | distribute_train::Error::BadAddress { .. }
                )
            ),
        };
        match (configuration, self.is_retryable()) {
            (true, _) => 2,
            (false, true) => 138,
            (false, false) => 1,
        }
    }
}

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
    fn tasks_of_a_job_that_has_failed_end_as_its_coordinator_does() {
        let task = distribute_cluster::Task::new(distribute_cluster::TaskType::Ps, 0);
        for (configuration, code) in [(false, 1), (true, 2)] {
            let error = distribute_parameter_server::Error::JobFailed {
                task,
                why: "no such variable".to_owned(),
                configuration,
            };
            assert_eq!(Error::from(error).exit_code(), code);
        }
        let alone =
            distribute_parameter_server::Error::NoCoordinator { task, waited: std::time::Duration::from_secs(5) };
        assert_eq!(Error::from(alone).exit_code(), 138);
    }

    #[test]
    fn a_full_disk_is_no_wrong_setting_and_being_told_to_stop_has_a_code_of_its_own() {
        let full =
            distribute_train::Error::File { path: "step-1".into(), source: std::io::ErrorKind::StorageFull.into() };
        assert_eq!(Error::from(full).exit_code(), 1);
        assert_eq!(Error::from(distribute_train::Error::Preempted { step: 1, exit_code: 143 }).exit_code(), 143);
    }
}

//! Errors of distributed programs.

use distribute_strategy::{FailsWith, Strategy};
use distribute_types::{Class, Classified, ErrorClass};

/// An error of one of the crates below this one, or of the program itself.
///
/// Its `Debug` form is its message, so that a program whose `main` returns it prints a sentence.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A burn model or optimizer failed.
    #[cfg(feature = "burn")]
    #[error(transparent)]
    Burn(#[from] distribute_burn::Error),
    /// A candle model or optimizer failed.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Model(#[from] distribute_candle::Error),
    /// An operation of candle failed.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used incorrectly, or could not be reduced.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A dataset could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// A collective operation failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// The description of the cluster is invalid, or its tasks did not join.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
    /// An estimator failed with its own error. Errors that it passes on have their own variants here.
    #[cfg(feature = "estimator")]
    #[error(transparent)]
    Estimator(distribute_estimator::Error),
    /// A data service, or a consumer of one, failed.
    #[cfg(feature = "data-service")]
    #[error(transparent)]
    DataService(#[from] distribute_data_service::Error),
    /// A parameter server, or a worker or coordinator that uses one, failed.
    #[cfg(feature = "parameter-server")]
    #[error(transparent)]
    ParameterServer(#[from] distribute_parameter_server::Error),
    /// The description of a device is invalid, or the device cannot be used.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
    /// A checkpoint, a callback, a metric or progress failed.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The program itself failed.
    #[error(transparent)]
    Program(Box<dyn std::error::Error + Send + Sync>),
}

distribute_types::debug_is_display!(Error);

impl Error {
    /// Wraps an error of the program itself.
    pub fn program(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::Program(error.into())
    }

    /// Returns whether the same program may succeed after a restart, because a peer was lost or slow.
    pub fn is_retryable(&self) -> bool {
        ErrorClass::is_retryable(self)
    }

    /// Returns the exit code for job managers:
    ///
    /// - 138 for lost processes and a slow or broken network, after which a restart helps;
    /// - 2 for an invalid description of the cluster or of devices, or processes that are configured differently;
    /// - 143, or the configured code, after preemption;
    /// - 128 plus the number of the signal that has ended a server or a worker;
    /// - 1 for all other errors.
    ///
    /// A process that ends because another one failed ends with a code of the same kind as that one.
    pub fn exit_code(&self) -> u8 {
        ErrorClass::exit_code(self)
    }
}

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            #[cfg(feature = "burn")]
            Error::Burn(error) => error.class(),
            #[cfg(feature = "candle")]
            Error::Model(error) => error.class(),
            #[cfg(feature = "candle")]
            Error::Candle(_) => Class::PERMANENT,
            #[cfg(feature = "estimator")]
            Error::Estimator(error) => error.class(),
            #[cfg(feature = "data-service")]
            Error::DataService(error) => error.class(),
            #[cfg(feature = "parameter-server")]
            Error::ParameterServer(error) => error.class(),
            Error::Strategy(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Input(error) => error.class(),
            Error::Collective(error) => error.class(),
            Error::Cluster(error) => error.class(),
            Error::Device(error) => error.class(),
            Error::Train(error) => error.class(),
            Error::Program(error) => Classified::class_of(&**error),
        }
    }
}

/// Converts an error that an estimator passes on to the variant that it has without one.
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

/// Lets `?` in the closure of [`Strategy::run`](crate::Strategy::run) convert to this error without naming it. A second
/// implementation would be ambiguous.
impl FailsWith<Error> for Strategy {}

/// The result of functions in distributed programs.
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

    #[cfg(feature = "parameter-server")]
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

    /// An error of a group, of a job's configuration and of a program, each wrapped in every way in which errors of
    /// lower crates can be wrapped.
    #[test]
    fn an_error_has_one_exit_code_however_it_is_wrapped() {
        use distribute_collectives::{Error as Collective, Rank};
        let lost = || Collective::PeerLost {
            name: "worker:0".to_owned(),
            peer_rank: Rank(1),
            peer: "worker:1".to_owned(),
            during: "all_reduce #7".to_owned(),
            how: "the connection was closed".to_owned(),
        };
        let misnamed = || Collective::UnknownName { what: "transport", given: "tpc".to_owned(), expected: "tcp" };
        let aborted = |kind| Collective::Aborted {
            group: "world".to_owned(),
            origin: "worker:1".to_owned(),
            cause: "it failed".to_owned(),
            kind,
        };
        let cases: [(&dyn Fn() -> Collective, u8); 5] = [
            (&lost, 138),
            (&misnamed, 2),
            (&|| aborted(distribute_types::FailureKind::Retryable), 138),
            (&|| aborted(distribute_types::FailureKind::Configuration), 2),
            (&|| aborted(distribute_types::FailureKind::Permanent), 1),
        ];
        for (make, code) in cases {
            let values = || distribute_values::Error::from(make());
            let strategy = || distribute_strategy::Error::from(values());
            let part = || distribute_train::Error::Part(Classified::new(strategy()).into());
            let mut all: Vec<Error> = vec![
                make().into(),
                values().into(),
                strategy().into(),
                distribute_train::Error::from(make()).into(),
                distribute_train::Error::from(strategy()).into(),
                part().into(),
                distribute_input::Error::library("reading", Classified::new(make())).into(),
                Error::program(Classified::new(values())),
            ];
            #[cfg(feature = "candle")]
            all.extend([
                Error::from(distribute_candle::Error::from(strategy())),
                distribute_candle::Error::from(part()).into(),
            ]);
            #[cfg(feature = "burn")]
            all.extend([
                Error::from(distribute_burn::Error::from(strategy())),
                distribute_burn::Error::from(part()).into(),
            ]);
            #[cfg(feature = "estimator")]
            all.push(distribute_estimator::Error::from(distribute_candle::Error::from(values())).into());
            #[cfg(feature = "parameter-server")]
            all.extend([
                Error::from(distribute_parameter_server::Error::from(values())),
                distribute_parameter_server::Error::from(part()).into(),
            ]);
            for error in all {
                assert_eq!((error.exit_code(), error.is_retryable()), (code, code == 138), "{error}");
            }
        }
    }
}

//! How programs end for errors of parameter servers.

use distribute_parameter_server::Error as Servers;

use super::Error;

/// The exit code of an error of parameter servers; `None` for any other.
pub(super) fn exit_code(error: &Error) -> Option<u8> {
    let error = match error {
        Error::ParameterServer(error) => error,
        #[cfg(feature = "candle")]
        Error::Model(distribute_candle::Error::ParameterServer(error)) => error,
        _ => return None,
    };
    Some(match error {
        // As the shell counts those that a signal ends.
        Servers::Stopped { signal, .. } => 128 + u8::try_from(*signal).unwrap_or(0),
        error if error.is_configuration() => 2,
        error if error.is_retryable() => 138,
        _ => 1,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use distribute_cluster::{Task, TaskType};

    use super::*;

    #[test]
    fn tasks_of_a_job_that_has_failed_end_as_its_coordinator_does() {
        let task = Task::new(TaskType::Ps, 0);
        for (configuration, code) in [(false, 1), (true, 2)] {
            let error = Servers::JobFailed { task, why: "no such variable".to_owned(), configuration };
            assert_eq!(Error::from(error).exit_code(), code);
        }
        let alone = Servers::NoCoordinator { task, waited: Duration::from_secs(5) };
        assert_eq!(Error::from(alone).exit_code(), 138);
    }
}

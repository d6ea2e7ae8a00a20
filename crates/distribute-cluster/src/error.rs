//! What can go wrong while tasks find each other.

use std::time::Duration;

use crate::text::clean;
use crate::{Failure, FailureKind};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The description of the cluster is wrong.
    #[error("{subject}: {problem}. Given: {given}. Expected: {expected}. {mend}")]
    Config {
        /// What is described, such as `TF_CONFIG`.
        subject: &'static str,
        /// What is wrong.
        problem: String,
        /// The part that is wrong.
        given: String,
        /// What would be right.
        expected: String,
        /// What to change.
        mend: String,
    },
    /// The leader's port cannot be listened on.
    #[error(
        "{task} leads the job and cannot listen on {address}: {source}; end the program that uses the port, or choose another \
         one: set DISTRIBUTE_PORT alike on every task, or change the leader's address in every task's TF_CONFIG"
    )]
    Listen {
        /// This task.
        task: String,
        /// The address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// Some tasks did not join in time.
    #[error(
        "{task}: {missing} did not join within {} s; start them, or look at their logs and at the addresses they were given",
        seconds(waited)
    )]
    Missing {
        /// This task.
        task: String,
        /// How long it waited.
        waited: Duration,
        /// Who is missing, with addresses where they are known.
        missing: String,
    },
    /// The leader could not be reached in time.
    #[error(
        "{task}: cannot join the leader {leader} at {address} within {} s: {last}; check that it runs and that the address is \
         right on every task",
        seconds(waited)
    )]
    Unreachable {
        /// This task.
        task: String,
        /// The leader.
        leader: String,
        /// Its address.
        address: String,
        /// How long was tried.
        waited: Duration,
        /// The last attempt's error.
        last: String,
    },
    /// The leader refused this task.
    #[error("{task} was refused by the leader at {address}: {reason}")]
    Refused {
        /// This task.
        task: String,
        /// The leader's address.
        address: String,
        /// The leader's words, with what to change.
        reason: String,
    },
    /// Not every member came to an exchange or barrier in time.
    #[error("{task}: {what} was not completed within {} s; missing: {missing}", seconds(waited))]
    Incomplete {
        /// This task.
        task: String,
        /// The exchange or barrier.
        what: String,
        /// How long it waited.
        waited: Duration,
        /// Who did not come.
        missing: String,
    },
    /// A key was not set in time.
    #[error(
        "{task}: nobody put key {key:?} within {} s; check that some task puts it, or wait longer",
        seconds(waited)
    )]
    KeyMissing {
        /// This task.
        task: String,
        /// The key.
        key: String,
        /// How long it waited.
        waited: Duration,
    },
    /// A key or value is too large for the coordination service, or there are too many.
    #[error("{task}: {what}: {problem}")]
    TooLarge {
        /// This task.
        task: String,
        /// The call.
        what: String,
        /// What is too large, what is allowed, and what to do instead.
        problem: String,
    },
    /// A member failed while this task waited for it.
    #[error("{task}: {what}: {failure}")]
    Failed {
        /// This task.
        task: String,
        /// What it waited for.
        what: String,
        /// The first failure of the job.
        failure: Failure,
    },
    /// A call to the coordination service failed.
    #[error("{task}: {what}: {reason}")]
    Call {
        /// This task.
        task: String,
        /// The call.
        what: String,
        /// Why.
        reason: String,
    },
    /// The system gave no random numbers, which tell jobs and their members apart.
    #[error("the system gives no random numbers: {0}; look at getrandom(2), and at /dev/urandom in containers")]
    Random(String),
    /// The service's own thread could not be started.
    #[error("cannot start the thread of the coordination service: {0}")]
    Thread(#[source] std::io::Error),
}

impl Error {
    /// Whether the same program may succeed when it is started again.
    pub fn is_retryable(&self) -> bool {
        self.failure_kind() == FailureKind::Retryable
    }

    /// Whether a restart helps; where a peer failed, whether it helps against that failure.
    pub fn failure_kind(&self) -> FailureKind {
        match self {
            Error::Config { .. } | Error::Refused { .. } => FailureKind::Configuration,
            Error::TooLarge { .. } => FailureKind::Permanent,
            Error::Failed { failure, .. } => failure.kind,
            _ => FailureKind::Retryable,
        }
    }

    /// Whose doing the error is.
    pub fn scope(&self) -> Scope {
        match self {
            Error::Config { .. }
            | Error::TooLarge { .. }
            | Error::KeyMissing { .. }
            | Error::Random(_)
            | Error::Thread(_) => Scope::Caller,
            Error::Failed { .. } => Scope::Peer,
            _ => Scope::Cluster,
        }
    }

    /// The error of a wrong description.
    pub(crate) fn config(
        subject: &'static str,
        problem: impl Into<String>,
        given: impl Into<String>,
        expected: impl Into<String>,
        mend: impl Into<String>,
    ) -> Error {
        // What was given may stand in the problem and the remedy too.
        let [problem, given, expected, mend] = [problem.into(), given.into(), expected.into(), mend.into()];
        let [problem, given, expected, mend] = [problem, given, expected, mend].map(|text| clean(&text, MAX_PART));
        Error::Config { subject, problem, given, expected, mend }
    }

    /// The same error, said of another subject.
    pub(crate) fn about(self, subject: &'static str) -> Error {
        match self {
            Error::Config { problem, given, expected, mend, .. } => {
                Error::Config { subject, problem, given, expected, mend }
            }
            other => other,
        }
    }
}

/// The longest part of a sentence about a description, in characters.
const MAX_PART: usize = 600;

/// Whose doing an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scope {
    /// This process: its configuration or its arguments.
    Caller,
    /// One other task, which failed.
    Peer,
    /// The job as a whole: tasks that did not meet.
    Cluster,
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Seconds with as many digits as are of interest: `300`, `2.5`, `0.04`.
pub(crate) fn seconds(duration: &Duration) -> String {
    let seconds = duration.as_secs_f64();
    let rounded = if seconds < 1.0 { (seconds * 100.0).round() / 100.0 } else { (seconds * 10.0).round() / 10.0 };
    rounded.to_string()
}

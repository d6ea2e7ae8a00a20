//! Failures of members, as the other members of the job receive them.

use std::fmt;
use std::time::Duration;

use crate::Task;

/// The kind of a failure: whether a restart may help. It is sent with the failure, so that all processes of a job end
/// with the same exit code and a job manager can decide whether to restart it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// A process or connection was lost, or a deadline passed: the same program may succeed when it is restarted.
    Retryable,
    /// An error of the program itself, which would recur after a restart.
    Permanent,
    /// Processes were configured wrongly or inconsistently.
    Configuration,
}

impl FailureKind {
    /// Returns the exit code of a process that ends because of such a failure: 138, 1 or 2.
    pub fn exit_code(self) -> u8 {
        match self {
            FailureKind::Retryable => 138,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// Returns the number that represents the kind on the wire.
    pub fn code(self) -> u32 {
        match self {
            FailureKind::Retryable => 0,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// Returns the kind that a number represents on the wire; an unknown number is [`FailureKind::Retryable`].
    pub fn from_code(code: u32) -> FailureKind {
        match code {
            1 => FailureKind::Permanent,
            2 => FailureKind::Configuration,
            _ => FailureKind::Retryable,
        }
    }
}

/// A member's failure, as all other members receive it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The member that failed.
    pub task: Task,
    /// Its rank.
    pub rank: u32,
    /// Why the member no longer takes part.
    pub cause: FailureCause,
    /// Whether a restart may help.
    pub kind: FailureKind,
}

impl Failure {
    /// Creates a failure: retryable if the member was lost, permanent if it reported an error of its own.
    pub fn new(task: Task, rank: u32, cause: FailureCause) -> Failure {
        let kind = match cause {
            FailureCause::Lost { .. } => FailureKind::Retryable,
            FailureCause::Reported(_) => FailureKind::Permanent,
        };
        Failure { task, rank, cause, kind }
    }

    /// Returns the same failure with another kind.
    #[must_use]
    pub fn with_kind(self, kind: FailureKind) -> Failure {
        Failure { kind, ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            FailureCause::Lost { how, last_heard } => {
                write!(f, "lost {}: {how} (last heard from {:.1} s ago)", self.task, last_heard.as_secs_f64())
            }
            FailureCause::Reported(message) => write!(f, "{} failed: {message}", self.task),
        }
    }
}

/// Why a member no longer takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureCause {
    /// The member's connection ended or its heartbeats stopped.
    Lost {
        /// How the loss was detected.
        how: String,
        /// Time between the member's last sign of life and the detection.
        last_heard: Duration,
    },
    /// The member reported the failure itself.
    Reported(String),
}

//! What the members of a job learn of each other's failure.

use std::fmt;
use std::time::Duration;

use crate::Task;

/// Whether a restart helps against a failure. It travels with the failure, so that all processes of a job end alike, and job
/// managers restart the job or do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// A process or a connection was lost, or somebody was too slow: the same program may succeed when it is started again.
    Retryable,
    /// The program's own error, which comes again.
    Permanent,
    /// Processes were described or configured differently or wrongly.
    Configuration,
}

impl FailureKind {
    /// The exit code of a process that ends by such a failure: 138, 1 or 2.
    pub fn exit_code(self) -> u8 {
        match self {
            FailureKind::Retryable => 138,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// The number by which it is sent.
    pub fn code(self) -> u32 {
        match self {
            FailureKind::Retryable => 0,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// The kind that was sent by this number; a number that this build does not know is a failure that a restart may help against.
    pub fn from_code(code: u32) -> FailureKind {
        match code {
            1 => FailureKind::Permanent,
            2 => FailureKind::Configuration,
            _ => FailureKind::Retryable,
        }
    }
}

/// A member's failure, as all others learn of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The member.
    pub task: Task,
    /// Its rank.
    pub rank: u32,
    /// Why it no longer takes part.
    pub cause: FailureCause,
    /// Whether a restart helps.
    pub kind: FailureKind,
}

impl Failure {
    /// The failure of a member: retryable where it was lost, permanent where it has reported an error of its own.
    pub fn new(task: Task, rank: u32, cause: FailureCause) -> Failure {
        let kind = match cause {
            FailureCause::Lost { .. } => FailureKind::Retryable,
            FailureCause::Reported(_) => FailureKind::Permanent,
        };
        Failure { task, rank, cause, kind }
    }

    /// The same failure, of another kind.
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
    /// It vanished or fell silent.
    Lost {
        /// How that was noticed.
        how: String,
        /// How long before that it gave its last sign of life.
        last_heard: Duration,
    },
    /// It said so itself.
    Reported(String),
}

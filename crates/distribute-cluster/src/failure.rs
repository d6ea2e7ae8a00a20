//! Failures of members, as the other members of the job receive them.

use std::fmt;
use std::time::Duration;

use distribute_types::FailureKind;

use crate::Task;

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

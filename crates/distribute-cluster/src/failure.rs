//! What the members of a job learn of each other's failure.

use std::fmt;
use std::time::Duration;

use crate::Task;

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
}

impl Failure {
    /// The failure of a member.
    pub fn new(task: Task, rank: u32, cause: FailureCause) -> Failure {
        Failure { task, rank, cause }
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

//! The messages about tasks that are started again one by one.

use std::time::Duration;

use crate::job::Task;
use crate::outcome::Exit;
use crate::report::{self, count, ended, seconds};
use crate::supervisor;

/// A message to the user while the tasks run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Note {
    /// One that jobs of all kinds have.
    Common(supervisor::Note),
    /// A task has ended, and is started again after a pause; `others` tells whether others of the same job run.
    Again { rank: usize, exit: Exit, at: Duration, pause: Duration, count: u32, of: u32, others: bool },
    /// A task has ended, and is not started again, for this reason; it is empty where no restart was asked for.
    Left { rank: usize, exit: Exit, at: Duration, why: String, others: bool },
    /// None that can continue the job is left. Its tasks are started again, after those that run have been stopped.
    AllLost { running: usize },
    /// A task has ended well, so that these are not started again.
    Ending { rank: usize, ranks: Vec<usize> },
    /// Fewer are left than needed. Those that run are being stopped, or, if it `waits`, after the grace.
    TooFew { left: usize, min: usize, running: usize, waits: bool },
}

impl Note {
    /// Formats the message.
    pub(crate) fn text(&self, tasks: &[Task], grace: Duration) -> String {
        let train_on =
            |others: bool, joint: &str| if others { format!("{joint}the others train on") } else { String::new() };
        match self {
            Note::Common(note) => report::note(note, tasks, grace),
            Note::Again { rank, exit, at, pause, count, of, others } => format!(
                "{} {} after {}; starting it again in {} s ({count} of {of}){}",
                tasks[*rank],
                ended(*exit),
                seconds(*at),
                pause.as_secs(),
                train_on(*others, ", "),
            ),
            Note::Left { rank, exit, at, why, others } => {
                let because = if why.is_empty() { String::new() } else { format!(": {why}") };
                format!(
                    "{} {} after {} and is not started again{because}{}",
                    tasks[*rank],
                    ended(*exit),
                    seconds(*at),
                    train_on(*others, "; "),
                )
            }
            Note::AllLost { running } => {
                let (who, stopping) = match running {
                    0 => ("all workers were lost", String::new()),
                    _ => {
                        let (workers, grace) = (count(*running, "worker"), grace.as_secs());
                        let stopping = format!("; stopping {workers} without it first (killed after {grace} s)");
                        ("all workers with the state of the job were lost", stopping)
                    }
                };
                format!(
                    "{who}; those that are started again begin another job, from a checkpoint if the program restores \
                     one{stopping}"
                )
            }
            Note::Ending { rank, ranks } => {
                let names: Vec<_> = ranks.iter().map(|rank| tasks[*rank].to_string()).collect();
                let are = if names.len() == 1 { "is" } else { "are" };
                format!("{} has ended, so {} {are} not started again", tasks[*rank], names.join(", "))
            }
            Note::TooFew { left, min, running, waits } => {
                let (are, them) = if *left == 1 { ("is", "it") } else { ("are", "them") };
                let grace = grace.as_secs();
                let stopping = match running {
                    0 => String::new(),
                    _ if *waits => format!("; stopping {them} in {grace} s, unless all end before"),
                    _ => format!("; stopping {them} (killed after {grace} s)"),
                };
                format!("{} {are} left, and the job needs {min}{stopping}", count(*left, "worker"))
            }
        }
    }
}

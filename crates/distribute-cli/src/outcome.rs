//! How tasks ended, and which failure was the first cause.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGKILL, SIGTERM};

/// How a process ended; displayed as `138`, `SIGKILL` or `lost`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
    /// Its host was lost, and with it the knowledge of its end.
    Lost,
}

impl Exit {
    /// Returns the code that a shell reports: 128 + n after signal n.
    pub(crate) fn code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128_i32.saturating_add(signal),
            Self::Lost => INFRASTRUCTURE,
        };
        u8::try_from(code).unwrap_or(1)
    }

    /// Returns whether this is the end of a task that was sent `signal`: killed by it, or by an exit that reports it.
    pub(crate) fn answers(self, signal: i32) -> bool {
        matches!(self, Self::Signal(by) if by == signal) || self == Self::Code(128_i32.saturating_add(signal))
    }

    /// Returns whether this says that another task failed.
    pub(crate) fn blames_others(self) -> bool {
        self == Self::Code(INFRASTRUCTURE)
    }

    /// Returns whether this may say that another task failed: a permanent failure ends its peers with its own exit
    /// code, 1 or 2.
    pub(crate) fn may_blame_others(self) -> bool {
        self.blames_others() || matches!(self, Self::Code(1 | 2))
    }

    pub(crate) fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => f.pad(&code.to_string()),
            Self::Signal(signal) => f.pad(&signal_name(*signal)),
            Self::Lost => f.pad("lost"),
        }
    }
}

/// Returns `SIGKILL`, or `signal 35` if it has no name.
pub(crate) fn signal_name(signal: i32) -> Cow<'static, str> {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}").into(), Cow::from)
}

/// The end of one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) exit: Exit,
    /// Time since the job began.
    pub(crate) at: Duration,
    /// Whether the launcher's own signals explain it.
    pub(crate) stopped: bool,
    /// Whether the job continues without it.
    pub(crate) forgiven: bool,
    /// Whether its output says that another task failed.
    pub(crate) told: bool,
}

impl Outcome {
    /// Returns whether another task is the cause of this end, by its exit code or its output: a task that was aborted
    /// ends with a code of the same kind as the one that failed.
    fn blames_others(&self) -> bool {
        self.exit.blames_others() || self.told
    }
}

/// Returns whether a task's last lines say that another one has aborted its group.
pub(crate) fn tells_of_another(lines: &[String]) -> bool {
    lines.iter().any(|line| line.contains("group \"") && line.contains(" was aborted by "))
}

/// The outcome of the job as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Success,
    /// The launcher was told to stop, which explains every failure.
    Interrupted(i32),
    /// The task whose failure came first and explains the others.
    Cause(usize),
}

impl Verdict {
    /// Returns the earliest failure that neither blames others nor was caused by the launcher; if all blame others, the
    /// earliest of them. A task that lost a peer often exits before its peer has ended.
    pub(crate) fn of(outcomes: &[Outcome], interrupted: Option<i32>) -> Self {
        let failed = |outcome: &Outcome| !outcome.exit.is_success() && !outcome.forgiven;
        let failures = || outcomes.iter().enumerate().filter(|(_, outcome)| failed(outcome));
        let earliest = |blames_others: bool| {
            let of_kind = move |outcome: &Outcome| !outcome.stopped && outcome.blames_others() == blames_others;
            let all = failures().filter(move |(_, outcome)| of_kind(outcome));
            all.min_by_key(|(_, outcome)| outcome.at).map(|(rank, _)| rank)
        };
        let first = || failures().min_by_key(|(_, outcome)| outcome.at).map(|(rank, _)| rank);
        match (earliest(false), interrupted) {
            (Some(rank), _) => Self::Cause(rank),
            (None, Some(signal)) if first().is_some() => Self::Interrupted(signal),
            (None, _) => earliest(true).or_else(first).map_or(Self::Success, Self::Cause),
        }
    }

    pub(crate) fn exit_code(self, outcomes: &[Outcome]) -> u8 {
        match self {
            Self::Success => 0,
            // A manager takes 143 for a job that has saved; one that had to be killed may not have.
            Self::Interrupted(SIGTERM)
                if outcomes.iter().any(|outcome| outcome.exit == Exit::Signal(SIGKILL) && !outcome.forgiven) =>
            {
                Exit::Signal(SIGKILL).code()
            }
            Self::Interrupted(signal) => Exit::Signal(signal).code(),
            Self::Cause(rank) => outcomes[rank].exit.code(),
        }
    }
}

/// The exit code of a task that lost a peer or exceeded a deadline.
pub(crate) const INFRASTRUCTURE: i32 = 138;

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(exit: Exit, at: u64) -> Outcome {
        Outcome { exit, at: Duration::from_millis(at), stopped: false, forgiven: false, told: false }
    }

    fn stopped(exit: Exit, at: u64) -> Outcome {
        Outcome { stopped: true, ..outcome(exit, at) }
    }

    fn verdict(outcomes: &[Outcome], interrupted: Option<i32>) -> (Verdict, u8) {
        let verdict = Verdict::of(outcomes, interrupted);
        (verdict, verdict.exit_code(outcomes))
    }

    #[test]
    fn a_victim_that_ends_first_is_not_the_cause() {
        use Exit::{Code, Signal};
        let lost = [outcome(Code(138), 1), outcome(Signal(9), 2), stopped(Signal(15), 3)];
        assert_eq!(verdict(&lost, None), (Verdict::Cause(1), 137));
        let panicked = [stopped(Signal(15), 3), outcome(Code(138), 1), outcome(Code(101), 2)];
        assert_eq!(verdict(&panicked, None), (Verdict::Cause(2), 101));
    }

    #[test]
    fn a_task_that_was_told_of_a_permanent_failure_is_not_the_cause() {
        let told = |at| Outcome { told: true, ..outcome(Exit::Code(2), at) };
        let all = [told(1), outcome(Exit::Code(2), 3), told(2)];
        assert_eq!(verdict(&all, None), (Verdict::Cause(1), 2));
        assert_eq!(verdict(&[told(2), told(1)], None), (Verdict::Cause(1), 2));
        let line = "error: group \"world\" was aborted by worker:1: the models differ".to_owned();
        assert!(tells_of_another(&[String::new(), line]) && !tells_of_another(&["was aborted by me".to_owned()]));
    }

    #[test]
    fn the_earliest_cause_wins() {
        let both = [outcome(Exit::Code(1), 5), outcome(Exit::Code(2), 4), outcome(Exit::Code(0), 1)];
        assert_eq!(verdict(&both, None), (Verdict::Cause(1), 2));
    }

    #[test]
    fn where_all_are_victims_the_earliest_is_named() {
        let all = [outcome(Exit::Code(138), 5), outcome(Exit::Code(138), 4), stopped(Exit::Signal(15), 3)];
        assert_eq!(verdict(&all, None), (Verdict::Cause(1), 138));
    }

    #[test]
    fn an_interrupted_job_ends_like_an_interrupted_program() {
        let all = [stopped(Exit::Signal(2), 5), outcome(Exit::Code(138), 6)];
        assert_eq!(verdict(&all, Some(2)), (Verdict::Interrupted(2), 130));
        let killed = [stopped(Exit::Code(143), 5), stopped(Exit::Signal(9), 6)];
        assert_eq!(verdict(&killed, Some(15)), (Verdict::Interrupted(15), 137));
        assert_eq!(verdict(&killed, Some(2)), (Verdict::Interrupted(2), 130));
        let saved = [outcome(Exit::Code(0), 5), outcome(Exit::Code(0), 6)];
        assert_eq!(verdict(&saved, Some(15)), (Verdict::Success, 0));
        let failed_to_save = [stopped(Exit::Code(143), 5), outcome(Exit::Code(1), 6)];
        assert_eq!(verdict(&failed_to_save, Some(15)), (Verdict::Cause(1), 1));
    }

    #[test]
    fn exits_are_named_as_users_know_them() {
        assert_eq!(Exit::Signal(9).to_string(), "SIGKILL");
        assert_eq!(format!("{:<5}|", Exit::Code(138)), "138  |");
        assert!(Exit::Code(143).answers(15) && Exit::Signal(15).answers(15) && !Exit::Code(1).answers(15));
        // A number that another launcher has sent.
        assert!(Exit::Signal(i32::MAX).answers(i32::MAX) && !Exit::Code(1).answers(i32::MAX));
        assert_eq!(crate::error::Error::Interrupted { signal: i32::MAX }.exit_code(), 1);
    }
}

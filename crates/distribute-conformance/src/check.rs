//! The outcome of a scenario, and what ends its body.

use std::fmt;

/// The outcome of a scenario under a strategy. Printed on one line, and parsed from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The promise holds.
    Passed,
    /// The promise is not one of this strategy, and why.
    NotApplicable(String),
    /// The promise does not hold, and how it does not.
    Failed(String),
}

/// Returns whether a scenario has passed or failed under some strategy, each given with whether it compiles steps. One
/// that does may refuse any scenario's promise, and shows nothing by it.
pub fn is_tried<'a>(outcomes: impl IntoIterator<Item = (bool, &'a Outcome)>) -> bool {
    let is_told = |(is_compiled, outcome): (bool, &Outcome)| match outcome {
        Outcome::Passed => !is_compiled,
        Outcome::NotApplicable(_) => false,
        Outcome::Failed(_) => true,
    };
    outcomes.into_iter().any(is_told)
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed => f.write_str("outcome: passed"),
            Outcome::NotApplicable(why) => write!(f, "outcome: not applicable: {why}"),
            Outcome::Failed(how) => write!(f, "outcome: failed: {}", how.replace('\n', " · ")),
        }
    }
}

impl Outcome {
    /// Parses the output of a process. One without an outcome has failed, and so has one that told that it has passed
    /// or that nothing applies, and did not succeed.
    pub fn read(stdout: &str, stderr: &str, succeeded: bool) -> Outcome {
        let told = Outcome::told(stdout, stderr);
        match told {
            Outcome::Passed | Outcome::NotApplicable(_) if !succeeded => {
                let problem = format!("it told `{told}`, and did not end with exit code 0: {}", stderr.trim());
                Outcome::Failed(problem)
            }
            told => told,
        }
    }

    fn told(stdout: &str, stderr: &str) -> Outcome {
        match stdout.lines().find_map(|line| line.strip_prefix("outcome: ")) {
            Some("passed") => Outcome::Passed,
            Some(line) => match line.split_once(": ") {
                Some(("not applicable", why)) => Outcome::NotApplicable(why.to_owned()),
                _ => Outcome::Failed(line.strip_prefix("failed: ").unwrap_or(line).to_owned()),
            },
            None => Outcome::Failed(format!("it ended without a word: {}", stderr.trim())),
        }
    }

    /// Returns the outcome of the processes of one strategy from that of each, by rank: the first failure, else the one
    /// that all have told. They have failed if they told different ones.
    pub fn of_all(told: &[Outcome]) -> Outcome {
        let Some(first) = told.first() else { return Outcome::Failed("no process was started".to_owned()) };
        if let Some(failed) = told.iter().find(|outcome| matches!(outcome, Outcome::Failed(_))) {
            return failed.clone();
        }
        match told.iter().position(|outcome| outcome != first) {
            None => first.clone(),
            Some(rank) => Outcome::Failed(format!("rank 0 told `{first}`, and rank {rank} `{}`", told[rank])),
        }
    }
}

/// Why a scenario's body ends early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The promise does not apply to the strategy.
    NotApplicable(&'static str),
    Wrong(String),
}

impl<E: std::error::Error> From<E> for Stop {
    fn from(error: E) -> Stop {
        Stop::Wrong(error.to_string())
    }
}

/// The error of bodies of runs and scopes.
#[derive(Debug)]
pub(crate) struct Fault(pub(crate) String);

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

impl From<Stop> for Fault {
    fn from(stop: Stop) -> Fault {
        match stop {
            Stop::Wrong(text) => Fault(text),
            Stop::NotApplicable(text) => Fault(text.to_owned()),
        }
    }
}

impl From<distribute::strategy::Error> for Fault {
    fn from(error: distribute::strategy::Error) -> Fault {
        Fault(error.to_string())
    }
}

impl From<distribute::values::Error> for Fault {
    fn from(error: distribute::values::Error) -> Fault {
        Fault(error.to_string())
    }
}

/// Ends the scenario unless the condition holds.
macro_rules! check {
    ($condition:expr, $($text:tt)+) => {
        // Bound first: a comparison with NaN must fail the check, so it must not be negated.
        let holds: bool = $condition;
        if !holds {
            return Err(crate::check::Stop::Wrong(format!($($text)+)).into());
        }
    };
}

/// Ends the scenario unless both are equal.
macro_rules! check_eq {
    ($got:expr, $expected:expr, $what:expr) => {
        let (got, expected) = (&$got, &$expected);
        if got != expected {
            return Err(crate::check::Stop::Wrong(format!("{}: got {got:?}, expected {expected:?}", $what)).into());
        }
    };
}

pub(crate) use {check, check_eq};

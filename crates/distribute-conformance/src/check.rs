//! The outcome of a scenario, and what ends its body.

use std::fmt;

/// The outcome of a scenario under a strategy. Printed on one line, and parsed from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    NotApplicable(String),
    Failed(String),
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
    pub(crate) fn read(stdout: &str, stderr: &str, succeeded: bool) -> Outcome {
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
    pub(crate) fn of_all(told: &[Outcome]) -> Outcome {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_come_back_from_what_processes_print() {
        let why = "nothing: of that".to_owned();
        for outcome in [Outcome::Passed, Outcome::NotApplicable(why), Outcome::Failed("how".to_owned())] {
            assert_eq!(Outcome::read(&format!("a line\n{outcome}\n"), "", true), outcome);
        }
        assert!(matches!(Outcome::read("", "a panic", true), Outcome::Failed(how) if how.contains("a panic")));
    }

    #[test]
    fn a_process_that_passes_and_crashes_at_its_end_has_failed() {
        for told in ["outcome: passed\n", "outcome: not applicable: there is one replica\n"] {
            let outcome = Outcome::read(told, "double free", false);
            assert!(matches!(&outcome, Outcome::Failed(how) if how.contains("double free")), "{outcome}");
        }
    }

    #[test]
    fn processes_must_tell_the_same() {
        let (passed, none) = (Outcome::Passed, Outcome::NotApplicable("there is one replica".to_owned()));
        let failed = Outcome::Failed("how".to_owned());
        assert_eq!(Outcome::of_all(&[passed.clone(), passed.clone()]), passed);
        assert_eq!(Outcome::of_all(&[none.clone(), none.clone()]), none);
        assert_eq!(Outcome::of_all(&[passed.clone(), none.clone(), failed.clone()]), failed);
        for told in [[passed.clone(), none.clone()], [none, passed]] {
            let outcome = Outcome::of_all(&told);
            assert!(matches!(&outcome, Outcome::Failed(how) if how.contains("and rank 1 `")), "{outcome}");
        }
        assert!(matches!(Outcome::of_all(&[]), Outcome::Failed(_)));
    }
}

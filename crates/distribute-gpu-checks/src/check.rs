//! Checks and their outcomes.

use std::time::{Duration, Instant};

use crate::gpu::Gpus;
use crate::{Error, Result};

/// A property that must hold.
#[derive(Clone, Copy)]
pub struct Check {
    /// The property: an area and a sentence.
    pub name: &'static str,
    run: fn(&Gpus) -> Result<Outcome>,
}

/// A check's name and function.
pub(crate) type Entry = (&'static str, fn(&Gpus) -> Result<Outcome>);

/// The outcome of a check that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds; the text says what was tried.
    Passed(String),
    /// It was not tried; the text says why.
    Skipped(String),
}

impl Check {
    pub(crate) fn new((name, run): Entry) -> Check {
        Check { name, run }
    }

    /// Runs the check, and returns how long that took.
    ///
    /// # Errors
    /// The property that does not hold.
    pub fn run(&self, gpus: &Gpus) -> (Result<Outcome>, Duration) {
        let started = Instant::now();
        // A panic must not keep the other checks from being run.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (self.run)(gpus)));
        let outcome = outcome.unwrap_or_else(|_| Err(Error::Wrong("it panicked; the message is above".to_owned())));
        (outcome, started.elapsed())
    }
}

/// Returns the outcome of a check that held.
pub(crate) fn passed(tried: impl Into<String>) -> Result<Outcome> {
    Ok(Outcome::Passed(tried.into()))
}

/// Returns an error unless a condition holds.
pub(crate) fn ensure(holds: bool, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Wrong(problem())) }
}

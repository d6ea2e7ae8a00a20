//! The list of all checks.

mod collectives;
mod kernels;
mod nccl;
mod optimizers;
mod packing;
mod streams;

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
type Entry = (&'static str, fn(&Gpus) -> Result<Outcome>);

/// The outcome of a check that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds; the text says what was tried.
    Passed(String),
    /// It was not tried; the text says why.
    Skipped(String),
}

impl Check {
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

/// Returns all checks, simple ones first.
pub fn checks() -> Vec<Check> {
    let all: [&[Entry]; 6] = [
        &streams::CHECKS,
        &kernels::CHECKS,
        &packing::CHECKS,
        &optimizers::CHECKS,
        &collectives::CHECKS,
        &nccl::CHECKS,
    ];
    all.into_iter().flatten().map(|(name, run)| Check { name, run: *run }).collect()
}

/// Returns the outcome of a check that held.
fn passed(tried: impl Into<String>) -> Result<Outcome> {
    Ok(Outcome::Passed(tried.into()))
}

/// Returns an error unless a condition holds.
fn ensure(holds: bool, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Wrong(problem())) }
}

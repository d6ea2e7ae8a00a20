//! Every check.

mod collectives;
mod kernels;
mod nccl;
mod optimizers;
mod packing;
mod streams;

use std::time::{Duration, Instant};

use crate::gpu::Gpus;
use crate::{Error, Result};

/// Something that must hold.
#[derive(Clone, Copy)]
pub struct Check {
    /// What holds: an area and a sentence.
    pub name: &'static str,
    run: fn(&Gpus) -> Result<Outcome>,
}

/// A check's name and itself.
type Entry = (&'static str, fn(&Gpus) -> Result<Outcome>);

/// How a check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds; what was tried.
    Passed(String),
    /// It was not tried, and why.
    Skipped(String),
}

impl Check {
    /// Tries it, and how long that took.
    ///
    /// # Errors
    /// What does not hold.
    pub fn run(&self, gpus: &Gpus) -> (Result<Outcome>, Duration) {
        let started = Instant::now();
        // A panic would keep the other checks from being run.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (self.run)(gpus)));
        let outcome = outcome.unwrap_or_else(|_| Err(Error::Wrong("it panicked; the message is above".to_owned())));
        (outcome, started.elapsed())
    }
}

/// All there are, simple ones first.
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

/// A check that held.
fn passed(tried: impl Into<String>) -> Result<Outcome> {
    Ok(Outcome::Passed(tried.into()))
}

/// An error, unless something holds.
fn ensure(holds: bool, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Wrong(problem())) }
}

//! `cargo xtask simulate --seeds N`: runs the simulators of the tests with many seeds, and prints their findings.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::error::text;

/// A simulator: a test that runs the seeds that DISTRIBUTE_TEST_SEED names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Simulator {
    /// Checkpoints on a disk that loses what was not synced.
    Checkpoints,
    /// The joining, exchanges and failures of a job, and strangers at its address.
    Coordination,
    /// The decisions of an elastic job.
    Generations,
}

impl Simulator {
    /// Returns the package and the name of the test.
    fn test(self) -> (&'static str, &'static str) {
        match self {
            Simulator::Checkpoints => ("distribute-train", "checkpoint::simulation::seeds"),
            Simulator::Coordination => ("distribute-cluster", "coordination::simulation::seeds"),
            Simulator::Generations => ("distribute-cluster", "elastic::simulation::seeds"),
        }
    }
}

/// Runs the seeds of each simulator, or of one, in pieces, so that all violations are found and not the first alone.
pub(crate) fn run(seeds: u64, first: u64, only: Option<Simulator>) -> Result<(), String> {
    let mut violations = 0;
    for simulator in Simulator::value_variants().iter().filter(|simulator| only.is_none_or(|only| only == **simulator))
    {
        let (package, test) = simulator.test();
        build(package)?;
        let (mut next, end, mut took, mut found) = (first, first + seeds, Duration::ZERO, 0);
        while next < end {
            let piece = (next + PIECE).min(end);
            let began = Instant::now();
            match violation(package, test, next, piece)? {
                None => next = piece,
                Some((seed, report)) => {
                    println!("{report}");
                    found += 1;
                    next = seed + 1;
                }
            }
            took += began.elapsed();
        }
        let rate = seeds as f64 / took.as_secs_f64().max(1e-3);
        let seconds = took.as_secs_f64();
        let name = simulator.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        println!("{name:<13} {seeds:>8} seeds {seconds:>8.1} s {rate:>8.0} seeds/s {found:>4} violations");
        violations += found;
    }
    match violations {
        0 => Ok(()),
        _ => Err(format!("{violations} seeds violate an invariant; DISTRIBUTE_TEST_SEED replays each")),
    }
}

/// Seeds of one run of a test.
const PIECE: u64 = 1000;

fn build(package: &str) -> Result<(), String> {
    let status = Command::new("cargo").args(["test", "-p", package, "--lib", "--locked", "--no-run"]).status();
    match status.map_err(text)?.success() {
        true => Ok(()),
        false => Err(format!("the tests of {package} do not build")),
    }
}

/// Runs seeds; returns the first that violates an invariant, and its report.
fn violation(package: &str, test: &str, first: u64, end: u64) -> Result<Option<(u64, String)>, String> {
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "-q", "-p", package, "--lib", "--locked", "--", "--exact", "--nocapture", test]);
    let cargo = cargo.env("DISTRIBUTE_TEST_SEED", format!("{first}..{end}")).env("RUST_BACKTRACE", "0");
    let output = cargo.stdin(Stdio::null()).output().map_err(text)?;
    let all = [output.stdout, output.stderr].concat();
    let all = String::from_utf8_lossy(&all);
    if output.status.success() {
        return match all.contains("1 passed") {
            true => Ok(None),
            false => Err(format!("{package} has no test {test}:\n{all}")),
        };
    }
    let seed = seed_of(&all).filter(|seed| (first..end).contains(seed));
    let seed = seed.ok_or_else(|| format!("{test} fails, and names no seed:\n{all}"))?;
    let from = all.find(NAMES).unwrap_or(0);
    Ok(Some((seed, all[from..].to_owned())))
}

/// Precedes the seed in the report of a violation.
const NAMES: &str = "DISTRIBUTE_TEST_SEED=";

/// Returns the seed that a report names.
fn seed_of(report: &str) -> Option<u64> {
    let rest = report.split_once(NAMES)?.1;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_of_a_violation_is_read_from_its_report() {
        assert_eq!(seed_of("thread panicked at x.rs:1:\nDISTRIBUTE_TEST_SEED=374: a restart: lost"), Some(374));
        assert_eq!(seed_of("DISTRIBUTE_TEST_SEED is a number"), None);
        assert_eq!(seed_of("no seed"), None);
    }
}

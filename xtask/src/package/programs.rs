//! Programs outside of the workspace that depend on the packages as on any crate of a registry.

use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Outcome};

use super::outside::Outside;
use super::readme;
use crate::error::text;
use crate::source;

/// Trains by the listing of the workspace's README, as it stands there, and by the program that `distribute new`
/// writes.
pub(super) fn train(outside: &Outside<'_>) -> Result<(), String> {
    let document = source::read(&outside.workspace.root.join("README.md"))?;
    let listing = readme::listing(&document).ok_or("README.md has no listing in Rust")?;
    learns(outside, "trains", "README.md's listing", listing)?;
    let new = source::read(&outside.workspace.root.join("crates/distribute-cli/src/new/main.rs.txt"))?;
    learns(outside, "begins", "what distribute new writes", &new.replace("@NAME@", "begins"))
}

/// Builds and runs a program that prints losses, which must fall.
fn learns(outside: &Outside<'_>, name: &str, what: &str, main: &str) -> Result<(), String> {
    let needs = ["distribute", "candle-core", "candle-nn"].map(|name| outside.dependency(name));
    let needs = needs.into_iter().collect::<Result<Vec<_>, _>>()?;
    let began = Instant::now();
    let program = outside.program(name, &needs, main)?;
    let built = began.elapsed().as_secs_f64();
    let [outcome] = &outcomes(Job::builder(&program))?[..] else { return Err("one process was started".to_owned()) };
    let loss = |line: &str| line.split_once("loss ")?.1.parse().ok();
    let losses: Vec<f64> = outcome.stdout.lines().filter_map(loss).collect();
    match losses[..] {
        [first, .., last] if last < first => {
            let steps = losses.len();
            println!("{name}: {steps} losses of {what}, {first} to {last}; built in {built:.1} s");
            Ok(())
        }
        _ => Err(format!("{what} does not learn; it printed:\n{}", outcome.stdout)),
    }
}

/// Reduces over three processes by the collectives alone, without their default features.
pub(super) fn reduce(outside: &Outside<'_>) -> Result<(), String> {
    let needs = outside.dependency("distribute-collectives")?.replace("\" }", "\", default-features = false }");
    let began = Instant::now();
    let program = outside.program("reduces", &[needs], REDUCES)?;
    let built = began.elapsed().as_secs_f64();
    // Without the coordination service the members meet in a folder.
    let folder = tempfile::tempdir().map_err(text)?;
    let store = format!("file:{}", folder.path().display());
    let place = move |rank: u32| {
        let place =
            [("RANK", rank.to_string()), ("WORLD_SIZE", RANKS.to_string()), ("DISTRIBUTE_STORE", store.clone())];
        // Nothing listens there.
        let leader = [("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", "1".to_owned())];
        let leader = leader.into_iter().chain([("DISTRIBUTE_JOB_ID", "reduces-1".to_owned())]);
        place.into_iter().chain(leader).map(|(name, value)| (name.to_owned(), value)).collect()
    };
    let outcomes = outcomes(Job::builder(&program).tasks(RANKS).task_env(place))?;
    for (rank, outcome) in outcomes.iter().enumerate() {
        let expected = format!("rank {rank} of {RANKS}: {}\n", (1..=RANKS).sum::<u32>());
        if outcome.stdout != expected {
            return Err(format!("{expected:?} was expected, and the program printed {:?}", outcome.stdout));
        }
    }
    println!("reduces: {RANKS} processes, by distribute-collectives without default features; built in {built:.1} s");
    Ok(())
}

/// Runs a program to its end, which must come in time and be a success.
fn outcomes(job: JobBuilder) -> Result<Vec<Outcome>, String> {
    // It would win over RANK.
    let mut job = job.without_env("TF_CONFIG").env("DISTRIBUTE_TIMEOUT", "30").start().map_err(text)?;
    let outcomes = job.wait_all(LIMIT).map_err(text)?;
    match outcomes.iter().find(|outcome| !outcome.success()) {
        None => Ok(outcomes),
        Some(Outcome { rank, code, stderr, .. }) => {
            Err(format!("process {rank} ended with {code:?}; it printed:\n{stderr}"))
        }
    }
}

/// Within which a program must have ended.
const LIMIT: Duration = Duration::from_secs(120);

const RANKS: u32 = 3;

/// A program that reduces over all processes that are started with it.
const REDUCES: &str = r#"use distribute_collectives::{Error, ProcessGroup, ReduceOp};

fn main() -> Result<(), Error> {
    let group = ProcessGroup::from_env()?;
    let mut values = vec![group.rank().0 as f32 + 1.0; 100_000];
    group.all_reduce(&mut values, ReduceOp::Sum)?;
    assert!(values.iter().all(|value| *value == values[0]));
    println!("rank {} of {}: {}", group.rank().0, group.world_size(), values[0]);
    Ok(())
}
"#;

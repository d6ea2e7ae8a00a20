//! A deterministic simulation of elastic jobs: clocks, network, processes and their faults follow from a seed.
//!
//! `DISTRIBUTE_TEST_SEED=7 cargo test -p distribute-cluster elastic::simulation::seeds` replays a seed, and
//! `DISTRIBUTE_TEST_SEED=0..100000` runs many.

use std::time::{Duration, Instant};

use distribute_testkit::short_or_long;
use distribute_testkit::simulation::{find_planted, run_seeds, seeds_or};

mod invariants;
mod scenario;
mod size;
mod training;
mod world;

use scenario::{Defect, Scenario};
use world::{Outcome, World};

/// How long after the last fault all live processes are in one generation, as far as a majority or the register is
/// there. It is 30 times the answer window of the scenarios.
const BOUND: Duration = Duration::from_secs(15);

/// Runs a scenario; returns what is wrong with it.
fn run(scenario: &Scenario) -> Result<Outcome, String> {
    World::new(scenario).run()
}

#[test]
fn seeds() {
    let (seeds, began) = (seeds_or(short_or_long(200, 400)), Instant::now());
    let outcomes = run_seeds(seeds.clone(), run);
    let count = |of: fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| of(outcome)).count();
    let (settled, stuck) = (count(|outcome| outcome.settled.is_some()), count(|outcome| outcome.settled.is_none()));
    let slowest = outcomes.iter().filter_map(|outcome| outcome.settled).max().unwrap_or_default();
    let generations: u64 = outcomes.iter().map(|outcome| outcome.generations).sum();
    println!("{settled} seeds settled, the slowest {slowest:?} after its last fault; {stuck} had no majority left");
    let steps: u64 = outcomes.iter().map(|outcome| outcome.steps).sum();
    let outdated: usize = outcomes.iter().map(|outcome| outcome.outdated).sum();
    println!("{generations} generations were decided, {outdated} of them without the newest state; {steps} steps made");
    println!("generations: {} seeds in {:.1} s", seeds.end - seeds.start, began.elapsed().as_secs_f64());
    // Most scenarios say something about progress, and faults do lead to new generations.
    assert!(outcomes.len() < 50 || settled > stuck * 3 && generations > seeds.end - seeds.start, "{settled}, {stuck}");
}

#[test]
fn defects_that_lose_steps_or_part_replicas_are_found() {
    for (defect, from) in [(Defect::Unchecked, 15), (Defect::Unfenced, 82), (Defect::StepsAlone, 242)] {
        let planted = |scenario: &Scenario| run(&Scenario { defect: Some(defect), ..scenario.clone() });
        let (seed, problem) = find_planted(&defect, (from, 700), planted, run);
        println!("{defect:?}: seed {seed}: {problem}");
    }
}

//! A deterministic simulation of jobs that meet: the real members, leader and exchange of secrets, whose clocks,
//! network and faults follow from a seed.
//!
//! Each process is an event loop of its own whose clock stands still between the steps of the simulation, so that one
//! can be stopped, and clocks can run apart. `DISTRIBUTE_TEST_SEED=7 cargo test -p distribute-cluster
//! coordination::simulation::seeds` replays a seed, and `DISTRIBUTE_TEST_SEED=0..10000` runs many.

mod invariants;
mod process;
mod scenario;
mod world;

use std::time::Instant;

use distribute_testkit::simulation::{Scenario as _, find_planted, run_seeds, seeds_or};

use crate::planted::{Defect, plant};
use scenario::Scenario;
use world::{Outcome, World};

/// Runs a scenario; returns what is wrong with it.
fn run(scenario: &Scenario) -> Result<Outcome, String> {
    World::new(scenario).run()
}

#[test]
fn seeds() {
    let (seeds, began) = (seeds_or(100), Instant::now());
    let mut sum = Outcome::default();
    run_seeds(seeds.clone(), run).iter().for_each(|outcome| sum.add(outcome));
    let count = seeds.end - seeds.start;
    println!("coordination: {count} seeds in {:.1} s; {sum}", began.elapsed().as_secs_f64());
    // Most jobs form, many notice a failure, and strangers are there to be refused.
    let enough = sum.formed > count / 2 && sum.failures > count / 5 && sum.refused > count / 10;
    assert!(count < 50 || enough, "{sum}");
}

/// Each planted defect is found within this many seeds.
const WITHIN: u64 = 200;

#[test]
fn planted_defects_are_found() {
    let defects = [
        (Defect::AnyJob, 22),
        (Defect::TwoOfARank, 7),
        (Defect::SilenceIgnored, 27),
        (Defect::StallsCount, 196),
        (Defect::ValuesStay, 26),
        (Defect::AnyProof, 12),
        (Defect::AnyClaim, 87),
    ];
    for (defect, from) in defects {
        let planted = |scenario: &Scenario| {
            plant(Some(defect));
            let outcome = run(scenario);
            plant(None);
            outcome
        };
        let (seed, problem) = find_planted(&defect, (from, WITHIN), planted, run);
        println!("{defect:?}: seed {seed}: {problem}");
    }
}

#[test]
fn a_seed_is_the_same_again() {
    for seed in 0..20 {
        let [one, other] = [0, 1].map(|_| World::new(&Scenario::draw(seed)).trace());
        let differs = one.iter().zip(&other).find(|(one, other)| one != other);
        assert!(differs.is_none() && one.len() == other.len(), "seed {seed}: {differs:?}");
    }
}

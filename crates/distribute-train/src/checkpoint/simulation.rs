//! A deterministic simulation of checkpoints on a disk that loses what was not synced: what a run does, its crashes and
//! the disk's failures follow from a seed.
//!
//! `DISTRIBUTE_TEST_SEED=7 cargo test -p distribute-train checkpoint::simulation::seeds` replays a seed, and
//! `DISTRIBUTE_TEST_SEED=0..100000` runs many.

mod disk;
mod oracle;
mod random;
mod scenario;
mod volume;
mod world;

use std::ops::Range;
use std::time::Instant;

use scenario::Scenario;
use volume::Defect;
use world::{Outcome, Plant, World};

/// Runs a scenario; returns what is wrong with it.
fn run(scenario: &Scenario, plant: Option<Plant>) -> Result<Outcome, String> {
    World::new(scenario, plant).run()
}

/// Leaves out faults and actions as long as something is still wrong.
fn shrink(mut scenario: Scenario, mut problem: String, plant: Option<Plant>) -> (Scenario, String) {
    loop {
        let shorter = scenario.shorter().find_map(|fewer| run(&fewer, plant).err().map(|problem| (fewer, problem)));
        match shorter {
            Some(found) => (scenario, problem) = found,
            None => return (scenario, problem),
        }
    }
}

/// Returns the seeds that `DISTRIBUTE_TEST_SEED` names, or `0..count`.
fn seeds_or(count: u64) -> Range<u64> {
    let number =
        |text: &str| text.trim().parse::<u64>().expect("DISTRIBUTE_TEST_SEED is a number, or two as in 0..100");
    let given = crate::environment::text("DISTRIBUTE_TEST_SEED");
    match given.as_deref().map(|given| given.split_once("..").unwrap_or((given, ""))) {
        None => 0..count,
        Some((one, "")) => number(one)..number(one) + 1,
        Some((first, end)) => number(first)..number(end),
    }
}

#[test]
fn seeds() {
    let (seeds, began) = (seeds_or(300), Instant::now());
    let mut sum = Outcome::default();
    for seed in seeds.clone() {
        let scenario = Scenario::draw(seed);
        let outcome = run(&scenario, None).unwrap_or_else(|problem| {
            let (scenario, shortest) = shrink(scenario, problem.clone(), None);
            panic!("DISTRIBUTE_TEST_SEED={seed}: {problem}\nwith the fewest faults: {shortest}\n{scenario:#?}")
        });
        sum.saved += outcome.saved;
        sum.crashes += outcome.crashes;
        sum.operations += outcome.operations;
        sum.restored += outcome.restored;
    }
    let count = seeds.end - seeds.start;
    println!(
        "checkpoints: {count} seeds in {:.1} s, {} saves, {} power failures, {} restores, {} file operations",
        began.elapsed().as_secs_f64(),
        sum.saved,
        sum.crashes,
        sum.restored,
        sum.operations
    );
    // Most scenarios save, and are interrupted.
    assert!(count < 50 || sum.saved > count && sum.crashes > count / 3 && sum.restored > count, "{sum:?}");
}

/// Each planted defect is found within this many seeds.
const WITHIN: u64 = 300;

#[test]
fn planted_defects_are_found() {
    let plants = [
        Plant::Disk(Defect::NoFileSync),
        Plant::Disk(Defect::NoFolderSync),
        Plant::Disk(Defect::RenameBeforeSync),
        Plant::Disk(Defect::ManifestSyncedAlone),
        Plant::Disk(Defect::SyncErrorIgnored),
        Plant::Disk(Defect::OldRemoved),
        Plant::NoChecksums,
        Plant::DamagedKept,
        Plant::NoClaim,
    ];
    for plant in plants {
        let found =
            (0..WITHIN).find_map(|seed| run(&Scenario::draw(seed), Some(plant)).err().map(|problem| (seed, problem)));
        let (seed, problem) = found.unwrap_or_else(|| panic!("{plant:?} is not found"));
        run(&Scenario::draw(seed), None).unwrap_or_else(|problem| panic!("seed {seed} without a defect: {problem}"));
        println!("{plant:?}: seed {seed}: {}", problem.lines().next().unwrap_or_default());
    }
}

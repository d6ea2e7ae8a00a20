//! A deterministic simulation of checkpoints on a disk that loses what was not synced: what a run does, its crashes and
//! the disk's failures follow from a seed.
//!
//! `DISTRIBUTE_TEST_SEED=7 cargo test -p distribute-train checkpoint::simulation::seeds` replays a seed, and
//! `DISTRIBUTE_TEST_SEED=0..100000` runs many.

mod disk;
mod oracle;
mod scenario;
mod volume;
mod world;

use std::time::Instant;

use distribute_testkit::simulation::{find_planted, run_seeds, seeds_or};

use scenario::Scenario;
use volume::Defect;
use world::{Outcome, Plant, World};

/// Runs a scenario; returns what is wrong with it.
fn run(scenario: &Scenario, plant: Option<Plant>) -> Result<Outcome, String> {
    World::new(scenario, plant).run()
}

#[test]
fn seeds() {
    let (seeds, began) = (seeds_or(300), Instant::now());
    let mut sum = Outcome::default();
    for outcome in run_seeds(seeds.clone(), |scenario| run(scenario, None)) {
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
        (Plant::Disk(Defect::NoFileSync), 5),
        (Plant::Disk(Defect::NoFolderSync), 11),
        (Plant::Disk(Defect::RenameBeforeSync), 23),
        (Plant::Disk(Defect::ManifestSyncedAlone), 5),
        (Plant::Disk(Defect::SyncErrorIgnored), 176),
        (Plant::Disk(Defect::OldRemoved), 204),
        (Plant::NoChecksums, 0),
        (Plant::DamagedKept, 289),
        (Plant::NoClaim, 7),
    ];
    for (plant, from) in plants {
        let planted = |scenario: &Scenario| run(scenario, Some(plant));
        let (seed, problem) = find_planted(&plant, (from, WITHIN), planted, |scenario| run(scenario, None));
        println!("{plant:?}: seed {seed}: {problem}");
    }
}

//! `cargo xtask faults`: faults of real processes, under each strategy, and what each costs.

mod cells;
mod crew;
mod elastic;
mod harm;
mod in_step;
mod peers;
mod row;
mod servers;
mod soak;
mod stage;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;

use cells::{Fault, Kind, promise};
use harm::Disk;
use peers::Peer;
use row::{Measured, Row, print_header};
use stage::{PAUSE_MS, Plan, Stage};

use crate::examples::Profile;
use crate::hosts::Hosts;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Seed of the moments and of the tasks that are hit; printed, so that a run can be repeated.
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds that each training takes at least, without the pauses of its faults.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Runs only faults whose names contain this.
    #[arg(long, value_name = "FAULT")]
    only: Option<String>,
    /// Strategies; all by default.
    #[arg(long, value_enum, value_delimiter = ',')]
    strategy: Vec<Kind>,
    /// Prints the faults' names, and runs none.
    #[arg(long)]
    list: bool,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    /// Others that are hit by the same faults, where they are installed in target/peers.
    #[arg(long, value_enum, value_delimiter = ',')]
    compare: Vec<Peer>,
    /// In place of the table, disturbs four elastic workers every 2 s for this long, such as 10m, and compares their
    /// weights with those of a training without faults.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    soak: Option<Duration>,
    /// Freezes every second worker that `--soak` would kill.
    #[arg(long, requires = "soak")]
    freeze: bool,
    /// Which build of the examples trains; it is made first.
    #[arg(long, value_enum, default_value = "release")]
    profile: Profile,
    /// Runs the examples as they lie in the target folder, without building them.
    #[arg(long)]
    no_build: bool,
}

/// Cargo features of the examples.
const FEATURES: &str = "candle,logging,parameter-server";

/// Milliseconds of silence after which a task counts as lost, where a strategy has an option of it.
const SILENCE_MS: u64 = 2000;

impl Flags {
    /// How many times as long as promised times may be: what is not optimized takes longer to start and to compute.
    fn slack(&self) -> u64 {
        if self.profile == Profile::Dev { 4 } else { 1 }
    }
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let chosen = |fault: &&Fault| flags.only.as_ref().is_none_or(|part| fault.name().contains(part));
    let faults: Vec<Fault> = Fault::ALL.iter().filter(chosen).copied().collect();
    if faults.is_empty() {
        let only = flags.only.as_deref().unwrap_or_default();
        return Err(format!("no fault's name contains {only:?}; cargo xtask faults --list shows all names"));
    }
    if flags.list {
        faults.iter().for_each(|fault| println!("{}", fault.name()));
        return Ok(());
    }
    let kinds = if flags.strategy.is_empty() { Kind::ALL.to_vec() } else { flags.strategy.clone() };
    let has_promise = |fault: &Fault| kinds.iter().any(|kind| promise(*fault, *kind, SILENCE_MS).is_some());
    if !faults.iter().any(has_promise) {
        let faults: Vec<&str> = faults.iter().map(|fault| fault.name()).collect();
        let (faults, kinds) = (faults.join(", "), kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "));
        return Err(format!("nothing is promised of {faults} under {kinds}; choose another --strategy or --only"));
    }
    let programs = flags.profile.examples(&["ledger", "elastic"], FEATURES, flags.no_build)?;
    let seed = flags.seed.unwrap_or_else(|| fastrand::u64(..1_000_000_000));
    if let Some(time) = flags.soak {
        return soak::run(flags, &programs, seed, time);
    }
    let broken = table(flags, programs, seed, &faults, &kinds)?;
    for peer in &flags.compare {
        peer.compare(flags.only.as_deref(), seed, flags.json)?;
    }
    match broken.is_empty() {
        true => Ok(()),
        false => Err(format!("these promises of docs/reliability.md are broken: {}", broken.join(", "))),
    }
}

/// Runs all cells, and prints a row for each; returns the names of those that break their promise.
fn table(flags: &Flags, programs: PathBuf, seed: u64, faults: &[Fault], kinds: &[Kind]) -> Result<Vec<String>, String> {
    let steps = ((flags.seconds * 1000.0 / PAUSE_MS as f64) as u64).max(100);
    let plan = Plan { programs, seed, steps, silence_ms: SILENCE_MS, calm: HashMap::new().into() };
    if !flags.json {
        println!("seed {seed}, {steps} steps each");
        print_header();
    }
    let (mut broken, mut count, began) = (Vec::new(), 0, Instant::now());
    for fault in faults {
        for kind in kinds {
            let Some(promise) = promise(*fault, *kind, plan.silence_ms) else { continue };
            count += 1;
            let row = match cell(&plan, *fault, *kind) {
                Ok(Outcome::Skipped(why)) => Row::without(fault.name(), kind.name(), seed, "skipped", why),
                Err(problem) => {
                    broken.push(format!("{} {}", fault.name(), kind.name()));
                    Row::without(fault.name(), kind.name(), seed, "BROKEN", problem)
                }
                Ok(Outcome::Measured(measured)) => match promise.broken_by(&measured, flags.slack()) {
                    None => Row::new(fault.name(), kind.name(), seed, "held", measured),
                    Some(problem) => {
                        broken.push(format!("{} {}", fault.name(), kind.name()));
                        let note = format!("{problem}. {}", measured.note);
                        Row::new(fault.name(), kind.name(), seed, "BROKEN", Measured { note, ..measured })
                    }
                },
            };
            row.print(flags.json)?;
        }
    }
    if !flags.json {
        println!("{count} cells in {:.0} s, {} broken", began.elapsed().as_secs_f64(), broken.len());
    }
    Ok(broken)
}

enum Outcome {
    Measured(Measured),
    Skipped(String),
}

fn cell(plan: &Plan, fault: Fault, kind: Kind) -> Result<Outcome, String> {
    if let Some(why) = missing(fault) {
        return Ok(Outcome::Skipped(why));
    }
    let stage = Stage::new(plan, kind, Some(fault))?;
    Ok(Outcome::Measured(match kind {
        Kind::Elastic => elastic::measure(&stage, fault)?,
        Kind::Servers => servers::measure(&stage, fault)?,
        Kind::Workers | Kind::Sharded | Kind::Diloco => in_step::measure(&stage, fault)?,
    }))
}

/// Returns why a fault cannot be made here, if it cannot.
fn missing(fault: Fault) -> Option<String> {
    match fault {
        fault if fault.is_of_network() => Hosts::missing(),
        fault if fault.is_of_disk() => Disk::missing(),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

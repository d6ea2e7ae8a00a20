//! The promises that every strategy makes: one body per promise, run under each strategy by `cargo xtask conformance`.
//!
//! Strategies of one process run in this process, a new one for each scenario; those of several processes run in
//! processes of this program, started anew for each scenario. Parameter servers and their workers are threads of this
//! process, with sockets between them.
#![expect(clippy::print_stdout, reason = "the suite prints its table")]

mod arrangement;
mod check;
mod conditions;
mod library;
mod place;
mod scenarios;

use std::panic::resume_unwind;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use distribute_testkit::{Job, Ports};

use crate::arrangement::Arrangement;
use crate::check::Outcome;
use crate::scenarios::{Scenario, Suite};

/// Runs every scenario under every strategy.
#[derive(Parser)]
struct Flags {
    /// Only scenarios whose names contain this
    filter: Option<String>,
    /// Only strategies whose names contain this
    #[arg(long)]
    strategy: Option<String>,
    /// Leave out a second arrangement of the same kind, such as four replicas in place of two
    #[arg(long)]
    brief: bool,
    /// One process of an arrangement of several; started by the suite
    #[arg(long, hide = true, num_args = 2, value_names = ["ARRANGEMENT", "SCENARIO"])]
    member: Vec<String>,
}

/// Time limit of one scenario under one strategy.
const DEADLINE: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let flags = Flags::parse();
    if let [arrangement, scenario] = &flags.member[..] {
        return member(arrangement, scenario);
    }
    let chosen = |part: &Option<String>, name: &str| part.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let scenarios: Vec<(String, &Scenario)> =
        Suite::scenarios().filter(|(name, _)| chosen(&flags.filter, name)).collect();
    let arrangements: Vec<&Arrangement> = Arrangement::ALL
        .iter()
        .filter(|arrangement| chosen(&flags.strategy, arrangement.name) && !(flags.brief && arrangement.is_extra))
        .collect();
    if scenarios.is_empty() || arrangements.is_empty() {
        println!("nothing to run: no scenario or strategy has a name that contains what was given");
        return ExitCode::from(2);
    }
    let (arrangements, skipped): (Vec<&Arrangement>, Vec<&Arrangement>) =
        arrangements.into_iter().partition(|arrangement| arrangement.missing().is_none());
    let began = Instant::now();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let headings = arrangements.iter().map(|arrangement| Cell::new(arrangement.short));
    table.set_header([Cell::new("scenario")].into_iter().chain(headings));
    let (mut passed, mut notes) = (0, Vec::new());
    let mut failures = Vec::new();
    for ((name, _), outcomes) in scenarios.iter().zip(run_all(&scenarios, &arrangements)) {
        let mut row = vec![Cell::new(name)];
        for (arrangement, outcome) in arrangements.iter().zip(outcomes) {
            let mark = match outcome {
                Outcome::Passed => {
                    passed += 1;
                    "pass".to_owned()
                }
                Outcome::NotApplicable(reason) => {
                    let known = notes.iter().position(|note| *note == reason);
                    let number = known.unwrap_or_else(|| {
                        notes.push(reason);
                        notes.len() - 1
                    });
                    format!("n/a {}", number + 1)
                }
                Outcome::Failed(how) => {
                    failures.push(format!("{name} under {}: {how}", arrangement.name));
                    "FAIL".to_owned()
                }
            };
            row.push(Cell::new(mark).set_alignment(CellAlignment::Center));
        }
        table.add_row(row);
    }
    println!("{table}");
    for (number, note) in (1..).zip(&notes) {
        println!("n/a {number}: {note}");
    }
    for arrangement in skipped {
        println!("skipped: {}: {}", arrangement.name, arrangement.missing().unwrap_or_default());
    }
    println!("{passed} passed, {} failed, in {:.1} s", failures.len(), began.elapsed().as_secs_f64());
    for failure in &failures {
        println!("failed: {failure}");
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns the outcomes of each scenario under each strategy. Strategies of several processes are tried at the same
/// time as those of this process.
fn run_all(scenarios: &[(String, &Scenario)], arrangements: &[&Arrangement]) -> Vec<Vec<Outcome>> {
    let some = |in_processes: bool| -> Vec<Vec<Option<Outcome>>> {
        let one = |name: &str, scenario| -> Vec<Option<Outcome>> {
            let is_chosen = |arrangement: &&Arrangement| arrangement.workers.is_some() == in_processes;
            let chosen = |arrangement| is_chosen(arrangement).then(|| run(arrangement, (name, scenario)));
            arrangements.iter().map(chosen).collect()
        };
        scenarios.iter().map(|(name, scenario)| one(name, scenario)).collect()
    };
    let (outside, here) = thread::scope(|scope| {
        let outside = scope.spawn(|| some(true));
        let here = some(false);
        (outside.join().unwrap_or_else(|panic| resume_unwind(panic)), here)
    });
    let of_scenario = |(outside, here): (Vec<Option<Outcome>>, Vec<Option<Outcome>>)| {
        outside.into_iter().zip(here).filter_map(|(outside, here)| outside.or(here)).collect()
    };
    outside.into_iter().zip(here).map(of_scenario).collect()
}

fn run(arrangement: &Arrangement, (name, scenario): (&str, &Scenario)) -> Outcome {
    match arrangement.workers {
        None => match arrangement.place() {
            Ok(place) => scenario.run(&place),
            Err(error) => Outcome::Failed(format!("the strategy cannot be made: {error}")),
        },
        Some(workers) => run_processes(arrangement, name, workers).unwrap_or_else(Outcome::Failed),
    }
}

fn run_processes(arrangement: &Arrangement, scenario: &str, workers: u32) -> Result<Outcome, String> {
    let text = |error: distribute_testkit::Error| error.to_string();
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let ports = Ports::reserve(workers as usize).map_err(text)?.release();
    let addresses: Vec<String> = ports.iter().map(|port| format!("\"127.0.0.1:{port}\"")).collect();
    let cluster = addresses.join(", ");
    let config = move |rank: u32| {
        let task = format!("{{\"type\": \"worker\", \"index\": {rank}}}");
        vec![("TF_CONFIG".to_owned(), format!("{{\"cluster\": {{\"worker\": [{cluster}]}}, \"task\": {task}}}"))]
    };
    let job = Job::builder(program).args(["--member", arrangement.name, scenario]).tasks(workers).task_env(config);
    let outcomes = job.start().map_err(text)?.wait_all(DEADLINE).map_err(text)?;
    let told: Vec<Outcome> = outcomes.iter().map(|outcome| Outcome::read(&outcome.stdout, &outcome.stderr)).collect();
    let failed = told.iter().find(|outcome| matches!(outcome, Outcome::Failed(_)));
    Ok(failed.or(told.first()).cloned().unwrap_or(Outcome::Failed("no process was started".to_owned())))
}

fn member(arrangement: &str, scenario: &str) -> ExitCode {
    let arrangement = Arrangement::ALL.iter().find(|known| known.name == arrangement);
    let scenario = Suite::scenarios().find(|(name, _)| name == scenario);
    let outcome = match arrangement.zip(scenario) {
        Some((arrangement, (_, scenario))) => match arrangement.place() {
            Ok(place) => scenario.run(&place),
            Err(error) => Outcome::Failed(format!("the strategy cannot be made: {error}")),
        },
        None => Outcome::Failed("unknown arrangement or scenario".to_owned()),
    };
    println!("{outcome}");
    ExitCode::SUCCESS
}

//! The program: its arguments, its processes and its table.
#![expect(clippy::print_stdout, reason = "the suite prints its table")]

use std::panic::resume_unwind;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use distribute_testkit::{Job, Ports, skipped};

use crate::arrangement::Arrangement;
use crate::check::{Outcome, is_tried};
use crate::one_replica;
use crate::scenarios::Case;

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
    /// One process of an arrangement of several, and the folder of trainings on one replica; started by the suite
    #[arg(long, hide = true, num_args = 3, value_names = ["ARRANGEMENT", "SCENARIO", "FOLDER"])]
    member: Vec<String>,
}

/// Time limit of one scenario under one strategy.
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs what the program's arguments choose.
pub fn main() -> ExitCode {
    let flags = Flags::parse();
    if let [arrangement, scenario, folder] = &flags.member[..] {
        one_replica::keep_in(Path::new(folder));
        return member(arrangement, scenario);
    }
    let chosen = |part: &Option<String>, name: &str| part.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let cases: Vec<Case> = Case::all().filter(|case| chosen(&flags.filter, &case.name)).collect();
    let arrangements: Vec<&'static Arrangement> = Arrangement::ALL
        .iter()
        .filter(|arrangement| chosen(&flags.strategy, arrangement.name) && !(flags.brief && arrangement.is_extra))
        .collect();
    if cases.is_empty() || arrangements.is_empty() {
        println!("nothing to run: no scenario or strategy has a name that contains what was given");
        return ExitCode::from(2);
    }
    let (arrangements, missing): (Vec<&Arrangement>, Vec<&Arrangement>) =
        arrangements.into_iter().partition(|arrangement| arrangement.missing().is_none());
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => {
            println!("no temporary folder for trainings on one replica: {error}");
            return ExitCode::FAILURE;
        }
    };
    one_replica::keep_in(folder.path());
    let began = Instant::now();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let headings = arrangements.iter().map(|arrangement| Cell::new(arrangement.short));
    table.set_header([Cell::new("scenario")].into_iter().chain(headings));
    let (mut passed, mut notes) = (0, Vec::new());
    let mut failures = Vec::new();
    let is_whole = flags.filter.is_none() && flags.strategy.is_none();
    for (Case { name, .. }, outcomes) in cases.iter().zip(run_all(&cases, &arrangements, folder.path())) {
        if is_whole && !is_tried(arrangements.iter().map(|arrangement| arrangement.is_compiled()).zip(&outcomes)) {
            failures.push(format!("{name}: it is not applicable under any strategy that compiles nothing"));
        }
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
    for arrangement in missing {
        skipped(format_args!("{}: {}", arrangement.name, arrangement.missing().unwrap_or_default()));
    }
    println!("{passed} passed, {} failed, in {:.1} s", failures.len(), began.elapsed().as_secs_f64());
    for failure in &failures {
        println!("failed: {failure}");
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns the outcomes of each scenario under each strategy. Strategies of several processes are tried at the same
/// time as those of this process.
fn run_all(cases: &[Case], arrangements: &[&'static Arrangement], folder: &Path) -> Vec<Vec<Outcome>> {
    let some = |in_processes: bool| -> Vec<Vec<Option<Outcome>>> {
        let one = |case: &Case| -> Vec<Option<Outcome>> {
            let is_chosen = |arrangement: &Arrangement| arrangement.workers.is_some() == in_processes;
            arrangements
                .iter()
                .map(|arrangement| is_chosen(arrangement).then(|| run(arrangement, case, folder)))
                .collect()
        };
        cases.iter().map(one).collect()
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

fn run(arrangement: &'static Arrangement, case: &Case, folder: &Path) -> Outcome {
    match arrangement.workers {
        None => {
            let case = case.clone();
            run_within(DEADLINE, move || run_here(arrangement, &case))
        }
        Some(workers) => run_processes(arrangement, &case.name, workers, folder).unwrap_or_else(Outcome::Failed),
    }
}

/// Runs a scenario in this process.
fn run_here(arrangement: &Arrangement, case: &Case) -> Outcome {
    match arrangement.place() {
        Ok(place) => case.run(&place),
        Err(error) => Outcome::Failed(format!("the strategy cannot be made: {error}")),
    }
}

/// Runs a scenario on a thread of its own. If it takes longer than `limit`, that continues until the program ends.
pub fn run_within(limit: Duration, body: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
    let (done, is_done) = mpsc::channel();
    // As much stack as the first thread of a program has.
    let thread = thread::Builder::new().name("scenario".to_owned()).stack_size(8 << 20);
    if let Err(error) = thread.spawn(move || drop(done.send(body()))) {
        return Outcome::Failed(format!("no thread for it: {error}"));
    }
    match is_done.recv_timeout(limit) {
        Ok(outcome) => outcome,
        Err(mpsc::RecvTimeoutError::Timeout) => Outcome::Failed(format!("it did not end within {limit:?}")),
        Err(mpsc::RecvTimeoutError::Disconnected) => Outcome::Failed("its thread ended without an outcome".to_owned()),
    }
}

fn run_processes(arrangement: &Arrangement, scenario: &str, workers: u32, folder: &Path) -> Result<Outcome, String> {
    let text = |error: distribute_testkit::Error| error.to_string();
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let ports = Ports::reserve(workers as usize).map_err(text)?.release();
    let addresses: Vec<String> = ports.iter().map(|port| format!("\"127.0.0.1:{port}\"")).collect();
    let cluster = addresses.join(", ");
    let config = move |rank: u32| {
        let task = format!("{{\"type\": \"worker\", \"index\": {rank}}}");
        vec![("TF_CONFIG".to_owned(), format!("{{\"cluster\": {{\"worker\": [{cluster}]}}, \"task\": {task}}}"))]
    };
    let folder = folder.to_str().ok_or("the temporary folder's name is not UTF-8")?;
    let member = ["--member", arrangement.name, scenario, folder];
    let job = Job::builder(program).args(member).tasks(workers).task_env(config);
    let outcomes = job.start().map_err(text)?.wait_all(DEADLINE).map_err(text)?;
    let told = outcomes.iter().map(|outcome| Outcome::read(&outcome.stdout, &outcome.stderr, outcome.success()));
    Ok(Outcome::of_all(&told.collect::<Vec<_>>()))
}

fn member(arrangement: &str, scenario: &str) -> ExitCode {
    let arrangement = Arrangement::ALL.iter().find(|known| known.name == arrangement);
    let case = Case::all().find(|case| case.name == scenario);
    let outcome = match arrangement.zip(case) {
        Some((arrangement, case)) => run_here(arrangement, &case),
        None => Outcome::Failed("unknown arrangement or scenario".to_owned()),
    };
    println!("{outcome}");
    ExitCode::SUCCESS
}

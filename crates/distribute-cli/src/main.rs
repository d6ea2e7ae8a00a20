//! The `distribute` program: starts the tasks of a distributed job on this machine, shows their output and progress,
//! and ends them together.
//!
//! - `args`: flags; `job`: the tasks and their environment; `ports`: the ports they listen on.
//! - `supervisor`: decides which tasks are stopped when, and which failure was the first cause; it does no input or
//!   output.
//! - `process`, `guardian`: starting tasks so that none outlives the launcher.
//! - `output`, `progress`, `report`: everything that is shown to the user.
//! - `run`: combines these.
//!
//! `explain` reads the flight records of a failed job; `doctor` reports what a job would find on this machine.
//!
//! The program does not depend on training: tasks learn their place from the environment, and report progress over TCP.

mod args;
mod doctor;
mod environment;
mod error;
mod guardian;
mod job;
mod outcome;
mod output;
mod ports;
mod process;
mod progress;
mod report;
mod run;
mod supervisor;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use distribute_collectives::FlightRecord;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Guardian => guardian::watch(),
        Command::Explain { folder } => explain(&folder),
        Command::Doctor(args) => ExitCode::from(doctor::run(&args)),
        Command::SelfTest { transports } => doctor::self_test_rank(&transports),
        Command::Run(args) => match run::run(&args) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprint!("{}", report::error(&error));
                ExitCode::from(error.exit_code())
            }
        },
    }
}

fn explain(folder: &Path) -> ExitCode {
    match FlightRecord::read_all(folder) {
        Ok(records) => {
            // An error of standard output cannot be reported.
            let _ = std::io::stdout().write_all(distribute_collectives::explain(&records).as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: no flight records in {}: {error}", folder.display());
            ExitCode::from(2)
        }
    }
}

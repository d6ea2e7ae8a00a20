//! The `distribute` program: starts the tasks of a distributed job on this machine, shows what they print and how they
//! progress, and ends them together.
//!
//! - `args`: flags; `job`: which tasks there are and what their environment says; `ports`: where they listen.
//! - `supervisor`: who is stopped when, and what was the first cause; it does no input or output.
//! - `process`, `guardian`: starting tasks so that none outlives the launcher.
//! - `output`, `progress`, `report`: what the user sees.
//! - `run`: ties these together.
//!
//! `explain` reads the flight records of a failed job; `doctor` says what a job would find here.
//!
//! It knows nothing of training: programs learn their place from the environment, and tell their progress over TCP.

mod args;
mod doctor;
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
            // Nobody is left to be told that the output cannot be written.
            let _ = std::io::stdout().write_all(distribute_collectives::explain(&records).as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: no flight records in {}: {error}", folder.display());
            ExitCode::from(2)
        }
    }
}

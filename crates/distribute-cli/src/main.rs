//! The `distribute` program: starts the tasks of a distributed job on this machine, shows what they print and how they
//! progress, and ends them together.
//!
//! - `args`: flags; `job`: which tasks there are and what their environment says; `ports`: where they listen.
//! - `supervisor`: who is stopped when, and what was the first cause; it does no input or output.
//! - `process`, `guardian`: starting tasks so that none outlives the launcher.
//! - `output`, `progress`, `report`: what the user sees.
//! - `run`: ties these together.
//!
//! It knows nothing of training: programs learn their place from the environment, and tell their progress over TCP.

mod args;
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

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Guardian => guardian::watch(),
        Command::Run(args) => match run::run(&args) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprint!("{}", report::error(&error));
                ExitCode::from(error.exit_code())
            }
        },
    }
}

//! The `distribute` program: starts the tasks of a distributed job on one machine or several, shows their output and
//! progress, and ends them together.
//!
//! - `args`: flags; `job`: the tasks and their environment; `ports`: the ports they listen on; `cores`: those that they
//!   are pinned to.
//! - `supervisor`: decides which tasks are stopped when, and which failure was the first cause; `restart`: whether the
//!   job is started again; `revival`: which task alone is. None of them does input or output.
//! - `signals`: what signals to the launcher ask for.
//! - `process`, `guardian`, `local`: starting tasks so that none outlives the launcher.
//! - `hosts`, `ssh`: the launchers of several hosts.
//! - `output`, `progress`, `report`: everything that is shown to the user; `host`: this host's part of the above.
//! - `status`: what is known of the running job, for its page and for `top`; `jobs`: where launchers are found;
//!   `stacks`: the functions in which a task's threads are.
//! - `run`, `attempt`: combine these; `elastic`, `data_service`: the same for workers of elastic jobs and for data
//!   workers, each of which is started again alone.
//!
//! `top` shows which ranks others wait for in a running job; `certs` issues and renews certificates for TLS; `explain`
//! reads the flight records of a failed job, or a checkpoint; `doctor` reports what a job would find on this machine;
//! `new` writes a crate; `manifest` writes job files for clusters; `pages` writes completions and manual pages.
//!
//! The program does not depend on training: tasks learn their place from the environment, and report progress over TCP.

mod args;
mod attempt;
#[cfg(feature = "tls")]
mod certs;
#[cfg(not(feature = "tls"))]
#[path = "certs/absent.rs"]
mod certs;
mod cores;
mod data_service;
mod doctor;
mod elastic;
mod environment;
mod error;
mod guardian;
mod host;
mod hosts;
mod job;
#[cfg(feature = "status")]
mod jobs;
mod local;
mod manifest;
mod memory;
mod new;
mod outcome;
mod output;
mod pages;
mod ports;
mod process;
mod progress;
mod report;
mod restart;
mod revival;
mod run;
mod signals;
mod ssh;
#[cfg(feature = "status")]
mod stacks;
mod status;
mod supervisor;
#[cfg(feature = "status")]
mod top;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use distribute_collectives::FlightRecord;

use crate::args::{Cli, Command, DEFAULT_REPLICAS};

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Guardian => guardian::watch(),
        Command::Explain { path, replicas } => explain(&path, replicas),
        Command::Doctor(args) => doctor::run(&args).map_or_else(|error| failed(&error), ExitCode::from),
        Command::New(args) => ended(new::run(&args)),
        Command::Certs(args) => ended(certs::run(&args)),
        Command::DataService(args) => data_service::run(&args).map_or_else(|error| failed(&error), ExitCode::from),
        Command::Manifest(args) => ended(manifest::run(&args)),
        Command::Completions { shell } => ended(Ok(pages::completions(shell))),
        Command::Man { folder } => ended(pages::manual(&folder)),
        #[cfg(feature = "status")]
        Command::Top(args) => top::run(&args).map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS),
        #[cfg(feature = "status")]
        Command::Stacks { pid } => stacks::print(pid),
        Command::SelfTest { transports } => doctor::self_test_rank(&transports),
        Command::ProbePjrt => doctor::probe_pjrt(),
        Command::Run(args) => run::run(&args).map_or_else(|error| failed(&error), ExitCode::from),
    }
}

/// Prints what a command says at its end, or its error.
fn ended(outcome: Result<String, error::Error>) -> ExitCode {
    let printed = outcome.and_then(|text| output::print(&text));
    printed.map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS)
}

fn failed(error: &error::Error) -> ExitCode {
    output::say(&report::error(error));
    ExitCode::from(error.exit_code())
}

fn explain(folder: &Path, replicas: Option<u64>) -> ExitCode {
    if let Some(checkpoint) = memory::checkpoint_at(folder) {
        return ended(memory::explain(&checkpoint, replicas.unwrap_or(DEFAULT_REPLICAS)));
    }
    if let Some(replicas) = replicas {
        return failed(&error::Error::Options {
            problem: "--replicas goes with a checkpoint only",
            given: format!("{replicas} replicas, and {}, which has no checkpoint", folder.display()),
            expected: "a .safetensors file, a checkpoint, or a folder of them".to_owned(),
        });
    }
    match FlightRecord::read_all(folder) {
        Ok(records) => ended(Ok(distribute_collectives::explain(&records))),
        Err(error) => {
            let folder = folder.display();
            output::say(&format!("error: neither flight records nor a checkpoint in {folder}: {error}\n"));
            ExitCode::from(2)
        }
    }
}

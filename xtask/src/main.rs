//! The workspace's own commands: `cargo xtask ci`, `cargo xtask test`.
#![expect(clippy::print_stdout, reason = "a command prints its results")]

mod ci;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The workspace's own commands.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Xtask {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything that must pass, cheapest first.
    Ci,
    /// All tests, as the README's command runs them.
    Test,
}

fn main() -> ExitCode {
    let outcome = match Xtask::parse().command {
        Command::Ci => ci::run(),
        Command::Test => ci::test(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

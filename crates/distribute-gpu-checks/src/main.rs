//! Checks GPUs, measures them, and writes a report.
#![expect(clippy::print_stdout, reason = "a command prints its results")]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use distribute_gpu_checks::bench::{Effort, measure};
use distribute_gpu_checks::{Gpus, Report, checks};

/// Checks GPUs, measures them, and writes a report.
#[derive(Parser)]
struct Flags {
    /// Where report.txt and report.json go.
    #[arg(long, value_name = "FOLDER")]
    report: Option<PathBuf>,
    /// Only checks whose names contain this, and no measurements.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// No checks.
    #[arg(long)]
    bench_only: bool,
    /// No measurements.
    #[arg(long)]
    no_bench: bool,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let gpus = match Gpus::find() {
        Ok(gpus) => gpus,
        Err(reason) => {
            println!("skipped: {reason}");
            return ExitCode::SUCCESS;
        }
    };
    let mut report = Report::new(&gpus);
    let wanted = |name: &str| flags.only.as_ref().is_none_or(|only| name.contains(only));
    for check in checks().iter().filter(|check| !flags.bench_only && wanted(check.name)) {
        println!("{}", report.check(check, &gpus));
    }
    if flags.only.is_none() && !flags.no_bench {
        let effort = if gpus.are_simulated() { Effort::TINY } else { Effort::FULL };
        match measure(&gpus, effort) {
            Ok(measurements) => report.measure(measurements),
            Err(error) => report.problem(format!("measuring: {error}")),
        }
    }
    println!("\n{}", report.to_text());
    if let Some(folder) = &flags.report
        && let Err(error) = report.write(folder)
    {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

//! The workspace's own commands: `cargo xtask ci`, `test`, `multiprocess`, `conformance`, `attack`, `loom`, `miri`,
//! `fuzz`, `layers`, `prose`, `docs`, `protos`, `api`, `powerset`, `package`, `platforms`, `dist`, `bench`, `faults`,
//! `goodput`, `gpu`, `pjrt`, `hosts`, `schedule`, `schedulers` and `simulate`.
#![expect(clippy::print_stdout, reason = "a command prints its results")]

mod api;
mod attack;
mod bench;
mod ci;
mod dist;
mod docs;
mod elf;
mod error;
mod examples;
mod faults;
mod fuzz;
mod gpu;
mod hosts;
mod launched;
mod layers;
mod output;
mod package;
mod pjrt;
mod platforms;
mod powerset;
mod prose;
mod protos;
mod schedule;
mod schedulers;
mod simulate;
#[cfg(test)]
mod skips;
mod source;
mod test;
#[cfg(test)]
mod waits;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measurements of training compare with candle, which needs an allocator that keeps its memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    /// The public items of each published crate, compared with those under docs/api.
    Api(api::Flags),
    /// Attacks on the examples as real processes: strangers, kills, containers, wrong settings.
    Attack(attack::Flags),
    /// Measurements.
    Bench {
        #[command(subcommand)]
        bench: bench::Bench,
    },
    /// Archives of the program for other machines, with manual pages, completions and checksums.
    Dist(dist::Flags),
    /// The links of all pages, and the site where mdBook is installed.
    Docs(docs::Flags),
    /// The decoders of bytes from outside, run on inputs that a fuzzer makes.
    Fuzz(fuzz::Flags),
    /// Share of a cluster's chips that train when chips fail, simulated for restarts, elastic jobs and groups apart.
    Goodput(simulate::goodput::Flags),
    /// Faults of real processes under each strategy, as a table of what each costs.
    Faults(faults::Flags),
    /// Checks of GPUs, here or in a folder to carry to one.
    Gpu(gpu::Flags),
    /// Jobs on three hosts, which are network namespaces of this machine: launch, a lost host, restarts.
    Hosts(hosts::Flags),
    /// Crates, their dependencies and the circles of their modules, held against docs/architecture.md.
    Layers(layers::Flags),
    /// Packages of the published crates: what they hold, whether each builds alone, and programs that depend on them.
    Package(package::Flags),
    /// PJRT plugins for tests, the tests that use them, and programs compiled for TPUs that are not there.
    Pjrt(pjrt::Flags),
    /// The crates that do not need Linux, compiled for macOS, Windows and 64-bit ARM.
    Platforms(platforms::Flags),
    /// Each published crate alone, with each combination of its features.
    Powerset(powerset::Flags),
    /// Compiles the protocol files to the Rust that is kept next to them.
    Protos(protos::Flags),
    /// Wording that comments and documents should not have, and lines that are too long.
    Prose(prose::Flags),
    /// Draws what each rank does in an algorithm.
    Schedule(schedule::Flags),
    /// The example mnist, started by the launchers and schedulers that are installed: Open MPI, MPICH, torchrun, Slurm.
    Schedulers(schedulers::Flags),
    /// Runs the algorithms' schedules in virtual time, on clusters that are not at hand; or looks for faults by seeds.
    Simulate(simulate::Flags),
    /// All tests, as the README's command runs them.
    Test(test::Flags),
    /// The tests that start real processes, their programs built first.
    Multiprocess {
        /// Run only tests whose names contain this.
        filter: Option<String>,
    },
    /// Every promise of the strategies under every strategy, as a table.
    Conformance {
        /// Passed on: a part of scenarios' names, and --strategy with a part of a strategy's.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Models of what threads and processes share, run through their interleavings by loom.
    Loom,
    /// The tests of memory that threads share, interpreted by Miri where that is installed.
    Miri,
}

fn main() -> ExitCode {
    output::end_quietly(|| run(Xtask::parse().command))
}

fn run(command: Command) -> Result<(), String> {
    match command {
        Command::Ci => ci::run(),
        Command::Api(flags) => api::run(&flags),
        Command::Attack(flags) => attack::run(&flags),
        Command::Bench { bench } => bench.run(),
        Command::Dist(flags) => dist::run(&flags),
        Command::Faults(flags) => faults::run(&flags),
        Command::Fuzz(flags) => fuzz::run(&flags),
        Command::Goodput(flags) => simulate::goodput::run(&flags),
        Command::Gpu(flags) => gpu::run(&flags),
        Command::Hosts(flags) => hosts::run(&flags),
        Command::Layers(flags) => layers::run(&flags),
        Command::Package(flags) => package::run(&flags),
        Command::Pjrt(flags) => pjrt::run(&flags),
        Command::Platforms(flags) => platforms::run(&flags),
        Command::Powerset(flags) => powerset::run(&flags),
        Command::Protos(flags) => protos::run(&flags),
        Command::Prose(flags) => prose::run(&flags),
        Command::Schedule(flags) => schedule::run(&flags),
        Command::Schedulers(flags) => schedulers::run(&flags),
        Command::Simulate(flags) => simulate::run(&flags),
        Command::Docs(flags) => docs::run(&flags),
        Command::Test(flags) => test::run(&flags),
        Command::Multiprocess { filter } => ci::multiprocess(filter.as_deref()),
        Command::Conformance { arguments } => ci::conformance(&arguments),
        Command::Loom => ci::loom(),
        Command::Miri => ci::miri(),
    }
}

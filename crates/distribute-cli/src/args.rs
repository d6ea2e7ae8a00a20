//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Parser, Subcommand, value_parser};
use distribute_collectives::TransportKind;

/// Distributed training for Rust programs.
#[derive(Debug, Parser)]
#[command(name = "distribute", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program as several tasks on this machine
    Run(Run),
    /// Say which rank a failed job should blame
    ///
    /// Reads the flight records that every rank of a failing process group writes to the folder that
    /// DISTRIBUTE_FLIGHT_DIR names: what each rank had called, where their calls part, and who left no record.
    Explain {
        /// The folder with rank_NNNNN.json files
        folder: PathBuf,
    },
    /// Say what this machine offers, what will be used, and why something is not
    ///
    /// One line for each item: ok, warn, fail or skipped; what was found; and how to fix it.
    Doctor(Doctor),
    /// Write a new crate that trains at once
    New(New),
    /// Print the completions of a shell
    ///
    /// For bash: distribute completions bash > ~/.local/share/bash-completion/completions/distribute
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages
    Man {
        /// The folder for distribute.1 and a page for each command; it is created
        folder: PathBuf,
    },
    /// One process of `doctor --run`.
    #[command(hide = true)]
    SelfTest {
        #[arg(required = true)]
        transports: Vec<TransportKind>,
    },
    /// Kills the tasks when the launcher is killed; the launcher starts it itself.
    #[command(hide = true)]
    Guardian,
}

/// Run a program as several tasks on this machine
///
/// Each task finds its place in TF_CONFIG and in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT and DISTRIBUTE_PORT, and the job's identity in DISTRIBUTE_JOB_ID. When one fails, the others are stopped
/// and the first cause is named.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, override_usage = "distribute run -n <N> [OPTIONS] -- <PROGRAM> [ARGS]...")]
pub(crate) struct Run {
    /// Number of workers
    #[arg(short = 'n', long, value_name = "N", env = "DISTRIBUTE_WORKERS", hide_env = true)]
    #[arg(value_parser = value_parser!(u32).range(1..=1024))]
    pub(crate) workers: u32,

    /// Tasks of the job `chief`, in addition to the workers
    #[arg(long, value_name = "0|1", env = "DISTRIBUTE_CHIEF", hide_env = true, default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=1))]
    pub(crate) chief: u32,

    /// Parameter servers, in addition to the workers and the chief that coordinates them
    #[arg(long, value_name = "N", env = "DISTRIBUTE_PS", hide_env = true, default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=1024))]
    pub(crate) ps: u32,

    /// Also write what each task prints to DIR/attempt-0/TASK/{stdout,stderr}.log, replacing older files
    #[arg(long, value_name = "DIR", env = "DISTRIBUTE_LOG_DIR", hide_env = true)]
    pub(crate) log_dir: Option<PathBuf>,

    /// Show only what one task prints, such as worker-1; `chief` is the task with rank 0
    #[arg(long, value_name = "TASK", env = "DISTRIBUTE_ONLY", hide_env = true)]
    pub(crate) only: Option<String>,

    /// Put the time (UTC) before each line
    #[arg(long, env = "DISTRIBUTE_TIMESTAMPS", hide_env = true, value_parser = FalseyValueParser::new())]
    pub(crate) timestamps: bool,

    /// Time that tasks get to stop before they are killed
    #[arg(long, value_name = "SECONDS", env = "DISTRIBUTE_GRACE", hide_env = true, default_value_t = 10)]
    #[arg(value_parser = value_parser!(u32).range(0..=86_400))]
    pub(crate) grace: u32,

    /// Show nothing that the tasks print, only progress, the summary and failures
    #[arg(short, long, env = "DISTRIBUTE_QUIET", hide_env = true, value_parser = FalseyValueParser::new())]
    pub(crate) quiet: bool,

    #[command(flatten)]
    pub(crate) status: crate::status::Options,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// Write a new crate that trains at once
///
/// Nothing is downloaded and nothing overwritten. The program trains alone, on several devices, and in several
/// processes.
#[derive(Debug, clap::Args)]
#[command(after_help = NEW_AFTER_HELP)]
pub(crate) struct New {
    /// The folder of the crate, whose name is the crate's
    pub(crate) folder: PathBuf,

    /// Use distribute from this checkout instead of from the registry
    #[arg(long, value_name = "FOLDER")]
    pub(crate) source: Option<PathBuf>,
}

const NEW_AFTER_HELP: &str = "\
Exit code: 0 when it is written, 1 when the disk refuses, 2 when the name is not that of a crate or is in use.

Example:
  distribute new my-training";

/// Say what this machine offers, what will be used, and why something is not
#[derive(Debug, clap::Args)]
#[command(after_help = DOCTOR_AFTER_HELP)]
pub(crate) struct Doctor {
    /// One JSON object, for programs
    #[arg(long, conflicts_with = "markdown")]
    pub(crate) json: bool,

    /// A table, to paste into an issue
    #[arg(long)]
    pub(crate) markdown: bool,

    /// Details of each line
    #[arg(short, long)]
    pub(crate) verbose: bool,

    /// Also start a small job that reduces known values over every transport, for at most 10 s
    #[arg(long)]
    pub(crate) run: bool,

    /// Number of processes of that job
    #[arg(short = 'n', long, value_name = "N", default_value_t = 2, requires = "run")]
    #[arg(value_parser = value_parser!(u32).range(2..=32))]
    pub(crate) workers: u32,
}

const DOCTOR_AFTER_HELP: &str = "\
Exit code: 0 when nothing failed, 1 when a line says fail, 2 when flags are wrong.

Example:
  distribute doctor --run -n 2";

const AFTER_HELP: &str = "\
Every option can be given as DISTRIBUTE_<OPTION>, such as DISTRIBUTE_LOG_DIR.

Exit code: 0 when all tasks end with 0, else that of the first cause (128 + n when signal n killed it), \
2 when nothing could be started.

Example:
  distribute run -n 2 -- target/release/examples/mnist --epochs 5";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn run(args: &[&str]) -> Result<Run, clap::Error> {
        let cli = Cli::try_parse_from(["distribute", "run"].iter().chain(args))?;
        let Command::Run(run) = cli.command else { panic!("{cli:?}") };
        Ok(run)
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_program_keeps_its_own_flags_with_and_without_dashes() {
        for dashes in [&["--"][..], &[]] {
            let run = run(&[&["-n", "2"], dashes, &["train", "-n", "5", "--quiet", "--", "x"]].concat()).unwrap();
            assert_eq!(run.workers, 2);
            assert_eq!(run.program, ["train", "-n", "5", "--quiet", "--", "x"]);
            assert!(!run.quiet);
        }
    }

    #[test]
    fn the_doctor_takes_one_form_and_a_number_only_for_its_job() {
        let doctor = |args: &[&str]| Cli::try_parse_from(["distribute", "doctor"].iter().chain(args));
        for args in [&[][..], &["--json"], &["--markdown", "-v"], &["--run", "-n", "3"]] {
            assert!(matches!(doctor(args).unwrap().command, Command::Doctor(_)), "{args:?}");
        }
        for args in [&["--json", "--markdown"][..], &["-n", "2"], &["--run", "-n", "1"], &["--jsn"]] {
            assert_eq!(doctor(args).unwrap_err().exit_code(), 2, "{args:?}");
        }
    }

    #[test]
    fn wrong_flags_are_refused() {
        for args in [
            &["-n", "2"][..],
            &["--", "train"],
            &["-n", "0", "--", "train"],
            &["-n", "two", "--", "train"],
            &["-n", "2", "--chief", "2", "--", "train"],
            &["-n", "2", "--wrokers", "2", "--", "train"],
        ] {
            assert_eq!(run(args).unwrap_err().exit_code(), 2, "{args:?}");
        }
    }
}

//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Parser, Subcommand, value_parser};
use distribute_collectives::TransportKind;

use crate::elastic::Elastic;
use crate::manifest::args::Manifest;

mod run;

/// The replicas that `explain` divides a model among if it is not told.
pub(crate) const DEFAULT_REPLICAS: u64 = 2;

/// Distributed training for Rust programs.
#[derive(Debug, Parser)]
#[command(name = "distribute", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program as several tasks, on this machine or on several
    Run(Box<Run>),
    /// Say which rank a failed job should blame, or how much memory a checkpoint's model needs
    ///
    /// Reads the flight records that every rank of a failing process group writes to the folder that
    /// DISTRIBUTE_FLIGHT_DIR names: what each rank had called, where their calls part, and who left no record.
    ///
    /// For a checkpoint, prints the memory that each replica needs for parameters, gradients and optimizer state under
    /// several strategies; only names and sizes are read.
    Explain {
        /// The folder with rank_NNNNN.GROUP.json files; or a .safetensors file, a checkpoint, or a folder of them
        path: PathBuf,
        /// Number of replicas that share the model, for a checkpoint [default: 2]
        #[arg(long, value_parser = value_parser!(u64).range(1..))]
        replicas: Option<u64>,
    },
    /// Say what this machine offers, what will be used, and why something is not
    ///
    /// One line for each item: ok, warn, fail or skipped; what was found; and how to fix it.
    Doctor(Doctor),
    /// Write a new crate that trains at once
    New(New),
    #[cfg(feature = "status")]
    Top(Top),
    Certs(Certs),
    Manifest(Manifest),
    DataService(Box<DataService>),
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
    /// Prints the stacks of a task's processes; the launcher starts it itself.
    #[cfg(feature = "status")]
    #[command(hide = true)]
    Stacks {
        /// The task's process
        pid: i32,
    },
    /// One process of `doctor --run`.
    #[command(hide = true)]
    SelfTest {
        #[arg(required = true)]
        transports: Vec<TransportKind>,
    },
    /// The process of `doctor` that opens a PJRT plugin, which may hang or crash.
    #[command(hide = true)]
    ProbePjrt,
    /// Kills the tasks when the launcher is killed; the launcher starts it itself.
    #[command(hide = true)]
    Guardian,
}

/// Show what the tasks of a running job do, and which ranks others wait for
///
/// For each task its state, its steps, for how long it waits, and its memory; for each collective in which ranks are
/// blocked the operation, since when, and the ranks that have not entered it. Without arguments, shows the jobs of this
/// user on this host. In a terminal it refreshes until q is pressed.
#[cfg(feature = "status")]
#[derive(Debug, clap::Args)]
pub(crate) struct Top {
    /// Address of the job's status page, such as 127.0.0.1:8080, for a job of another host or user
    #[arg(value_name = "[HOST:]PORT")]
    pub(crate) address: Option<String>,

    /// Process id of the job's launcher
    #[arg(long, value_name = "PID", conflicts_with = "address")]
    pub(crate) pid: Option<u32>,

    /// Print the state once; also if standard output is not a terminal
    #[arg(long)]
    pub(crate) once: bool,

    /// Print the state once as JSON, one object for each job
    #[arg(long, conflicts_with = "stacks")]
    pub(crate) json: bool,

    /// Print once also where the threads of a task are; by default, of the tasks that others wait for
    ///
    /// Stops each thread for a moment. For tasks of this host.
    #[arg(long, value_name = "TASK", num_args = 0..=1)]
    pub(crate) stacks: Option<Option<String>>,

    /// Time between two refreshes
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub(crate) interval: f64,
}

/// Reads the time between two refreshes.
#[cfg(feature = "status")]
fn interval(given: &str) -> Result<f64, String> {
    let seconds = given.trim().parse::<f64>().ok().filter(|seconds| (0.2..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "expected seconds from 0.2 to 3600".to_owned())
}

/// Run a program as several tasks, on this machine or on several
///
/// Each task finds its place in TF_CONFIG and in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT and DISTRIBUTE_PORT, the job's identity in DISTRIBUTE_JOB_ID, and on one machine a secret in
/// DISTRIBUTE_JOB_SECRET_FILE, by which tasks know each other. When one fails, the others are stopped and the first
/// cause is named; with --elastic, a worker that is lost is started again while the others train.
#[derive(Debug, clap::Args)]
#[command(
    after_help = AFTER_HELP,
    override_usage = "distribute run <-n <N>|--elastic <MIN:MAX>> [OPTIONS] -- <PROGRAM> [ARGS]..."
)]
pub(crate) struct Run {
    /// Number of workers, dealt to the hosts in blocks
    #[arg(short = 'n', long, value_name = "N", env = "DISTRIBUTE_WORKERS", hide_env = true)]
    #[arg(value_parser = value_parser!(u32).range(1..=100_000))]
    #[arg(required_unless_present_any = ["workers_per_node", "elastic"])]
    pub(crate) workers: Option<u32>,

    /// Number of workers on each host
    #[arg(long, value_name = "N", env = "DISTRIBUTE_WORKERS_PER_NODE", hide_env = true, conflicts_with = "workers")]
    #[arg(value_parser = value_parser!(u32).range(1..=1024), visible_alias = "nproc-per-node")]
    pub(crate) workers_per_node: Option<u32>,

    /// Start MAX workers on this host, of which MIN suffice: one that is lost is started again, the others train on
    ///
    /// For programs whose strategy is elastic. A worker that a signal ends, or that ends with a code of 128 or more, is
    /// lost; 143 says that it was told to stop. Other codes than 0 stop the job. The workers find each other by the
    /// folder that DISTRIBUTE_GENERATIONS names.
    #[arg(long, value_name = "MIN:MAX", env = "DISTRIBUTE_ELASTIC", hide_env = true)]
    pub(crate) elastic: Option<Elastic>,

    /// Tasks of the job `chief`, in addition to the workers
    #[arg(long, value_name = "0|1", env = "DISTRIBUTE_CHIEF", hide_env = true, default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=1))]
    pub(crate) chief: u32,

    /// Parameter servers, in addition to the workers and the chief that coordinates them
    #[arg(long, value_name = "N", env = "DISTRIBUTE_PS", hide_env = true, default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=1024))]
    pub(crate) ps: u32,

    /// Tasks that evaluate while the others train: they find themselves in TF_CONFIG only
    #[arg(long, value_name = "0|1", env = "DISTRIBUTE_EVALUATOR", hide_env = true, default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=1))]
    pub(crate) evaluator: u32,

    /// Number of hosts; the same command runs on each
    #[arg(long, value_name = "N", env = "DISTRIBUTE_NNODES", hide_env = true, default_value_t = 1)]
    #[arg(value_parser = value_parser!(u32).range(1..=10_000), help_heading = "Several hosts")]
    pub(crate) nnodes: u32,

    /// Where the launchers of all hosts meet: an address of one of them, and a free port
    #[arg(long, value_name = "HOST:PORT", env = "DISTRIBUTE_RENDEZVOUS", hide_env = true)]
    #[arg(visible_alias = "rdzv-endpoint", help_heading = "Several hosts")]
    pub(crate) rendezvous: Option<String>,

    /// Identity of the job: launchers with another one are refused
    #[arg(long, value_name = "ID", env = "DISTRIBUTE_RENDEZVOUS_ID", hide_env = true)]
    #[arg(visible_alias = "rdzv-id", help_heading = "Several hosts")]
    pub(crate) rendezvous_id: Option<String>,

    /// Number of this host, from 0; by default the leader's is 0, and the others follow by name
    #[arg(long, value_name = "N", env = "DISTRIBUTE_NODE_RANK", hide_env = true, help_heading = "Several hosts")]
    pub(crate) node_rank: Option<u32>,

    /// Address at which the other hosts reach the tasks of this one, if it is not the one that they see
    #[arg(long, value_name = "HOST", env = "DISTRIBUTE_NODE_ADDRESS", hide_env = true)]
    #[arg(visible_alias = "local-addr", help_heading = "Several hosts")]
    pub(crate) node_address: Option<String>,

    /// Time that the launchers of all hosts get to join, also after a restart
    #[arg(long, value_name = "SECONDS", env = "DISTRIBUTE_JOIN_TIMEOUT", hide_env = true, default_value_t = 600)]
    #[arg(value_parser = value_parser!(u32).range(1..=604_800), help_heading = "Several hosts")]
    pub(crate) join_timeout: u32,

    /// Hosts on which this launcher starts the others, in the order of their numbers
    #[arg(long, value_name = "HOST,...", env = "DISTRIBUTE_HOSTS", hide_env = true, value_delimiter = ',')]
    #[arg(requires = "ssh", help_heading = "Several hosts")]
    pub(crate) hosts: Option<Vec<String>>,

    /// Start them by this command, which is followed by the host and a command for its shell
    #[arg(long, value_name = "COMMAND", env = "DISTRIBUTE_SSH", hide_env = true)]
    #[arg(num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = SSH, requires = "hosts", help_heading = "Several hosts")]
    pub(crate) ssh: Option<String>,

    /// How often the job may be started again after a failure [default: 0]; with --elastic, each worker [default: 3]
    #[arg(long, value_name = "N", env = "DISTRIBUTE_MAX_RESTARTS", hide_env = true)]
    #[arg(help_heading = "Restarts")]
    pub(crate) max_restarts: Option<u32>,

    /// How often the chief may be started again alone, while servers and workers wait for it
    ///
    /// For programs whose strategy has restart_in_place, on one host. It is started again if a signal ends it, or if it
    /// ends with a code of 128 or more, except 143, which says that it was told to stop.
    #[arg(long, value_name = "N", env = "DISTRIBUTE_CHIEF_RESTARTS", hide_env = true, default_value_t = 0)]
    #[arg(help_heading = "Restarts")]
    pub(crate) chief_restarts: u32,

    /// Restarts that are longer ago do not count [default: all count; with --elastic, 600]
    #[arg(long, value_name = "SECONDS", env = "DISTRIBUTE_RESTART_WINDOW", hide_env = true)]
    #[arg(value_parser = value_parser!(u32).range(1..), help_heading = "Restarts")]
    pub(crate) restart_window: Option<u32>,

    /// Pause before the first restart; each further one doubles it, up to 60 s
    #[arg(long, value_name = "SECONDS", env = "DISTRIBUTE_RESTART_BACKOFF", hide_env = true, default_value_t = 1)]
    #[arg(value_parser = value_parser!(u32).range(0..=86_400), help_heading = "Restarts")]
    pub(crate) restart_backoff: u32,

    /// Pin each task to N cores of its own, of one NUMA node where possible
    #[arg(long, value_name = "N", env = "DISTRIBUTE_CPUS_PER_WORKER", hide_env = true)]
    #[arg(value_parser = value_parser!(u32).range(1..=1024))]
    pub(crate) cpus_per_worker: Option<u32>,

    /// Also write what each task prints to DIR/attempt-0/TASK/{stdout,stderr}.log, replacing older files
    #[arg(long, value_name = "DIR", env = "DISTRIBUTE_LOG_DIR", hide_env = true)]
    pub(crate) log_dir: Option<PathBuf>,

    /// Show only what one task prints, such as worker-1; `chief` is the task with rank 0
    #[arg(long, value_name = "TASK", env = "DISTRIBUTE_ONLY", hide_env = true)]
    pub(crate) only: Option<String>,

    /// Encrypt the connections of the tasks: gives each a certificate of an authority that ends with the job
    ///
    /// For programs that are built with the feature `tls`, on one host.
    #[arg(long, env = "DISTRIBUTE_TLS", hide_env = true, value_parser = FalseyValueParser::new())]
    pub(crate) tls: bool,

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

/// The command by which other hosts are reached: without questions, and not for ever.
const SSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10";

/// Serve datasets that other processes read and transform for a training job
///
/// Runs the dispatcher, which knows the data workers, and prints its address as DISTRIBUTE_DATA_SERVICE=HOST:PORT. With
/// --workers, it also starts that many data workers on this host, which find the address in the same variable, and
/// starts those again that fail. SIGTERM and Ctrl-C end all of them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = DATA_SERVICE_AFTER_HELP,
    override_usage = "distribute data-service [OPTIONS] [--workers <N> -- <PROGRAM> [ARGS]...]"
)]
pub(crate) struct DataService {
    /// Address to listen at; port 0 is a free one, and 0.0.0.0 means all of this host, of which one is printed
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    pub(crate) bind: String,

    /// Name of the service, which its data workers and consumers share; others are refused
    #[arg(long, value_name = "ID", env = "DISTRIBUTE_DATA_SERVICE_ID", hide_env = true)]
    pub(crate) id: Option<String>,

    /// Number of data workers on this host
    #[arg(short = 'n', long, value_name = "N", value_parser = value_parser!(u32).range(1..=1024), requires = "program")]
    pub(crate) workers: Option<u32>,

    /// How often each data worker may be started again after a failure
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Restarts")]
    pub(crate) max_restarts: u32,

    /// Restarts that are longer ago do not count
    #[arg(long, value_name = "SECONDS", default_value_t = 600, help_heading = "Restarts")]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    pub(crate) restart_window: u32,

    /// Also write what each data worker prints to DIR/attempt-0/data-worker-0/{stdout,stderr}.log
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,

    /// Put the time (UTC) before each line
    #[arg(long)]
    pub(crate) timestamps: bool,

    /// Time that data workers get to stop before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = value_parser!(u32).range(0..=86_400))]
    pub(crate) grace: u32,

    /// Show nothing that the data workers print
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The program and its arguments
    #[arg(trailing_var_arg = true, value_name = "PROGRAM", requires = "workers")]
    pub(crate) program: Vec<OsString>,
}

const DATA_SERVICE_AFTER_HELP: &str = "\
Exit code: 0 when it was told to stop, that of the first data worker that failed when none is left, 2 when flags or \
the program are wrong, 1 when the system refuses, such as a process.

Examples:
  distribute data-service --bind 10.0.0.7:5050
  distribute data-service --bind 10.0.0.7:5050 --workers 4 -- ./data_worker";

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

/// Issue and renew the certificates of a cluster's processes, for mutual TLS
///
/// A process uses TLS when DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY name the certificate of the
/// authority, its own, and its key. Keep the folder with the authority's key on one host, and copy ca.pem, NAME.pem and
/// NAME.key to the others. Processes read the files again when they change.
#[derive(Debug, clap::Args)]
#[command(after_help = CERTS_AFTER_HELP)]
pub(crate) struct Certs {
    #[command(subcommand)]
    pub(crate) command: CertsCommand,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum CertsCommand {
    /// Create an authority: ca.pem and ca.key
    Init {
        /// The folder, which is created
        folder: PathBuf,
        /// How long the authority is valid
        #[arg(long, value_name = "N", default_value_t = 3650, value_parser = value_parser!(u32).range(1..=36_500))]
        days: u32,
    },
    /// Issue a certificate: NAME.pem and NAME.key
    Issue {
        /// The folder of the authority
        folder: PathBuf,
        /// The name of the files, such as worker-0
        #[arg(long, value_name = "NAME")]
        name: String,
        /// A further host name or address that the certificate is valid for; can be repeated
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
        /// The name that all processes of a job verify: DISTRIBUTE_TLS_NAME
        #[arg(long, value_name = "DNS", default_value = "distribute")]
        job_name: String,
        /// How long the certificate is valid
        #[arg(long, value_name = "N", default_value_t = 7, value_parser = value_parser!(u32).range(1..=3650))]
        days: u32,
    },
    /// Issue those certificates again that have less than a third of their time left, with the same keys
    Renew {
        /// The folder of the authority
        folder: PathBuf,
        /// Renew all certificates, whatever time they have left
        #[arg(long)]
        all: bool,
        /// Look again and again, until a signal ends it
        #[arg(long)]
        watch: bool,
        /// Seconds between two looks
        #[arg(long, value_name = "SECONDS", default_value_t = 3600, requires = "watch")]
        #[arg(value_parser = value_parser!(u64).range(1..=86_400))]
        every: u64,
    },
    /// Print the certificates, their names and the days that they have left
    Show {
        /// The folder of the authority
        folder: PathBuf,
    },
}

const CERTS_AFTER_HELP: &str = "\
Exit code: 0 when it is done, 1 when the disk refuses, 2 when a name or file cannot be used.

Examples:
  distribute certs init certs
  distribute certs issue certs --name worker-0 --host node1
  distribute certs renew certs --watch";

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

Exit code: 0 when all tasks end with 0 (of an elastic job, all that are left), else that of the first cause: \
128 + n when signal n killed it, 138 when its host was lost. 128 + n when signal n has stopped the job; 137 when tasks \
had to be killed after SIGTERM. When tasks cannot be started: 2 when the options, the program or another host's \
command is wrong, 138 when a host is missing or lost, 1 when the system refuses, such as a process or a port.

Examples:
  distribute run -n 2 -- target/release/examples/mnist --epochs 5
  distribute run --elastic 2:4 -- ./train
  distribute run --nnodes 2 --rendezvous node1:29400 --workers-per-node 8 --max-restarts 3 -- ./train
  distribute run --hosts node1,node2 --ssh --workers-per-node 8 -- ./train";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::error::Error;

    fn run(args: &[&str]) -> Result<Box<Run>, clap::Error> {
        let cli = Cli::try_parse_from(["distribute", "run"].iter().chain(args))?;
        let Command::Run(run) = cli.command else { panic!("{cli:?}") };
        Ok(run)
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_names_the_exit_codes_of_all_errors() {
        let refused = || std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let lost = |why: &str| Error::HostLost { host: "a".into(), why: why.into() };
        for error in [Error::Addresses, lost("x"), Error::Ports { tasks: 2, source: refused() }] {
            let code = error.exit_code();
            assert!(AFTER_HELP.contains(&format!(" {code} when ")), "{code}");
        }
        assert_eq!(Error::Interrupted { signal: 15 }.exit_code(), 143);
        assert!(AFTER_HELP.contains("128 + n when signal n has stopped the job"));
    }

    #[test]
    fn the_program_keeps_its_own_flags_with_and_without_dashes() {
        for dashes in [&["--"][..], &[]] {
            let run = run(&[&["-n", "2"], dashes, &["train", "-n", "5", "--quiet", "--", "x"]].concat()).unwrap();
            assert_eq!(run.workers, Some(2));
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
    fn options_that_contradict_each_other_get_a_sentence() {
        for (args, words) in [
            (&["--nnodes", "2"][..], "no place where they meet"),
            (&["--nnodes", "2", "--rendezvous", "node1"], "--rendezvous is not an address"),
            (&["--nnodes", "2", "--rendezvous", "a:1", "--node-rank", "2"], "a number below --nnodes 2"),
            (&["--hosts", "a,b", "--ssh", "--nnodes", "3"], "--nnodes contradicts --hosts"),
            (&["--hosts", "a,b,a", "--ssh"], "names a host twice"),
            (&["--hosts", "a,,b", "--ssh"], "an entry that is not a host"),
            (&["--hosts=-oProxyCommand=x", "--ssh"], "an entry that is not a host"),
            (&["--restart-window", "60"], "--max-restarts N too"),
            (&["--elastic", "2:5"], "--elastic 2:5 and --workers 4"),
            (&["--elastic", "2:4", "--hosts", "a", "--ssh"], "an elastic job runs on one host"),
            (&["--elastic", "2:4", "--nnodes", "2", "--rendezvous", "a:1"], "--elastic 2:4 and --nnodes 2"),
            (&["--elastic", "2:4", "--chief", "1"], "an elastic job has workers only"),
            (&["--elastic", "2:4", "--ps", "1"], "--elastic without --ps"),
            (&["--elastic", "2:4", "--evaluator", "1"], "--elastic without --evaluator"),
        ] {
            let run = run(&[&["-n", "4"], args, &["--", "train"]].concat()).unwrap();
            let error = run.check().unwrap_err();
            let text = crate::report::error(&error);
            assert!(text.contains(words) && error.exit_code() == 2, "{text}");
        }
        let hosts = run(&["--workers-per-node", "2", "--hosts", "a,b", "--ssh", "--", "train"]).unwrap();
        assert!(hosts.check().is_ok() && hosts.nodes() == 2 && hosts.ssh_command() == SSH);
        let per_node = run(&["--elastic", "1:2", "--workers-per-node", "1", "--", "train"]).unwrap();
        assert!(crate::report::error(&per_node.check().unwrap_err()).contains("--workers-per-node 1"));
        let elastic = |args: &[&str]| run(&[args, &["--", "train"]].concat()).unwrap();
        for (args, restarts) in [
            (&["--elastic", "2:4", "-n", "4", "--restart-window", "60"][..], 3),
            (&["--elastic", "2:4", "--max-restarts", "0"], 0),
            (&["-n", "4"], 0),
        ] {
            let run = elastic(args);
            assert!(run.check().is_ok() && run.max_restarts() == restarts, "{args:?}");
        }
        let own = run(&["-n", "2", "--hosts", "a", "--ssh=sh -c", "--", "train"]).unwrap();
        assert_eq!(own.ssh_command(), "sh -c");
        assert!(run(&["-n", "2", "--workers-per-node", "2", "--", "train"]).is_err());
        assert!(run(&["-n", "2", "--hosts", "a", "--", "train"]).is_err());
    }

    #[test]
    fn wrong_flags_are_refused() {
        for args in [
            &["-n", "2"][..],
            &["--", "train"],
            &["-n", "0", "--", "train"],
            &["-n", "two", "--", "train"],
            &["-n", "2", "--chief", "2", "--", "train"],
            &["--elastic", "4:2", "--", "train"],
            &["-n", "2", "--wrokers", "2", "--", "train"],
            // In a window of no length no restart would count.
            &["-n", "2", "--max-restarts", "1", "--restart-window", "0", "--", "train"],
        ] {
            assert_eq!(run(args).unwrap_err().exit_code(), 2, "{args:?}");
        }
        let service = ["distribute", "data-service", "--restart-window", "0"];
        assert_eq!(Cli::try_parse_from(service).unwrap_err().exit_code(), 2);
    }
}

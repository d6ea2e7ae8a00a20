use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// An error of the test harness itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A task could not be started.
    #[error("task {rank}: {program} cannot be started: {source}")]
    Start {
        /// The rank of the task.
        rank: u32,
        /// The given program.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// No free loopback port is available.
    #[error("no free port on 127.0.0.1: {0}")]
    Port(#[source] io::Error),
    /// There is no task of this rank.
    #[error("task {rank} does not exist: the job has {tasks} tasks, counted from 0")]
    NoTask {
        /// The requested rank.
        rank: u32,
        /// The number of tasks.
        tasks: usize,
    },
    /// A signal could not be sent.
    #[error("task {rank} cannot be signalled: {source}")]
    Signal {
        /// The rank of the task.
        rank: u32,
        /// The system's error.
        source: io::Error,
    },
    /// A task did not print the expected line in time.
    #[error("task {rank} printed no line with {text:?} within {waited:?}; it printed:\n{output}")]
    NoLine {
        /// The rank of the task.
        rank: u32,
        /// The expected text.
        text: String,
        /// The duration of the wait.
        waited: Duration,
        /// Everything it printed, standard output first.
        output: String,
    },
    /// A task closed its output without printing the expected line.
    #[error("task {rank} ended its output without a line with {text:?}; it printed:\n{output}")]
    OutputEnded {
        /// The rank of the task.
        rank: u32,
        /// The expected text.
        text: String,
        /// Everything it printed, standard output first.
        output: String,
    },
    /// A task did not end in time.
    #[error("task {rank} did not end within {waited:?}; it printed:\n{output}")]
    StillRunning {
        /// The rank of the task.
        rank: u32,
        /// The duration of the wait.
        waited: Duration,
        /// Everything it printed, standard output first.
        output: String,
    },
    /// Processes were left behind.
    #[error("processes were left after {waited:?}: {processes}; end what the test starts")]
    Leftover {
        /// The duration of the wait.
        waited: Duration,
        /// Their ids and command lines.
        processes: String,
    },
    /// Cargo has not built the program.
    #[error(
        "{name} is not built: looked for {looked_at:?}; build it with `cargo build --bin {name}` or `--example {name}`"
    )]
    NotBuilt {
        /// The requested program.
        name: String,
        /// The paths that were searched.
        looked_at: Vec<PathBuf>,
    },
    /// The path of the running test is unknown.
    #[error("the path of this test program is unknown: {0}")]
    OwnPath(#[source] io::Error),
    /// A certificate cannot be made or written.
    #[error("no certificate: {0}")]
    Certificate(#[source] io::Error),
    /// Slurm's daemons do not run.
    #[error("Slurm cannot be started: {problem}; its daemons said:\n{log}")]
    Slurm {
        /// The cause.
        problem: String,
        /// The logs of the daemons.
        log: String,
    },
}

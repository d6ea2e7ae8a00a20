use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What can go wrong in the harness itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A task could not be started.
    #[error("task {rank}: {program} cannot be started: {source}")]
    Start {
        /// The task.
        rank: u32,
        /// The program that was given.
        program: String,
        /// Why not.
        source: io::Error,
    },
    /// No free loopback port could be had.
    #[error("no free port on 127.0.0.1: {0}")]
    Port(#[source] io::Error),
    /// No such task.
    #[error("task {rank} does not exist: the job has {tasks} tasks, counted from 0")]
    NoTask {
        /// The task that was asked for.
        rank: u32,
        /// How many there are.
        tasks: usize,
    },
    /// A signal could not be sent.
    #[error("task {rank} cannot be signalled: {source}")]
    Signal {
        /// The task.
        rank: u32,
        /// Why not.
        source: io::Error,
    },
    /// A task did not print the expected line in time.
    #[error("task {rank} printed no line with {text:?} within {waited:?}; it printed:\n{output}")]
    NoLine {
        /// The task.
        rank: u32,
        /// What was waited for.
        text: String,
        /// How long.
        waited: Duration,
        /// Everything it printed, standard output first.
        output: String,
    },
    /// A task closed its output without the expected line.
    #[error("task {rank} ended its output without a line with {text:?}; it printed:\n{output}")]
    OutputEnded {
        /// The task.
        rank: u32,
        /// What was waited for.
        text: String,
        /// Everything it printed, standard output first.
        output: String,
    },
    /// A task did not end in time.
    #[error("task {rank} did not end within {waited:?}; it printed:\n{output}")]
    StillRunning {
        /// The task.
        rank: u32,
        /// How long.
        waited: Duration,
        /// Everything it printed, standard output first.
        output: String,
    },
    /// Processes were left behind.
    #[error("processes were left after {waited:?}: {processes}; end what the test starts")]
    Leftover {
        /// How long.
        waited: Duration,
        /// Their ids and command lines.
        processes: String,
    },
    /// Cargo has not built the program.
    #[error(
        "{name} is not built: looked for {looked_at:?}; build it with `cargo build --bin {name}` or `--example {name}`"
    )]
    NotBuilt {
        /// The program that was asked for.
        name: String,
        /// Where it was expected.
        looked_at: Vec<PathBuf>,
    },
    /// The test's own place is unknown.
    #[error("the path of this test program is unknown: {0}")]
    OwnPath(#[source] io::Error),
}

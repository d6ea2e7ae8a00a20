//! Errors of strategies.

use distribute_types::{Class, ErrorClass};

/// An error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The list of devices is empty, names one twice, or names one that a replica cannot use.
    #[error("{strategy}: {problem}")]
    Devices {
        /// The strategy.
        strategy: &'static str,
        /// The problem with the list, and the remedy.
        problem: String,
    },
    /// The environment makes this process one of several, of which it has joined none, and the strategy would train in
    /// it alone. Remedy: a strategy of several workers, or DISTRIBUTE_ALONE=1 if each is to train by itself.
    #[error(
        "{strategy} trains in one process, but this one is {task} of {processes} processes, by {described_by}; use \
        MultiWorkerMirroredStrategy, or Strategy::from_env, or set DISTRIBUTE_ALONE=1 if each is to train alone"
    )]
    Alone {
        /// The strategy.
        strategy: &'static str,
        /// The description in the environment.
        described_by: &'static str,
        /// This process's task.
        task: String,
        /// The number of processes.
        processes: u32,
    },
    /// The text of a program could not be written. Remedy: another folder for
    /// [`TpuBuilder::dump_programs`](crate::TpuBuilder::dump_programs).
    #[cfg(feature = "pjrt")]
    #[error("the program could not be written to {}: {source}; choose another folder", path.display())]
    Dump {
        /// The file.
        path: std::path::PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Parameters cannot be sharded among the replicas as the settings say.
    #[error("{problem}")]
    Sharding {
        /// The problem, and the remedy.
        problem: String,
    },
    /// Replicas cannot update their own variables as the settings say.
    #[error("{problem}")]
    LocalUpdates {
        /// The problem, and the remedy.
        problem: String,
    },
    /// A strategy of another crate could not exchange with other processes what its local updates need.
    #[error("{source}")]
    Exchange {
        /// The class of the failure.
        class: Class,
        /// The failure, with its remedy.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A moving average was given a decay that is none.
    #[error("the decay of the moving average {name:?} is {given}; give one from 0 to below 1, such as 0.99")]
    Decay {
        /// The average.
        name: String,
        /// The decay.
        given: f64,
    },
    /// A function was called in a context that does not allow it.
    #[error("{what} was called {place}; {remedy}")]
    Context {
        /// The function.
        what: &'static str,
        /// The context.
        place: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// Workers have different settings. Remedy: start all of them with the same.
    #[error("{mine} on {here}, but {theirs} on {there}; start every worker with the same settings")]
    SettingsDiffer {
        /// This worker.
        here: String,
        /// Its setting.
        mine: String,
        /// The other worker.
        there: String,
        /// Its setting.
        theirs: String,
    },
    /// A replica panicked; the group was aborted so that no other replica waits for it.
    #[error("replica {replica} panicked: {message}")]
    ReplicaPanicked {
        /// Its id among all replicas.
        replica: usize,
        /// The panic's message.
        message: String,
    },
    /// Replicas made different numbers of merge calls, or one of them failed or gave up waiting, in this call or an
    /// earlier one of the run.
    #[error("merge_call on replica {replica}: {problem}")]
    Merge {
        /// The replica whose call this was.
        replica: usize,
        /// The reason why it has no result, and the remedy.
        problem: String,
    },
    /// The number of an argument's components is not the number of local replicas.
    #[error(
        "an argument of run has {got} components, but this process has {expected} replicas; pass values made for this \
        strategy"
    )]
    Arguments {
        /// Number of components.
        got: usize,
        /// Number of local replicas.
        expected: usize,
    },
    /// A replica has examples in one of several batches and none in another.
    #[error(
        "replica {replica} has examples in one batch of this run and none in another, so its loss and its metrics have \
        no one \
         weight; run the batches one after another, or ask for empty ones (DistributedDataset::with_empty_batches)"
    )]
    MixedExamples {
        /// The replica.
        replica: usize,
    },
    /// The loss of a replica without examples was not multiplied by its weight.
    #[error(
        "replica {replica} has no examples in this step, and a row of another replica's stands in for them, but its \
        loss was \
         not multiplied by ReplicaContext::weight; compute it by average_loss, multiply it by the weight (a loss of \
         candle's \
         by CandleContext::weigh), or ask for empty batches (DistributedDataset::with_empty_batches)"
    )]
    Unweighed {
        /// The replica.
        replica: usize,
    },
    /// A worker has no data, not even an element that tells the shape of an empty batch.
    #[error(
        "this worker has no data, and nothing to tell their shape by, while another worker has some; give all the same \
        dataset"
    )]
    NoData,
    /// Another run of the strategy did not end within the deadline.
    #[error(
        "run waited {waited:.1?} for another run of this strategy, which began {running:.1?} ago on thread {thread:?}; \
        call run \
         from one thread at a time, and not from a thread that a replica waits for"
    )]
    Busy {
        /// The thread of the other run.
        thread: String,
        /// Time since the other run began.
        running: std::time::Duration,
        /// Time that this call has waited.
        waited: std::time::Duration,
    },
    /// The state that a failed run would restore could not be read.
    #[error("the state that a failed run would go back to cannot be read: {0}")]
    NotNoted(#[source] crate::RecoveryError),
    /// A run failed, and its changes could not be undone.
    #[error(
        "the run failed ({failure}), and what it had changed could not be taken back: {source}; restore the newest \
        checkpoint"
    )]
    NotTakenBack {
        /// Why the run failed.
        failure: String,
        /// The class of that failure, and therefore of this error: after the loss of a peer, a restart from the newest
        /// checkpoint helps.
        class: Class,
        /// Why its changes could not be undone.
        source: crate::RecoveryError,
    },
    /// A strategy of processes that do not change was asked for another generation of them.
    #[error("the processes of this strategy do not change; build it by MultiWorkerMirroredBuilder::elastic")]
    Fixed,
    /// An optimizer was to make a step in the groups of a [generation](crate::Gathering) in which its process has not
    /// begun, so that its members may have different states.
    #[error(
        "a step was made in a generation in which this process has not begun: its members may have different \
             states; call Gathering::begin before, or use distribute_train::elastic::run"
    )]
    NotBegun,
    /// A step was made under an elastic strategy in a process that is one of several and has joined none of them: each
    /// would train a copy of its own.
    #[error(
        "a step was made under an elastic strategy before this process, {task} of {processes} by {described_by}, has \
        joined the others, so that each would train alone; train by Trainer::fit or in distribute_train::elastic::run, \
        or set DISTRIBUTE_ALONE=1 if each is to train alone"
    )]
    NotJoined {
        /// The description in the environment.
        described_by: &'static str,
        /// This process's task.
        task: String,
        /// The number of processes.
        processes: u32,
    },
    /// This process was told to stop while it waited for other members of an elastic job. Its exit code is 143.
    #[error(transparent)]
    Stopped(distribute_cluster::Error),
    /// The settings of an elastic strategy do not fit together.
    #[error("{problem}")]
    Elastic {
        /// The settings, and the remedy.
        problem: String,
    },
    /// The thread of a replica could not be started.
    #[error("cannot start the thread of replica {replica}: {source}")]
    Thread {
        /// The replica.
        replica: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A device string or a device is invalid.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// A distributed value was misused.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// The dataset could not be distributed or read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// The description of the cluster is invalid, or its tasks did not connect.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Collective(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Cluster(error) | Error::Stopped(error) => error.class(),
            Error::Input(error) => error.class(),
            Error::Device(error) => error.class(),
            Error::NotTakenBack { class, .. } | Error::Exchange { class, .. } => *class,
            Error::Devices { .. }
            | Error::Alone { .. }
            | Error::NotJoined { .. }
            | Error::Elastic { .. }
            | Error::SettingsDiffer { .. }
            | Error::Sharding { .. }
            | Error::LocalUpdates { .. } => Class::CONFIGURATION,
            _ => Class::PERMANENT,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

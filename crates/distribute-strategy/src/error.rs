//! What can go wrong with strategies.

use distribute_cluster::FailureKind;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A strategy was given no device, or one twice.
    #[error("{strategy}: {problem}")]
    Devices {
        /// The strategy.
        strategy: &'static str,
        /// What is wrong with the list, and what to give.
        problem: String,
    },
    /// Code ran where it may not.
    #[error("{what} was called {place}; {remedy}")]
    Context {
        /// The function.
        what: &'static str,
        /// Where.
        place: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A replica panicked; the group was aborted so that no other replica waits for it.
    #[error("replica {replica} panicked: {message}")]
    ReplicaPanicked {
        /// Its id among all replicas.
        replica: usize,
        /// What it said.
        message: String,
    },
    /// Replicas made different numbers of merge calls, or one failed meanwhile.
    #[error(
        "merge_call: replica {replica} waited for the others, but {problem}; every replica must make the same merge calls"
    )]
    Merge {
        /// The replica that waited.
        replica: usize,
        /// What happened to the others.
        problem: String,
    },
    /// An argument has no component for a replica.
    #[error(
        "an argument of run has {got} components, but this process has {expected} replicas; pass values made for this strategy"
    )]
    Arguments {
        /// Components.
        got: usize,
        /// Local replicas.
        expected: usize,
    },
    /// A worker has nothing to take part in a step with.
    #[error(
        "this worker has no data, and nothing to tell their shape by, while another worker has some; give all the same dataset"
    )]
    NoData,
    /// Threads of the replicas could not be started.
    #[error("cannot start the thread of replica {replica}: {source}")]
    Thread {
        /// The replica.
        replica: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A device string or buffer was wrong.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// A distributed value was used wrongly.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// The dataset could not be distributed or read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// The cluster's description is wrong, or its tasks did not meet.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
}

impl Error {
    /// Whether the same program may succeed when it is started again: a peer was lost or slow.
    pub fn is_retryable(&self) -> bool {
        self.failure_kind() == FailureKind::Retryable
    }

    /// Whether a restart helps; where a peer failed, whether it helps against that failure.
    pub fn failure_kind(&self) -> FailureKind {
        match self {
            Error::Collective(error) | Error::Values(distribute_values::Error::Collective(error)) => {
                error.failure_kind()
            }
            Error::Cluster(error) => error.failure_kind(),
            Error::Devices { .. } | Error::Device(_) => FailureKind::Configuration,
            _ => FailureKind::Permanent,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

//! The properties of a group that all parts of the engine use: its members, and whether it has been aborted.

use std::any::Any;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use distribute_types::{ErrorClass, FailureKind};

use crate::call::Call;
use crate::sync::lock;
use crate::transport::AbortReason;
use crate::{Error, Rank, Result};

/// The members of a group, as seen by one of its processes, and the group's abort state.
pub(crate) struct GroupContext {
    /// The group's name.
    pub(crate) name: String,
    /// Names of all ranks of the group, local or not.
    pub(crate) names: Vec<String>,
    /// Group rank of the first local rank.
    pub(crate) first_rank: usize,
    /// Number of ranks in each process of the group.
    pub(crate) local_ranks: usize,
    /// Set as soon as the group is aborted; also interrupts an exchange with other processes.
    pub(crate) interrupted: AtomicBool,
    cause: Mutex<Option<AbortCause>>,
}

/// The first failure of a group.
#[derive(Clone)]
struct AbortCause {
    origin: String,
    error: Error,
}

impl GroupContext {
    pub(super) fn new(name: String, names: Vec<String>, first_rank: usize, local_ranks: usize) -> GroupContext {
        let (interrupted, cause) = (AtomicBool::new(false), Mutex::new(None));
        GroupContext { name, names, first_rank, local_ranks, interrupted, cause }
    }

    /// Returns the number of ranks.
    pub(crate) fn world_size(&self) -> usize {
        self.names.len()
    }

    /// Returns the number of processes.
    pub(crate) fn processes(&self) -> usize {
        self.names.len() / self.local_ranks
    }

    /// Returns this process's index among the group's processes.
    pub(crate) fn process(&self) -> usize {
        self.first_rank / self.local_ranks
    }

    /// Returns the name of a local rank, as errors print it.
    pub(crate) fn local_name(&self, local: usize) -> String {
        self.names[self.first_rank + local].clone()
    }

    /// Returns the name of the first rank of a process; empty for a process outside the group.
    pub(crate) fn process_name(&self, process: usize) -> String {
        self.names.get(process * self.local_ranks).cloned().unwrap_or_default()
    }

    /// Returns the group rank of a local rank.
    pub(crate) fn rank(&self, local: usize) -> Rank {
        Rank::of(self.first_rank + local)
    }

    /// Records why the group ends and interrupts exchanges. Returns whether this is the first cause.
    pub(super) fn interrupt(&self, origin: &str, error: &Error) -> bool {
        {
            let mut cause = lock(&self.cause);
            if cause.is_some() {
                return false;
            }
            *cause = Some(AbortCause { origin: origin.to_owned(), error: error.clone() });
        }
        // Set after the cause, so that a thread that sees the flag finds a cause to report.
        self.interrupted.store(true, Ordering::SeqCst);
        true
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.interrupted.load(Ordering::Acquire)
    }

    /// Returns an error if the group has been aborted; `call` is the operation that the caller is about to start.
    pub(crate) fn check_alive(&self, call: Call) -> Result<()> {
        if self.is_aborted() { Err(self.aborted(Some(call))) } else { Ok(()) }
    }

    /// Returns what the other processes are told of an abort, if the group has been aborted.
    pub(super) fn abort_reason(&self) -> Option<AbortReason> {
        self.cause().map(|(origin, error)| error.as_reason(&origin))
    }

    /// Returns the origin and the error of the first failure, if the group has been aborted.
    pub(super) fn cause(&self) -> Option<(String, Error)> {
        if !self.is_aborted() {
            return None;
        }
        lock(&self.cause).as_ref().map(|AbortCause { origin, error }| (origin.clone(), error.clone()))
    }

    /// Returns why the group has ended, if it has.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.is_aborted().then(|| self.aborted(None))
    }

    /// Builds the error of a call in an aborted group from the first cause.
    pub(crate) fn aborted(&self, call: Option<Call>) -> Error {
        match lock(&self.cause).clone() {
            Some(AbortCause { error: error @ Error::Aborted { .. }, .. }) => error,
            Some(AbortCause { error: Error::PeerLost { name, peer, peer_rank, during, how }, .. }) => {
                let during = call.map_or(during, |call| call.to_string());
                Error::PeerLost { name, peer, peer_rank, during, how }
            }
            Some(AbortCause { origin, error }) => {
                Error::aborted(&self.name, &origin, &error.to_string(), error.failure_kind())
            }
            None => {
                let (origin, cause) = ("an earlier failure", "an operation failed");
                Error::aborted(&self.name, origin, cause, FailureKind::Retryable)
            }
        }
    }

    /// Builds the error of a call in which a user's function panicked.
    pub(super) fn panicked(&self, call: Option<Call>, panic: &(dyn Any + Send)) -> Error {
        let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
        Error::Panicked {
            name: self.local_name(0),
            during: call.map_or_else(|| "a call".to_owned(), |call| call.to_string()),
            message: message.unwrap_or_else(|| "a value that is not text".to_owned()),
        }
    }
}

//! The future result of a scheduled function.

use std::sync::{Arc, Weak};
use std::time::Instant;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::de::DeserializeOwned;

use crate::coordinator;
use crate::{Error, Result, message};

/// The result of a scheduled function. It is available on the coordinator once the function has run, even if the worker
/// is lost later.
///
/// It cannot be an argument of further functions, which does not compile: fetch it and pass the value.
/// ```compile_fail
/// # use distribute_parameter_server::{ClusterCoordinator, RemoteValue};
/// fn again(coordinator: &ClusterCoordinator, value: &RemoteValue) {
///     let _ = coordinator.schedule("train_step", value);
/// }
/// ```
///
/// # Source
/// `tf.distribute.experimental.coordinator.RemoteValue`.
#[derive(Clone, Debug)]
pub struct RemoteValue {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    function: String,
    coordinator: Weak<coordinator::Shared>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    NotReady,
    Ready(Bytes),
    Aborted(Error),
}

/// The state of a remote value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteValueStatus {
    /// The function waits or runs.
    NotReady,
    /// The value can be fetched.
    Ready,
    /// The function has failed or was cancelled.
    Aborted,
}

impl RemoteValue {
    pub(crate) fn new(function: &str, coordinator: Weak<coordinator::Shared>) -> RemoteValue {
        let (state, changed) = (Mutex::new(State::NotReady), Condvar::new());
        RemoteValue { shared: Arc::new(Shared { function: function.to_owned(), coordinator, state, changed }) }
    }

    /// Returns the state of the value.
    pub fn status(&self) -> RemoteValueStatus {
        match &*self.lock() {
            State::NotReady => RemoteValueStatus::NotReady,
            State::Ready(_) => RemoteValueStatus::Ready,
            State::Aborted(_) => RemoteValueStatus::Aborted,
        }
    }

    /// Waits until the function has run, and returns its result. The wait ends with the function, which
    /// `closure_timeout` and `max_attempts` limit, with the coordinator, when there are no workers for
    /// `worker_timeout`, and at the latest when nothing has happened to the coordinator's functions for longer than all
    /// these limits together allow.
    ///
    /// # Errors
    /// The function's error; [`Error::Cancelled`] if it did not run; [`Error::Stalled`] if nothing happens any more;
    /// [`Error::Value`] if the result is not an `R`.
    pub fn fetch<R: DeserializeOwned>(&self) -> Result<R> {
        let (begun, what) = (Instant::now(), format!("the result of {}", self.shared.function));
        loop {
            // Read before the value's lock is taken.
            let left =
                self.shared.coordinator.upgrade().map(|coordinator| {
                    coordinator.progress.left(begun).map_err(|waited| (waited, coordinator.describe()))
                });
            let mut state = self.lock();
            match (&*state, left) {
                (State::Ready(bytes), _) => {
                    return message::decode(bytes).map_err(|source| Error::Value { what, source });
                }
                (State::Aborted(error), _) => return Err(error.again()),
                (State::NotReady, None) => {
                    return Err(Error::Cancelled { what, why: "the coordinator has ended".to_owned() });
                }
                (State::NotReady, Some(Err((waited, state)))) => return Err(Error::Stalled { what, waited, state }),
                (State::NotReady, Some(Ok(left))) => {
                    self.shared.changed.wait_for(&mut state, left);
                }
            }
        }
    }

    pub(crate) fn set(&self, outcome: Result<Bytes>) {
        let mut state = self.lock();
        // A cancelled value stays cancelled, although its function may have run.
        if matches!(*state, State::NotReady) {
            *state = outcome.map_or_else(State::Aborted, State::Ready);
        }
        self.shared.changed.notify_all();
    }

    pub(crate) fn function(&self) -> &str {
        &self.shared.function
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock()
    }
}

//! What a scheduled function returns, once it has run.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::{Error, Result, message};

/// The result of a function that was scheduled: there when the function has run, and then on the coordinator, whatever becomes of
/// the worker.
///
/// It is no argument of further functions, which does not compile: fetch it and pass the value.
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
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    NotReady,
    Ready(Bytes),
    Aborted(Error),
}

/// How far a remote value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteValueStatus {
    /// Its function waits or runs.
    NotReady,
    /// It can be fetched.
    Ready,
    /// There will be none.
    Aborted,
}

impl RemoteValue {
    pub(crate) fn new(function: &str) -> RemoteValue {
        let (state, changed) = (Mutex::new(State::NotReady), Condvar::new());
        RemoteValue { shared: Arc::new(Shared { function: function.to_owned(), state, changed }) }
    }

    /// How far it is.
    pub fn status(&self) -> RemoteValueStatus {
        match &*self.lock() {
            State::NotReady => RemoteValueStatus::NotReady,
            State::Ready(_) => RemoteValueStatus::Ready,
            State::Aborted(_) => RemoteValueStatus::Aborted,
        }
    }

    /// Waits until the function has run, and returns what it has. The wait ends with the function, which the coordinator's
    /// `closure_timeout` limits, and with the coordinator.
    ///
    /// # Errors
    /// The function's error, [`Error::Cancelled`] where it did not run, [`Error::Value`] where it returns something else than
    /// an `R`.
    pub fn fetch<R: DeserializeOwned>(&self) -> Result<R> {
        let mut state = self.lock();
        loop {
            match &*state {
                State::NotReady => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                State::Ready(bytes) => {
                    let what = format!("the result of {}", self.shared.function);
                    return message::decode(bytes).map_err(|source| Error::Value { what, source });
                }
                State::Aborted(error) => return Err(error.again()),
            }
        }
    }

    pub(crate) fn set(&self, outcome: Result<Bytes>) {
        let mut state = self.lock();
        // What was cancelled stays so, although its function may have run all the same.
        if matches!(*state, State::NotReady) {
            *state = outcome.map_or_else(State::Aborted, State::Ready);
        }
        self.shared.changed.notify_all();
    }

    pub(crate) fn function(&self) -> &str {
        &self.shared.function
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

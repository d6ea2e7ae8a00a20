//! Points in the work of streams.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::registry::locked;

/// One point in a stream's work; each recording of an event creates another mark.
pub(crate) struct Mark {
    reached: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Mark {
    pub(crate) fn new() -> Self {
        Self { reached: Mutex::new(None), changed: Condvar::new() }
    }

    pub(crate) fn reach(&self) {
        *locked(&self.reached) = Some(Instant::now());
        self.changed.notify_all();
    }

    pub(crate) fn reached(&self) -> Option<Instant> {
        *locked(&self.reached)
    }

    /// Waits until the mark is reached; returns false at the deadline.
    pub(crate) fn wait(&self, deadline: Duration) -> bool {
        let reached = locked(&self.reached);
        let waited = self.changed.wait_timeout_while(reached, deadline, |reached| reached.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_some()
    }
}

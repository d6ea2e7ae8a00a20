//! The clock that renderers read, which tests can replace.

use std::time::{Duration, Instant, SystemTime};

/// A clock for renderers.
pub trait Clock: Send {
    /// Returns the monotonic time since some fixed moment, for rates and pauses.
    fn elapsed(&self) -> Duration;

    /// Returns the time of day, for timestamps.
    fn wall(&self) -> SystemTime;
}

/// The clock of this machine.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// Creates a clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn elapsed(&self) -> Duration {
        self.origin.elapsed()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A clock that only a test advances; clones share the time.
#[cfg(test)]
#[derive(Debug, Clone, Default)]
pub(crate) struct ManualClock(std::sync::Arc<parking_lot::Mutex<Duration>>);

#[cfg(test)]
impl ManualClock {
    pub(crate) fn advance(&self, by: Duration) {
        *self.0.lock() += by;
    }
}

#[cfg(test)]
impl Clock for ManualClock {
    fn elapsed(&self) -> Duration {
        *self.0.lock()
    }

    fn wall(&self) -> SystemTime {
        // 2026-11-20T20:41:07Z
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_207_267) + self.elapsed()
    }
}

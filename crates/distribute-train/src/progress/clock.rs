//! Time as renderers see it, so that tests can turn the hands.

use std::time::{Duration, Instant, SystemTime};

/// Where renderers read the time.
pub trait Clock: Send {
    /// Monotonic time since some fixed moment; rates and pauses are measured with it.
    fn elapsed(&self) -> Duration;

    /// Time of day, for timestamps.
    fn wall(&self) -> SystemTime;
}

/// The clock of this machine.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// A clock that starts now.
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

/// A clock whose hands only a test moves; clones share them.
#[cfg(test)]
#[derive(Debug, Clone, Default)]
pub(crate) struct ManualClock(std::sync::Arc<std::sync::Mutex<Duration>>);

#[cfg(test)]
impl ManualClock {
    pub(crate) fn advance(&self, by: Duration) {
        *self.0.lock().unwrap() += by;
    }
}

#[cfg(test)]
impl Clock for ManualClock {
    fn elapsed(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn wall(&self) -> SystemTime {
        // 2026-11-20T20:41:07Z
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_207_267) + self.elapsed()
    }
}

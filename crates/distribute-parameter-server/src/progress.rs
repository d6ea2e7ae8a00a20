//! The time of the last event, which bounds waits that would be endless because of a bug or a distant limit.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The time of the last event of a coordinator's closures, workers or servers.
#[derive(Debug)]
pub(crate) struct Progress {
    last: Mutex<Instant>,
    limit: Duration,
}

impl Progress {
    /// Creates the record; waits end when nothing has happened for `limit`.
    pub(crate) fn new(limit: Duration) -> Progress {
        Progress { last: Mutex::new(Instant::now()), limit }
    }

    /// Records an event.
    pub(crate) fn happened(&self) {
        *self.last.lock() = Instant::now();
    }

    /// Returns how much longer a wait that began at `begun` may last.
    ///
    /// # Errors
    /// How long nothing has happened, once that exceeds the limit.
    pub(crate) fn left(&self, begun: Instant) -> Result<Duration, Duration> {
        let still = begun.max(*self.last.lock()).elapsed();
        let left = self.limit.saturating_sub(still);
        if left.is_zero() { Err(still) } else { Ok(left) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_when_nothing_has_happened_since_it_began() {
        let limit = Duration::from_secs(60);
        let progress = Progress::new(limit);
        let long_ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        // Events before the wait do not shorten it.
        *progress.last.lock() = long_ago(1000);
        assert!(progress.left(Instant::now()).unwrap() > limit / 2);
        assert!(progress.left(long_ago(100)).unwrap_err() >= Duration::from_secs(100));
        // Events during the wait prolong it.
        progress.happened();
        assert!(progress.left(long_ago(100)).unwrap() > limit / 2);
        assert_eq!(Progress::new(Duration::MAX).left(Instant::now()).map(|left| left > limit), Ok(true));
    }
}

//! Measures how long the peer has been silent.

use std::time::{Duration, Instant};

use crate::planted::{Defect, planted};

/// Returns the time by the clock of the event loop, which a simulation sets.
pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The time at which the peer was last heard. Time in which this process itself was stopped, swapped out or suspended
/// is not counted, because it could not receive anything then.
#[derive(Debug)]
pub(super) struct Pulse {
    heard: Instant,
    looked: Instant,
    /// A gap between two checks above this means that this process was stopped.
    stall: Duration,
}

impl Pulse {
    pub(super) fn new(now: Instant, timeout: Duration) -> Pulse {
        Pulse { heard: now, looked: now, stall: timeout / 2 }
    }

    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.looked = now;
    }

    /// Returns how long the peer has been silent; must be called often.
    pub(super) fn silence(&mut self, now: Instant) -> Duration {
        let gap = now.saturating_duration_since(self.looked);
        if gap > self.stall && !planted(Defect::StallsCount) {
            self.heard += gap;
        }
        self.looked = now;
        now.saturating_duration_since(self.heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_only_while_someone_listens() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut pulse = Pulse::new(start, Duration::from_millis(400));
        assert_eq!(pulse.silence(at(100)), Duration::from_millis(100));
        assert_eq!(pulse.silence(at(300)), Duration::from_millis(300));
        pulse.heard(at(350));
        assert_eq!(pulse.silence(at(450)), Duration::from_millis(100));
        // This process was stopped for ten seconds.
        assert_eq!(pulse.silence(at(10_450)), Duration::from_millis(100));
        assert_eq!(pulse.silence(at(10_550)), Duration::from_millis(200));
        // A clock that does not advance or goes backwards does not panic.
        assert_eq!(pulse.silence(at(0)), Duration::ZERO);
    }
}

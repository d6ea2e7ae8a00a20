//! Times for which a process waited.

use std::time::Duration;

/// Total times for which a process waited in steps of training.
///
/// The difference between two readings tells how much of the time between them was the process's own: processes that
/// train in step take equally long for a step, and the slowest one is the one that waits least for the others.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_types::Waits;
/// let [before, after] = [10, 14].map(|s| Waits { collectives: Duration::from_secs(s), input: Duration::ZERO });
/// assert_eq!(after.since(before).collectives, Duration::from_secs(4));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Time blocked in collectives, waiting for peers and exchanging values.
    pub collectives: Duration,
    /// Time spent waiting for data.
    pub input: Duration,
}

impl Waits {
    /// Returns the waits since an earlier reading; a total that became smaller counts as unchanged.
    #[must_use]
    pub fn since(self, before: Waits) -> Waits {
        Waits {
            collectives: self.collectives.saturating_sub(before.collectives),
            input: self.input.saturating_sub(before.input),
        }
    }
}

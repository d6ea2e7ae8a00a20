//! Times for which the replicas of a process waited.

use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use distribute_collectives::ProcessGroup;
use distribute_types::Waits;

use crate::{Replicas, Strategy, StrategyExtended};

/// A reference to a strategy that does not keep it alive.
#[derive(Clone)]
pub struct WeakStrategy(Weak<dyn StrategyExtended>);

impl WeakStrategy {
    pub(crate) fn new(extended: Weak<dyn StrategyExtended>) -> WeakStrategy {
        WeakStrategy(extended)
    }

    /// Returns the strategy, if another owner has kept it.
    pub fn upgrade(&self) -> Option<Strategy> {
        self.0.upgrade().map(Strategy::from_extended)
    }
}

impl std::fmt::Debug for WeakStrategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeakStrategy").field("is_alive", &(self.0.strong_count() > 0)).finish()
    }
}

impl Strategy {
    /// Returns for how long the replicas of this process have waited since the strategy was built. Time in collectives
    /// is that of the replica that was blocked least: what computation did not hide.
    ///
    /// Operations that NCCL runs on a GPU's stream are not part of it, because the host does not wait for them. The
    /// time of groups that a failed run has ended is forgotten, so a total can become smaller.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use distribute_strategy::MirroredStrategy;
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let before = strategy.waits();
    /// strategy.run_with((), |context, ()| context.barrier())?;
    /// assert!(strategy.waits().collectives > before.collectives);
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn waits(&self) -> Waits {
        self.replicas().waits()
    }

    /// Returns a reference that does not keep the strategy, and with it this process's place in the job, alive.
    pub fn downgrade(&self) -> WeakStrategy {
        WeakStrategy::new(self.downgraded())
    }
}

impl Replicas {
    pub(crate) fn waits(&self) -> Waits {
        let (groups, further, sharded) = (self.groups(), self.graph_groups(), self.shard_groups());
        let of_replica = |(local, group): (usize, &ProcessGroup)| {
            let further = further.get(local).and_then(Option::as_ref).map_or(Duration::ZERO, |group| group.waited());
            let tensor = self.tensor_group(local).map_or(Duration::ZERO, |group| group.waited());
            let sharded = sharded.as_ref().and_then(|groups| groups.get(local));
            group.waited() + further + tensor + sharded.map_or(Duration::ZERO, |groups| groups.waited())
        };
        let collectives = groups.iter().enumerate().map(of_replica).min().unwrap_or_default();
        Waits { collectives, input: self.input_wait.total() }
    }
}

/// Time spent waiting for data, over all iterators.
#[derive(Default)]
pub(crate) struct InputWait(AtomicU64);

impl InputWait {
    pub(crate) fn add(&self, waited: Duration) {
        // Relaxed: a total by itself.
        self.0.fetch_add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use distribute_input::Dataset;

    use super::*;
    use crate::MirroredStrategy;

    #[test]
    fn the_wait_is_that_of_the_replica_which_waits_least() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let (began, before) = (Instant::now(), strategy.waits());
        let late = Duration::from_millis(200);
        let steps = strategy.run_with((), |context, ()| {
            if context.local_replica_id() == 1 {
                std::thread::sleep(late);
            }
            context.barrier()
        });
        steps.unwrap();
        let waited = strategy.waits().collectives - before.collectives;
        // The other replica has waited for all of the time.
        assert!(waited < began.elapsed() - late, "{waited:?}");
        let groups = strategy.groups();
        assert!(groups[0].waited() >= late / 2, "{:?}", groups[0].waited());
    }

    #[test]
    fn waiting_for_data_is_counted_over_all_passes() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
        let pause = Duration::from_millis(30);
        let slow = Dataset::range(0..4).map(move |number| {
            std::thread::sleep(pause);
            Ok(number)
        });
        let data = strategy.distribute_dataset(&slow.batch(2)).unwrap();
        for _ in 0..2 {
            assert_eq!(data.iter().count(), 2);
        }
        assert!(strategy.waits().input >= 8 * pause, "{:?}", strategy.waits());
    }

    #[test]
    fn a_weak_strategy_keeps_nothing_alive() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
        let weak = strategy.downgrade();
        assert_eq!(weak.upgrade().map(|strategy| strategy.name()), Some("Mirrored"));
        drop(strategy);
        assert!(weak.upgrade().is_none());
    }
}

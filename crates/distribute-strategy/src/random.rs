//! Reproducible random numbers that differ between replicas.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::{Recoverable, RecoveryError, ReplicaContext, Strategy};

/// A source of random generators with one stream per replica.
///
/// A replica's numbers depend only on the seed, its id and its number of previous calls, neither on the number of
/// replicas nor on other replicas. Restoring the [`state`](ReplicaRandom::state) therefore resumes the streams, also
/// with another number of replicas.
///
/// # Examples
/// ```
/// use distribute_strategy::{Error, MirroredStrategy};
/// use rand_chacha::rand_core::Rng;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let random = strategy.random(42);
/// let draw = || strategy.run_with((), |context, ()| Ok::<_, Error>(random.next(context).next_u64()));
/// let (first, second) = (draw()?, draw()?);
/// assert_ne!(first.values()[0], first.values()[1]);
/// assert_ne!(first.values(), second.values());
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.random.Generator` created in a strategy's scope, whose replicas have different streams.
#[derive(Debug)]
pub struct ReplicaRandom {
    seed: u64,
    uses: Arc<Uses>,
}

/// The number of uses of each replica of this process.
#[derive(Debug)]
struct Uses {
    present: Vec<AtomicU64>,
    noted: Vec<AtomicU64>,
}

impl Recoverable for Uses {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        self.noted[local].store(self.present[local].load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        self.present[local].store(self.noted[local].load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(())
    }
}

/// The saved state of a [`ReplicaRandom`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomState {
    /// The seed.
    pub seed: u64,
    /// The number of uses; of replicas with different numbers, the maximum.
    pub uses: u64,
}

impl RandomState {
    /// Returns the generator that a replica's next use gets after these.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Error, MirroredStrategy, RandomState};
    /// use rand_chacha::rand_core::Rng;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let random = strategy.random(42);
    /// let drawn = strategy.run_with((), |context, ()| Ok::<_, Error>(random.next(context).next_u64()))?;
    /// assert_eq!(RandomState { seed: 42, uses: 0 }.generator(1).next_u64(), drawn.values()[1]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn generator(self, replica_id: usize) -> ChaCha8Rng {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(replica_id as u64);
        // The position is in words of four bytes.
        random.set_word_pos(u128::from(self.uses) << 34);
        random
    }
}

impl Strategy {
    /// Creates random generators for the replicas from a seed.
    pub fn random(&self, seed: u64) -> ReplicaRandom {
        self.restore_random(RandomState { seed, uses: 0 })
    }

    /// Restores random generators from a state, whatever strategy it was saved under.
    pub fn restore_random(&self, state: RandomState) -> ReplicaRandom {
        let all = || (0..self.num_local_replicas()).map(|_| AtomicU64::new(state.uses)).collect();
        ReplicaRandom { seed: state.seed, uses: Arc::new(Uses { present: all(), noted: all() }) }
    }
}

impl ReplicaRandom {
    /// Returns a generator for this replica's next use. It yields 2^36 bytes before it would overlap with the following
    /// one. The uses of a failed run are undone.
    pub fn next(&self, context: &ReplicaContext) -> ChaCha8Rng {
        let local = context.local_replica_id();
        let uses = self.uses.present.get(local).map_or(0, |uses| {
            let state: Arc<dyn Recoverable> = self.uses.clone();
            // Saving a counter cannot fail.
            let _ = context.recover(&state);
            uses.fetch_add(1, Ordering::Relaxed)
        });
        RandomState { seed: self.seed, uses }.generator(context.replica_id())
    }

    /// Returns the state to save. Call outside `run`; it is the same on all processes if all replicas have equally many
    /// uses.
    pub fn state(&self) -> RandomState {
        let uses = self.uses.present.iter().map(|uses| uses.load(Ordering::Relaxed)).max().unwrap_or(0);
        RandomState { seed: self.seed, uses }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::Rng;

    use super::*;
    use crate::{Error, MirroredStrategy};

    fn strategy(replicas: usize) -> Strategy {
        let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
        MirroredStrategy::builder().devices(devices).build().unwrap()
    }

    fn draw(strategy: &Strategy, random: &ReplicaRandom) -> Vec<u64> {
        let drawn = strategy.run_with((), |context, ()| Ok::<_, Error>(random.next(context).next_u64()));
        drawn.unwrap().into_values()
    }

    #[test]
    fn streams_go_on_after_a_restore_on_another_number_of_replicas() {
        let (two, four) = (strategy(2), strategy(4));
        let through = two.random(7);
        let all: Vec<Vec<u64>> = (0..4).map(|_| draw(&two, &through)).collect();
        let before = two.random(7);
        assert_eq!([draw(&two, &before), draw(&two, &before)], [all[0].clone(), all[1].clone()]);
        let after = four.restore_random(before.state());
        for expected in &all[2..] {
            assert_eq!(draw(&four, &after)[..2], expected[..]);
        }
        assert_eq!(after.state(), RandomState { seed: 7, uses: 4 });
    }

    #[test]
    fn seeds_replicas_and_uses_differ() {
        let four = strategy(4);
        let mut all: Vec<u64> = [1, 2]
            .into_iter()
            .flat_map(|seed| {
                let random = four.random(seed);
                (0..3).flat_map(|_| draw(&four, &random)).collect::<Vec<_>>()
            })
            .collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 24);
    }
}

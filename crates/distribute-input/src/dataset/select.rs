//! Transformations that select, repeat or reorder elements without inspecting them.

use std::sync::Arc;

use super::limited::is_counted;
use super::selection::Selection;
use super::{Cardinality, Dataset, Facts, Items, Opener, Share, Shares};
use crate::{Error, Result};

impl<T: Send + 'static> Dataset<T> {
    /// Keeps the first `count` elements.
    pub fn take(self, count: usize) -> Dataset<T> {
        self.select(Selection::Take(count))
    }

    /// Skips the first `count` elements.
    pub fn skip(self, count: usize) -> Dataset<T> {
        self.select(Selection::Skip(count))
    }

    /// Keeps every `count`-th element, beginning at `index`: the share of worker `index` of `count`.
    ///
    /// # Errors
    /// Each pass reports [`Error::Shard`] if `index` is not below `count`.
    pub fn shard(mut self, count: usize, index: usize) -> Dataset<T> {
        self.facts.note((index >= count).then_some(Error::Shard { index, count }));
        self.select(Selection::Shard { count, index })
    }

    /// Repeats the dataset `times` times; a preceding shuffle uses a new order for each repetition.
    pub fn repeat(self, times: usize) -> Dataset<T> {
        self.select(Selection::Repeat(Some(times)))
    }

    /// Repeats the dataset endlessly; a preceding shuffle uses a new order for each repetition. An empty dataset still
    /// ends.
    pub fn repeat_forever(self) -> Dataset<T> {
        self.select(Selection::Repeat(None))
    }

    /// Shuffles the elements, in a different order in each pass.
    ///
    /// A buffer of `buffer_size` elements is filled; each element yielded is drawn from it uniformly and replaced by
    /// the next of the input. A buffer as large as the dataset shuffles uniformly. Orders depend only on `seed` and the
    /// number of the pass (ChaCha with 8 rounds).
    ///
    /// # Errors
    /// Each pass reports [`Error::Zero`] if `buffer_size` is zero.
    ///
    /// # Source
    /// `tf.data.Dataset.shuffle` with `reshuffle_each_iteration=True`.
    pub fn shuffle(mut self, buffer_size: usize, seed: u64) -> Dataset<T> {
        self.facts.positive("shuffle", "buffer size", buffer_size);
        self.facts.seeds.push(seed);
        self.facts.varies = true;
        self.select(Selection::Shuffle { buffer_size, seed, each_pass: true })
    }

    /// Shuffles like [`shuffle`](Dataset::shuffle), in the same order in each pass.
    ///
    /// # Errors
    /// Each pass reports [`Error::Zero`] if `buffer_size` is zero.
    ///
    /// # Source
    /// `tf.data.Dataset.shuffle` with `reshuffle_each_iteration=False`.
    pub fn shuffle_once(mut self, buffer_size: usize, seed: u64) -> Dataset<T> {
        self.facts.positive("shuffle_once", "buffer size", buffer_size);
        self.facts.seeds.push(seed);
        self.select(Selection::Shuffle { buffer_size, seed, each_pass: false })
    }

    /// Marks where a distribution with [`AutoShardPolicy::Hint`](crate::AutoShardPolicy::Hint) applies
    /// [`shard`](Dataset::shard): each of `n` workers gets every `n`-th element from this point on. Without a
    /// distribution the dataset stays whole.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{AutoShardPolicy, Dataset, InputOptions, Topology, distribute_dataset};
    /// let data = Dataset::range(0..8).shard_hint().batch(4);
    /// let options = InputOptions::default().auto_shard_policy(AutoShardPolicy::Hint);
    /// let second = distribute_dataset(&data, Topology::new(2, 1, 1)?, options)?;
    /// assert_eq!(second.iter().next().expect("there are two steps")?[0].as_slice(), [1, 3]);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `shard(SHARD_HINT, SHARD_HINT)` of TensorFlow.
    pub fn shard_hint(self) -> Dataset<T> {
        let open = self.open;
        let hinted: Opener<T> = Arc::new(move |pass| match pass.share() {
            Some(Share { count, index }) => {
                let items = open(pass.of_share(None)).enumerate();
                let mine = move |(at, item): (usize, Result<T>)| {
                    (item.is_err() || at.checked_rem(count) == Some(index)).then_some(item)
                };
                Box::new(items.filter_map(mine)) as Items<T>
            }
            None => open(pass),
        });
        let mut facts = Facts { shares: Shares::Hint, prefetch: 0, ..self.facts };
        facts.stage("shard_hint");
        Dataset::new(hinted, facts)
    }

    fn select(self, selection: Selection) -> Dataset<T> {
        let mut facts = self.facts;
        if matches!(selection, Selection::Take(_) | Selection::Skip(_) | Selection::Shard { .. }) {
            // The positions of these selections refer to the whole dataset, not to a share of it.
            facts.shares = Shares::None;
        }
        match (&selection, facts.cardinality) {
            // The order of a shuffle depends on the number of its elements.
            (Selection::Shuffle { .. }, Cardinality::Known(count)) => {
                facts.stage(format_args!("{selection} of {count}"))
            }
            // Batches of any size keep the order of the rows, unless some are dropped at the end of each repetition.
            (Selection::Repeat(_), _) if facts.exact_size().is_none() => {
                facts.stages.push(format!("{selection}{}", facts.ends()));
            }
            (Selection::Repeat(_) | Selection::Shuffle { .. }, _) => {
                let ends = facts.ends();
                facts.stage(format_args!("{selection}{ends}"));
            }
            _ => facts.stage(selection),
        }
        facts.uneven |= matches!(selection, Selection::Repeat(_));
        facts.cardinality = selection.cardinality(facts.cardinality);
        // Moving row numbers would bypass the thread of a preceding prefetch.
        let prefetched = std::mem::take(&mut facts.prefetch) > 0;
        match self.picks.filter(|_| !prefetched) {
            Some(picks) => Dataset::picked(picks.select(selection), facts),
            None => {
                let holds = matches!(selection, Selection::Shuffle { .. }) && is_counted::<T>();
                facts.buffers += usize::from(holds);
                Dataset::new(selection.apply(self.open), facts)
            }
        }
    }
}

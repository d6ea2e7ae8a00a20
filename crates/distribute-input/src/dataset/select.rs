//! Transformations that select, repeat or reorder elements without inspecting them.

use std::sync::Arc;

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::{Cardinality, Dataset, Facts, Items, Opener, Pass, Share, Shares};
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
    /// use distribute_input::{AutoShardPolicy, Dataset, InputOptions, InputTopology, distribute_dataset};
    /// let data = Dataset::range(0..8).shard_hint().batch(4);
    /// let options = InputOptions { auto_shard_policy: AutoShardPolicy::Hint, ..InputOptions::default() };
    /// let second = distribute_dataset(&data, InputTopology::new(2, 1, 1)?, options)?;
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
        Dataset::new(hinted, Facts { shares: Shares::Hint, prefetch: 0, ..self.facts })
    }

    fn select(self, selection: Selection) -> Dataset<T> {
        let mut facts = self.facts;
        if matches!(selection, Selection::Take(_) | Selection::Skip(_) | Selection::Shard { .. }) {
            // The positions of these selections refer to the whole dataset, not to a share of it.
            facts.shares = Shares::None;
        }
        facts.cardinality = selection.cardinality(facts.cardinality);
        // Moving row numbers would bypass the thread of a preceding prefetch.
        let prefetched = std::mem::take(&mut facts.prefetch) > 0;
        match self.picks.filter(|_| !prefetched) {
            Some(picks) => Dataset::picked(picks.select(selection), facts),
            None => Dataset::new(selection.apply(self.open), facts),
        }
    }
}

/// A selection among the elements of a sequence, applied to elements or to row numbers.
#[derive(Clone, Copy)]
pub(crate) enum Selection {
    Take(usize),
    Skip(usize),
    Shard { count: usize, index: usize },
    Repeat(Option<usize>),
    Shuffle { buffer_size: usize, seed: u64, each_pass: bool },
}

impl Selection {
    pub(crate) fn apply<X: Send + 'static>(self, open: Opener<X>) -> Opener<X> {
        match self {
            Selection::Take(count) => Arc::new(move |pass| Box::new(open(pass).take(count)) as Items<X>),
            Selection::Skip(count) => filtered(open, move |index| index >= count),
            Selection::Shard { count, index } => filtered(open, move |at| at.checked_rem(count) == Some(index)),
            Selection::Repeat(times) => Arc::new(move |pass| Box::new(Repeated::new(&open, pass, times)) as Items<X>),
            Selection::Shuffle { buffer_size, seed, each_pass } => Arc::new(move |pass| {
                let key = if each_pass { pass } else { pass.first() };
                let upstream = Some(open(pass));
                Box::new(Shuffled { upstream, buffer: Vec::new(), buffer_size, random: key.random(seed) }) as Items<X>
            }),
        }
    }

    fn cardinality(self, before: Cardinality) -> Cardinality {
        match self {
            Selection::Take(count) => match before {
                Cardinality::Infinite => Cardinality::Known(count),
                Cardinality::Unknown if count == 0 => Cardinality::Known(0),
                other => other.map(|known| known.min(count)),
            },
            Selection::Skip(count) => before.map(|known| known.saturating_sub(count)),
            // A count of zero is an error that was noted; 1 avoids a division by zero here.
            Selection::Shard { count, index } => before.map(|known| known.saturating_sub(index).div_ceil(count.max(1))),
            Selection::Repeat(Some(0)) => Cardinality::Known(0),
            Selection::Repeat(Some(times)) => before.map(|known| known.saturating_mul(times)),
            Selection::Repeat(None) if before == Cardinality::Known(0) => before,
            Selection::Repeat(None) => Cardinality::Infinite,
            Selection::Shuffle { .. } => before,
        }
    }
}

/// Keeps the elements whose index satisfies `wanted`, and every error.
fn filtered<X: Send + 'static>(
    open: Opener<X>,
    wanted: impl Fn(usize) -> bool + Copy + Send + Sync + 'static,
) -> Opener<X> {
    Arc::new(move |pass| {
        let indexed = open(pass).enumerate();
        Box::new(indexed.filter_map(move |(index, item)| (item.is_err() || wanted(index)).then_some(item))) as Items<X>
    })
}

struct Repeated<X> {
    open: Opener<X>,
    pass: Pass,
    times: Option<usize>,
    begun: u64,
    current: Option<Items<X>>,
    /// Whether the current repetition has yielded an item; an empty one ends the repetitions.
    fruitful: bool,
}

impl<X> Repeated<X> {
    fn new(open: &Opener<X>, pass: Pass, times: Option<usize>) -> Repeated<X> {
        Repeated { open: Arc::clone(open), pass, times, begun: 0, current: None, fruitful: true }
    }
}

impl<X> Iterator for Repeated<X> {
    type Item = Result<X>;

    fn next(&mut self) -> Option<Result<X>> {
        loop {
            if let Some(item) = self.current.as_mut().and_then(Iterator::next) {
                self.fruitful = true;
                return Some(item);
            }
            self.current = None;
            if !self.fruitful || self.times.is_some_and(|times| self.begun >= times as u64) {
                return None;
            }
            self.current = Some((self.open)(self.pass.repetition(self.begun, self.times)));
            self.fruitful = false;
            self.begun += 1;
        }
    }
}

struct Shuffled<X> {
    upstream: Option<Items<X>>,
    buffer: Vec<X>,
    buffer_size: usize,
    random: ChaCha8Rng,
}

impl<X> Iterator for Shuffled<X> {
    type Item = Result<X>;

    fn next(&mut self) -> Option<Result<X>> {
        while let Some(upstream) = &mut self.upstream
            && self.buffer.len() < self.buffer_size
        {
            match upstream.next() {
                Some(Ok(item)) => self.buffer.push(item),
                Some(Err(error)) => {
                    self.upstream = None;
                    return Some(Err(error));
                }
                None => self.upstream = None,
            }
        }
        if self.buffer.is_empty() {
            return None;
        }
        let drawn = self.random.random_range(0..self.buffer.len());
        Some(Ok(self.buffer.swap_remove(drawn)))
    }
}

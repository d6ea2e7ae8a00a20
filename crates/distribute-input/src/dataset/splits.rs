//! Numbered splits of a dataset that is read elsewhere, and the reading of one share of a pass.

use std::sync::Arc;

use super::files::names;
use super::{Cardinality, Dataset, DatasetIter, Facts, Items, Opener, Pass, Share, Shares, Source};
use crate::{BoxError, Error};

/// One split of a pass, or one of several equal parts of its elements: the element of a list of splits.
///
/// A reader yields the elements of the split whose number, counted from 0 within the split, is `part` modulo `parts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Split {
    /// The number of the pass.
    pub epoch: u64,
    /// The number of splits of the pass.
    pub count: usize,
    /// The index of the split.
    pub index: usize,
    /// The index of the part; 0 for a whole split.
    pub part: usize,
    /// The number of parts; 1 for a whole split.
    pub parts: usize,
}

impl Dataset<Split> {
    /// Creates a dataset of `count` numbered splits, for sources that yield the elements of one split of a pass at a
    /// time. When it is distributed, each worker reads splits of its own; splits that cannot be distributed evenly are
    /// divided by elements.
    ///
    /// Apply [`interleave`](Dataset::interleave) or [`flat_map`](Dataset::flat_map) with a reader of splits to it.
    ///
    /// # Errors
    /// Each pass reports [`Error::Zero`] if there are no splits.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Dataset, Split};
    /// let numbers = Dataset::range(0..10);
    /// let read = move |split: Split| {
    ///     let (numbers, Split { epoch, count, index, .. }) = (numbers.clone(), split);
    ///     Ok(Dataset::from_generator(move || numbers.iter_share(epoch, count, index).map(|item| Ok(item?))))
    /// };
    /// let data = Dataset::from_splits(2).interleave(2, 1, read);
    /// let values: distribute_input::Result<Vec<i64>> = data.iter().map(|item| Ok(item?.as_slice()[0])).collect();
    /// assert_eq!(values?, (0..10).collect::<Vec<_>>());
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn from_splits(count: usize) -> Dataset<Split> {
        let mut facts = Facts::of(Cardinality::Unknown);
        // "Dealt in turn" refuses positions of older versions, where each share had the same part of all that remain.
        facts.sources.push(Source::Named(format!("{count} splits dealt in turn")));
        facts.shares = Shares::Splits(vec![count]);
        facts.varies = true;
        facts.positive("from_splits", "count", count);
        let open: Opener<Split> = Arc::new(move |pass: Pass| {
            let epoch = pass.number();
            let share = pass.share().unwrap_or(Share { count: 1, index: 0 });
            Box::new(deal(count, share).map(move |(index, part, parts)| Ok(Split { epoch, count, index, part, parts })))
                as Items<Split>
        });
        Dataset::new(open, facts)
    }

    /// Adds a name of the data that the splits are of. Data with other names are refused where workers compare their
    /// [settings](crate::DataPlan::settings), and where a pass is resumed from a [position](crate::InputPosition).
    ///
    /// `name` is called when the dataset is distributed, unless each worker may have data of its own. It should show
    /// everything that determines the elements and their order, such as a digest of files and seeds.
    ///
    /// # Errors
    /// If `name` fails, [`distribute_dataset`](crate::distribute_dataset) returns [`Error::External`].
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Dataset, InputOptions, Split, Topology, distribute_dataset};
    /// let read = |split: Split| Ok(Dataset::range(0..9).shard(split.count, split.index));
    /// let data = Dataset::from_splits(3).named_by(|| Ok("digits".to_owned())).flat_map(read).batch(2);
    /// let data = distribute_dataset(&data, Topology::new(3, 0, 1)?, InputOptions::default())?;
    /// assert!(data.plan().settings().contains(&("sources", "3 splits dealt in turn, digits".to_owned())));
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn named_by<F>(mut self, name: F) -> Dataset<Split>
    where
        F: Fn() -> Result<String, BoxError> + Send + Sync + 'static,
    {
        self.facts.sources.push(Source::Asked(Arc::new(name)));
        self
    }
}

impl<T: Send + 'static> Dataset<T> {
    /// Begins one of `count` equal shares of the pass with the given number. The shares of a pass have no element in
    /// common, and together they are all of its elements.
    ///
    /// Yields elements that depend on the pipeline, its seeds, the pass and the share only, also if an
    /// [unordered](crate::Parallel::unordered) map is part of it: its results are yielded in order here.
    ///
    /// # Cost
    /// A dataset that reads a list of files reads the files of the share; one with a
    /// [`shard_hint`](Dataset::shard_hint) divides the elements there. Every other dataset is read as a whole, and the
    /// elements whose number modulo `count` is `index` are kept.
    ///
    /// # Errors
    /// The first item is [`Error::Shard`] if `index` is not below `count`.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::Dataset;
    /// let data = Dataset::range(0..5);
    /// let share: distribute_input::Result<Vec<i64>> =
    ///     data.iter_share(0, 2, 1).map(|item| Ok(item?.as_slice()[0])).collect();
    /// assert_eq!(share?, [1, 3]);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn iter_share(&self, epoch: u64, count: usize, index: usize) -> DatasetIter<T> {
        let failed = |error| DatasetIter { items: Some(Box::new(std::iter::once(Err(error)))) };
        if let Some(error) = &self.facts.error {
            return failed(error.clone());
        }
        if index >= count {
            return failed(Error::Shard { index, count });
        }
        let pass = Pass::epoch(epoch).in_order();
        let items = match &self.facts.shares {
            Shares::None => {
                let mine = move |(at, item): (usize, crate::Result<T>)| {
                    (item.is_err() || at.checked_rem(count) == Some(index)).then_some(item)
                };
                Box::new((self.open)(pass).enumerate().filter_map(mine)) as Items<T>
            }
            _ => (self.open)(pass.of_share(Some(Share { count, index }))),
        };
        DatasetIter { items: Some(items) }
    }

    /// Returns the named settings that must be equal in all processes that read shares of the same passes.
    ///
    /// They show neither the functions of the pipeline nor the contents of its sources.
    ///
    /// # Errors
    /// [`Error::External`] if a source does not know its name ([`named_by`](Dataset::named_by)).
    ///
    /// # Examples
    /// ```
    /// use distribute_input::Dataset;
    /// let settings = Dataset::range(0..70).shuffle(70, 42).batch(7).settings()?;
    /// assert!(settings.contains(&("batch", "7".to_owned())));
    /// assert!(settings.contains(&("seeds of shuffles", "[42]".to_owned())));
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn settings(&self) -> crate::Result<Vec<(&'static str, String)>> {
        let Facts { cardinality, seeds, shares, stages, sources, .. } = &self.facts;
        let sources = sources.iter().map(Source::name).collect::<crate::Result<Vec<_>>>()?;
        Ok(vec![
            ("elements of a pass", cardinality.to_string()),
            ("sources", sources.join(", ")),
            ("batch", self.batch_size().map_or_else(|| "none".to_owned(), |size| size.to_string())),
            ("seeds of shuffles", format!("{seeds:?}")),
            ("division", shares.to_string()),
            ("stages", stages.join(", ")),
        ])
    }
}

impl std::fmt::Display for Shares {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shares::None => formatter.write_str("by elements"),
            Shares::Hint => formatter.write_str("at shard_hint"),
            Shares::Splits(counts) => write!(formatter, "by splits, {counts:?}"),
            Shares::Files(lists) => {
                write!(formatter, "by {}", names(lists.iter().flat_map(|list| list.iter())))
            }
        }
    }
}

/// Returns the splits of one share, each with its part and the number of parts: whole splits in round-robin order, then
/// its part of each remaining split. The parts are dealt in turn, so that what is left of splits whose elements are not
/// a multiple of the shares is spread over them.
fn deal(splits: usize, share: Share) -> impl Iterator<Item = (usize, usize, usize)> + Send {
    let count = share.count.max(1);
    let whole = splits / count * count;
    let dealt = (share.index.min(whole)..whole).step_by(count).map(|split| (split, 0, 1));
    dealt.chain((whole..splits).map(move |split| (split, share.index.wrapping_add(split - whole) % count, count)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Array, InputOptions, Parallel, Topology, distribute_dataset};

    fn values(items: impl Iterator<Item = crate::Result<Array<i64>>>) -> Vec<i64> {
        items.map(|item| item.unwrap().as_slice()[0]).collect()
    }

    #[test]
    fn seeds_of_both_datasets_are_settings() {
        let shuffled = |seed| Dataset::range(0..8).shuffle(8, seed);
        let seeds = ("seeds of shuffles", "[1, 2]".to_owned());
        assert!(shuffled(1).zip(shuffled(2)).settings().unwrap().contains(&seeds));
        assert!(shuffled(1).concatenate(shuffled(2)).settings().unwrap().contains(&seeds));
    }

    /// Splits of 0..`to`, as a source that reads them elsewhere would yield them.
    fn by_splits(to: i64, count: usize) -> Dataset<Array<i64>> {
        let numbers = Dataset::range(0..to).shuffle(8, 3);
        Dataset::from_splits(count).interleave(2, 1, move |split| {
            let numbers = numbers.clone();
            Ok(Dataset::from_generator(move || {
                let all = numbers.iter_share(split.epoch, split.count, split.index).enumerate();
                all.filter(move |(at, _)| at % split.parts == split.part).map(|(_, item)| Ok(item?))
            }))
        })
    }

    #[test]
    fn splits_are_dealt_and_what_is_left_divided_by_elements() {
        let dealt = |splits, count, index| deal(splits, Share { count, index }).collect::<Vec<_>>();
        assert_eq!(dealt(5, 2, 0), [(0, 0, 1), (2, 0, 1), (4, 0, 2)]);
        assert_eq!(dealt(5, 2, 1), [(1, 0, 1), (3, 0, 1), (4, 1, 2)]);
        assert_eq!(dealt(1, 3, 2), [(0, 2, 3)]);
        // The first element of each of three splits is another share's.
        let firsts = |index| dealt(3, 4, index).into_iter().filter(|(_, part, _)| *part == 0).count();
        assert_eq!([0, 1, 2, 3].map(firsts), [1, 0, 1, 1]);
        assert_eq!(dealt(3, 1, 0).len(), 3);
    }

    #[test]
    fn workers_divide_splits_and_see_every_example_once() {
        for workers in [1, 2, 3, 5] {
            let mut all = Vec::new();
            for worker in 0..workers {
                let topology = Topology::new(workers, worker, 1).unwrap();
                let data = distribute_dataset(&by_splits(40, 4).batch(workers), topology, InputOptions::default());
                let data = data.unwrap();
                assert!(data.plan().settings().contains(&("sources", "4 splits dealt in turn".to_owned())));
                for step in data.iter_epoch(1) {
                    step.unwrap().iter().for_each(|part| all.extend_from_slice(part.as_slice()));
                }
            }
            all.sort_unstable();
            assert_eq!(all, (0..40).collect::<Vec<_>>(), "{workers} workers");
        }
    }

    #[test]
    fn shares_of_files_of_hints_and_of_all_others_are_disjoint_and_complete() {
        let paths = ["a", "b", "c"];
        let files = Dataset::from_files(paths).map(|shard| Ok(Array::scalar((shard.part * 8 + shard.parts) as i64)));
        assert_eq!(values(files.iter_share(0, 3, 1)), [1]);
        assert_eq!(values(files.iter_share(0, 2, 1)), [1, 10]);
        for data in [Dataset::range(0..9), Dataset::range(0..9).shuffle(9, 5), Dataset::range(0..9).shard_hint()] {
            let mut all: Vec<i64> = (0..4).flat_map(|index| values(data.iter_share(2, 4, index))).collect();
            all.sort_unstable();
            assert_eq!(all, (0..9).collect::<Vec<_>>());
        }
        let text = Dataset::range(0..9).iter_share(0, 2, 2).next().unwrap().unwrap_err().to_string();
        assert!(text.contains("shard 2 of 2"), "{text}");
    }

    #[test]
    fn an_unordered_map_is_in_order_within_a_share() {
        let slow = |x: Array<i64>| {
            // The first element is ready last.
            std::thread::sleep(std::time::Duration::from_millis(if x.item() == Some(&0) { 60 } else { 0 }));
            Ok(x)
        };
        let data = Dataset::range(0..6).par_map(Parallel::threads(3).unordered(), slow);
        assert_eq!(values(data.iter_share(0, 1, 0)), (0..6).collect::<Vec<_>>());
        // Also in a pass that workers share and that can be resumed.
        let topology = Topology::new(1, 0, 1).unwrap();
        let steps = distribute_dataset(&data.clone().batch(1), topology, InputOptions::default()).unwrap();
        let rows: Vec<i64> = steps.iter_epoch(0).flat_map(|step| step.unwrap()[0].as_slice().to_vec()).collect();
        assert_eq!(rows, (0..6).collect::<Vec<_>>());
        // A cache that any pass has filled is read by passes that workers share.
        assert_eq!(values(data.clone().cache().iter()), (0..6).collect::<Vec<_>>());
        #[cfg(feature = "tfrecord")]
        {
            let folder = tempfile::tempdir().unwrap();
            let encode = |x: &Array<i64>| x.item().unwrap().to_le_bytes().to_vec();
            let decode = |bytes: &[u8]| Ok(Array::scalar(i64::from_le_bytes(bytes.try_into()?)));
            assert_eq!(values(data.snapshot(folder.path(), encode, decode).iter()), (0..6).collect::<Vec<_>>());
        }
    }
}

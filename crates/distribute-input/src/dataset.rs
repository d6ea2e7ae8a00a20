//! Descriptions of input pipelines.

mod background;
mod batch;
mod budget;
mod cache;
mod cardinality;
mod files;
mod flatten;
mod limited;
mod map;
mod padded;
mod parallel;
mod pass;
mod picks;
mod prefetch;
mod select;
mod selection;
#[cfg(feature = "tfrecord")]
mod snapshot;
mod source;
mod splits;

use std::{
    any::Any,
    fmt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{BoxError, Element, ElementSpec, Error};

pub use budget::Sizes;
pub use cardinality::Cardinality;
pub use files::FileShard;
pub use parallel::Parallel;
pub use prefetch::AUTOTUNE;
pub use splits::Split;

pub(crate) use batch::chunked;
pub(crate) use files::divide;
#[cfg(feature = "images")]
pub(crate) use files::list;
pub(crate) use pass::{Items, Opener, Pass, Share};
pub(crate) use picks::{Order, Picks};
pub(crate) use prefetch::{Depth, prefetched_items};

/// A description of a sequence of elements, which is read lazily and any number of times.
///
/// A dataset is cheap to clone and does nothing until it is iterated. Every call of [`iter`](Dataset::iter) begins a
/// new *pass*. Clones share one counter of passes; datasets derived from them start a counter of their own. What a pass
/// yields depends only on the pipeline, its seeds and the number of the pass, so that the same program reads the same
/// data on every worker and in every run.
///
/// The first error ends a pass. An error in the description (a batch of zero, tensors of unequal length) is reported in
/// the same way, as the only item of each pass, so that descriptions need no `?`.
///
/// # Examples
/// ```
/// use distribute_input::{Cardinality, Dataset};
/// let data = Dataset::range(0..5).batch(2).repeat(2);
/// assert_eq!(data.cardinality(), Cardinality::Known(6));
/// let batches: Result<Vec<Vec<i64>>, distribute_input::Error> =
///     data.iter().map(|batch| Ok(batch?.as_slice().to_vec())).collect();
/// assert_eq!(batches?, [vec![0, 1], vec![2, 3], vec![4], vec![0, 1], vec![2, 3], vec![4]]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.data.Dataset`.
pub struct Dataset<T> {
    pub(crate) open: Opener<T>,
    /// If the elements are rows of a value in memory: the selected rows and their order.
    pub(crate) picks: Option<Picks<T>>,
    pub(crate) facts: Facts,
    passes: Arc<AtomicU64>,
}

/// Properties of a dataset that are known without reading it.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) cardinality: Cardinality,
    /// The last `batch`.
    pub(crate) batched: Option<Batched>,
    /// The depth of a prefetch at the end of the pipeline.
    pub(crate) prefetch: usize,
    pub(crate) error: Option<Error>,
    pub(crate) shares: Shares,
    /// The files of the sources, or their numbers of splits and the data that those are of, in pipeline order.
    pub(crate) sources: Vec<Source>,
    /// The seeds of the shuffles, in pipeline order.
    pub(crate) seeds: Vec<u64>,
    /// The stages that choose and order elements, and memory budgets, in pipeline order.
    pub(crate) stages: Vec<String>,
    /// The lengths of the sources in memory, in pipeline order.
    pub(crate) lengths: Vec<usize>,
    /// The most rows of a record, if an option of a reader sets it and the elements are such records.
    pub(crate) record_rows: Option<usize>,
    /// Whether other elements may follow a batch that is shorter than the others.
    pub(crate) uneven: bool,
    /// Whether the order may change with the number of the pass.
    pub(crate) varies: bool,
    /// The number of stages that hold elements and take part in a memory budget.
    pub(crate) buffers: usize,
}

/// A source that is compared between workers, and with the one that a position was saved with.
#[derive(Clone)]
pub(crate) enum Source {
    Named(String),
    /// Asked for its name when the dataset is distributed.
    Asked(Arc<dyn Fn() -> Result<String, BoxError> + Send + Sync>),
}

/// A `batch` of elements.
#[derive(Clone, Debug)]
pub(crate) struct Batched {
    size: usize,
    /// Whether smaller batches are dropped, so that the end of a share depends on the replicas of a worker.
    exact: bool,
    join: Joining,
}

/// How rows of several batches become one batch.
#[derive(Clone, Debug)]
pub(crate) enum Joining {
    /// By [`Element::concat`].
    Concat,
    /// By a `fn(&[T]) -> Result<T>` for batches of type `T`, whose rows may differ in shape.
    With(Arc<dyn Any + Send + Sync>),
    /// A map or `zip` may have changed how the rows were padded: they must be equal in shape.
    Unknown,
}

/// How the dataset can be divided between workers that each read a share of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shares {
    /// Not at all: a requested share is ignored.
    None,
    /// By dividing each list of files.
    Files(Vec<Arc<[PathBuf]>>),
    /// At the position of `shard_hint`.
    Hint,
    /// By dividing each list of numbered splits, which has this many.
    Splits(Vec<usize>),
}

impl Shares {
    /// Combines the shares of two datasets that are read one after the other.
    pub(crate) fn both(self, other: Shares) -> Shares {
        match (self, other) {
            (Shares::Files(one), Shares::Files(two)) => Shares::Files([one, two].concat()),
            (Shares::Hint, Shares::Hint) => Shares::Hint,
            (Shares::Splits(one), Shares::Splits(two)) => Shares::Splits([one, two].concat()),
            _ => Shares::None,
        }
    }
}

impl Source {
    /// Returns the name of the source.
    ///
    /// # Errors
    /// [`Error::External`] if it is not known.
    pub(crate) fn name(&self) -> crate::Result<String> {
        match self {
            Source::Named(name) => Ok(name.clone()),
            Source::Asked(ask) => ask().map_err(Error::external),
        }
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Named(name) => formatter.write_str(name),
            Source::Asked(_) => formatter.write_str("a source that is asked for its name"),
        }
    }
}

/// An iterator over one pass of a [`Dataset`]. It ends after the first error.
pub struct DatasetIter<T> {
    items: Option<Items<T>>,
}

impl<T: Send + 'static> Dataset<T> {
    pub(crate) fn new(open: Opener<T>, facts: Facts) -> Dataset<T> {
        Dataset { open, picks: None, facts, passes: Arc::default() }
    }

    /// Creates a dataset without known properties.
    pub(crate) fn of_opener(open: Opener<T>) -> Dataset<T> {
        Dataset::new(open, Facts::of(Cardinality::Unknown))
    }

    pub(crate) fn picked(picks: Picks<T>, facts: Facts) -> Dataset<T> {
        Dataset { open: picks.opener(), picks: Some(picks), facts, passes: Arc::default() }
    }

    /// Begins the next pass: 0, 1, 2, … over the life of this dataset and its clones.
    pub fn iter(&self) -> DatasetIter<T> {
        self.iter_epoch(self.next_epoch())
    }

    /// Begins the pass with the given number without advancing the counter, to resume training or to repeat a pass.
    pub fn iter_epoch(&self, epoch: u64) -> DatasetIter<T> {
        self.open_with(&self.open, epoch)
    }

    /// Combines the elements of the next pass into one value. An error of an element or of the function ends it.
    ///
    /// # Errors
    /// The error that ends the pass; [`Error::User`] if the function fails.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::Dataset;
    /// let sum = Dataset::range(0..5).reduce(0, |sum, x| Ok(sum + x.item().ok_or("no scalar")?))?;
    /// assert_eq!(sum, 10);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.reduce`.
    pub fn reduce<S, F>(&self, initial: S, mut function: F) -> crate::Result<S>
    where
        F: FnMut(S, T) -> Result<S, BoxError>,
    {
        self.iter()
            .try_fold(initial, |state, element| function(state, element?).map_err(|error| Error::user("reduce", error)))
    }

    /// Returns the number of elements of a pass.
    pub fn cardinality(&self) -> Cardinality {
        self.facts.cardinality
    }

    /// Returns the size of the last `batch` of the pipeline, if any.
    ///
    /// Transformations that keep elements whole preserve it. So does `map`, which is assumed not to change the leading
    /// dimension. The last batch may be smaller.
    pub fn batch_size(&self) -> Option<usize> {
        self.facts.batch_size()
    }

    /// Returns the shapes and types of an element, read from the first one; the leading extent of batches is left open.
    /// The result is empty if the dataset is empty.
    ///
    /// # Errors
    /// The errors of reading the first element.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::Dataset;
    /// assert_eq!(Dataset::range(0..9).batch(4).element_spec()?[0].to_string(), "[?] i64");
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.element_spec`.
    pub fn element_spec<L>(&self) -> crate::Result<Vec<ElementSpec>>
    where
        T: Element<L>,
    {
        let first = self.iter_epoch(0).next().transpose()?;
        let spec = first.map_or_else(Vec::new, |element| element.spec());
        let batched = self.batch_size().is_some();
        Ok(spec.into_iter().map(|spec| if batched { spec.of_any_rows() } else { spec }).collect())
    }

    pub(crate) fn next_epoch(&self) -> u64 {
        // Relaxed: the counter orders no other memory access.
        self.passes.fetch_add(1, Ordering::Relaxed)
    }

    /// Begins a pass through another opener derived from this dataset's; an error in the description is its only item.
    pub(crate) fn open_with(&self, open: &Opener<T>, epoch: u64) -> DatasetIter<T> {
        let items = match &self.facts.error {
            Some(error) => Box::new(std::iter::once(Err(error.clone()))),
            None => open(Pass::epoch(epoch)),
        };
        DatasetIter { items: Some(items) }
    }
}

impl<T> Clone for Dataset<T> {
    fn clone(&self) -> Self {
        Dataset {
            open: Arc::clone(&self.open),
            picks: self.picks.clone(),
            facts: self.facts.clone(),
            passes: Arc::clone(&self.passes),
        }
    }
}

impl<T> fmt::Debug for Dataset<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Dataset")
            .field("cardinality", &self.facts.cardinality)
            .field("batch_size", &self.facts.batch_size())
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> IntoIterator for &Dataset<T> {
    type Item = crate::Result<T>;
    type IntoIter = DatasetIter<T>;

    fn into_iter(self) -> DatasetIter<T> {
        self.iter()
    }
}

impl<T> Iterator for DatasetIter<T> {
    type Item = crate::Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.items.as_mut()?.next();
        if !matches!(item, Some(Ok(_))) {
            self.items = None;
        }
        item
    }
}

impl<T> fmt::Debug for DatasetIter<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("DatasetIter").field("ended", &self.items.is_none()).finish_non_exhaustive()
    }
}

/// Joins rows of several batches.
pub(crate) type Join<T> = fn(&[T]) -> crate::Result<T>;

impl Batched {
    /// Creates a description of batches of elements of equal shape.
    pub(crate) fn of(size: usize) -> Batched {
        Batched { size, exact: false, join: Joining::Concat }
    }

    /// Creates a description of batches whose rows only `join` joins.
    pub(crate) fn joined_by<T: 'static>(size: usize, join: Join<T>) -> Batched {
        Batched { join: Joining::With(Arc::new(join)), ..Batched::of(size) }
    }
}

impl Facts {
    pub(crate) fn of(cardinality: Cardinality) -> Facts {
        Facts {
            cardinality,
            batched: None,
            prefetch: 0,
            error: None,
            shares: Shares::None,
            sources: Vec::new(),
            seeds: Vec::new(),
            stages: Vec::new(),
            lengths: if let Cardinality::Known(length) = cardinality { vec![length] } else { Vec::new() },
            record_rows: None,
            uneven: false,
            varies: false,
            buffers: 0,
        }
    }

    /// Returns the properties of the elements of two datasets, which `stage` pairs or appends. It names the stages of
    /// each, and the sizes of their batches unless they are equal.
    fn joined(stage: &str, one: Facts, other: Facts) -> Facts {
        let is_alike = (one.batch_size(), one.record_rows) == (other.batch_size(), other.record_rows);
        let part = |facts: &Facts| {
            let size = facts.element_rows().filter(|_| !is_alike);
            let size = size.map_or_else(String::new, |size| format!(" of batches of {size}"));
            format!("[{}]{size}", facts.stages.join(", "))
        };
        let is_plain = is_alike && one.stages.is_empty() && other.stages.is_empty();
        let stages = if is_plain { Vec::new() } else { vec![format!("{stage} {} and {}", part(&one), part(&other))] };
        let mut facts = Facts::of(Cardinality::Unknown);
        facts.batched = one.batched_as(&other);
        facts.record_rows = one.record_rows.filter(|_| is_alike);
        facts.note(one.error.or(other.error));
        facts.sources = [one.sources, other.sources].concat();
        facts.seeds = [one.seeds, other.seeds].concat();
        facts.lengths = [one.lengths, other.lengths].concat();
        facts.uneven = one.uneven || other.uneven;
        facts.varies = one.varies || other.varies;
        facts.buffers = one.buffers + other.buffers;
        Facts { stages, ..facts }
    }

    /// Returns the size of the last `batch`, if any.
    pub(crate) fn batch_size(&self) -> Option<usize> {
        self.batched.as_ref().map(|batched| batched.size)
    }

    /// Returns the size of the last `batch` if smaller ones are dropped.
    pub(crate) fn exact_size(&self) -> Option<usize> {
        self.batched.as_ref().filter(|batched| batched.exact).map(|batched| batched.size)
    }

    /// Returns the properties after a map of the elements.
    pub(crate) fn mapped(self) -> Facts {
        let batched = self.batched.map(|batched| Batched { join: Joining::Unknown, ..batched });
        Facts { batched, prefetch: 0, ..self }
    }

    /// Returns the function that joins batches of type `T`, if it is not [`Element::concat`].
    pub(crate) fn join_of_rows<T: 'static>(&self) -> Option<Join<T>> {
        match &self.batched.as_ref()?.join {
            Joining::With(join) => join.downcast_ref().copied(),
            Joining::Concat | Joining::Unknown => None,
        }
    }

    /// Returns the batches of two sequences of batches, if they are of one size.
    fn batched_as(&self, other: &Facts) -> Option<Batched> {
        let (one, other) = (self.batched.as_ref()?, other.batched.as_ref()?);
        let join = match (&one.join, &other.join) {
            (Joining::Unknown, _) | (_, Joining::Unknown) => Joining::Unknown,
            (Joining::Concat, join) | (join, _) => join.clone(),
        };
        (one.size == other.size).then_some(Batched { size: one.size, exact: one.exact || other.exact, join })
    }

    /// Returns the most rows of an element, if elements are batches of a known size.
    fn element_rows(&self) -> Option<usize> {
        self.batch_size().or(self.record_rows)
    }

    /// Records a stage that chooses or orders elements. If those are batches, it moves rows by the batch, and the order
    /// of the rows depends on the size.
    pub(crate) fn stage(&mut self, stage: impl fmt::Display) {
        self.stages.push(match self.element_rows() {
            Some(size) => format!("{stage} of batches of {size}"),
            None => stage.to_string(),
        });
    }

    /// Records that batches, if the elements are any, become elements as a whole.
    fn no_rows(&mut self, stage: &str) {
        if self.element_rows().is_some() {
            self.stage(stage);
        }
        self.single();
    }

    /// Notes that elements are no longer batches of a known size.
    fn single(&mut self) {
        (self.batched, self.record_rows, self.uneven) = (None, None, false);
    }

    /// Returns the size of batches if elements are counted and not rows, and batches of other sizes would have other
    /// rows: those of readers, and those that may be short in the middle of a pass.
    pub(crate) fn counted_rows(&self) -> Option<usize> {
        self.record_rows.or(self.batch_size().filter(|_| self.uneven))
    }

    /// Describes where the sources in memory end, for a stage whose order depends on it.
    fn ends(&self) -> String {
        let lengths: Vec<String> = self.lengths.iter().map(usize::to_string).collect();
        if lengths.is_empty() { String::new() } else { format!(" of {}", lengths.join(" and ")) }
    }

    /// Records that other elements follow the end of these, where the sources or exact batches determine it.
    fn followed(&mut self) {
        self.uneven = true;
        let end = format!("end{}", self.ends());
        match self.exact_size() {
            Some(_) => self.stage(end),
            None if self.lengths.is_empty() => {}
            None => self.stages.push(end),
        }
    }

    /// Records a stage after which other rows follow those that exact batches have dropped.
    fn follows_dropped(&mut self, stage: &str) {
        if self.exact_size().is_some() {
            self.stage(stage);
        }
    }

    /// Records a stage that repeats the order of one pass, if the order changes with the pass.
    fn keeps_order(&mut self, stage: &str) {
        if self.varies {
            self.stages.push(stage.to_owned());
        }
    }

    /// Keeps the first error.
    pub(crate) fn note(&mut self, error: Option<Error>) {
        self.error = self.error.take().or(error);
    }

    /// Records an error if a parameter that must be positive is zero.
    pub(crate) fn positive(&mut self, stage: &'static str, parameter: &'static str, value: usize) {
        self.note((value == 0).then_some(Error::Zero { stage, parameter }));
    }
}

#[cfg(test)]
mod tests;

//! Datasets divided between the replicas of all workers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::dataset::{Depth, Items, Opener, Order, Picks, Share, Shares, prefetched_items};
use crate::element::Operations;
use crate::feed::Feed;
use crate::plan::Division;
use crate::position::{Lane, ReadMode, Taken};
use crate::rebatch::Rebatch;
use crate::{
    AutoShardPolicy, BoxError, Cardinality, DataPlan, Dataset, Element, ElementSpec, Error, InputContext, InputOptions,
    InputPosition, InputReplicationMode, Result, Topology, UnequalData,
};

mod function;
mod iter;

pub use function::distribute_datasets_from_function;
pub use iter::{More, WorkerIterator};

/// One step of one worker.
pub(crate) struct Step<T> {
    parts: Vec<T>,
    /// The position of the pass after the step.
    lanes: Vec<Lane>,
    /// Whether every replica of this worker has all of its rows.
    full: bool,
    /// Whether each part has rows of the data; false for an empty part or a stand-in row.
    examples: Vec<bool>,
}

/// The parameters of a pass.
#[derive(Clone)]
pub(crate) struct Start {
    epoch: u64,
    /// The steps of the pass before this part of it.
    steps: u64,
    read_mode: ReadMode,
    lanes: Vec<Lane>,
    /// Whether empty parts are replaced by a stand-in row.
    stand_ins: bool,
}

type StepOpener<T> = Arc<dyn Fn(Start) -> Items<Step<T>> + Send + Sync>;
/// Returns the parts of a worker without data: empty, or a stand-in row each if the argument is true.
type EmptyParts<T> = Arc<dyn Fn(bool) -> Result<Option<Vec<T>>> + Send + Sync>;

/// Divides the global batches of a dataset between the replicas of all workers and returns this worker's share.
///
/// If the dataset reads a list of files, each worker reads files of its own; see [`AutoShardPolicy`]. Otherwise, or
/// with [`InputOptions::deterministic`], every worker iterates over the same global pipeline and keeps its own
/// replicas' rows of each batch: the data of a step then do not depend on how replicas are spread over workers, and all
/// workers end together. In both cases every example reaches exactly one replica. This requires that the pipeline is
/// deterministic (equal seeds, no external state) and that all workers begin passes in the same order.
///
/// # Cost
/// When iterating over the global pipeline, every worker reads and maps all data. If the pipeline holds tensors in
/// memory up to its `batch`, a worker gathers the rows of its own replicas only.
///
/// # Shapes
/// A global batch of `G` rows is divided between `N` replicas into parts that differ by at most one row; the larger
/// parts rotate, so that each worker gets its share of them. A short last batch fills replicas in order; replicas
/// without data get zero rows, or a [stand-in row](WorkerDataset::with_stand_ins), and still take part in the
/// step.
///
/// # Errors
/// - [`Error::NotBatched`] if the dataset is not batched; call `.batch(global_batch)`.
/// - [`Error::Options`] if the sharding policy does not fit the dataset, or an option is for input functions.
/// - [`Error::External`] if a source that is [asked for its name](Dataset::named_by) does not know it.
/// - The error of the dataset's description, if it is invalid.
///
/// # Examples
/// ```
/// use distribute_input::{Dataset, InputOptions, Topology, distribute_dataset};
/// let data = Dataset::range(0..9).batch(2);
/// let data = distribute_dataset(&data, Topology::local(2)?, InputOptions::default())?;
/// let last = data.iter().last().expect("there are five steps")?;
/// assert_eq!([last[0].as_slice(), last[1].as_slice()], [&[8][..], &[]]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.Strategy.experimental_distribute_dataset`.
pub fn distribute_dataset<T, L>(
    dataset: &Dataset<T>,
    topology: Topology,
    options: InputOptions,
) -> Result<WorkerDataset<T>>
where
    T: Element<L>,
{
    if let Some(error) = &dataset.facts.error {
        return Err(error.clone());
    }
    if options.replication_mode != InputReplicationMode::default() {
        let problem = "InputReplicationMode says how often an input function is called, and this is a dataset; \
                       leave it out, or distribute a function";
        return Err(Error::Options { problem });
    }
    let cardinality = dataset.cardinality();
    let global_batch = dataset.batch_size().ok_or(Error::NotBatched { cardinality })?;
    let reads = reads(&dataset.facts.shares, topology, options)?;
    let equal_pieces = options.auto_shard_policy == AutoShardPolicy::Data;
    let rebatch = Rebatch { global_batch, topology, equal_pieces };
    let (open, empty) = match &dataset.picks {
        Some(Picks { source, order: Order::Batches(open) }) => {
            let (source, rows) = (Arc::clone(source), row_numbers());
            steps(Arc::clone(open), rows, rebatch, move |rows: &Vec<usize>, range| source.pick(&rows[range]))
        }
        _ => {
            let mut operations = Operations::of::<L>();
            if let Some(join) = dataset.facts.join_of_rows() {
                operations.concat = join;
            }
            steps(Arc::clone(&dataset.open), operations, rebatch, operations.slice)
        }
    };
    let (read_mode, lane, cardinality) = match &reads {
        Reads::Walk => (ReadMode::Walk, Lane::of(None), cardinality),
        Reads::Own { share, .. } => {
            (ReadMode::Lanes, Lane::of_worker(*share, topology.replicas_per_worker()), Cardinality::Unknown)
        }
    };
    let cardinality = of_steps(cardinality, options);
    Ok(WorkerDataset {
        open,
        empty,
        read_mode,
        lanes: vec![lane],
        cardinality,
        depth: Depth::new(options.per_replica_buffer_size.max(dataset.facts.prefetch)),
        plan: DataPlan::new(topology, Division::Global { rebatch, reads }, cardinality).with_sources(&dataset.facts)?,
        unequal_data: options.unequal_data,
        passes: Arc::default(),
        stand_ins: false,
        taken: None,
    })
}

/// Returns the number of steps of as many batches. Which of them are dropped is known only when they are read.
fn of_steps(batches: Cardinality, options: InputOptions) -> Cardinality {
    match (batches, options.unequal_data) {
        (Cardinality::Known(_), UnequalData::Drop) => Cardinality::Unknown,
        _ => batches,
    }
}

/// How each worker reads a dataset that is divided by global batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// All workers iterate over the whole dataset together.
    Walk,
    /// Each worker reads by itself: this worker's share, or everything if `share` is `None`. `shares` is how the
    /// dataset is divided.
    Own { share: Option<Share>, shares: Shares },
}

fn reads(shares: &Shares, topology: Topology, options: InputOptions) -> Result<Reads> {
    let (policy, several) = (options.auto_shard_policy, topology.workers() > 1);
    let refuse = |problem| Err(Error::Options { problem });
    let own = || {
        let share = Some(Share { count: topology.workers(), index: topology.worker() });
        Reads::Own { share, shares: shares.clone() }
    };
    match (policy, shares) {
        (AutoShardPolicy::Hint | AutoShardPolicy::Off, _) if options.deterministic => refuse(
            "deterministic has all workers walk the whole data, AutoShardPolicy::Hint and Off have each read by \
             itself; leave one of them out",
        ),
        (AutoShardPolicy::File, Shares::None | Shares::Hint) => refuse(
            "AutoShardPolicy::File needs a dataset that reads a list of files or splits, up to its batch without take, \
             skip, shard, enumerate or zip; begin it with Dataset::from_files, or use AutoShardPolicy::Auto",
        ),
        _ if !several => Ok(Reads::Walk),
        (AutoShardPolicy::Auto | AutoShardPolicy::File, Shares::Files(_) | Shares::Splits(_))
            if !options.deterministic =>
        {
            Ok(own())
        }
        (AutoShardPolicy::Auto | AutoShardPolicy::File | AutoShardPolicy::Data, _) => Ok(Reads::Walk),
        (AutoShardPolicy::Hint, Shares::Hint) => Ok(own()),
        (AutoShardPolicy::Hint, _) => {
            distribute_notice::warn!(
                "AutoShardPolicy::Hint was asked for, but the dataset has no shard_hint: every worker reads \
                 everything, and each example is seen {} times in a pass; put shard_hint before the batch",
                topology.workers()
            );
            Ok(Reads::Own { share: None, shares: Shares::None })
        }
        (AutoShardPolicy::Off, _) => {
            tracing::warn!(
                "AutoShardPolicy::Off: every worker reads everything, and each example is seen {} times in a pass",
                topology.workers()
            );
            Ok(Reads::Own { share: None, shares: Shares::None })
        }
    }
}

/// Returns the element operations on row numbers of a source in memory.
fn row_numbers() -> Operations<Vec<usize>> {
    Operations {
        rows: |rows| Ok(rows.len()),
        row: |rows, at| Ok(vec![rows[at]]),
        slice: |rows, range| Ok(rows[range].to_vec()),
        gather: |rows, places| Ok(places.iter().map(|place| rows[*place]).collect()),
        concat: |all| Ok(all.concat()),
    }
}

/// Returns the steps of one worker from batches of type `B`, and its parts if it has no data.
fn steps<T, B, C>(
    open: Opener<B>,
    operations: Operations<B>,
    rebatch: Rebatch,
    cut: C,
) -> (StepOpener<T>, EmptyParts<T>)
where
    T: Clone + Send + 'static,
    B: Send + 'static,
    C: Fn(&B, Range<usize>) -> Result<T> + Send + Sync + 'static,
{
    let cut = Arc::new(cut);
    let empty: EmptyParts<T> = {
        let (open, cut) = (Arc::clone(&open), Arc::clone(&cut));
        Arc::new(move |stand_in| {
            let first = open(crate::dataset::Pass::epoch(0)).next().transpose()?;
            let part = first.map(|batch| cut(&batch, 0..usize::from(stand_in))).transpose()?;
            Ok(part.map(|part| vec![part; rebatch.topology.replicas_per_worker()]))
        })
    };
    let steps: StepOpener<T> = Arc::new(move |start| {
        let (cut, mut step) = (Arc::clone(&cut), start.steps as usize);
        let mut feed = Feed::new(&open, operations, start.epoch, rebatch.topology.replicas_per_worker(), start.lanes);
        let mut next = move || -> Result<Option<Step<T>>> {
            let (ranges, piece, rows, full) = match start.read_mode {
                ReadMode::Walk => {
                    let Some((rows, batch)) = feed.batch()? else { return Ok(None) };
                    let ranges: Vec<Range<usize>> = rebatch.local_ranges(step, rows)?.collect();
                    (ranges, batch, rows, rows == rebatch.global_batch)
                }
                ReadMode::Lanes | ReadMode::Function => {
                    let own = rebatch.own_ranges(step)?;
                    let wanted = own.last().map_or(0, |range| range.end);
                    let Some((rows, piece)) = feed.rows(wanted)? else { return Ok(None) };
                    let within = |range: Range<usize>| range.start.min(rows)..range.end.min(rows);
                    (own.into_iter().map(within).collect(), piece, rows, rows == wanted)
                }
            };
            // The number of a restored position is whatever its file has.
            step = step.saturating_add(1);
            let examples: Vec<bool> = ranges.iter().map(|range| !range.is_empty()).collect();
            // The last row of the piece; some replica has it as well.
            let last = rows.saturating_sub(1);
            let part = |range: Range<usize>| {
                cut(&piece, if range.is_empty() && start.stand_ins { last..last + 1 } else { range })
            };
            let parts = ranges.into_iter().map(part).collect::<Result<Vec<T>>>()?;
            Ok(Some(Step { parts, lanes: feed.lanes().to_vec(), full, examples }))
        };
        Box::new(std::iter::from_fn(move || next().transpose())) as Items<Step<T>>
    });
    (steps, empty)
}

/// One worker's share of a dataset: each step yields one element per local replica.
///
/// Every iteration is a new pass. Passes are counted by this dataset alone; iterating over the dataset that it was made
/// from has no effect on it.
///
/// # Source
/// One worker's part of `tf.distribute.DistributedDataset`.
pub struct WorkerDataset<T> {
    open: StepOpener<T>,
    empty: EmptyParts<T>,
    read_mode: ReadMode,
    /// The lanes that this worker reads in a whole pass.
    lanes: Vec<Lane>,
    cardinality: Cardinality,
    depth: Depth,
    plan: DataPlan,
    unequal_data: UnequalData,
    passes: Arc<AtomicU64>,
    stand_ins: bool,
    /// The share of each step in the data of an input function, if one chooses the data.
    taken: Option<Taken>,
}

impl<T: Send + 'static> WorkerDataset<T> {
    /// Gives a replica whose part of a step would be empty one row of the data, a *stand-in*, for programs that cannot
    /// process zero rows. Another replica has the same row, so it must have weight zero; [`WorkerIterator::examples`]
    /// distinguishes it from other rows.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Dataset, InputOptions, Topology, distribute_dataset};
    /// let data = Dataset::range(0..9).batch(2);
    /// let data = distribute_dataset(&data, Topology::local(2)?, InputOptions::default())?;
    /// let mut steps = data.with_stand_ins().iter();
    /// let last = steps.by_ref().last().expect("there are five steps")?;
    /// assert_eq!([last[0].as_slice(), last[1].as_slice()], [&[8][..], &[8]]);
    /// assert_eq!(steps.examples(), [true, false]);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn with_stand_ins(self) -> WorkerDataset<T> {
        WorkerDataset { stand_ins: true, ..self }
    }

    /// Gives a replica whose part of a step is empty zero rows, which is the default. Reverts
    /// [`with_stand_ins`](WorkerDataset::with_stand_ins).
    pub fn without_stand_ins(self) -> WorkerDataset<T> {
        WorkerDataset { stand_ins: false, ..self }
    }

    /// Counts passes together with another dataset, whose place this one takes.
    pub fn counting_with<U>(self, other: &WorkerDataset<U>) -> WorkerDataset<T> {
        WorkerDataset { passes: Arc::clone(&other.passes), ..self }
    }

    /// Returns whether a replica whose part of a step would be empty gets a stand-in row.
    pub fn has_stand_ins(&self) -> bool {
        self.stand_ins
    }

    /// Begins the next pass.
    pub fn iter(&self) -> WorkerIterator<T> {
        // Relaxed: the counter orders no other memory access.
        self.iter_epoch(self.passes.fetch_add(1, Ordering::Relaxed))
    }

    /// Begins the pass with the given number without advancing the counter.
    pub fn iter_epoch(&self, epoch: u64) -> WorkerIterator<T> {
        let (read_mode, stand_ins) = (self.read_mode, self.stand_ins);
        self.begin(Start { epoch, steps: 0, read_mode, lanes: self.lanes.clone(), stand_ins })
    }

    /// Resumes the pass at a position; the next pass is the one after it. The position may have been saved with another
    /// number of workers: together the workers see each remaining example exactly once.
    ///
    /// # Cost
    /// The part of the pass that was seen before is read again, unless the tensors are in memory.
    ///
    /// # Errors
    /// [`Error::Position`] if the rows have another order: files were added, renamed or removed, or a stage, a seed of
    /// a shuffle or an option of a reader has changed. Also if an input function chose the data, and the number of
    /// workers or what a step takes has changed, or if only one of both datasets is of an input function. At the
    /// beginning of a pass all of this may change.
    pub fn iter_from(&self, position: &InputPosition) -> Result<WorkerIterator<T>> {
        let lanes = position.lanes_of(self.topology(), self.unequal_data)?;
        position.check(self.read_mode, self.taken, &self.plan)?;
        self.passes.fetch_max(position.epoch.saturating_add(1), Ordering::Relaxed);
        let InputPosition { epoch, steps, read_mode, .. } = *position;
        Ok(self.begin(Start { epoch, steps, read_mode, lanes, stand_ins: self.stand_ins }))
    }

    fn begin(&self, start: Start) -> WorkerIterator<T> {
        let (open, first) = (Arc::clone(&self.open), start.clone());
        let steps = prefetched_items(move || open(first), &self.depth);
        // Workers that read data of their own agree on the end instead.
        let is_decided_here = start.read_mode == ReadMode::Walk || self.topology().workers() == 1;
        let only_full = self.unequal_data == UnequalData::Drop && is_decided_here;
        let Start { epoch, steps: before, read_mode, lanes, .. } = start;
        let (taken, order) = (self.taken, self.plan.order());
        let orders = self.plan.own_order().map(str::to_owned).into_iter().collect();
        let position = InputPosition { epoch, steps: before, read_mode, lanes, taken, order, orders };
        WorkerIterator::new(steps, position, only_full)
    }

    /// Returns whether passes of all workers that continue from this position, also that of a dataset which was read
    /// otherwise, end after the same number of steps, so that the workers need not agree on it.
    pub fn ends_together(&self, position: &InputPosition) -> bool {
        self.topology().workers() == 1 || position.read_mode == ReadMode::Walk
    }

    /// Returns what happens when some replicas have no data left.
    pub fn unequal_data(&self) -> UnequalData {
        self.unequal_data
    }

    /// Returns the parts of a step for a worker that has no data left: all empty, or all [stand-in
    /// rows](WorkerDataset::with_stand_ins). Returns `None` if the dataset is empty.
    ///
    /// # Errors
    /// The errors of reading the first batch, which determines shapes and types.
    pub fn empty_parts(&self) -> Result<Option<Vec<T>>> {
        (self.empty)(self.stand_ins)
    }

    /// Returns the shapes and types of each replica's elements with the number of rows left open; empty if the dataset
    /// is empty.
    ///
    /// # Errors
    /// The errors of reading the first batch.
    ///
    /// # Source
    /// `tf.distribute.WorkerDataset.element_spec`.
    pub fn element_spec<L>(&self) -> Result<Vec<ElementSpec>>
    where
        T: Element<L>,
    {
        let parts = self.empty_parts()?.unwrap_or_default();
        Ok(parts.first().map_or_else(Vec::new, |part| part.spec().into_iter().map(ElementSpec::of_any_rows).collect()))
    }

    /// Gives every part to `times` neighbouring ranks, for replicas that are groups of ranks which work on the same
    /// examples.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Dataset, InputOptions, Topology, distribute_dataset};
    /// let data = Dataset::range(0..4).batch(2);
    /// let data = distribute_dataset(&data, Topology::local(2)?, InputOptions::default())?.repeat_parts(2);
    /// let first = data.iter().next().expect("there are two steps")?;
    /// assert_eq!(first.iter().map(|part| part.as_slice()).collect::<Vec<_>>(), [[0], [0], [1], [1]]);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn repeat_parts(self, times: usize) -> WorkerDataset<T>
    where
        T: Clone,
    {
        fn repeated<T: Clone>(all: Vec<T>, times: usize) -> Vec<T> {
            all.into_iter().flat_map(|one| std::iter::repeat_n(one, times)).collect()
        }
        let (open, empty) = (Arc::clone(&self.open), Arc::clone(&self.empty));
        WorkerDataset {
            open: Arc::new(move |start| {
                Box::new(open(start).map(move |step| {
                    let Step { parts, lanes, full, examples } = step?;
                    Ok(Step { parts: repeated(parts, times), lanes, full, examples: repeated(examples, times) })
                })) as Items<Step<T>>
            }),
            empty: Arc::new(move |stand_in| Ok(empty(stand_in)?.map(|parts| repeated(parts, times)))),
            ..self
        }
    }

    /// Applies a function to each local replica's element when it is read ahead. The function receives the replica's
    /// index within this worker.
    pub fn map_replicas<U, F>(self, function: F) -> WorkerDataset<U>
    where
        U: Send + 'static,
        F: Fn(usize, T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        self.map_parts("map_replicas", function)
    }

    /// Applies a function that copies each local replica's element to the replica's device, when it is read ahead.
    pub fn fetch_parts<F>(self, function: F) -> WorkerDataset<T>
    where
        F: Fn(usize, T) -> Result<T, BoxError> + Send + Sync + 'static,
    {
        self.map_parts("copy to a device", function)
    }

    fn map_parts<U, F>(self, stage: &'static str, function: F) -> WorkerDataset<U>
    where
        U: Send + 'static,
        F: Fn(usize, T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        let map = Arc::new(move |parts: Vec<T>| -> Result<Vec<U>> {
            let parts = parts.into_iter().enumerate();
            parts.map(|(replica, part)| function(replica, part).map_err(|error| Error::user(stage, error))).collect()
        });
        let (open, empty, mapped) = (self.open, self.empty, Arc::clone(&map));
        WorkerDataset {
            open: Arc::new(move |start| {
                let map = Arc::clone(&map);
                Box::new(open(start).map(move |step| {
                    let Step { parts, lanes, full, examples } = step?;
                    Ok(Step { parts: map(parts)?, lanes, full, examples })
                })) as Items<Step<U>>
            }),
            empty: Arc::new(move |stand_in| empty(stand_in)?.map(|parts| mapped(parts)).transpose()),
            read_mode: self.read_mode,
            lanes: self.lanes,
            cardinality: self.cardinality,
            depth: self.depth,
            plan: self.plan,
            unequal_data: self.unequal_data,
            passes: self.passes,
            stand_ins: self.stand_ins,
            taken: self.taken,
        }
    }

    /// Returns the number of steps of a pass.
    pub fn cardinality(&self) -> Cardinality {
        self.cardinality
    }

    /// Returns the number of rows that each local replica gets in a step of a full global batch; `None` if an input
    /// function made the dataset without batching it.
    pub fn batch_sizes(&self, step: usize) -> Option<Vec<usize>> {
        self.plan.local_batch_sizes(step)
    }

    /// Returns the workers and replicas that read the dataset.
    pub fn topology(&self) -> Topology {
        self.plan.topology()
    }

    /// Returns the plan of which replica reads which rows, which can be printed.
    pub fn plan(&self) -> &DataPlan {
        &self.plan
    }
}

impl<T> Clone for WorkerDataset<T> {
    fn clone(&self) -> Self {
        WorkerDataset {
            open: Arc::clone(&self.open),
            empty: Arc::clone(&self.empty),
            read_mode: self.read_mode,
            lanes: self.lanes.clone(),
            cardinality: self.cardinality,
            depth: self.depth.clone(),
            plan: self.plan.clone(),
            unequal_data: self.unequal_data,
            passes: Arc::clone(&self.passes),
            stand_ins: self.stand_ins,
            taken: self.taken,
        }
    }
}

impl<T> fmt::Debug for WorkerDataset<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("WorkerDataset").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> IntoIterator for &WorkerDataset<T> {
    type Item = Result<Vec<T>>;
    type IntoIter = WorkerIterator<T>;

    fn into_iter(self) -> WorkerIterator<T> {
        self.iter()
    }
}

#[cfg(test)]
mod tests;

//! Datasets divided between the replicas of all workers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::dataset::{Items, Opener, Order, Picks, Share, Shares, prefetched_items};
use crate::element::Operations;
use crate::feed::Feed;
use crate::plan::Division;
use crate::position::{Lane, Way};
use crate::rebatch::Rebatch;
use crate::{
    AutoShardPolicy, BoxError, Cardinality, DataPlan, Dataset, Element, ElementSpec, Error, InputContext, InputOptions,
    InputPosition, InputReplicationMode, InputTopology, Result, UnequalData,
};

mod function;
mod iter;

pub use function::distribute_datasets_from_function;
pub use iter::{DistributedIter, More};

/// One step of one worker.
pub(crate) struct Step<T> {
    parts: Vec<T>,
    /// Where the pass stands after it.
    lanes: Vec<Lane>,
    /// Whether every replica of this worker has all its rows.
    full: bool,
    /// Whether each part has rows of the data: false where a repeated row stands in for them.
    examples: Vec<bool>,
}

/// What a pass reads, and how.
#[derive(Clone)]
pub(crate) struct Start {
    epoch: u64,
    way: Way,
    lanes: Vec<Lane>,
    /// Whether parts without rows get a row that stands in.
    stand_ins: bool,
}

type StepOpener<T> = Arc<dyn Fn(Start) -> Items<Step<T>> + Send + Sync>;
/// Makes the parts of a worker that has no data: without rows, or with a row that stands in.
type EmptyParts<T> = Arc<dyn Fn(bool) -> Result<Option<Vec<T>>> + Send + Sync>;

/// Divides the global batches of a dataset between the replicas of all workers; this is one worker's share.
///
/// Where the dataset reads a list of files, each worker reads files of its own; see [`AutoShardPolicy`]. Else, and with
/// [`InputOptions::deterministic`], every worker walks the same global pipeline and takes its own replicas' rows of each batch:
/// what a step trains on then does not depend on how replicas are spread over workers, and all workers end together. Either
/// way every example reaches exactly one replica. It asks of the pipeline that it is deterministic (equal seeds, no outside
/// state), and of the program that all workers count the passes alike.
///
/// # Cost
/// Walking, every worker reads everything, and maps what is mapped. Where the pipeline is tensors in memory up to its `batch`,
/// a worker gathers the rows of its own replicas only.
///
/// # Shapes
/// A global batch of `G` rows is divided between `N` replicas into parts that differ by one row at most; the larger parts
/// go round, so that each worker gets its share of them. A short last batch fills replicas in order; those without data get
/// zero rows, or a row that [stands in](DistributedDataset::with_stand_ins), and still take part in the step.
///
/// # Errors
/// - [`Error::NotBatched`]: call `.batch(global_batch)`.
/// - [`Error::Options`] where the policy does not fit the dataset.
/// - Mistakes in the description of the dataset.
///
/// # Examples
/// ```
/// use distribute_input::{Dataset, InputOptions, InputTopology, distribute_dataset};
/// let data = Dataset::range(0..9).batch(2);
/// let data = distribute_dataset(&data, InputTopology::local(2)?, InputOptions::default())?;
/// let last = data.iter().last().expect("there are five steps")?;
/// assert_eq!([last[0].as_slice(), last[1].as_slice()], [&[8][..], &[]]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.Strategy.experimental_distribute_dataset`.
pub fn distribute_dataset<T, L>(
    dataset: &Dataset<T>,
    topology: InputTopology,
    options: InputOptions,
) -> Result<DistributedDataset<T>>
where
    T: Element<L>,
{
    if let Some(error) = &dataset.facts.error {
        return Err(error.clone());
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
            let operations = Operations::of::<L>();
            steps(Arc::clone(&dataset.open), operations, rebatch, operations.slice)
        }
    };
    let (way, lane, cardinality) = match &reads {
        Reads::Walk => (Way::Walk, Lane::of(None), cardinality),
        Reads::Own { share, .. } => (Way::Lanes, Lane::of(*share), Cardinality::Unknown),
    };
    Ok(DistributedDataset {
        open,
        empty,
        way,
        lanes: vec![lane],
        cardinality,
        depth: options.per_replica_buffer_size.max(dataset.facts.prefetch),
        plan: DataPlan::new(topology, Division::Global { rebatch, reads }, cardinality),
        unequal_data: options.unequal_data,
        passes: Arc::default(),
        stand_ins: false,
    })
}

/// What each worker reads of a dataset that is divided by global batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// The whole, together.
    Walk,
    /// By itself: this worker's share, or everything; `shares` is how the dataset is divided.
    Own { share: Option<Share>, shares: Shares },
}

fn reads(shares: &Shares, topology: InputTopology, options: InputOptions) -> Result<Reads> {
    let (policy, several) = (options.auto_shard_policy, topology.workers() > 1);
    let refuse = |problem| Err(Error::Options { problem });
    let own = || {
        let share = Some(Share { count: topology.workers(), index: topology.worker() });
        Reads::Own { share, shares: shares.clone() }
    };
    match (policy, shares) {
        (AutoShardPolicy::Hint | AutoShardPolicy::Off, _) if options.deterministic => refuse(
            "deterministic has all workers walk the whole data, AutoShardPolicy::Hint and Off have each read by itself; \
             leave one of them out",
        ),
        (AutoShardPolicy::File, Shares::None | Shares::Hint) => refuse(
            "AutoShardPolicy::File needs a dataset that reads a list of files, up to its batch without take, skip, shard, \
             enumerate or zip; begin it with Dataset::from_files, or use AutoShardPolicy::Auto",
        ),
        _ if !several => Ok(Reads::Walk),
        (AutoShardPolicy::Auto | AutoShardPolicy::File, Shares::Files(_)) if !options.deterministic => Ok(own()),
        (AutoShardPolicy::Auto | AutoShardPolicy::File | AutoShardPolicy::Data, _) => Ok(Reads::Walk),
        (AutoShardPolicy::Hint, Shares::Hint) => Ok(own()),
        (AutoShardPolicy::Hint, _) => {
            distribute_notice::warn!(
                "AutoShardPolicy::Hint was asked for, but the dataset has no shard_hint: every worker reads everything, and \
                 each example is seen {} times in a pass; put shard_hint before the batch",
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

/// Row numbers of a source in memory, as elements.
fn row_numbers() -> Operations<Vec<usize>> {
    Operations {
        rows: |rows| Ok(rows.len()),
        row: |rows, at| Ok(vec![rows[at]]),
        slice: |rows, range| Ok(rows[range].to_vec()),
        gather: |rows, places| Ok(places.iter().map(|place| rows[*place]).collect()),
        concat: |all| Ok(all.concat()),
    }
}

/// The steps of one worker, of batches read as `B`; and its parts where it has no data.
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
        let (cut, mut step) = (Arc::clone(&cut), 0);
        let mut feed = Feed::new(&open, operations, start.epoch, start.lanes);
        let mut next = move || -> Result<Option<Step<T>>> {
            let (ranges, piece, rows, full) = match start.way {
                Way::Walk => {
                    let Some((rows, batch)) = feed.batch()? else { return Ok(None) };
                    let ranges: Vec<Range<usize>> = rebatch.local_ranges(step, rows)?.collect();
                    (ranges, batch, rows, rows == rebatch.global_batch)
                }
                Way::Lanes | Way::Function => {
                    let own = rebatch.own_ranges(step)?;
                    let wanted = own.last().map_or(0, |range| range.end);
                    let Some((rows, piece)) = feed.rows(wanted)? else { return Ok(None) };
                    let within = |range: Range<usize>| range.start.min(rows)..range.end.min(rows);
                    (own.into_iter().map(within).collect(), piece, rows, rows == wanted)
                }
            };
            step += 1;
            let examples: Vec<bool> = ranges.iter().map(|range| !range.is_empty()).collect();
            // The last row there is, which some replica has too.
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

/// One worker's share of the data: each step yields one element per local replica.
///
/// Every iteration is a new pass, counted by this dataset alone: looking into the dataset it was made from changes
/// nothing here.
///
/// # Source
/// `tf.distribute.DistributedDataset`.
pub struct DistributedDataset<T> {
    open: StepOpener<T>,
    empty: EmptyParts<T>,
    way: Way,
    /// What this worker reads in a whole pass.
    lanes: Vec<Lane>,
    cardinality: Cardinality,
    depth: usize,
    plan: DataPlan,
    unequal_data: UnequalData,
    passes: Arc<AtomicU64>,
    stand_ins: bool,
}

impl<T: Send + 'static> DistributedDataset<T> {
    /// The same, where a replica whose part of a step would be empty gets one row of the data, which other replicas have, too:
    /// for programs that cannot work on no rows. [`DistributedIter::examples`] tells such a row, which must weigh nothing,
    /// from others.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Dataset, InputOptions, InputTopology, distribute_dataset};
    /// let data = distribute_dataset(&Dataset::range(0..9).batch(2), InputTopology::local(2)?, InputOptions::default())?;
    /// let mut steps = data.with_stand_ins().iter();
    /// let last = steps.by_ref().last().expect("there are five steps")?;
    /// assert_eq!([last[0].as_slice(), last[1].as_slice()], [&[8][..], &[8]]);
    /// assert_eq!(steps.examples(), [true, false]);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn with_stand_ins(self) -> DistributedDataset<T> {
        DistributedDataset { stand_ins: true, ..self }
    }

    /// The same, where a replica whose part of a step is empty gets no rows: as it is without
    /// [`with_stand_ins`](DistributedDataset::with_stand_ins).
    pub fn without_stand_ins(self) -> DistributedDataset<T> {
        DistributedDataset { stand_ins: false, ..self }
    }

    /// Whether a replica whose part of a step would be empty gets a row that stands in.
    pub fn has_stand_ins(&self) -> bool {
        self.stand_ins
    }

    /// Begins the next pass.
    pub fn iter(&self) -> DistributedIter<T> {
        // A counter that orders nothing else.
        self.iter_epoch(self.passes.fetch_add(1, Ordering::Relaxed))
    }

    /// Begins the pass of a given number, without counting it.
    pub fn iter_epoch(&self, epoch: u64) -> DistributedIter<T> {
        let (way, stand_ins) = (self.way, self.stand_ins);
        self.begin(Start { epoch, way, lanes: self.lanes.clone(), stand_ins })
    }

    /// Goes on with the pass that a position is in; the next pass is the one after it. The position may have been saved under
    /// another number of workers: together they see the examples that were left, once each.
    ///
    /// # Cost
    /// What the pass has seen is read again, except where tensors are in memory.
    ///
    /// # Errors
    /// [`Error::Position`] where an input function chose the data of another number of workers.
    pub fn iter_from(&self, position: &InputPosition) -> Result<DistributedIter<T>> {
        let lanes = position.lanes_of(self.topology())?;
        self.passes.fetch_max(position.epoch + 1, Ordering::Relaxed);
        let (epoch, way, stand_ins) = (position.epoch, position.way, self.stand_ins);
        Ok(self.begin(Start { epoch, way, lanes, stand_ins }))
    }

    fn begin(&self, start: Start) -> DistributedIter<T> {
        let (open, first) = (Arc::clone(&self.open), start.clone());
        let steps = prefetched_items(move || open(first), self.depth);
        let only_full = self.unequal_data == UnequalData::Drop && start.way == Way::Walk;
        DistributedIter::new(steps, start, only_full)
    }

    /// Whether all workers' passes end after the same number of steps, so that they need not agree on it.
    pub fn ends_together(&self) -> bool {
        self.topology().workers() == 1 || self.way == Way::Walk
    }

    /// What happens when some replicas have no data left.
    pub fn unequal_data(&self) -> UnequalData {
        self.unequal_data
    }

    /// The parts of a step of a worker that has no data left, all of which [stand in](DistributedDataset::with_stand_ins) for
    /// rows or have none; `None` where nobody has any.
    ///
    /// # Errors
    /// Those of reading the first batch, whose form they have.
    pub fn empty_parts(&self) -> Result<Option<Vec<T>>> {
        (self.empty)(self.stand_ins)
    }

    /// The shapes and types of what each replica gets, whose rows are left open; empty where there is no data.
    ///
    /// # Errors
    /// Those of reading the first batch.
    ///
    /// # Source
    /// `tf.distribute.DistributedDataset.element_spec`.
    pub fn element_spec<L>(&self) -> Result<Vec<ElementSpec>>
    where
        T: Element<L>,
    {
        let parts = self.empty_parts()?.unwrap_or_default();
        Ok(parts.first().map_or_else(Vec::new, |part| part.spec().into_iter().map(ElementSpec::of_any_rows).collect()))
    }

    /// Applies a function to each local replica's element, ahead of the reader: for example a copy to the replica's
    /// device. It gets the replica's number within this worker.
    pub fn map_replicas<U, F>(self, function: F) -> DistributedDataset<U>
    where
        U: Send + 'static,
        F: Fn(usize, T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        let map = Arc::new(move |parts: Vec<T>| -> Result<Vec<U>> {
            let parts = parts.into_iter().enumerate();
            parts
                .map(|(replica, part)| function(replica, part).map_err(|error| Error::user("map_replicas", error)))
                .collect()
        });
        let (open, empty, mapped) = (self.open, self.empty, Arc::clone(&map));
        DistributedDataset {
            open: Arc::new(move |start| {
                let map = Arc::clone(&map);
                Box::new(open(start).map(move |step| {
                    let Step { parts, lanes, full, examples } = step?;
                    Ok(Step { parts: map(parts)?, lanes, full, examples })
                })) as Items<Step<U>>
            }),
            empty: Arc::new(move |stand_in| empty(stand_in)?.map(|parts| mapped(parts)).transpose()),
            way: self.way,
            lanes: self.lanes,
            cardinality: self.cardinality,
            depth: self.depth,
            plan: self.plan,
            unequal_data: self.unequal_data,
            passes: self.passes,
            stand_ins: self.stand_ins,
        }
    }

    /// How many steps a pass has.
    pub fn cardinality(&self) -> Cardinality {
        self.cardinality
    }

    /// Rows each local replica gets in a step of a full global batch; nothing where a function made the dataset without
    /// batching it.
    pub fn batch_sizes(&self, step: usize) -> Option<Vec<usize>> {
        self.plan.local_batch_sizes(step)
    }

    /// Who reads, over all workers.
    pub fn topology(&self) -> InputTopology {
        self.plan.topology()
    }

    /// Which replica reads what: print it.
    pub fn plan(&self) -> &DataPlan {
        &self.plan
    }
}

impl<T> Clone for DistributedDataset<T> {
    fn clone(&self) -> Self {
        DistributedDataset {
            open: Arc::clone(&self.open),
            empty: Arc::clone(&self.empty),
            way: self.way,
            lanes: self.lanes.clone(),
            cardinality: self.cardinality,
            depth: self.depth,
            plan: self.plan.clone(),
            unequal_data: self.unequal_data,
            passes: Arc::clone(&self.passes),
            stand_ins: self.stand_ins,
        }
    }
}

impl<T> fmt::Debug for DistributedDataset<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("DistributedDataset").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> IntoIterator for &DistributedDataset<T> {
    type Item = Result<Vec<T>>;
    type IntoIter = DistributedIter<T>;

    fn into_iter(self) -> DistributedIter<T> {
        self.iter()
    }
}

#[cfg(test)]
mod tests;

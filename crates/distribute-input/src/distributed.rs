//! Datasets divided between the replicas of all workers.

use std::{fmt, sync::Arc};

use crate::{
    BoxError, Cardinality, DataPlan, Dataset, DatasetIter, Element, Error, InputContext, InputTopology, Result,
    dataset::{Facts, Items, Opener, Order, Picks, chunked, prefetched},
    element::Operations,
    plan::Division,
    rebatch::Rebatch,
};

/// How a distributed dataset is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputOptions {
    /// Elements read ahead for each replica, on a thread of each pass; 0 reads when asked, [`AUTOTUNE`](crate::AUTOTUNE)
    /// finds a depth. A deeper prefetch at the end of the dataset counts instead. Default: 1.
    pub per_replica_buffer_size: usize,
}

impl Default for InputOptions {
    fn default() -> Self {
        InputOptions { per_replica_buffer_size: 1 }
    }
}

/// Divides the global batches of a dataset between the replicas of all workers; this is one worker's share.
///
/// Every worker walks the same global pipeline and takes its own replicas' rows of each batch. So every example reaches
/// exactly one replica, what a step trains on does not depend on how replicas are spread over workers, and all workers end
/// together. It asks of the pipeline that it is deterministic (equal seeds, no outside state), and of the program that all
/// workers count the passes alike.
///
/// # Cost
/// Every worker reads everything, and maps what is mapped. Where the pipeline is tensors in memory up to its `batch`, a
/// worker gathers the rows of its own replicas only.
///
/// # Shapes
/// A global batch of `G` rows is divided between `N` replicas into parts that differ by one row at most; the larger parts
/// go round, so that each worker gets its share of them. A short last batch fills replicas in order; those without data get
/// zero rows, and still take part in the step.
///
/// # Errors
/// - [`Error::NotBatched`]: call `.batch(global_batch)`.
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
/// `tf.distribute.Strategy.experimental_distribute_dataset` with `AutoShardPolicy.OFF`, where each replica takes its own
/// part of what its worker reads.
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
    let rebatch = Rebatch { global_batch, topology };
    let open = match &dataset.picks {
        Some(Picks { source, order: Order::Batches(open) }) => {
            let (source, open) = (Arc::clone(source), Arc::clone(open));
            divided(open, rebatch, |rows| Ok(rows.len()), move |rows, range| source.pick(&rows[range]))
        }
        _ => {
            let operations = Operations::of::<L>();
            divided(Arc::clone(&dataset.open), rebatch, operations.rows, operations.slice)
        }
    };
    let plan = DataPlan::new(topology, Division::Global(rebatch), cardinality);
    let depth = options.per_replica_buffer_size.max(dataset.facts.prefetch);
    Ok(DistributedDataset { steps: Dataset::new(open, Facts::of(cardinality)), depth, plan })
}

/// Calls a function that makes this worker's own dataset; its batches are *per-replica* batches.
///
/// The function is called once per worker and decides itself what the worker reads, for example with
/// [`Dataset::shard`]. Each replica takes the next element in turn. When the data end within a step, the replicas left get
/// zero rows. Workers end together only if their datasets are equally long: nothing is divided here, so nothing can see to
/// it.
///
/// # Errors
/// What the function returns, and mistakes in the description of its dataset.
///
/// # Examples
/// ```
/// use distribute_input::{Dataset, InputOptions, InputTopology, distribute_datasets_from_function};
/// let worker = InputTopology::new(2, 1, 1)?;
/// let data = distribute_datasets_from_function(worker, InputOptions::default(), |context| {
///     let batch = context.per_replica_batch_size(4)?;
///     Ok(Dataset::range(0..8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(batch))
/// })?;
/// let first = data.iter().next().expect("there are two steps")?;
/// assert_eq!(first[0].as_slice(), [1, 3]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.Strategy.distribute_datasets_from_function`.
pub fn distribute_datasets_from_function<T, L>(
    topology: InputTopology,
    options: InputOptions,
    function: impl FnOnce(InputContext) -> Result<Dataset<T>, BoxError>,
) -> Result<DistributedDataset<T>>
where
    T: Element<L>,
{
    let dataset = function(topology.context()).map_err(|error| Error::user("input function", error))?;
    if let Some(error) = dataset.facts.error {
        return Err(error);
    }
    let replicas = topology.replicas_per_worker();
    let cardinality = dataset.facts.cardinality.map(|elements| elements.div_ceil(replicas));
    let chunks = chunked(dataset.open, replicas, false);
    let open: Opener<Vec<T>> = Arc::new(move |pass| {
        Box::new(chunks(pass).map(move |step| {
            let mut step = step?;
            if let Some(empty) =
                step.last().filter(|_| step.len() < replicas).map(|last| last.slice(0..0)).transpose()?
            {
                step.resize(replicas, empty);
            }
            Ok(step)
        })) as Items<Vec<T>>
    });
    let plan = DataPlan::new(topology, Division::PerWorker { batch: dataset.facts.batch_size }, cardinality);
    Ok(DistributedDataset {
        steps: Dataset::new(open, Facts::of(cardinality)),
        depth: options.per_replica_buffer_size,
        plan,
    })
}

/// One worker's share of the data: each step yields one element per local replica.
///
/// Every iteration is a new pass, counted by this dataset alone: looking into the dataset it was made from changes
/// nothing here.
///
/// # Source
/// `tf.distribute.DistributedDataset`.
pub struct DistributedDataset<T> {
    steps: Dataset<Vec<T>>,
    depth: usize,
    plan: DataPlan,
}

/// One pass over a [`DistributedDataset`]: for each step, one element per local replica, in their order.
pub type DistributedIter<T> = DatasetIter<Vec<T>>;

impl<T: Send + 'static> DistributedDataset<T> {
    /// Begins the next pass.
    pub fn iter(&self) -> DistributedIter<T> {
        self.iter_epoch(self.steps.next_epoch())
    }

    /// Begins the pass of a given number, without counting it: to resume a training.
    pub fn iter_epoch(&self, epoch: u64) -> DistributedIter<T> {
        self.steps.open_with(&prefetched(Arc::clone(&self.steps.open), self.depth), epoch)
    }

    /// Applies a function to each local replica's element, ahead of the reader: for example a copy to the replica's
    /// device. It gets the replica's number within this worker.
    pub fn map_replicas<U, F>(self, function: F) -> DistributedDataset<U>
    where
        U: Send + 'static,
        F: Fn(usize, T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        let steps = self.steps.map(move |step| {
            step.into_iter().enumerate().map(|(replica, element)| function(replica, element)).collect()
        });
        DistributedDataset { steps, depth: self.depth, plan: self.plan }
    }

    /// How many steps a pass has.
    pub fn cardinality(&self) -> Cardinality {
        self.steps.cardinality()
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
        DistributedDataset { steps: self.steps.clone(), depth: self.depth, plan: self.plan.clone() }
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

/// Cuts each global batch, read as `B`, to the parts of this worker's replicas.
fn divided<T, B, C>(open: Opener<B>, rebatch: Rebatch, rows: fn(&B) -> Result<usize>, cut: C) -> Opener<Vec<T>>
where
    T: Send + 'static,
    B: Send + 'static,
    C: Fn(&B, std::ops::Range<usize>) -> Result<T> + Send + Sync + 'static,
{
    let cut = Arc::new(cut);
    Arc::new(move |pass| {
        let cut = Arc::clone(&cut);
        Box::new(open(pass).enumerate().map(move |(step, batch)| {
            let batch = batch?;
            rebatch.local_ranges(step, rows(&batch)?)?.map(|range| cut(&batch, range)).collect()
        })) as Items<Vec<T>>
    })
}

#[cfg(test)]
mod tests;

//! Datasets that a function creates for each worker.

use super::*;
use crate::dataset::chunked;

/// Calls a function that creates this worker's own dataset, whose batches are *per-replica* batches.
///
/// The function is called once per worker and determines what the worker reads, for example with [`Dataset::shard`].
/// Each replica takes the next element in turn. With [`InputReplicationMode::PerReplica`] it is called once for each
/// replica instead, and the pipeline id is the replica's number over all workers. If the data end within a step, the
/// remaining replicas get zero rows, or a [stand-in row](WorkerDataset::with_stand_ins).
///
/// # Errors
/// [`Error::User`] or the function's own [`enum@Error`] if the function fails, and the error of its dataset's
/// description, if it is invalid; [`Error::Options`] for options that say how data are divided between workers, and for
/// datasets of a worker that are batched by different sizes.
///
/// # Examples
/// ```
/// use distribute_input::{Dataset, InputOptions, Topology, distribute_datasets_from_function};
/// let worker = Topology::new(2, 1, 1)?;
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
    topology: Topology,
    options: InputOptions,
    mut function: impl FnMut(InputContext) -> Result<Dataset<T>, BoxError>,
) -> Result<WorkerDataset<T>>
where
    T: Element<L>,
{
    if options.deterministic || options.auto_shard_policy != AutoShardPolicy::default() {
        let problem = "the input function decides which data each worker reads; leave auto_shard_policy and \
                       deterministic out, or distribute a dataset";
        return Err(Error::Options { problem });
    }
    let replicas = topology.replicas_per_worker();
    let mut made = Vec::new();
    let calls = match options.replication_mode {
        InputReplicationMode::PerWorker => vec![InputContext::of(&topology)],
        InputReplicationMode::PerReplica => {
            let context = |local: usize| InputContext {
                num_input_pipelines: topology.num_replicas(),
                input_pipeline_id: topology.worker() * replicas + local,
                num_replicas_in_sync: topology.num_replicas(),
            };
            (0..replicas).map(context).collect()
        }
    };
    for context in calls {
        let dataset = function(context).map_err(|error| Error::user("input function", error))?;
        if let Some(error) = dataset.facts.error {
            return Err(error);
        }
        made.push(dataset);
    }
    let sizes: Vec<Option<usize>> = made.iter().map(|dataset| dataset.batch_size()).collect();
    let mut known = sizes.iter().flatten();
    if known.next().is_some_and(|first| known.any(|size| size != first)) {
        let problem = "the input function makes batches of different sizes for the replicas of a worker; batch all of \
                       its datasets by the same size";
        return Err(Error::Options { problem });
    }
    let batch = sizes[0].filter(|_| !sizes.contains(&None));
    let per_step = replicas / made.len();
    let sizes: Arc<[Option<usize>]> = sizes.into_iter().flat_map(|size| std::iter::repeat_n(size, per_step)).collect();
    let rows = batch.map(|batch| (batch * per_step) as u64);
    let taken = Taken { pipelines: made.len() as u64, batches: per_step as u64, rows };
    let cardinality = made.iter().map(|dataset| dataset.facts.cardinality.map(|elements| elements.div_ceil(per_step)));
    let cardinality = of_steps(cardinality.reduce(Cardinality::longer).unwrap_or(Cardinality::Unknown), options);
    let plan = DataPlan::new(topology, Division::PerWorker { batch }, cardinality)
        .with_datasets(made.iter().map(|dataset| &dataset.facts));
    let firsts: Vec<Opener<T>> = made.iter().map(|dataset| Arc::clone(&dataset.open)).collect();
    let Operations { slice, rows, .. } = Operations::of::<L>();
    let chunks: Vec<Opener<Vec<T>>> = made.into_iter().map(|dataset| chunked(dataset.open, per_step, false)).collect();
    let open: StepOpener<T> = Arc::new(move |start| {
        let pass = crate::dataset::Pass::epoch(start.epoch).in_order();
        let sizes = Arc::clone(&sizes);
        let mut lane = start.lanes.first().cloned().unwrap_or_else(|| Lane::of(None));
        // Nothing is seen after the cuts yet.
        let passed = usize::try_from(lane.passed()).unwrap_or(usize::MAX);
        let mut pipelines: Vec<Items<Vec<T>>> =
            chunks.iter().map(|open| skipping(open(pass.clone()), passed)).collect();
        let mut next = move || -> Result<Option<Step<T>>> {
            let mut parts: Vec<Option<T>> = Vec::with_capacity(replicas);
            for pipeline in &mut pipelines {
                let elements = pipeline.next().transpose()?.unwrap_or_default();
                let missing = per_step - elements.len();
                parts.extend(elements.into_iter().map(Some));
                parts.extend((0..missing).map(|_| None));
            }
            let Some(some) = parts.iter().flatten().next_back().cloned() else { return Ok(None) };
            let is_full = |(part, size): (&Option<T>, &Option<usize>)| match (part, size) {
                (Some(part), Some(size)) => Ok(rows(part)? >= *size),
                (part, _) => Ok(part.is_some()),
            };
            let full = parts.iter().zip(&*sizes).map(is_full).collect::<Result<Vec<bool>>>()?;
            let full = full.iter().all(|is_full| *is_full);
            let examples = parts.iter().map(Option::is_some).collect();
            // Replicas without data get zero rows or a stand-in row.
            let part = |part: Option<T>| part.map_or_else(|| slice(&some, 0..usize::from(start.stand_ins)), Ok);
            let parts = parts.into_iter().map(part).collect::<Result<Vec<T>>>()?;
            lane.seen = lane.seen.saturating_add(1);
            Ok(Some(Step { parts, lanes: vec![lane.clone()], full, examples }))
        };
        Box::new(std::iter::from_fn(move || next().transpose())) as Items<Step<T>>
    });
    let empty: EmptyParts<T> = Arc::new(move |stand_in| {
        let mut elements = firsts.iter().flat_map(|open| open(crate::dataset::Pass::epoch(0)));
        let Some(first) = elements.next().transpose()? else { return Ok(None) };
        Ok(Some(vec![slice(&first, 0..usize::from(stand_in))?; replicas]))
    });
    let share = Share { count: topology.workers(), index: topology.worker() };
    Ok(WorkerDataset {
        open,
        empty,
        read_mode: ReadMode::Function,
        lanes: vec![Lane::of(Some(share))],
        cardinality,
        depth: Depth::new(options.per_replica_buffer_size),
        plan,
        unequal_data: options.unequal_data,
        passes: Arc::default(),
        stand_ins: false,
        taken: Some(taken),
    })
}

/// Skips the first `steps` steps, but keeps errors among them.
fn skipping<X: Send + 'static>(items: Items<X>, steps: usize) -> Items<X> {
    let kept = move |(at, item): (usize, Result<X>)| (item.is_err() || at >= steps).then_some(item);
    Box::new(items.enumerate().filter_map(kept))
}

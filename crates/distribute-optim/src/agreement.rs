//! Agreement of all workers on the model: the same variables, with the chief's values.

use distribute_collectives::{Difference, ProcessGroup, Rank, first_difference, on_local_ranks};
use distribute_strategy::{ReplicaContext, Strategy};
use distribute_values::TensorStorage;
use twox_hash::XxHash3_64;

use crate::parameters::describe;
use crate::{Error, Parameters, TensorLibrary, Variable};

/// Compares the variables of all workers and copies the chief's values to all of them.
///
/// # Errors
/// [`Error::ModelDiffers`] if workers have different variables. The collective's error if a worker is missing or fails,
/// and the library's if a tensor cannot be read or written.
pub fn check_and_share<L: TensorLibrary>(strategy: &Strategy, variables: &[Variable<L>]) -> Result<(), L::Error> {
    if strategy.topology().workers() == 1 {
        return Ok(());
    }
    let descriptions: Vec<String> = variables.iter().map(describe).collect();
    compare::<L>(strategy, &descriptions)?;
    share_parts(strategy, variables)?;
    share(strategy, variables)
}

/// Copies the parts of sharded variables of the first shard group to those that mirror it.
fn share_parts<L: TensorLibrary>(strategy: &Strategy, variables: &[Variable<L>]) -> Result<(), L::Error> {
    if strategy.sharding().is_none_or(|sharding| sharding.mirrors == 1) {
        return Ok(());
    }
    for variable in variables.iter().filter(|variable| variable.layout().is_some()) {
        let shared = strategy.on_shard_groups(|local, groups| {
            let mut own = Vec::new();
            variable.components()[local].read(&mut |buffer| own.extend_from_slice(buffer.as_bytes()))?;
            let start = |group: &ProcessGroup| group.start().broadcast(own, Rank(0));
            Ok::<_, L::Error>(groups.mirrors().map(start).transpose()?)
        })?;
        for (component, part) in variable.components().iter().zip(shared) {
            let part = part.unwrap_or_default();
            component.write(&mut |mut buffer| {
                buffer.as_bytes_mut().iter_mut().zip(&part).for_each(|(own, shared)| *own = *shared);
            })?;
        }
    }
    Ok(())
}

/// Copies the chief's values of variables to all workers. Every worker must name the same variables in the same order.
///
/// # Errors
/// The collective's error if a worker is missing or fails, and the library's if a tensor cannot be read or written.
pub fn share<'a, L: TensorLibrary>(
    strategy: &Strategy,
    variables: impl IntoIterator<Item = &'a Variable<L>>,
) -> Result<(), L::Error> {
    if strategy.topology().workers() == 1 {
        return Ok(());
    }
    // Parts of sharded variables come from the chief already when they are created.
    let variables: Vec<&Variable<L>> = variables.into_iter().filter(|variable| variable.layout().is_none()).collect();
    let groups = strategy.groups();
    // The bytes are copied first, since the program may read its parameters while the broadcast runs.
    let mut all = Vec::new();
    for variable in &variables {
        variable.components()[0].read(&mut |buffer| all.extend_from_slice(buffer.as_bytes()))?;
    }
    let chiefs =
        on_local_ranks::<_, L::Error>(&groups, |_, group| Ok(group.start().broadcast(all.clone(), Rank(0))?))?
            .unwrap_or(all);
    for component in 0..groups.len() {
        let mut rest = &chiefs[..];
        for variable in &variables {
            variable.components()[component].write(&mut |mut buffer| {
                let (values, later) = rest.split_at(buffer.as_bytes_mut().len());
                buffer.as_bytes_mut().copy_from_slice(values);
                rest = later;
            })?;
        }
    }
    Ok(())
}

/// Compares the lists of variables of all workers.
fn compare<L: TensorLibrary>(strategy: &Strategy, descriptions: &[String]) -> Result<(), L::Error> {
    let groups = strategy.groups();
    let Some(Difference { line: index, mine, theirs, rank }) = first_difference(&groups, descriptions)? else {
        return Ok(());
    };
    let name = |rank: Rank| groups.first().map_or_else(String::new, |group| group.rank_name(rank).to_owned());
    let own = groups.first().map_or(Rank(0), |group| group.rank());
    let missing = || "missing".to_owned();
    Err(Error::ModelDiffers {
        index,
        here: mine.unwrap_or_else(missing),
        here_name: name(own),
        there: theirs.unwrap_or_else(missing),
        there_name: name(rank),
    }
    .into())
}

/// Compares the copies of all replicas in all processes, bit for bit. Every process calls this, outside `run`.
///
/// # Errors
/// [`Error::Diverged`], with the first variable that differs and the first replica where it does. The collective's
/// error if a process is missing or fails, and the library's if a tensor cannot be read.
pub fn audit<L: TensorLibrary>(strategy: &Strategy, parameters: &Parameters<L>) -> Result<(), L::Error> {
    if parameters.shared || strategy.num_replicas_in_sync() == 1 {
        return Ok(());
    }
    let gathered = on_local_ranks::<_, L::Error>(&strategy.groups(), |local, group| {
        let own = digests(parameters, local)?;
        let all = vec![0; own.len() * group.world_size()];
        Ok(group.start().all_gather(own, all)?)
    })?;
    let [_, all] = gathered.unwrap_or_default();
    compare_digests(compared(parameters), &all, |replica| replica)?;
    let Some(sharding) = strategy.sharding().filter(|sharding| sharding.mirrors > 1) else { return Ok(()) };
    let gathered = strategy.on_shard_groups(|local, groups| {
        let own = part_digests(parameters, local)?;
        let start =
            |group: &ProcessGroup| group.start().all_gather(own.clone(), vec![0; own.len() * group.world_size()]);
        Ok::<_, L::Error>(groups.mirrors().map(start).transpose()?)
    })?;
    for (local, gathered) in gathered.into_iter().enumerate() {
        let [_, all] = gathered.unwrap_or_default();
        let part = sharding.part_of(strategy.topology().first_replica() + local);
        compare_digests(sharded(parameters), &all, |mirror| mirror * sharding.parts + part)?;
    }
    Ok(())
}

/// Compares copies like [`audit`]; every replica calls this inside `run`.
pub(crate) fn audit_replica<L: TensorLibrary>(
    context: &ReplicaContext,
    parameters: &Parameters<L>,
) -> Result<(), L::Error> {
    let group = context.group();
    if parameters.shared || group.world_size() == 1 {
        return Ok(());
    }
    let own = digests(parameters, context.local_replica_id())?;
    let mut all = vec![0; own.len() * group.world_size()];
    group.all_gather(&own, &mut all)?;
    compare_digests(compared(parameters), &all, |replica| replica)?;
    let (sharding, groups) = (context.strategy().sharding(), context.shard_groups());
    let (Some(sharding), Some(groups)) = (sharding, groups) else { return Ok(()) };
    let Some(mirrors) = groups.mirrors() else { return Ok(()) };
    let own = part_digests(parameters, context.local_replica_id())?;
    let mut all = vec![0; own.len() * mirrors.world_size()];
    mirrors.all_gather(&own, &mut all)?;
    let part = sharding.part_of(context.replica_id());
    compare_digests(sharded(parameters), &all, |mirror| mirror * sharding.parts + part)
}

/// Returns the sharded variables, whose parts are equal on replicas that mirror each other.
fn sharded<L: TensorLibrary>(parameters: &Parameters<L>) -> impl Iterator<Item = &Variable<L>> {
    parameters.variables().iter().filter(|variable| variable.layout().is_some())
}

/// Returns one digest for each part that a replica holds.
fn part_digests<L: TensorLibrary>(parameters: &Parameters<L>, local: usize) -> Result<Vec<u64>, L::Error> {
    sharded(parameters).map(|variable| digest::<L>(&variable.components()[local])).collect()
}

/// Returns the variables whose copies are equal on all replicas. Statistics may differ: each replica computes them from
/// its own examples. Replicas have different parts of sharded variables.
fn compared<L: TensorLibrary>(parameters: &Parameters<L>) -> impl Iterator<Item = &Variable<L>> {
    parameters.variables().iter().filter(|variable| !variable.is_statistic() && variable.layout().is_none())
}

/// Returns one digest for each copy that a replica holds.
fn digests<L: TensorLibrary>(parameters: &Parameters<L>, local: usize) -> Result<Vec<u64>, L::Error> {
    compared(parameters).map(|variable| digest::<L>(&variable.components()[local])).collect()
}

/// Returns an error if some replica's digests differ from the first replica's. `all` has the digests of `variables` on
/// one replica after another; `name` returns a replica's id.
fn compare_digests<'p, L: TensorLibrary>(
    variables: impl Iterator<Item = &'p Variable<L>>,
    all: &[u64],
    name: impl Fn(usize) -> usize,
) -> Result<(), L::Error> {
    let variables: Vec<&Variable<L>> = variables.collect();
    let mut replicas = all.chunks_exact(variables.len().max(1));
    let Some(first) = replicas.next() else { return Ok(()) };
    let differs = |of: &[u64]| first.iter().zip(of).position(|(a, b)| a != b);
    // The first variable that differs on any replica, and the first replica where it does.
    let found = (1..).zip(replicas).filter_map(|(replica, of)| Some((differs(of)?, replica))).min();
    match found.and_then(|(index, replica)| Some((variables.get(index)?, name(replica)))) {
        None => Ok(()),
        Some((variable, replica)) => Err(Error::Diverged { name: variable.name().to_owned(), replica }.into()),
    }
}

fn digest<L: TensorLibrary>(tensor: &L::Tensor) -> Result<u64, L::Error> {
    let mut digest = 0;
    tensor.read(&mut |buffer| {
        digest = XxHash3_64::oneshot_with_seed(digest, buffer.as_bytes());
    })?;
    Ok(digest)
}

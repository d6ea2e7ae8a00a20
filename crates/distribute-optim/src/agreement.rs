//! Agreement of all workers on the model: the same variables, with the chief's values.

use distribute_collectives::{Difference, ProcessGroup, Rank, first_difference, on_each_local_rank, on_local_ranks};
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
    let (groups, ranks) = (strategy.groups(), strategy.tensor_parallel());
    // Ranks of equal place form a group. The first place sends its parts and all variables that are not split, the
    // others their parts.
    let sent = |place: usize| variables.iter().filter(move |of| place == 0 || of.tensor_split().is_some());
    // The bytes are copied first, since the program may read its parameters while the broadcast runs.
    let mut own: Vec<Vec<u8>> = vec![Vec::new(); ranks];
    for (place, own) in own.iter_mut().enumerate() {
        for variable in sent(place) {
            variable.components()[place].read(&mut |buffer| own.extend_from_slice(buffer.as_bytes()))?;
        }
    }
    let chiefs = on_each_local_rank::<_, L::Error>(&groups, |local, group| {
        Ok(group.start().broadcast(own[local % ranks].clone(), Rank(0))?)
    })?;
    for (place, chiefs) in chiefs.iter().take(ranks).enumerate() {
        let mut rest = &chiefs[..];
        for variable in sent(place) {
            let (components, of_all) = (variable.components(), variable.tensor_split().is_none());
            let mut values: &[u8] = &[];
            for (at, component) in components.iter().enumerate().filter(|(at, _)| of_all || at % ranks == place) {
                component.write(&mut |mut buffer| {
                    if at == if of_all { 0 } else { place } {
                        (values, rest) = rest.split_at(buffer.as_bytes_mut().len());
                    }
                    buffer.as_bytes_mut().copy_from_slice(values);
                })?;
            }
        }
    }
    Ok(())
}

/// Compares the descriptions of the variables of all workers, one line for each.
///
/// # Errors
/// [`Error::ModelDiffers`] with the first that differs; the collective's error if a worker is missing or fails.
pub fn compare<L: TensorLibrary>(strategy: &Strategy, descriptions: &[String]) -> Result<(), L::Error> {
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

/// Compares the copies of all replicas in all processes, bit for bit: of a split variable, those of each part. Every
/// process calls this, outside `run`.
///
/// # Errors
/// [`Error::Diverged`], with the first variable that differs and the first replica where it does, or
/// [`Error::RanksDiverged`] if it differs inside a tensor group. The collective's error if a process is missing or
/// fails, and the library's if a tensor cannot be read.
pub fn audit<L: TensorLibrary>(strategy: &Strategy, parameters: &Parameters<L>) -> Result<(), L::Error> {
    let ranks = strategy.tensor_parallel();
    if parameters.shared || strategy.num_replicas_in_sync() * ranks == 1 {
        return Ok(());
    }
    let own: Vec<Vec<u64>> =
        (0..strategy.num_local_replicas()).map(|local| digests(parameters, local)).collect::<Result<_, _>>()?;
    let gathered = on_local_ranks::<_, L::Error>(&strategy.groups(), |local, group| {
        let replica = local / ranks * ranks;
        let own = own[replica..replica + ranks].concat();
        let all = vec![0; own.len() * group.world_size()];
        Ok(group.start().all_gather(own, all)?)
    })?;
    let [_, all] = gathered.unwrap_or_default();
    compare_digests(compared(parameters), parameters.tensor_ranks, &all, |replica| replica)?;
    if ranks > 1 {
        let parts = (0..strategy.num_local_replicas()).map(|local| part_digests(parameters, local));
        let parts = parts.collect::<Result<Vec<_>, L::Error>>()?;
        for (replica, parts) in (strategy.topology().first_replica()..).zip(parts.chunks(ranks)) {
            compare_digests(sharded(parameters), ranks, &parts.concat(), |_| replica)?;
        }
    }
    let Some(sharding) = strategy.sharding().filter(|sharding| sharding.mirrors > 1) else { return Ok(()) };
    let gathered = strategy.on_shard_groups(|local, groups| {
        let own = part_digests(parameters, local)?;
        let start =
            |group: &ProcessGroup| group.start().all_gather(own.clone(), vec![0; own.len() * group.world_size()]);
        Ok::<_, L::Error>(groups.mirrors().map(start).transpose()?)
    })?;
    for (local, gathered) in gathered.into_iter().enumerate() {
        let [_, all] = gathered.unwrap_or_default();
        let part = sharding.part_of(strategy.topology().first_replica() + local / ranks);
        compare_digests(sharded(parameters), 1, &all, |mirror| mirror * sharding.parts + part)?;
    }
    Ok(())
}

/// Compares copies like [`audit`]; every replica calls this inside `run`.
pub(crate) fn audit_replica<L: TensorLibrary>(
    context: &ReplicaContext,
    parameters: &Parameters<L>,
) -> Result<(), L::Error> {
    let (group, tensor) = (context.group(), context.tensor_group());
    if parameters.shared || group.world_size() == 1 && tensor.is_none() {
        return Ok(());
    }
    let mut own = digests(parameters, context.local_replica_id())?;
    if let Some(tensor) = tensor {
        let mut of_replica = vec![0; own.len() * tensor.world_size()];
        tensor.all_gather(&own, &mut of_replica)?;
        own = of_replica;
    }
    let mut all = vec![0; own.len() * group.world_size()];
    group.all_gather(&own, &mut all)?;
    compare_digests(compared(parameters), parameters.tensor_ranks, &all, |replica| replica)?;
    let (sharding, groups) = (context.strategy().sharding(), context.shard_groups());
    let (Some(sharding), Some(groups)) = (sharding, groups) else { return Ok(()) };
    if let Some(tensor) = context.tensor_group() {
        let own = part_digests(parameters, context.local_replica_id())?;
        let mut all = vec![0; own.len() * tensor.world_size()];
        tensor.all_gather(&own, &mut all)?;
        compare_digests(sharded(parameters), tensor.world_size(), &all, |_| context.replica_id())?;
    }
    let Some(mirrors) = groups.mirrors() else { return Ok(()) };
    let own = part_digests(parameters, context.local_replica_id())?;
    let mut all = vec![0; own.len() * mirrors.world_size()];
    mirrors.all_gather(&own, &mut all)?;
    let part = sharding.part_of(context.replica_id());
    compare_digests(sharded(parameters), 1, &all, |mirror| mirror * sharding.parts + part)
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

/// Returns an error if some replica's digests differ from the first replica's, or, for variables that are not split,
/// those of its `ranks` from each other. `all` has the digests of `variables` on the ranks of one replica after
/// another;
/// `id` returns a replica's id.
fn compare_digests<'p, L: TensorLibrary>(
    variables: impl Iterator<Item = &'p Variable<L>>,
    ranks: usize,
    all: &[u64],
    id: impl Fn(usize) -> usize,
) -> Result<(), L::Error> {
    let variables: Vec<&Variable<L>> = variables.collect();
    let count = variables.len().max(1);
    let whole: Vec<bool> = variables.iter().map(|variable| variable.tensor_split().is_none()).collect();
    let name = |index: usize| variables.get(index).map_or_else(String::new, |of| of.name().to_owned());
    let mut replicas = all.chunks_exact(count * ranks);
    // The first variable that differs on any replica, and the first replica where it does.
    let differs = |replica: usize, of: &[u64]| {
        let ranks = (1..).zip(of.chunks_exact(count).skip(1));
        let place = |(place, rank): (usize, &[u64])| {
            let index = (0..whole.len()).find(|index| whole[*index] && of[*index] != rank[*index])?;
            Some((index, replica, place))
        };
        ranks.filter_map(place).min()
    };
    if let Some((index, replica, place)) = (0..).zip(replicas.clone()).filter_map(|(at, of)| differs(at, of)).min() {
        return Err(Error::RanksDiverged { name: name(index), replica: id(replica), place }.into());
    }
    let Some(first) = replicas.next() else { return Ok(()) };
    let differs = |of: &[u64]| (0..first.len()).filter(|at| first[*at] != of[*at]).map(|at| at % count).min();
    let found = (1..).zip(replicas).filter_map(|(replica, of)| Some((differs(of)?, replica))).min();
    match found {
        None => Ok(()),
        Some((index, replica)) => Err(Error::Diverged { name: name(index), replica: id(replica) }.into()),
    }
}

pub(crate) fn digest<L: TensorLibrary>(tensor: &L::Tensor) -> Result<u64, L::Error> {
    let mut digest = 0;
    tensor.read(&mut |buffer| {
        digest = XxHash3_64::oneshot_with_seed(digest, buffer.as_bytes());
    })?;
    Ok(digest)
}

//! Making sure that all workers have the same model, with the chief's values.

use candle_core::Tensor;
use distribute_collectives::{Difference, Rank, first_difference, on_local_ranks};
use distribute_strategy::{ReplicaContext, Strategy};
use distribute_values::TensorStorage;
use twox_hash::XxHash3_64;

use crate::model::Parts;
use crate::{Candle, Error, Result, Variable};

/// Compares the variables of all workers and copies the chief's values to all of them.
pub(crate) fn check_and_share(strategy: &Strategy, variables: &[Variable]) -> Result<()> {
    if strategy.topology().workers == 1 {
        return Ok(());
    }
    let descriptions: Vec<String> = variables.iter().map(describe).collect();
    compare(strategy, &descriptions)?;
    share(strategy, variables)
}

/// Copies the chief's values of variables to all workers, which name the same ones in the same order.
pub(crate) fn share<'a>(strategy: &Strategy, variables: impl IntoIterator<Item = &'a Variable>) -> Result<()> {
    if strategy.topology().workers == 1 {
        return Ok(());
    }
    let variables: Vec<&Variable> = variables.into_iter().collect();
    let groups = strategy.groups();
    // As bytes of their own: the program may look at its parameters meanwhile.
    let mut all = Vec::new();
    for variable in &variables {
        TensorStorage::<Candle>::read(&variable.components[0], &mut |buffer| all.extend_from_slice(buffer.as_bytes()))?;
    }
    let chiefs = on_local_ranks::<_, Error>(&groups, |_, group| Ok(group.broadcast_async(all.clone(), Rank(0))?))?
        .unwrap_or(all);
    for component in 0..groups.len() {
        let mut rest = &chiefs[..];
        for variable in &variables {
            TensorStorage::<Candle>::write(&variable.components[component], &mut |mut buffer| {
                let (values, later) = rest.split_at(buffer.as_bytes_mut().len());
                buffer.as_bytes_mut().copy_from_slice(values);
                rest = later;
            })?;
        }
    }
    Ok(())
}

fn describe(variable: &Variable) -> String {
    let tensor = &variable.components[0];
    format!("{} {:?} {:?}", variable.name, tensor.dims(), tensor.dtype())
}

/// Compares the lists of variables of all workers.
fn compare(strategy: &Strategy, descriptions: &[String]) -> Result<()> {
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
    })
}

/// Compares the copies of all replicas, of every process, bit for bit. Outside of `run`, on every process.
pub(crate) fn audit(strategy: &Strategy, parts: &Parts) -> Result<()> {
    if parts.shared || strategy.num_replicas_in_sync() == 1 {
        return Ok(());
    }
    let gathered = on_local_ranks::<_, Error>(&strategy.groups(), |local, group| {
        let own = digests(parts, local)?;
        let all = vec![0; own.len() * group.world_size()];
        Ok(group.all_gather_async(own, all)?)
    })?;
    let [_, all] = gathered.unwrap_or_default();
    compare_digests(parts, &all)
}

/// As [`audit`], called by every replica inside of `run`.
pub(crate) fn audit_replica(context: &ReplicaContext, parts: &Parts) -> Result<()> {
    let group = context.group();
    if parts.shared || group.world_size() == 1 {
        return Ok(());
    }
    let own = digests(parts, context.local_replica_id())?;
    let mut all = vec![0; own.len() * group.world_size()];
    group.all_gather(&own, &mut all)?;
    compare_digests(parts, &all)
}

/// Variables whose copies are equal on all replicas: statistics that a replica keeps of its own examples may differ.
fn compared(parts: &Parts) -> impl Iterator<Item = &Variable> {
    parts.variables.iter().filter(|variable| !variable.statistic)
}

/// One digest for each of one replica's copies.
fn digests(parts: &Parts, local: usize) -> Result<Vec<u64>> {
    compared(parts).map(|variable| digest(&variable.components[local])).collect()
}

/// An error where the digests of some replica are not those of the first; `all` has those of one replica after another.
fn compare_digests(parts: &Parts, all: &[u64]) -> Result<()> {
    let mut replicas = all.chunks_exact(compared(parts).count().max(1));
    let Some(first) = replicas.next() else { return Ok(()) };
    let differs = |of: &[u64]| first.iter().zip(of).position(|(a, b)| a != b);
    // The first variable that differs anywhere, and the first replica where it does.
    let found = (1..).zip(replicas).filter_map(|(replica, of)| Some((differs(of)?, replica))).min();
    match found.and_then(|(index, replica)| Some((compared(parts).nth(index)?, replica))) {
        None => Ok(()),
        Some((variable, replica)) => Err(Error::Diverged { name: variable.name.clone(), replica }),
    }
}

fn digest(tensor: &Tensor) -> Result<u64> {
    let mut digest = 0;
    TensorStorage::<Candle>::read(tensor, &mut |buffer| {
        digest = XxHash3_64::oneshot_with_seed(digest, buffer.as_bytes());
    })?;
    Ok(digest)
}

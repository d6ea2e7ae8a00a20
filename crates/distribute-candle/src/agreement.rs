//! Making sure that all workers have the same model, with the chief's values.

use std::hash::{DefaultHasher, Hasher};

use candle_core::Tensor;
use distribute_collectives::{Difference, Rank, first_difference, on_local_ranks};
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;

use crate::Candle;
use crate::{Error, Result, Variable};

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

/// Compares the copies of all replicas, of every process, bit for bit.
pub(crate) fn audit(strategy: &Strategy, variables: &[Variable]) -> Result<()> {
    // Statistics that a replica keeps of its own examples may differ.
    let compared: Vec<&Variable> = variables.iter().filter(|variable| !variable.statistic).collect();
    let gathered = on_local_ranks::<_, Error>(&strategy.groups(), |local, group| {
        let sums = compared.iter().map(|variable| checksum(&variable.components[local]));
        let sums = sums.collect::<Result<Vec<u64>>>()?;
        let all = vec![0; sums.len() * group.world_size()];
        Ok(group.all_gather_async(sums, all)?)
    })?;
    let [_, all] = gathered.unwrap_or_default();
    let mut replicas = all.chunks_exact(compared.len().max(1));
    let Some(first) = replicas.next() else { return Ok(()) };
    let differs = |of: &[u64]| first.iter().zip(of).position(|(a, b)| a != b);
    // The first variable that differs anywhere, and the first replica where it does.
    let found = (1..).zip(replicas).filter_map(|(replica, of)| Some((differs(of)?, replica))).min();
    match found {
        None => Ok(()),
        Some((index, replica)) => Err(Error::Diverged { name: compared[index].name.clone(), replica }),
    }
}

fn checksum(tensor: &Tensor) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    TensorStorage::<Candle>::read(tensor, &mut |buffer| hasher.write(buffer.as_bytes()))?;
    Ok(hasher.finish())
}

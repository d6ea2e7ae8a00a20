//! Making sure that all workers have the same model, with the chief's values.

use std::hash::{DefaultHasher, Hasher};

use candle_core::Tensor;
use distribute_collectives::{Rank, ReduceOp, on_local_ranks};
use distribute_device::DType;
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;

use crate::Candle;
use crate::tensor::dtype_of;
use crate::tensor_list::TensorList;
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
    for dtype in DType::ALL {
        let of_type: Vec<&Variable> = variables
            .iter()
            .copied()
            .filter(|variable| dtype_of(variable.components[0].dtype()).is_ok_and(|other| other == dtype))
            .collect();
        if of_type.is_empty() {
            continue;
        }
        on_local_ranks::<_, Error>(&strategy.groups(), |local, group| {
            let tensors: Vec<Tensor> = of_type.iter().map(|variable| variable.components[local].clone()).collect();
            Ok(group.broadcast_async(TensorList::new(tensors, dtype)?, Rank(0))?)
        })?;
    }
    Ok(())
}

fn describe(variable: &Variable) -> String {
    let tensor = &variable.components[0];
    format!("{} {:?} {:?}", variable.name, tensor.dims(), tensor.dtype())
}

/// Every worker learns every worker's list of variables.
fn compare(strategy: &Strategy, descriptions: &[String]) -> Result<()> {
    let groups = strategy.groups();
    let text = descriptions.join("\n").into_bytes();
    let longest = on_local_ranks(&groups, |_, group| group.all_reduce_async(vec![text.len() as u64], ReduceOp::Max))?;
    let longest = longest.map_or(0, |longest| longest[0] as usize);
    // Shorter lists end in zero bytes, which no name holds.
    let mut padded = text;
    padded.resize(longest, 0);
    let gathered = on_local_ranks(&groups, |_, group| {
        group.all_gather_async(padded.clone(), vec![0u8; longest * group.world_size()])
    })?;
    let [_, all] = gathered.unwrap_or_default();
    let Some(group) = groups.first() else { return Ok(()) };
    for (rank, bytes) in all.chunks_exact(longest.max(1)).enumerate() {
        if bytes == padded {
            continue;
        }
        let theirs = String::from_utf8_lossy(bytes);
        let theirs: Vec<&str> = theirs.trim_end_matches('\0').lines().collect();
        let index = (0..).find(|index| descriptions.get(*index).map(String::as_str) != theirs.get(*index).copied());
        let index = index.unwrap_or(0);
        return Err(Error::ModelDiffers {
            index,
            here: descriptions.get(index).cloned().unwrap_or_else(|| "missing".to_owned()),
            here_name: group.rank_name(group.rank()).to_owned(),
            there: theirs.get(index).map_or_else(|| "missing".to_owned(), |text| (*text).to_owned()),
            there_name: group.rank_name(Rank(u32::try_from(rank).unwrap_or(u32::MAX))).to_owned(),
        });
    }
    Ok(())
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

//! Making sure that all workers have the same model, with the chief's values.

use candle_core::Tensor;
use distribute_collectives::{Rank, ReduceOp};
use distribute_device::DType;
use distribute_strategy::Strategy;

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
    for dtype in DType::ALL {
        let of_type: Vec<&Variable> = variables
            .iter()
            .filter(|variable| dtype_of(variable.components[0].dtype()).is_ok_and(|other| other == dtype))
            .collect();
        if of_type.is_empty() {
            continue;
        }
        let groups = strategy.groups();
        let mut works = Vec::new();
        for (local, group) in groups.iter().enumerate() {
            let tensors: Vec<Tensor> = of_type.iter().map(|variable| variable.components[local].clone()).collect();
            works.push(group.broadcast_async(TensorList::new(tensors, dtype)?, Rank(0))?);
        }
        for work in works {
            work.wait()?;
        }
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
    let mut works = Vec::new();
    for group in groups.iter() {
        works.push(group.all_reduce_async(vec![text.len() as u64], ReduceOp::Max)?);
    }
    let mut longest = 0;
    for work in works {
        longest = work.wait()?[0] as usize;
    }
    // Shorter lists end in zero bytes, which no name holds.
    let mut padded = text;
    padded.resize(longest, 0);
    let mut works = Vec::new();
    for group in groups.iter() {
        works.push(group.all_gather_async(padded.clone(), vec![0u8; longest * group.world_size()])?);
    }
    let mut all = Vec::new();
    for work in works {
        let [_, gathered] = work.wait()?;
        all = gathered;
    }
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

//! Exchange between replicas.

use distribute_hlo::{OpKind, Reducer, TensorType};

use crate::elementwise::combine;
use crate::movement::{concatenate, slice};
use crate::number::Num;
use crate::{Error, Result, Tensor};

/// Computes a collective for the replicas `active`, which give `inputs` in the same order.
pub(crate) fn exchange(kind: &OpKind, active: &[usize], inputs: &[Tensor], replicas: usize) -> Result<Vec<Tensor>> {
    let input = |replica: usize| active.iter().position(|&other| other == replica).and_then(|place| inputs.get(place));
    let complete = |group: &[usize]| -> Result<Vec<&Tensor>> {
        let found: Option<Vec<&Tensor>> = group.iter().map(|&replica| input(replica)).collect();
        found.ok_or_else(|| Error::Diverged { operation: kind.name(), reached: active.to_vec(), group: group.to_vec() })
    };
    let groups = match kind {
        OpKind::AllReduce { groups, .. }
        | OpKind::AllGather { groups, .. }
        | OpKind::ReduceScatter { groups, .. }
        | OpKind::AllToAll { groups, .. } => groups.resolve(replicas),
        _ => vec![(0..replicas).collect()],
    };
    active
        .iter()
        .map(|&replica| {
            let group = groups.iter().find(|group| group.contains(&replica)).map_or(&[][..], Vec::as_slice);
            let members = complete(group)?;
            let place = group.iter().position(|&other| other == replica).unwrap_or(0);
            Ok(match kind {
                OpKind::AllReduce { reducer, .. } => reduced(*reducer, &members),
                OpKind::AllGather { dimension, .. } => concatenate(&members, *dimension),
                OpKind::ReduceScatter { reducer, dimension, .. } => {
                    part(&reduced(*reducer, &members), *dimension, place, group.len())
                }
                OpKind::AllToAll { split_dimension, concat_dimension, .. } => {
                    let parts: Vec<Tensor> =
                        members.iter().map(|member| part(member, *split_dimension, place, group.len())).collect();
                    concatenate(&parts.iter().collect::<Vec<_>>(), *concat_dimension)
                }
                OpKind::CollectivePermute { pairs } => {
                    let sender = pairs.iter().find(|&&(_, receiver)| receiver == replica);
                    sender.map_or_else(|| zeros(members[0].ty()), |&(sender, _)| members[sender].clone())
                }
                // The caller passes collectives alone.
                _ => members[place].clone(),
            })
        })
        .collect()
}

/// Combines tensors in order.
fn reduced(reducer: Reducer, members: &[&Tensor]) -> Tensor {
    let element = members[0].ty().element;
    Tensor::generate(members[0].ty().clone(), |index| {
        let mut result = members[0].at(index);
        for member in &members[1..] {
            result = combine(reducer.binary(), element, result, member.at(index));
        }
        result
    })
}

/// Returns a part of several along a dimension.
fn part(x: &Tensor, dimension: usize, place: usize, parts: usize) -> Tensor {
    let size = x.dims()[dimension] / parts;
    let (mut start, mut limit) = (vec![0; x.dims().len()], x.dims().to_vec());
    (start[dimension], limit[dimension]) = (place * size, (place + 1) * size);
    slice(x, &start, &limit, &vec![1; start.len()])
}

fn zeros(ty: &TensorType) -> Tensor {
    Tensor::generate(ty.clone(), |_| Num::Int(0).converted(ty.element))
}

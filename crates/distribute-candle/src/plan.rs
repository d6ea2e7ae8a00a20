//! In which order gradients are reduced, and which of them together.

use std::sync::Arc;

use candle_core::DType;
use distribute_collectives::{Rank, ReduceOp};
use distribute_strategy::ReplicaContext;

use crate::model::Parts;
use crate::{Error, Result};

/// Bytes of gradients that are reduced together. Smaller buckets begin earlier in backward, larger ones cost fewer
/// operations; between processes an operation costs about as much as moving 64 KiB.
const BUCKET_BYTES: usize = 1 << 20;

/// The buckets of a model's gradients, equal on all replicas of all workers.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Variables of each bucket, in the order in which their gradients come.
    pub(crate) buckets: Vec<Bucket>,
    /// For each variable its bucket and its place in there; `None` where it got no gradient in the first step.
    pub(crate) place: Vec<Option<(usize, usize)>>,
}

#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) dtype: DType,
    pub(crate) variables: Vec<usize>,
}

impl Plan {
    /// Agrees with all replicas on the plan, after the first backward of each: variables that got a gradient somewhere, in
    /// the order in which they came on the first replica.
    pub(crate) fn agree(context: &ReplicaContext, parts: &Parts, fired: &[usize]) -> Result<Arc<Plan>> {
        let count = parts.variables.len();
        let mut present = vec![0u8; count];
        let mut order = vec![u32::MAX; count];
        for (position, index) in fired.iter().enumerate() {
            present[*index] = 1;
            order[*index] = position as u32;
        }
        context.group().all_reduce(&mut present, ReduceOp::Max)?;
        context.group().broadcast(&mut order, Rank(0))?;
        let mut variables: Vec<usize> = (0..count).filter(|index| present[*index] == 1).collect();
        // Those that did not come on the first replica follow at the end.
        variables.sort_by_key(|index| (order[*index], *index));
        if variables.is_empty() {
            return Err(Error::NoGradient);
        }
        let silent: Vec<&str> = parts
            .variables
            .iter()
            .zip(&present)
            .filter(|(variable, present)| variable.trainable && **present == 0)
            .map(|(variable, _)| variable.name.as_str())
            .collect();
        if !silent.is_empty() && context.replica_id() == 0 {
            tracing::warn!(
                "no replica got a gradient for {}; they stay as they are (candle's layer_norm, rms_norm and softmax_last_dim \
                 cut the graph; use operations with a backward)",
                silent.join(", ")
            );
        }
        let mut plan = Plan { buckets: Vec::new(), place: vec![None; count] };
        let mut bytes = 0;
        for index in variables {
            let variable = &parts.variables[index];
            let tensor = &variable.components[0];
            if !matches!(tensor.dtype(), DType::F32 | DType::F64) {
                return Err(Error::UntrainableType { name: variable.name.clone(), dtype: tensor.dtype() });
            }
            let size = tensor.elem_count() * tensor.dtype().size_in_bytes();
            let fits = plan.buckets.last().is_some_and(|bucket| bucket.dtype == tensor.dtype() && bytes < BUCKET_BYTES);
            if !fits {
                plan.buckets.push(Bucket { dtype: tensor.dtype(), variables: Vec::new() });
                bytes = 0;
            }
            bytes += size;
            let bucket = plan.buckets.len() - 1;
            plan.place[index] = Some((bucket, plan.buckets[bucket].variables.len()));
            plan.buckets[bucket].variables.push(index);
        }
        Ok(Arc::new(plan))
    }
}

//! In which order gradients are reduced, and which of them together.

use std::sync::Arc;

use distribute_collectives::{BucketPlan, FusedTensor, Rank, ReduceOp};
use distribute_device::DType;
use distribute_strategy::{ReplicaContext, STEP_WORDS};

use crate::model::Parts;
use crate::tensor::{dtype_of, is_short};
use crate::{Error, Result};

/// Which gradients are reduced, and when; equal on all replicas of all workers.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Variables that got a gradient in the first step, by their index, and after all variables the [flags](Plan::flags).
    pub(crate) buckets: BucketPlan,
}

impl Plan {
    /// Agrees with all replicas on the plan, after the first backward of each: variables that got a gradient somewhere, in
    /// the order in which they came on the first replica.
    pub(crate) fn agree(context: &ReplicaContext, parts: &Parts, fired: &[usize]) -> Result<Arc<Plan>> {
        let count = parts.variables.len();
        let mut present = vec![0u8; count];
        let mut order = vec![u32::MAX; count];
        let trainable = |index: &&usize| parts.variables[**index].trainable;
        for (position, index) in fired.iter().filter(trainable).enumerate() {
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
            warn_untrained(&silent);
        }
        for index in &variables {
            let variable = &parts.variables[*index];
            let dtype = variable.components[0].dtype();
            if !is_short(dtype) && !matches!(dtype, candle_core::DType::F32 | candle_core::DType::F64) {
                return Err(Error::UntrainableType { name: variable.name.clone(), dtype });
            }
        }
        let tensors: Result<Vec<FusedTensor>> = parts
            .variables
            .iter()
            .map(|variable| {
                let tensor = &variable.components[0];
                Ok(FusedTensor::new(dtype_of(tensor.dtype())?, tensor.dims()))
            })
            .chain([Ok(FusedTensor::new(DType::U32, [count + STEP_WORDS]))])
            .collect();
        variables.push(count);
        let bytes = |index: &usize| parts.variables.get(*index).map_or(0, |variable| bytes_of(&variable.components[0]));
        let bytes_per_pack = context.group().bytes_per_pack(variables.iter().map(bytes).sum());
        Ok(Arc::new(Plan { buckets: BucketPlan::new(&tensors?, &variables, bytes_per_pack) }))
    }

    /// The index of what says for each variable on how many replicas it got a gradient, and what else travels with a step. It
    /// comes last.
    pub(crate) fn flags(&self) -> usize {
        self.buckets.tensors().len() - 1
    }
}

/// Names the variables that are not trained, and the usual cause.
pub(crate) fn warn_untrained(variables: &[&str]) {
    distribute_notice::warn!(
        "no gradient came for {}; they stay as they are. Operations of candle without a backward cut the graph in silence: in \
         place of candle_nn's layer_norm and rms_norm use those of distribute_candle (distribute::candle), in place of \
         softmax_last_dim candle_nn::ops::softmax, in place of rope rope_slow, in place of sdpa matmul and softmax. Variables \
         that are not to be trained are frozen by Model::freeze",
        variables.join(", ")
    );
}

fn bytes_of(tensor: &candle_core::Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

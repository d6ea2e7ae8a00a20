//! The plan of gradient buckets: which gradients are reduced together, and in which order.

use std::sync::Arc;

use distribute_collectives::{Bucket, BucketPlan, FusedTensor, Rank, ReduceOp};
use distribute_device::DType;
use distribute_strategy::ReplicaContext;
use distribute_values::TensorStorage;

use crate::exchange::StepFlags;
use crate::library::{bytes, dtype};
use crate::row_share::is_worth_it;
use crate::{Error, Parameters, TensorLibrary, is_short};

/// The buckets of a model's gradients and their order, equal on all replicas of all workers.
#[derive(Debug)]
pub struct Plan {
    /// The variables that got a gradient in the first step, by index, followed by the [flags](Plan::flags).
    pub(crate) buckets: BucketPlan,
    /// The variables whose gradients are reduced by rows, in ascending order; they are in no bucket.
    rows: Vec<usize>,
}

impl Plan {
    /// Returns the buckets and the tensors in them: the model's variables in order, and one for the flags of a step.
    pub fn buckets(&self) -> &BucketPlan {
        &self.buckets
    }

    /// Agrees with all replicas on the plan, after the first backward of each. The plan has the variables that got a
    /// gradient on any replica, in the order in which the first replica reported them. `rows` has the number of rows
    /// that each gradient would exchange, or `None` for those that are reduced as a whole.
    pub(crate) fn agree<L: TensorLibrary>(
        context: &ReplicaContext,
        parameters: &Parameters<L>,
        fired: &[usize],
        rows: &[(usize, Option<usize>)],
    ) -> Result<Arc<Plan>, L::Error> {
        let all = parameters.variables();
        let count = all.len();
        let mut present = vec![0u8; count];
        let mut order = vec![u32::MAX; count];
        let trainable = |index: &&usize| all[**index].is_trainable();
        for (position, index) in fired.iter().filter(trainable).enumerate() {
            present[*index] = 1;
            order[*index] = position as u32;
        }
        // The largest number of rows; a variable whose gradient some replica reduces as a whole has the maximum.
        let mut widest = vec![0u64; count];
        for (index, rows) in rows {
            widest[*index] = rows.map_or(u64::MAX, |rows| rows as u64);
        }
        context.group().all_reduce(&mut present, ReduceOp::Max)?;
        context.group().all_reduce(&mut widest, ReduceOp::Max)?;
        context.group().broadcast(&mut order, Rank(0))?;
        if let Some(tensor) = context.tensor_group() {
            // All ranks of this process use one plan.
            tensor.all_reduce(&mut present, ReduceOp::Max)?;
            tensor.all_reduce(&mut widest, ReduceOp::Max)?;
            tensor.broadcast(&mut order, Rank(0))?;
        }
        if !present.contains(&1) {
            return Err(Error::NoGradient.into());
        }
        let replicas = context.num_replicas_in_sync();
        let by_rows = |index: &usize| {
            let of = all[*index].components()[0].shape().first().copied().unwrap_or(0);
            let rows = usize::try_from(widest[*index]).unwrap_or(usize::MAX);
            present[*index] == 1 && all[*index].layout().is_none() && is_worth_it(rows, of, replicas)
        };
        let rows: Vec<usize> = (0..count).filter(by_rows).collect();
        // Sharded variables are in no bucket.
        let is_planned =
            |index: &usize| present[*index] == 1 && all[*index].layout().is_none() && !rows.contains(index);
        let mut variables: Vec<usize> = (0..count).filter(is_planned).collect();
        // Variables that the first replica did not report follow at the end.
        variables.sort_by_key(|index| (order[*index], *index));
        let silent: Vec<&str> = all
            .iter()
            .zip(&present)
            .filter(|(variable, present)| variable.is_trainable() && **present == 0)
            .map(|(variable, _)| variable.name())
            .collect();
        if !silent.is_empty() && context.replica_id() == 0 {
            warn_untrained::<L>(&silent);
        }
        for variable in all.iter().zip(&present).filter(|(_, present)| **present == 1).map(|(variable, _)| variable) {
            let dtype = dtype::<L>(&variable.components()[0])?;
            if !is_short(dtype) && !matches!(dtype, DType::F32 | DType::F64) {
                return Err(Error::UntrainableType { name: variable.name().to_owned(), dtype }.into());
            }
        }
        let tensors: Result<Vec<FusedTensor>, L::Error> = all
            .iter()
            .map(|variable| {
                let tensor = &variable.components()[0];
                Ok(FusedTensor::new(dtype::<L>(tensor)?, tensor.shape()))
            })
            .chain([Ok(FusedTensor::new(DType::U32, [StepFlags::len_for(count)]))])
            .collect();
        variables.push(count);
        let bytes = |index: &usize| all.get(*index).map_or(0, |variable| bytes::<L>(&variable.components()[0]));
        let bytes_per_pack = context.group().bytes_per_pack(variables.iter().map(bytes).sum());
        Ok(Arc::new(Plan { buckets: BucketPlan::new(&tensors?, &variables, bytes_per_pack), rows }))
    }

    /// Returns the buckets of gradients: all but the last, which has the flags only.
    pub(crate) fn gradients(&self) -> &[Bucket] {
        self.buckets.buckets().split_last().map_or(&[], |(_, gradients)| gradients)
    }

    /// Returns the variables whose gradients are reduced by rows.
    pub(crate) fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Returns whether a variable's gradient is reduced by rows.
    pub(crate) fn reduces_rows(&self, index: usize) -> bool {
        self.rows.binary_search(&index).is_ok()
    }

    /// Returns the index of the flags, the last tensor: for each variable the number of replicas on which it got a
    /// gradient, and then the step header.
    pub(crate) fn flags(&self) -> usize {
        self.buckets.tensors().len() - 1
    }
}

/// Warns about variables that are not trained, with the usual cause.
pub fn warn_untrained<L: TensorLibrary>(variables: &[&str]) {
    distribute_notice::warn!("no gradient came for {}; they stay as they are. {}", variables.join(", "), L::CUT_GRAPH);
}

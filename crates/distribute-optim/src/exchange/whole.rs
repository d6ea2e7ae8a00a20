//! The exchange in which every replica gets the sums of all gradients.

use std::sync::Arc;

use distribute_collectives::{FusedAllReduce, FusedStep, ProcessGroup};

use super::{Exchange, Payload, StepFlags, Summed};
use crate::TensorLibrary;
use crate::gradient::Reduced;
use crate::plan::Plan;

/// One step's gradients, which every replica receives whole.
pub(crate) struct WholeStep<L: TensorLibrary> {
    plan: Arc<Plan>,
    fused: FusedAllReduce,
    step: FusedStep<Payload<L, u32>>,
}

impl<L: TensorLibrary> WholeStep<L> {
    pub(crate) fn new(plan: &Arc<Plan>, fused: &FusedAllReduce) -> WholeStep<L> {
        WholeStep { plan: plan.clone(), fused: fused.clone(), step: fused.begin() }
    }
}

impl<L: TensorLibrary> Exchange<L> for WholeStep<L> {
    fn has(&self, index: usize) -> bool {
        self.step.has(index)
    }

    fn push(&mut self, group: &ProcessGroup, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        Ok(self.step.push(group, index, Payload::gradient(L::own(gradient)?)?)?)
    }

    fn finish(mut self: Box<Self>, group: &ProcessGroup, flags: StepFlags) -> Result<(Summed<L>, StepFlags), L::Error> {
        self.step.push(group, self.plan.flags(), Payload::Elements(flags.into_words()))?;
        let mut payloads = self.step.finish(group)?;
        // The flags are the plan's last tensor.
        let flags = StepFlags::from_words(payloads.pop().map(Payload::into_elements).unwrap_or_default());
        let planned = || (0..self.plan.flags()).filter(|index| self.plan.buckets.contains(*index));
        // All replicas have pushed zeros for them; what compression has sent all the same is kept for later.
        planned().filter(|index| !flags.came(*index)).for_each(|index| self.fused.discard(index));
        let gradients = planned()
            .zip(payloads.into_iter().filter_map(Payload::into_gradient))
            .filter(|(index, _)| flags.came(*index))
            .map(|(index, gradient)| Reduced::new(index, gradient))
            .collect::<Result<Vec<_>, L::Error>>()?;
        Ok((Summed::Whole(gradients), flags))
    }
}

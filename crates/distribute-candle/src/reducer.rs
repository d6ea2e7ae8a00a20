//! Gradients of one replica on their way: into buckets, over the replicas, and out again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use distribute_collectives::{ReduceOp, Work};
use distribute_strategy::ReplicaContext;

use crate::model::Parts;
use crate::plan::Plan;
use crate::tensor::dtype_of;
use crate::tensor_list::TensorList;
use crate::{Error, Result};

/// One step's gradients of one replica.
pub(crate) struct Reducer {
    context: ReplicaContext,
    parts: Arc<Parts>,
    plan: Arc<Plan>,
    /// Gradients that have come, by bucket and place.
    gradients: Vec<Vec<Option<Tensor>>>,
    /// How many of each bucket are still missing.
    missing: Vec<usize>,
    /// Buckets are launched in order on every replica; these are under way.
    launched: Vec<Work<TensorList>>,
    /// Gradients of variables that are not in the plan.
    unplanned: Vec<Option<Tensor>>,
    failure: Option<Error>,
    /// Time spent in collectives, of which computation could not make use.
    pub(crate) communication: Duration,
}

/// A variable's gradient, summed over all replicas.
pub(crate) struct Reduced {
    pub(crate) index: usize,
    pub(crate) gradient: Tensor,
}

impl Reducer {
    pub(crate) fn new(context: &ReplicaContext, parts: &Arc<Parts>, plan: &Arc<Plan>) -> Reducer {
        Reducer {
            context: context.clone(),
            parts: parts.clone(),
            plan: plan.clone(),
            gradients: plan.buckets.iter().map(|bucket| vec![None; bucket.variables.len()]).collect(),
            missing: plan.buckets.iter().map(|bucket| bucket.variables.len()).collect(),
            launched: Vec::with_capacity(plan.buckets.len()),
            unplanned: vec![None; parts.variables.len()],
            failure: None,
            communication: Duration::ZERO,
        }
    }

    /// Takes a gradient; begins to reduce its bucket, and those that wait for it, if that is now complete.
    ///
    /// The last bucket waits for [`finish`](Reducer::finish), which adds to it what only then is known.
    pub(crate) fn push(&mut self, index: usize, gradient: Tensor) {
        let Some((bucket, place)) = self.plan.place[index] else {
            self.unplanned[index] = Some(gradient);
            return;
        };
        if self.gradients[bucket][place].replace(gradient).is_none() {
            self.missing[bucket] -= 1;
        }
        while self.failure.is_none()
            && self.launched.len() + 1 < self.plan.buckets.len()
            && self.missing[self.launched.len()] == 0
        {
            if let Err(error) = self.launch(None) {
                self.failure = Some(error);
            }
        }
    }

    /// Notes a failure, which [`finish`](Reducer::finish) returns.
    pub(crate) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// Completes what is missing with zeros and waits for all buckets. The reduced gradients, in the same order on every
    /// replica, and the time spent in collectives.
    pub(crate) fn finish(mut self) -> Result<(Vec<Reduced>, Duration)> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let has_gradient = self.has_gradient()?;
        while self.launched.len() < self.plan.buckets.len() {
            let last = self.launched.len() + 1 == self.plan.buckets.len();
            self.launch(last.then(|| has_gradient.clone()))?;
        }
        let works = std::mem::take(&mut self.launched);
        let plan = self.plan.clone();
        // Which variables got a gradient anywhere is only known with the last bucket.
        let mut flags: Option<Vec<f32>> = None;
        let mut all = Vec::new();
        for (bucket, work) in plan.buckets.iter().zip(works) {
            let started = Instant::now();
            let mut tensors = work.wait()?.into_tensors();
            self.communication += started.elapsed();
            if tensors.len() > bucket.variables.len()
                && let Some(reduced) = tensors.pop()
            {
                flags = Some(reduced.to_dtype(candle_core::DType::F32)?.to_vec1()?);
            }
            let reduced =
                bucket.variables.iter().zip(tensors).map(|(index, gradient)| Reduced { index: *index, gradient });
            all.extend(reduced);
        }
        let flags = flags.unwrap_or_default();
        all.retain(|reduced| flags.get(reduced.index).is_some_and(|count| *count > 0.0));
        self.finish_unplanned(&flags, &mut all)?;
        Ok((all, self.communication))
    }

    /// Variables outside the plan for which some replica got a gradient after all: all replicas reduce them one by one.
    fn finish_unplanned(&mut self, flags: &[f32], all: &mut Vec<Reduced>) -> Result<()> {
        for index in 0..self.parts.variables.len() {
            if self.plan.place[index].is_some() || flags.get(index).is_none_or(|count| *count == 0.0) {
                continue;
            }
            let gradient = match self.unplanned[index].take() {
                Some(gradient) => own(gradient)?,
                None => self.zeros(index)?,
            };
            let dtype = dtype_of(gradient.dtype())?;
            let list = TensorList::new(vec![gradient], dtype)?;
            let reduced = self.context.group().all_reduce_async(list, ReduceOp::Sum)?.wait()?;
            all.extend(reduced.into_tensors().into_iter().map(|gradient| Reduced { index, gradient }));
        }
        Ok(())
    }

    /// One for each variable that got a gradient on this replica, to be summed along with the last bucket.
    fn has_gradient(&self) -> Result<Tensor> {
        let came = |index: usize| match self.plan.place[index] {
            Some((bucket, place)) => self.gradients.get(bucket).is_some_and(|all| all[place].is_some()),
            None => self.unplanned[index].is_some(),
        };
        // Buckets that were launched were complete.
        let flag = |index: usize| match self.plan.place[index] {
            Some((bucket, _)) if bucket < self.launched.len() => 1.0f32,
            _ if came(index) => 1.0,
            _ => 0.0,
        };
        let flags: Vec<f32> = (0..self.parts.variables.len()).map(flag).collect();
        let dtype = self.plan.buckets.last().map_or(candle_core::DType::F32, |bucket| bucket.dtype);
        Ok(Tensor::from_vec(flags, self.parts.variables.len(), &Device::Cpu)?.to_dtype(dtype)?)
    }

    fn launch(&mut self, extra: Option<Tensor>) -> Result<()> {
        let index = self.launched.len();
        let bucket = &self.plan.buckets[index];
        let mut tensors = Vec::with_capacity(bucket.variables.len() + 1);
        for (place, variable) in bucket.variables.iter().enumerate() {
            tensors.push(match self.gradients[index][place].take() {
                Some(gradient) => own(gradient)?,
                None => self.zeros(*variable)?,
            });
        }
        tensors.extend(extra);
        let dtype = dtype_of(bucket.dtype)?;
        let list = TensorList::new(tensors, dtype)?;
        let started = Instant::now();
        self.launched.push(self.context.group().all_reduce_async(list, ReduceOp::Sum)?);
        self.communication += started.elapsed();
        Ok(())
    }

    fn zeros(&self, index: usize) -> Result<Tensor> {
        let component = &self.parts.variables[index].components[0];
        Ok(Tensor::zeros(component.shape(), component.dtype(), &Device::Cpu)?)
    }
}

/// The gradient as a contiguous tensor that shares its storage with no other. Almost always it is that already.
fn own(gradient: Tensor) -> candle_core::Result<Tensor> {
    let whole = {
        let (storage, layout) = gradient.storage_and_layout();
        let len = match &*storage {
            candle_core::Storage::Cpu(candle_core::CpuStorage::F32(all)) => all.len(),
            candle_core::Storage::Cpu(candle_core::CpuStorage::F64(all)) => all.len(),
            _ => usize::MAX,
        };
        layout.is_contiguous() && layout.start_offset() == 0 && len == layout.shape().elem_count()
    };
    let gradient = gradient.detach();
    if whole { Ok(gradient) } else { gradient.force_contiguous() }
}

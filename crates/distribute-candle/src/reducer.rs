//! Gradients of one replica on their way: into buckets, over the replicas, and out again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use distribute_collectives::{FusedStep, ReduceOp};
use distribute_strategy::{ReplicaContext, STEP_WORDS};

use crate::gpu::{GpuStep, GpuSum};
use crate::model::Parts;
use crate::plan::Plan;
use crate::shards::{GradientShard, ShardedStep};
use crate::tensor::{dtype_of, is_short};
use crate::tensor_list::TensorList;
use crate::{Error, Result};

/// One step's gradients of one replica.
pub(crate) struct Reducer {
    context: ReplicaContext,
    parts: Arc<Parts>,
    plan: Arc<Plan>,
    step: Way,
    /// Gradients of variables that are not in the plan.
    unplanned: Vec<Option<Tensor>>,
    failure: Option<Error>,
    /// Time spent in collectives, of which computation could not make use.
    pub(crate) communication: Duration,
}

/// How gradients are summed.
pub(crate) enum Way {
    /// Every replica gets all of them.
    Whole(FusedStep<TensorList>),
    /// Each gets a part.
    Sharded(ShardedStep),
    /// Every replica gets all of them, in its GPU's memory.
    Gpu(GpuStep),
}

/// What a step's gradients have become.
pub(crate) enum Summed {
    /// Variables' gradients, in the same order on every replica.
    Whole(Vec<Reduced>),
    /// This replica's parts of all buckets, and on how many replicas each variable got a gradient.
    Sharded(Vec<GradientShard>, Vec<u32>),
    /// Variables' gradients in the GPU's memory.
    Gpu(GpuSum),
}

impl Summed {
    /// The variables that got a gradient on some replica, of `count`.
    pub(crate) fn variables(&self, count: usize) -> Vec<usize> {
        match self {
            Summed::Whole(gradients) => gradients.iter().map(|reduced| reduced.index).collect(),
            Summed::Sharded(_, flags) => {
                (0..count).filter(|index| flags.get(*index).is_some_and(|replicas| *replicas > 0)).collect()
            }
            Summed::Gpu(sum) => sum.variables(),
        }
    }
}

/// A variable's gradient, summed over all replicas.
pub(crate) struct Reduced {
    pub(crate) index: usize,
    pub(crate) gradient: Tensor,
}

impl Reduced {
    /// In 32 bits at least, for what comes now.
    pub(crate) fn new(index: usize, gradient: Tensor) -> candle_core::Result<Reduced> {
        let gradient = if is_short(gradient.dtype()) { gradient.to_dtype(DType::F32)? } else { gradient };
        Ok(Reduced { index, gradient })
    }
}

impl Reducer {
    pub(crate) fn new(context: &ReplicaContext, parts: &Arc<Parts>, plan: &Arc<Plan>, step: Way) -> Reducer {
        Reducer {
            context: context.clone(),
            parts: parts.clone(),
            plan: plan.clone(),
            step,
            unplanned: vec![None; parts.variables.len()],
            failure: None,
            communication: Duration::ZERO,
        }
    }

    /// Takes a gradient; begins to reduce its bucket, and those that wait for it, if that is now complete.
    pub(crate) fn push(&mut self, index: usize, gradient: Tensor) {
        if !self.parts.variables[index].trainable {
            // Frozen.
        } else if !self.plan.buckets.contains(index) {
            self.unplanned[index] = Some(gradient);
        } else if self.failure.is_none()
            && let Err(error) = self.take(index, gradient)
        {
            self.failure = Some(error);
        }
    }

    /// Notes a failure, which [`finish`](Reducer::finish) returns.
    pub(crate) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// Completes what is missing with zeros and waits for all buckets. The summed gradients, and the time spent in
    /// collectives.
    pub(crate) fn finish(mut self) -> Result<(Summed, Duration)> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let variables = self.parts.variables.len();
        let came = |index: usize| self.has(index) || self.unplanned[index].is_some();
        let mut flags: Vec<u32> = (0..variables).map(|index| u32::from(came(index))).collect();
        for (index, came) in flags.iter().enumerate() {
            if *came == 0 && self.plan.buckets.contains(index) {
                self.launch(index, zeros(&self.parts, self.context.local_replica_id(), index)?)?;
            }
        }
        flags.extend(self.context.step_words());
        if !matches!(self.step, Way::Gpu(_)) {
            let flags = Tensor::from_slice(&flags, variables + STEP_WORDS, &Device::Cpu)?;
            self.launch(self.plan.flags(), flags)?;
        }
        let Reducer { context, parts, plan, step, mut unplanned, mut communication, .. } = self;
        let started = Instant::now();
        let step = match step {
            Way::Whole(step) => step,
            Way::Sharded(step) => {
                let (shards, flags) = step.finish()?;
                communication += started.elapsed();
                agree(&context, &parts, &plan, &flags)?;
                return Ok((Summed::Sharded(shards, flags), communication));
            }
            Way::Gpu(step) => {
                let (sum, flags) = step.finish(flags)?;
                communication += started.elapsed();
                agree(&context, &parts, &plan, &flags)?;
                return Ok((Summed::Gpu(sum), communication));
            }
        };
        let mut lists = step.finish(context.group())?;
        communication += started.elapsed();
        let flags: Vec<u32> = match lists.pop().and_then(|list| list.into_tensors().pop()) {
            Some(flags) => flags.to_vec1()?,
            None => Vec::new(),
        };
        context.agree_on_step(words(&flags));
        let came_anywhere = |index: usize| flags.get(index).is_some_and(|count| *count > 0);
        let mut all: Vec<Reduced> = (0..variables)
            .filter(|index| plan.buckets.contains(*index))
            .zip(lists.into_iter().flat_map(TensorList::into_tensors))
            .filter(|(index, _)| came_anywhere(*index))
            .map(|(index, gradient)| Reduced::new(index, gradient))
            .collect::<candle_core::Result<_>>()?;
        // Variables outside the plan for which some replica got a gradient after all: all replicas reduce them one by one.
        for index in (0..variables).filter(|index| came_anywhere(*index) && !plan.buckets.contains(*index)) {
            let gradient = match unplanned[index].take() {
                Some(gradient) => own(gradient)?,
                None => zeros(&parts, context.local_replica_id(), index)?,
            };
            let reduced = context.group().all_reduce_async(list(gradient)?, ReduceOp::Sum)?.wait()?;
            for gradient in reduced.into_tensors() {
                all.push(Reduced::new(index, gradient)?);
            }
        }
        Ok((Summed::Whole(all), communication))
    }

    /// Whether any gradient has come.
    pub(crate) fn has_any(&self) -> bool {
        self.unplanned.iter().any(Option::is_some) || (0..self.parts.variables.len()).any(|index| self.has(index))
    }

    fn has(&self, index: usize) -> bool {
        match &self.step {
            Way::Whole(step) => step.has(index),
            Way::Sharded(step) => step.has(index),
            Way::Gpu(step) => step.has(index),
        }
    }

    fn take(&mut self, index: usize, gradient: Tensor) -> Result<()> {
        let gradient = if let Way::Gpu(_) = self.step { gradient } else { own(gradient)? };
        self.launch(index, gradient)
    }

    fn launch(&mut self, index: usize, tensor: Tensor) -> Result<()> {
        let started = Instant::now();
        match &mut self.step {
            Way::Whole(step) => step.push(self.context.group(), index, list(tensor)?)?,
            Way::Sharded(step) => step.push(self.context.group(), index, tensor)?,
            Way::Gpu(step) => step.push(index, tensor)?,
        }
        self.communication += started.elapsed();
        Ok(())
    }
}

/// Tells the step's words; an error where a variable outside the plan got a gradient after all, for which these ways have no
/// place.
fn agree(context: &ReplicaContext, parts: &Parts, plan: &Plan, flags: &[u32]) -> Result<()> {
    context.agree_on_step(words(flags));
    let late = (0..parts.variables.len()).find(|index| flags[*index] > 0 && !plan.buckets.contains(*index));
    late.map_or(Ok(()), |index| Err(Error::LateGradient { name: parts.variables[index].name.clone() }))
}

/// What follows the flags of the variables.
fn words(flags: &[u32]) -> [u32; STEP_WORDS] {
    flags.last_chunk().copied().unwrap_or_default()
}

#[expect(unsafe_code, reason = "gradients are reduced where backward has left them")]
fn list(tensor: Tensor) -> Result<TensorList> {
    let dtype = dtype_of(tensor.dtype())?;
    // SAFETY: the tensor was made here (`zeros`, flags), or is a gradient that backward has just finished and handed over:
    // candle adds every gradient up in storage of its own (`own` copies those that are views), and forgets it.
    unsafe { TensorList::new(vec![tensor], dtype) }
}

fn zeros(parts: &Parts, local: usize, index: usize) -> Result<Tensor> {
    let component = &parts.variables[index].components[local];
    Ok(Tensor::zeros(component.shape(), component.dtype(), component.device())?)
}

/// The gradient as a contiguous tensor that shares its storage with no other. Almost always it is that already.
fn own(gradient: Tensor) -> candle_core::Result<Tensor> {
    let whole = {
        let (storage, layout) = gradient.storage_and_layout();
        let len = match &*storage {
            candle_core::Storage::Cpu(candle_core::CpuStorage::F32(all)) => all.len(),
            candle_core::Storage::Cpu(candle_core::CpuStorage::F64(all)) => all.len(),
            candle_core::Storage::Cpu(candle_core::CpuStorage::F16(all)) => all.len(),
            candle_core::Storage::Cpu(candle_core::CpuStorage::BF16(all)) => all.len(),
            _ => usize::MAX,
        };
        layout.is_contiguous() && layout.start_offset() == 0 && len == layout.shape().elem_count()
    };
    let gradient = gradient.detach();
    if whole { Ok(gradient) } else { gradient.force_contiguous() }
}

//! Gradients of one replica on their way: into buckets, over the replicas, and out again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use distribute_collectives::{FusedAllReduce, FusedStep, ReduceOp};
use distribute_strategy::{ReplicaContext, STEP_WORDS};

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
enum Way {
    /// Every replica gets all of them.
    Whole(FusedStep<TensorList>),
    /// Each gets a part.
    Sharded(ShardedStep),
}

/// What a step's gradients have become.
pub(crate) enum Summed {
    /// Variables' gradients, in the same order on every replica.
    Whole(Vec<Reduced>),
    /// This replica's parts of all buckets, and on how many replicas each variable got a gradient.
    Sharded(Vec<GradientShard>, Vec<u32>),
}

/// A variable's gradient, summed over all replicas.
pub(crate) struct Reduced {
    pub(crate) index: usize,
    pub(crate) gradient: Tensor,
}

impl Reduced {
    /// In 32 bits at least, for what comes now.
    fn new(index: usize, gradient: Tensor) -> candle_core::Result<Reduced> {
        let gradient = if is_short(gradient.dtype()) { gradient.to_dtype(DType::F32)? } else { gradient };
        Ok(Reduced { index, gradient })
    }
}

impl Reducer {
    pub(crate) fn new(
        context: &ReplicaContext,
        parts: &Arc<Parts>,
        plan: &Arc<Plan>,
        fused: Option<&FusedAllReduce>,
    ) -> Reducer {
        Reducer {
            context: context.clone(),
            parts: parts.clone(),
            plan: plan.clone(),
            step: fused.map_or_else(|| Way::Sharded(ShardedStep::new(plan)), |fused| Way::Whole(fused.begin())),
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
            && let Err(error) = own(gradient).map_err(Error::from).and_then(|gradient| self.launch(index, gradient))
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
                self.launch(index, zeros(&self.parts, index)?)?;
            }
        }
        flags.extend(self.context.step_words());
        self.launch(self.plan.flags(), Tensor::from_vec(flags, variables + STEP_WORDS, &Device::Cpu)?)?;
        let Reducer { context, parts, plan, step, mut unplanned, mut communication, .. } = self;
        let started = Instant::now();
        let step = match step {
            Way::Whole(step) => step,
            Way::Sharded(step) => {
                let (shards, flags) = step.finish()?;
                communication += started.elapsed();
                context.agree_on_step(words(&flags));
                let late = (0..variables).find(|index| flags[*index] > 0 && !plan.buckets.contains(*index));
                return match late {
                    Some(index) => Err(Error::LateGradient { name: parts.variables[index].name.clone() }),
                    None => Ok((Summed::Sharded(shards, flags), communication)),
                };
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
                None => zeros(&parts, index)?,
            };
            let reduced = context.group().all_reduce_async(list(gradient)?, ReduceOp::Sum)?.wait()?;
            for gradient in reduced.into_tensors() {
                all.push(Reduced::new(index, gradient)?);
            }
        }
        Ok((Summed::Whole(all), communication))
    }

    fn has(&self, index: usize) -> bool {
        match &self.step {
            Way::Whole(step) => step.has(index),
            Way::Sharded(step) => step.has(index),
        }
    }

    fn launch(&mut self, index: usize, tensor: Tensor) -> Result<()> {
        let started = Instant::now();
        match &mut self.step {
            Way::Whole(step) => step.push(self.context.group(), index, list(tensor)?)?,
            Way::Sharded(step) => step.push(self.context.group(), index, tensor)?,
        }
        self.communication += started.elapsed();
        Ok(())
    }
}

/// What follows the flags of the variables.
fn words(flags: &[u32]) -> [u32; STEP_WORDS] {
    flags.last_chunk().copied().unwrap_or_default()
}

fn list(tensor: Tensor) -> Result<TensorList> {
    let dtype = dtype_of(tensor.dtype())?;
    TensorList::new(vec![tensor], dtype)
}

fn zeros(parts: &Parts, index: usize) -> Result<Tensor> {
    let component = &parts.variables[index].components[0];
    Ok(Tensor::zeros(component.shape(), component.dtype(), &Device::Cpu)?)
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

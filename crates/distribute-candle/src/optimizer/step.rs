//! What an optimizer does in a step: backward, reduction, update.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use candle_core::Tensor;
use distribute_collectives::{Compression, FusedAllReduce, FusionOptions, ReduceOp};
use distribute_device::{BufferMut, DType, Element};
use distribute_strategy::ReplicaContext;
use distribute_values::{Real, UpdateRule, with_storage};

use super::accumulated::Sum;
use super::loss_scale::Scaling;
use super::{Optimizer, StepCounts, clip, lock};
use crate::gpu::{GpuReduction, GpuSum};
use crate::plan::Plan;
use crate::reducer::{Reduced, Reducer, Summed, Way};
use crate::shards::{GradientShard, ShardedStep, Update};
use crate::tensor::is_short;
use crate::{Candle, Error, Result};

impl Optimizer {
    pub(super) fn step(&self, context: &ReplicaContext, local: usize, loss: &Tensor) -> Result<()> {
        let started = Instant::now();
        let (mut counts, accumulated, scaling) = {
            let mut state = lock(&self.replicas[local]);
            (state.counts.clone(), std::mem::take(&mut state.accumulated), state.scaling)
        };
        let loss = &scaled(loss, scaling)?;
        let reducer = match self.plan.get() {
            Some(plan) => self.backward(context, local, plan, loss, accumulated)?,
            None => self.first_backward(context, local, loss, accumulated)?,
        };
        let (mut summed, communication) = reducer.finish()?;
        if self.clip.is_some() || scaling.is_some() {
            // There are no kernels for these.
            summed = summed.on_tensors(&self.parts, local)?;
        }
        let finite = match scaling {
            Some(scaling) => unscale(context, &mut summed, scaling.scale)?,
            None => true,
        };
        // Flags and gradients are those of all replicas, so these are the same everywhere.
        counts.advance(summed.variables(self.parts.variables.len()));
        let gradient_norm = match summed {
            _ if !finite => None,
            Summed::Whole(gradients) => self.apply_whole(context, local, &counts, gradients)?,
            Summed::Sharded(shards, flags) => self.apply_sharded(context, local, &counts, shards, flags)?,
            Summed::Gpu(sum) => self.apply_on_gpu(context, local, &counts, sum)?,
        };
        let mut state = lock(&self.replicas[local]);
        if let Some(scaling) = &mut state.scaling {
            scaling.note(finite);
        }
        // A step that was left out does not count, nor does one that failed.
        if finite {
            state.steps += 1;
            state.counts = counts;
        }
        state.gradient_norm = gradient_norm;
        state.times.total += started.elapsed();
        state.times.communication += communication;
        Ok(())
    }

    /// Steps all parameters by kernels, or one after another where there are none for the rule.
    fn apply_on_gpu(
        &self,
        context: &ReplicaContext,
        local: usize,
        counts: &StepCounts,
        sum: GpuSum,
    ) -> Result<Option<f64>> {
        let slots = |index: usize| -> Vec<Tensor> {
            self.slots[index].iter().map(|slot| slot.components()[local].clone()).collect()
        };
        if sum.apply(&self.parts, local, self.rule, (counts, self.learning_rate()), &slots)? {
            return Ok(None);
        }
        self.apply_whole(context, local, counts, sum.into_tensors(&self.parts, local)?)
    }

    fn apply_sharded(
        &self,
        context: &ReplicaContext,
        local: usize,
        counts: &StepCounts,
        mut gradients: Vec<GradientShard>,
        flags: Vec<u32>,
    ) -> Result<Option<f64>> {
        let plan = self.plan.get().ok_or(Error::NoGradient)?;
        let learning_rate = self.learning_rate();
        let (group, parts, rule) = (context.group(), &*self.parts, self.rule);
        let update = Update { group, plan, parts, rule, local, counts, learning_rate, flags };
        let norm = self.clip.map_or(Ok(None), |clip| update.clip(clip, &mut gradients))?;
        let (mut slots, restored) = {
            let mut state = lock(&self.replicas[local]);
            (std::mem::take(&mut state.shards), state.restored.take())
        };
        if let Some(whole) = restored {
            slots = self.shards_of(plan, group, &whole)?;
        }
        let outcome = update.apply(gradients, &mut slots);
        lock(&self.replicas[local]).shards = slots;
        outcome.map(|()| norm)
    }

    fn apply_whole(
        &self,
        context: &ReplicaContext,
        local: usize,
        counts: &StepCounts,
        mut gradients: Vec<Reduced>,
    ) -> Result<Option<f64>> {
        let learning_rate = self.learning_rate();
        let gradient_norm = self.clip.map_or(Ok(None), |clip| clip.apply(&mut gradients))?;
        // All have brought their gradients, so nobody reads shared variables any more; one replica writes them.
        if !self.parts.shared || local == 0 {
            for reduced in gradients {
                self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
            }
        }
        if self.parts.shared {
            context.barrier()?;
        }
        Ok(gradient_norm)
    }

    /// Reduces while backward runs.
    fn backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
        loss: &Tensor,
        accumulated: Vec<Option<Tensor>>,
    ) -> Result<Reducer> {
        let reducer = self.reducer(context, local, plan)?;
        let state = Arc::new(Mutex::new(Some((reducer, Sum::from(accumulated)))));
        let sink = {
            let state = state.clone();
            Box::new(move |index, gradient| {
                if let Some((reducer, sum)) = &mut *lock(&state) {
                    match sum.take_with(index, gradient) {
                        Ok(gradient) => reducer.push(index, gradient),
                        Err(error) => reducer.fail(error.into()),
                    }
                }
            })
        };
        self.parts.backward(local, sink, loss)?;
        // Only this function takes it out.
        let (mut reducer, sum) = lock(&state).take().ok_or(Error::NoGradient)?;
        for (index, gradient) in sum.into_rest() {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    /// Learns which gradients come, and in which order, before anything is reduced.
    fn first_backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        loss: &Tensor,
        accumulated: Vec<Option<Tensor>>,
    ) -> Result<Reducer> {
        let mut sum = Sum::from(accumulated);
        let mut fired = Vec::new();
        for (index, gradient) in self.record(local, loss)? {
            fired.push((index, sum.take_with(index, gradient)?));
        }
        fired.extend(sum.into_rest());
        let order: Vec<usize> = fired.iter().map(|(index, _)| *index).collect();
        let agreed = Plan::agree(context, &self.parts, &order)?;
        let plan = self.plan.get_or_init(|| agreed);
        let mut reducer = self.reducer(context, local, plan)?;
        for (index, gradient) in fired {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    fn reducer(&self, context: &ReplicaContext, local: usize, plan: &Arc<Plan>) -> Result<Reducer> {
        if self.sharded {
            return Ok(Reducer::new(context, &self.parts, plan, Way::Sharded(ShardedStep::new(plan))));
        }
        let mut state = lock(&self.replicas[local]);
        if state.on_gpu.is_none() && !self.parts.shared {
            state.on_gpu = Some(GpuReduction::new(context, &self.parts, plan)?);
        }
        if let Some(Some(reduction)) = &state.on_gpu {
            if !matches!(self.compression, Compression::None) {
                let why = "gradients of GPUs are sent as they are; leave compress out";
                return Err(Error::Combination { what: "compress", other: "a replica on a GPU", why });
            }
            return Ok(Reducer::new(context, &self.parts, plan, Way::Gpu(reduction.begin(context)?)));
        }
        let fused = match &mut state.fused {
            Some(fused) => fused,
            none => {
                let options = FusionOptions { compression: self.compression.clone(), ..FusionOptions::default() };
                none.insert(FusedAllReduce::with_plan(plan.buckets.clone(), &options)?)
            }
        };
        Ok(Reducer::new(context, &self.parts, plan, Way::Whole(fused.begin())))
    }

    /// Adds the gradients of `loss` to those of this replica that wait for its next step.
    pub(super) fn accumulate(&self, local: usize, loss: &Tensor) -> Result<()> {
        let scaling = lock(&self.replicas[local]).scaling;
        let fired = self.record(local, &scaled(loss, scaling)?)?;
        let mut sum = Sum::from(std::mem::take(&mut lock(&self.replicas[local]).accumulated));
        for (index, gradient) in fired {
            sum.add(index, gradient)?;
        }
        lock(&self.replicas[local]).accumulated = sum.0;
        Ok(())
    }

    /// Runs backward; the gradients in the order in which they came.
    fn record(&self, local: usize, loss: &Tensor) -> Result<Vec<(usize, Tensor)>> {
        let fired: Arc<Mutex<Vec<(usize, Tensor)>>> = Arc::default();
        let sink = {
            let fired = fired.clone();
            Box::new(move |index, gradient| lock(&fired).push((index, gradient)))
        };
        self.parts.backward(local, sink, loss)?;
        let fired = std::mem::take(&mut *lock(&fired));
        Ok(fired)
    }

    fn apply(&self, local: usize, step: u64, learning_rate: f64, reduced: Reduced) -> Result<()> {
        let variable = &self.parts.variables[reduced.index];
        let parameter = &variable.components[local];
        let mut slots: Vec<Tensor> =
            self.slots[reduced.index].iter().map(|slot| slot.components()[local].clone()).collect();
        let master = if is_short(parameter.dtype()) { slots.pop() } else { None };
        let mut tensors = vec![master.clone().unwrap_or_else(|| parameter.clone()), reduced.gradient];
        tensors.extend(slots);
        let mut outcome = Ok(());
        with_storage::<Candle, Tensor>(&tensors, &mut |buffers| {
            outcome = match buffers.first().map(|buffer| buffer.dtype()) {
                Some(DType::F64) => update::<f64>(buffers, self.rule, step, learning_rate),
                _ => update::<f32>(buffers, self.rule, step, learning_rate),
            };
        })?;
        outcome?;
        match master {
            Some(master) => round_to(parameter, &master),
            None => Ok(()),
        }
    }
}

/// Writes a parameter of 16 bits from its master copy.
fn round_to(parameter: &Tensor, master: &Tensor) -> Result<()> {
    let mut outcome = Ok(());
    with_storage::<Candle, Tensor>(&[parameter.clone(), master.clone()], &mut |buffers| {
        if let [parameter, master] = buffers {
            outcome = match parameter.dtype() {
                DType::F16 => round(parameter, master, distribute_device::f16::from_f32),
                _ => round(parameter, master, distribute_device::bf16::from_f32),
            };
        }
    })?;
    outcome
}

fn round<T: Element>(parameter: &mut BufferMut<'_>, master: &BufferMut<'_>, round: fn(f32) -> T) -> Result<()> {
    let master = master.as_slice::<f32>().map_err(distribute_values::Error::from)?;
    let parameter = parameter.as_mut_slice::<T>().map_err(distribute_values::Error::from)?;
    parameter.iter_mut().zip(master).for_each(|(short, wide)| *short = round(*wide));
    Ok(())
}

fn scaled(loss: &Tensor, scaling: Option<Scaling>) -> Result<Tensor> {
    Ok(scaling.map_or_else(|| Ok(loss.clone()), |scaling| loss * scaling.scale)?)
}

/// Divides gradients by what losses were multiplied by; whether they are finite, on all replicas alike.
fn unscale(context: &ReplicaContext, summed: &mut Summed, scale: f64) -> Result<bool> {
    match summed {
        Summed::Whole(gradients) => {
            for reduced in &*gradients {
                // Sums are the same on every replica.
                if !clip::is_finite(&reduced.gradient)? {
                    return Ok(false);
                }
                clip::change(&reduced.gradient, |x| x / scale)?;
            }
            Ok(true)
        }
        Summed::Sharded(shards, _) => {
            let mut finite = [u8::from(shards.iter().all(|shard| shard.square_sum().is_finite()))];
            context.group().all_reduce(&mut finite, ReduceOp::Min)?;
            shards.iter_mut().for_each(|shard| shard.change(|x| x / scale));
            Ok(finite[0] == 1)
        }
        // They have become tensors before.
        Summed::Gpu(_) => Ok(true),
    }
}

/// Sorts the storage of parameter, gradient and slots into what a rule takes.
fn update<T: Real>(buffers: &mut [BufferMut<'_>], rule: UpdateRule, step: u64, learning_rate: f64) -> Result<()> {
    if let [parameter, gradient, slots @ ..] = buffers {
        let mut slots = slots
            .iter_mut()
            .map(|slot| slot.as_mut_slice::<T>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(distribute_values::Error::from)?;
        let parameter = parameter.as_mut_slice::<T>().map_err(distribute_values::Error::from)?;
        let gradient = gradient.as_slice::<T>().map_err(distribute_values::Error::from)?;
        rule.update(step, learning_rate, parameter, gradient, &mut slots);
    }
    Ok(())
}

//! One step of an optimizer: backward, reduction, update.

use std::sync::Arc;
use std::time::Instant;

use distribute_collectives::{Compression, FusedAllReduce, FusionOptions, ReduceOp};
use distribute_device::{BufferMut, DType, Element};
use distribute_strategy::{Recoverable, ReplicaContext};
use distribute_values::with_storage;
use parking_lot::Mutex;

use super::Optimizer;
use super::states::Change;
use crate::agreement::audit_replica;
use crate::exchange::{
    Exchange, GradientShard, OnDevice, Reducer, ShardedStep, StepFlags, SumOnDevice, Summed, Update, WholeStep,
};
use crate::gradient::{Accumulated, Clip, Reduced, Scaling, SquaresOfParts, change, is_finite, square_sum};
use crate::library::dtype;
use crate::plan::Plan;
use crate::rule::{Real, UpdateRule};
use crate::{DeviceExchange, DeviceUpdate, Error, StepCounts, TensorLibrary, is_short};

/// The index of a variable, and its gradient.
type Fired<L> = (usize, <L as TensorLibrary>::Tensor);

impl<L: TensorLibrary> Optimizer<L> {
    pub(super) fn step(&self, context: &ReplicaContext, local: usize, loss: &L::Loss) -> Result<(), L::Error> {
        let started = Instant::now();
        self.watch(context)?;
        let (counts, accumulated, scaling) = {
            let mut state = self.states.each[local].lock();
            // The caller may have ignored the failure of an earlier step.
            state.forget_step();
            state.undecided = true;
            let standing = &state.standing;
            (standing.counts.clone(), standing.accumulated.clone(), standing.scaling)
        };
        let scaled = scaling.map(|scaling| L::scale(loss, scaling.scale)).transpose()?;
        let loss = scaled.as_ref().unwrap_or(loss);
        let reducer = match self.states.plan.get() {
            Some(plan) => self.backward(context, local, plan, loss, accumulated)?,
            None => self.first_backward(context, local, loss, accumulated)?,
        };
        let (summed, communication) = reducer.finish()?;
        let counts = &{
            // Flags and gradients are summed over all replicas, so the counts are the same everywhere.
            let mut counts = counts;
            counts.advance(summed.variables(self.parameters.variables().len()));
            counts
        };
        let needs_norms = self.clip.is_some_and(Clip::needs_norms) || scaling.is_some();
        let summed = match summed {
            // The norms of split gradients are computed on the host.
            Summed::OnDevice(sum) if needs_norms && context.tensor_group().is_some() => {
                Summed::Whole(L::Devices::into_tensors(sum, &self.parameters, local)?)
            }
            other => other,
        };
        let squares = {
            let gradients = match &summed {
                Summed::Whole(gradients) if needs_norms => Some(&gradients[..]),
                _ => None,
            };
            SquaresOfParts::agree(context, &self.parameters, gradients)?
        };
        let committed = match summed {
            Summed::Whole(gradients) => {
                self.commit(context, local, counts, || self.apply_whole(local, counts, scaling, gradients, &squares))?
            }
            Summed::Sharded(shards, flags) => self.apply_sharded(context, local, counts, scaling, shards, flags)?,
            Summed::OnDevice(sum) => {
                self.commit(context, local, counts, || self.apply_on_device(local, counts, scaling, sum))?
            }
        };
        if self.parameters.shared && committed {
            context.barrier()?;
        }
        if committed {
            self.audit_when_due(context, local)?;
        }
        let mut state = self.states.each[local].lock();
        state.times.total += started.elapsed();
        state.times.communication += communication;
        Ok(())
    }

    /// Compares the parameters of all replicas, in the steps in which an audit is due.
    fn audit_when_due(&self, context: &ReplicaContext, local: usize) -> Result<(), L::Error> {
        // The count is equal on all replicas, which have made the same steps.
        let steps = self.states.each[local].lock().standing.steps;
        let is_due = self.audit_every > 0 && (steps == 1 || steps.is_multiple_of(self.audit_every));
        if is_due { audit_replica(context, &self.parameters) } else { Ok(()) }
    }

    /// Registers the state, so that a failed run reverts what steps change.
    fn watch(&self, context: &ReplicaContext) -> Result<(), L::Error> {
        self.states.check()?;
        context.check_weighed()?;
        let states: Arc<dyn Recoverable> = self.states.clone();
        Ok(context.recover(&states)?)
    }

    /// Commits a step whose gradients all replicas have, and applies it. Returns whether it was applied, or skipped
    /// because gradients were not finite.
    ///
    /// The last collective of the step has succeeded, which it does on all replicas of a process or on none. From here
    /// on the step counts on all of them, whether `apply` succeeds or not: after the run, a replica on which it failed
    /// gets the values of one on which it succeeded.
    fn commit(
        &self,
        context: &ReplicaContext,
        local: usize,
        counts: &StepCounts,
        apply: impl FnOnce() -> Result<Applied, L::Error>,
    ) -> Result<bool, L::Error> {
        let ending = Commit(Some(context));
        let before = {
            let mut state = self.states.each[local].lock();
            (state.undecided, state.change) = (false, Change::Begun);
            state.standing.accumulated.clear();
            state.standing.steps += 1;
            std::mem::replace(&mut state.standing.counts, counts.clone())
        };
        let Applied { finite, gradient_norm } = apply()?;
        {
            let mut state = self.states.each[local].lock();
            state.change = Change::Whole;
            let standing = &mut state.standing;
            if let Some(scaling) = &mut standing.scaling {
                scaling.note(finite);
            }
            // A skipped step does not count.
            if !finite {
                standing.steps -= 1;
                standing.counts = before;
            }
            standing.gradient_norm = gradient_norm;
        }
        ending.now()?;
        Ok(finite)
    }

    /// Updates all parameters by kernels, or one by one if the rule or the settings have no kernel.
    fn apply_on_device(
        &self,
        local: usize,
        counts: &StepCounts,
        scaling: Option<Scaling>,
        sum: SumOnDevice<L>,
    ) -> Result<Applied, L::Error> {
        let slots = |index: usize| -> Vec<L::Tensor> {
            self.slots[index].iter().map(|slot| slot.components()[local].clone()).collect()
        };
        let (parameters, rule, learning_rate) = (&*self.parameters, self.rule, self.learning_rate());
        let update = DeviceUpdate { parameters, local, rule, counts, learning_rate, slots: &slots };
        if self.clip.is_none() && scaling.is_none() && L::Devices::apply(&sum, &update)? {
            return Ok(Applied { finite: true, gradient_norm: None });
        }
        let gradients = L::Devices::into_tensors(sum, parameters, local)?;
        self.apply_whole(local, counts, scaling, gradients, &SquaresOfParts::default())
    }

    fn apply_sharded(
        &self,
        context: &ReplicaContext,
        local: usize,
        counts: &StepCounts,
        scaling: Option<Scaling>,
        mut gradients: Vec<GradientShard>,
        flags: StepFlags,
    ) -> Result<bool, L::Error> {
        let plan = self.states.plan.get().ok_or(Error::NoGradient)?;
        let learning_rate = self.learning_rate();
        let (group, parameters, rule) = (context.group(), &*self.parameters, self.rule);
        let mut finite = true;
        if let Some(scaling) = scaling {
            let mut all = [u8::from(gradients.iter().all(|shard| shard.square_sum().is_finite()))];
            group.all_reduce(&mut all, ReduceOp::Min)?;
            finite = all[0] == 1;
            gradients.iter_mut().for_each(|shard| shard.change(|x| x / scaling.scale));
        }
        let update = Update { group, plan, parameters, rule, local, counts, learning_rate, flags };
        let gradient_norm = match self.clip {
            Some(clip) if finite => update.clip(clip, &mut gradients)?,
            _ => None,
        };
        self.commit(context, local, counts, || {
            if finite {
                let (mut slots, restored) = {
                    let mut state = self.states.each[local].lock();
                    (std::mem::take(&mut state.shards), state.restored.take())
                };
                if let Some(whole) = restored {
                    slots = self.shards_of(plan, group, &whole)?;
                }
                let gathering = update.own_part(gradients, &mut slots);
                {
                    let mut state = self.states.each[local].lock();
                    state.shards = slots;
                    if gathering.is_ok() {
                        state.change = Change::OwnPart;
                    }
                }
                update.gather(gathering?)?;
            }
            Ok(Applied { finite, gradient_norm })
        })
    }

    fn apply_whole(
        &self,
        local: usize,
        counts: &StepCounts,
        scaling: Option<Scaling>,
        mut gradients: Vec<Reduced<L>>,
        squares: &SquaresOfParts,
    ) -> Result<Applied, L::Error> {
        if let Some(scaling) = scaling
            && (!squares.are_finite() || !unscale(&gradients, scaling.scale)?)
        {
            return Ok(Applied { finite: false, gradient_norm: None });
        }
        let learning_rate = self.learning_rate();
        let scale = scaling.map_or(1.0, |scaling| scaling.scale);
        let square_sum = |reduced: &Reduced<L>| match squares.of(reduced.index) {
            Some(square) => Ok(square / (scale * scale)),
            None => square_sum::<L>(&reduced.gradient),
        };
        let gradient_norm = self.clip.map_or(Ok(None), |clip| clip.apply_with(&mut gradients, square_sum))?;
        // All replicas have contributed their gradients, so none reads shared variables any more; one replica writes
        // them.
        if !self.parameters.shared || local == 0 {
            for reduced in gradients {
                self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
            }
        }
        Ok(Applied { finite: true, gradient_norm })
    }

    /// Runs backward and reduces gradients meanwhile.
    fn backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
        loss: &L::Loss,
        accumulated: Accumulated<L>,
    ) -> Result<Reducer<L>, L::Error> {
        let reducer = self.reducer(context, local, plan)?;
        let state = Arc::new(Mutex::new(Some((reducer, accumulated))));
        let sink = {
            let state = state.clone();
            Box::new(move |index, gradient| {
                if let Some((reducer, accumulated)) = &mut *state.lock() {
                    match accumulated.take_with(index, gradient) {
                        Ok(gradient) => reducer.push(index, gradient),
                        Err(error) => reducer.fail(error),
                    }
                }
            })
        };
        self.parameters.backward(local, sink, loss)?;
        // No other function takes the reducer.
        let (mut reducer, accumulated) = state.lock().take().ok_or(Error::NoGradient)?;
        check_cut(context, reducer.has_any())?;
        for (index, gradient) in accumulated.into_rest()? {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    /// Runs the first backward, which shows which gradients there are and in which order, before anything is reduced.
    fn first_backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        loss: &L::Loss,
        mut accumulated: Accumulated<L>,
    ) -> Result<Reducer<L>, L::Error> {
        let mut fired = Vec::new();
        for (index, gradient) in self.record(context, local, loss)? {
            fired.push((index, accumulated.take_with(index, gradient)?));
        }
        fired.extend(accumulated.into_rest()?);
        let order: Vec<usize> = fired.iter().map(|(index, _)| *index).collect();
        // Settings are compared first, because the operations themselves differ if, for example, one worker compresses.
        let scaling = self.states.each[local].lock().standing.scaling;
        context.compare_settings(self.settings(scaling).lines())?;
        let agreed = Plan::agree(context, &self.parameters, &order)?;
        let plan = self.states.plan.get_or_init(|| agreed);
        let mut reducer = self.reducer(context, local, plan)?;
        for (index, gradient) in fired {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    fn reducer(&self, context: &ReplicaContext, local: usize, plan: &Arc<Plan>) -> Result<Reducer<L>, L::Error> {
        let scaling = self.states.each[local].lock().standing.scaling;
        let exchange = self.exchange(context, local, plan)?;
        Ok(Reducer::new(context, &self.parameters, plan, self.settings(scaling), exchange))
    }

    /// Starts the exchange of one step's gradients.
    fn exchange(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
    ) -> Result<Box<dyn Exchange<L>>, L::Error> {
        if self.sharded {
            return Ok(Box::new(ShardedStep::new(plan)));
        }
        let mut state = self.states.each[local].lock();
        if state.on_device.is_none() && !self.parameters.shared {
            state.on_device = Some(L::Devices::new(context, &self.parameters, plan)?);
        }
        if let Some(Some(devices)) = &state.on_device {
            if !matches!(self.compression, Compression::None) {
                let why = "gradients of GPUs are sent as they are; leave compress out";
                return Err(Error::Combination { what: "compress", other: "a replica on a GPU", why }.into());
            }
            return Ok(Box::new(OnDevice::<L>(devices.begin(context)?)));
        }
        let fused = match &mut state.fused {
            Some(fused) => fused,
            none => {
                let options = FusionOptions::default().compression(self.compression.clone());
                none.insert(FusedAllReduce::with_plan(plan.buckets.clone(), &options)?)
            }
        };
        Ok(Box::new(WholeStep::new(plan, fused.begin())))
    }

    /// Adds the gradients of `loss` to those that this replica accumulates for its next step.
    pub(super) fn accumulate(&self, context: &ReplicaContext, local: usize, loss: &L::Loss) -> Result<(), L::Error> {
        self.watch(context)?;
        let scaling = self.states.each[local].lock().standing.scaling;
        let scaled = scaling.map(|scaling| L::scale(loss, scaling.scale)).transpose()?;
        let fired = self.record(context, local, scaled.as_ref().unwrap_or(loss))?;
        let mut accumulated = self.states.each[local].lock().standing.accumulated.clone();
        for (index, gradient) in fired {
            accumulated.add(index, gradient)?;
        }
        self.states.each[local].lock().standing.accumulated = accumulated;
        Ok(())
    }

    /// Runs backward and returns the gradients in the order in which they were reported.
    fn record(&self, context: &ReplicaContext, local: usize, loss: &L::Loss) -> Result<Vec<Fired<L>>, L::Error> {
        let fired: Arc<Mutex<Vec<Fired<L>>>> = Arc::default();
        let sink = {
            let fired = fired.clone();
            Box::new(move |index, gradient| fired.lock().push((index, gradient)))
        };
        self.parameters.backward(local, sink, loss)?;
        let fired = std::mem::take(&mut *fired.lock());
        check_cut(context, !fired.is_empty())?;
        Ok(fired)
    }

    fn apply(&self, local: usize, step: u64, learning_rate: f64, reduced: Reduced<L>) -> Result<(), L::Error> {
        let parameter = &self.parameters.variables()[reduced.index].components()[local];
        let mut slots: Vec<L::Tensor> =
            self.slots[reduced.index].iter().map(|slot| slot.components()[local].clone()).collect();
        let master = if is_short(dtype::<L>(parameter)?) { slots.pop() } else { None };
        let mut tensors = vec![master.clone().unwrap_or_else(|| parameter.clone()), reduced.gradient];
        tensors.extend(slots);
        let mut outcome = Ok(());
        with_storage::<L, L::Tensor>(&tensors, &mut |buffers| {
            outcome = match buffers.first().map(|buffer| buffer.dtype()) {
                Some(DType::F64) => update::<f64>(buffers, self.rule, step, learning_rate),
                _ => update::<f32>(buffers, self.rule, step, learning_rate),
            };
        })?;
        outcome?;
        match master {
            Some(master) => round_to::<L>(parameter, &master),
            None => Ok(()),
        }
    }
}

/// Refuses the loss of a replica without examples if it was disconnected from the model: other replicas wait during
/// backward for collectives that this replica would skip.
fn check_cut(context: &ReplicaContext, has_gradients: bool) -> Result<(), Error> {
    let is_cut = !has_gradients && !context.has_examples() && context.has_graph_group();
    if is_cut { Err(Error::CutLoss) } else { Ok(()) }
}

/// Rounds a parameter of 16 bits from its f32 copy.
fn round_to<L: TensorLibrary>(parameter: &L::Tensor, master: &L::Tensor) -> Result<(), L::Error> {
    let mut outcome = Ok(());
    with_storage::<L, L::Tensor>(&[parameter.clone(), master.clone()], &mut |buffers| {
        if let [parameter, master] = buffers {
            outcome = match parameter.dtype() {
                DType::F16 => round(parameter, master, distribute_device::f16::from_f32),
                _ => round(parameter, master, distribute_device::bf16::from_f32),
            };
        }
    })?;
    Ok(outcome?)
}

fn round<T: Element>(
    parameter: &mut BufferMut<'_>,
    master: &BufferMut<'_>,
    round: fn(f32) -> T,
) -> distribute_values::Result<()> {
    let master = master.as_slice::<f32>()?;
    let parameter = parameter.as_mut_slice::<T>()?;
    parameter.iter_mut().zip(master).for_each(|(short, wide)| *short = round(*wide));
    Ok(())
}

/// Divides gradients by the loss scale. Returns false if a gradient is not finite, on all replicas alike, since the
/// sums are equal on every replica.
fn unscale<L: TensorLibrary>(gradients: &[Reduced<L>], scale: f64) -> Result<bool, L::Error> {
    for reduced in gradients {
        if !is_finite::<L>(&reduced.gradient)? {
            return Ok(false);
        }
        change::<L>(&reduced.gradient, |x| x / scale)?;
    }
    Ok(true)
}

/// The outcome of applying a step.
struct Applied {
    /// Whether the gradients were finite; otherwise nothing was changed.
    finite: bool,
    gradient_norm: Option<f64>,
}

/// Commits a replica's changes, also if the code in between fails or panics.
struct Commit<'a>(Option<&'a ReplicaContext>);

impl Commit<'_> {
    fn now(mut self) -> distribute_strategy::Result<()> {
        self.0.take().map_or(Ok(()), ReplicaContext::commit)
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        if let Some(context) = self.0 {
            // The failure in progress is the one to report.
            let _ = context.commit();
        }
    }
}

/// Splits the storage of parameter, gradient and slots into the arguments of a rule.
fn update<T: Real>(
    buffers: &mut [BufferMut<'_>],
    rule: UpdateRule,
    step: u64,
    learning_rate: f64,
) -> distribute_values::Result<()> {
    if let [parameter, gradient, slots @ ..] = buffers {
        let mut slots = slots.iter_mut().map(|slot| slot.as_mut_slice::<T>()).collect::<Result<Vec<_>, _>>()?;
        let (parameter, gradient) = (parameter.as_mut_slice::<T>()?, gradient.as_slice::<T>()?);
        rule.update(step, learning_rate, parameter, gradient, &mut slots);
    }
    Ok(())
}

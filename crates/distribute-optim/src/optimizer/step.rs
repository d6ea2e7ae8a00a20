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
    Exchange, GradientShard, InProgress, OnDevice, PartsStep, Reducer, ShardedStep, StepFlags, SumOnDevice, Summed,
    Sums, Update, WholeStep, is_exchanged,
};
use crate::gradient::{Accumulated, Clip, Reduced, Scaling, SquaresOfParts, change, is_finite, square_sum};
use crate::library::dtype;
use crate::plan::Plan;
use crate::rule::{Real, UpdateRule};
use crate::{DeviceExchange, DeviceUpdate, Error, Parameters, StepCounts, TensorLibrary, is_short};

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
        let (sums, communication) = reducer.finish()?;
        let counts = &{
            // Flags and gradients are summed over all replicas, so the counts are the same everywhere.
            let mut counts = counts;
            counts.advance(sums.variables(self.parameters.variables().len()));
            counts
        };
        let Sums { summed, parts, order } = sums;
        let is_sharded = order.is_some();
        if let Some(order) = order {
            self.states.set_parts_order(order);
        }
        let needs_norms = self.clip.is_some_and(Clip::needs_norms) || scaling.is_some();
        let summed = match summed {
            // The norms of split gradients are computed on the host.
            Summed::OnDevice(sum) if needs_norms && context.tensor_group().is_some() => {
                Summed::Whole(L::Devices::into_tensors(sum, &self.parameters, local)?)
            }
            other => other,
        };
        let committed = match summed {
            Summed::Whole(gradients) => {
                let mut parts = self.parts(context, is_sharded, scaling, parts)?;
                let split = needs_norms.then_some(&gradients[..]);
                parts.squares_of_split = SquaresOfParts::agree(context, &self.parameters, split)?;
                self.commit(context, local, counts, || self.apply_whole(local, counts, scaling, gradients, parts))?
            }
            Summed::Sharded(shards, flags) => {
                self.apply_sharded(context, local, counts, scaling, (shards, flags), parts)?
            }
            Summed::OnDevice(sum) => {
                let parts = self.parts(context, is_sharded, scaling, parts)?;
                SquaresOfParts::agree(context, &self.parameters, None)?;
                self.commit(context, local, counts, || self.apply_on_device(local, counts, scaling, sum, parts))?
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

    /// Divides the parts of sharded variables' gradients by the loss scale, and sums their squares over all replicas if
    /// the settings need them.
    fn parts(
        &self,
        context: &ReplicaContext,
        is_sharded: bool,
        scaling: Option<Scaling>,
        gradients: Vec<Reduced<L>>,
    ) -> Result<Parts<L>, L::Error> {
        let needs_squares = scaling.is_some() || matches!(self.clip, Some(Clip::GlobalNorm(_)));
        if !is_sharded || !needs_squares {
            return Ok(Parts { gradients, squares: 0.0, squares_of_split: SquaresOfParts::default() });
        }
        let mut squares = self.own_squares(context, scaling, &gradients)?;
        context.group().all_reduce(&mut squares, ReduceOp::Sum)?;
        if let Some(tensor) = context.tensor_group() {
            // Of split variables, each rank has summed the squares of its part.
            tensor.all_reduce(&mut squares[1..], ReduceOp::Sum)?;
        }
        Ok(Parts { gradients, squares: squares.iter().sum(), squares_of_split: SquaresOfParts::default() })
    }

    /// Divides the parts of sharded variables' gradients by the loss scale, and returns the sum of their squares, apart
    /// for those that are split among tensor ranks too; 0 on replicas that mirror others, so that every element is
    /// counted once.
    fn own_squares(
        &self,
        context: &ReplicaContext,
        scaling: Option<Scaling>,
        gradients: &[Reduced<L>],
    ) -> Result<[f64; 2], L::Error> {
        let sharding = context.strategy().sharding();
        let is_mirror = sharding.is_some_and(|sharding| sharding.shard_group_of(context.replica_id()) > 0);
        let mut squares = [0.0; 2];
        for reduced in gradients {
            if let Some(scaling) = scaling {
                change::<L>(&reduced.gradient, |x| x / scaling.scale)?;
            }
            let is_split = self.parameters.variables()[reduced.index].tensor_split().is_some();
            squares[usize::from(is_split)] += if is_mirror { 0.0 } else { square_sum::<L>(&reduced.gradient)? };
        }
        Ok(squares)
    }

    /// Updates all parameters by kernels, or one by one if the rule or the settings have no kernel.
    fn apply_on_device(
        &self,
        local: usize,
        counts: &StepCounts,
        scaling: Option<Scaling>,
        sum: SumOnDevice<L>,
        parts: Parts<L>,
    ) -> Result<Applied, L::Error> {
        let slots = |index: usize| -> Vec<L::Tensor> {
            self.slots[index].iter().map(|slot| slot.components()[local].clone()).collect()
        };
        let (parameters, rule, learning_rate) = (&*self.parameters, self.rule, self.learning_rate());
        let update = DeviceUpdate { parameters, local, rule, counts, learning_rate, slots: &slots };
        if self.clip.is_none() && scaling.is_none() && L::Devices::apply(&sum, &update)? {
            for reduced in parts.gradients {
                self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
            }
            return Ok(Applied { finite: true, gradient_norm: None });
        }
        self.apply_whole(local, counts, scaling, L::Devices::into_tensors(sum, parameters, local)?, parts)
    }

    fn apply_sharded(
        &self,
        context: &ReplicaContext,
        local: usize,
        counts: &StepCounts,
        scaling: Option<Scaling>,
        (mut gradients, flags): (Vec<GradientShard>, StepFlags),
        mut parts: Vec<Reduced<L>>,
    ) -> Result<bool, L::Error> {
        let plan = self.states.plan.get().ok_or(Error::NoGradient)?;
        let learning_rate = self.learning_rate();
        let (group, parameters, rule) = (context.group(), &*self.parameters, self.rule);
        let mut finite = true;
        // There are no tensor ranks, among which variables would be split.
        let squares: f64 = self.own_squares(context, scaling, &parts)?.iter().sum();
        if let Some(scaling) = scaling {
            let shards = gradients.iter().all(|shard| shard.square_sum().is_finite());
            let mut all = [u8::from(shards && squares.is_finite())];
            group.all_reduce(&mut all, ReduceOp::Min)?;
            finite = all[0] == 1;
            gradients.iter_mut().for_each(|shard| shard.change(|x| x / scaling.scale));
        }
        let update = Update { group, plan, parameters, rule, local, counts, learning_rate, flags };
        let gradient_norm = match self.clip {
            Some(clip) if finite => {
                let norm = update.clip(clip, &mut gradients, squares)?;
                // Clip::Norm, which needs their squares, does not go with parts.
                clip.apply_with(&mut parts, norm, |reduced| square_sum::<L>(&reduced.gradient))?;
                norm
            }
            _ => None,
        };
        self.commit(context, local, counts, || {
            if finite {
                for reduced in parts {
                    self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
                }
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
        mut parts: Parts<L>,
    ) -> Result<Applied, L::Error> {
        let squares = &parts.squares_of_split;
        if let Some(scaling) = scaling
            && !(squares.are_finite() && unscale(&gradients, scaling.scale)? && parts.squares.is_finite())
        {
            return Ok(Applied { finite: false, gradient_norm: None });
        }
        let learning_rate = self.learning_rate();
        let scale = scaling.map_or(1.0, |scaling| scaling.scale);
        let square = |reduced: &Reduced<L>| match squares.of(reduced.index) {
            Some(square) => Ok(square / (scale * scale)),
            None => square_sum::<L>(&reduced.gradient),
        };
        let gradient_norm = match self.clip {
            Some(clip) => {
                let norm = clip.norm(&gradients, parts.squares, square)?;
                clip.apply_with(&mut gradients, norm, square)?;
                clip.apply_with(&mut parts.gradients, norm, square)?;
                norm
            }
            None => None,
        };
        // All replicas have contributed their gradients, so none reads shared variables any more; one replica writes
        // them.
        if !self.parameters.shared || local == 0 {
            let all = gradients.into_iter().chain(parts.gradients);
            match &self.library {
                Some(library) => library.apply(local, learning_rate, all.collect())?,
                None => {
                    for reduced in all {
                        self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
                    }
                }
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
        let reducer = self.reducer(context, local, plan, self.parts_step(context)?)?;
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
        check_cut(context, &self.parameters, reducer.has_any())?;
        for (index, gradient) in accumulated.into_rest()? {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    /// Runs the first backward, which shows which gradients there are and in which order, before anything is reduced
    /// but sharded variables' gradients, which a replica may not have the memory to keep.
    fn first_backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        loss: &L::Loss,
        accumulated: Accumulated<L>,
    ) -> Result<Reducer<L>, L::Error> {
        // Settings are compared first, because the operations themselves differ if, for example, one worker compresses.
        let scaling = self.states.each[local].lock().standing.scaling;
        context.compare_settings(self.settings(scaling).lines())?;
        let parts = self.parts_step(context)?;
        let first = First { parts, accumulated, fired: Vec::new(), order: Vec::new(), failure: None };
        let state = Arc::new(Mutex::new(Some(first)));
        let sink = {
            let (state, parameters) = (state.clone(), self.parameters.clone());
            Box::new(move |index, gradient| {
                if let Some(first) = &mut *state.lock() {
                    first.push(&parameters, index, gradient);
                }
            })
        };
        self.parameters.backward(local, sink, loss)?;
        // No other function takes it.
        let mut first = state.lock().take().ok_or(Error::NoGradient)?;
        check_cut(context, &self.parameters, !first.order.is_empty())?;
        for (index, gradient) in std::mem::take(&mut first.accumulated).into_rest()? {
            first.push(&self.parameters, index, gradient);
        }
        let First { parts, fired, order, failure, .. } = first;
        if let Some(failure) = failure {
            return Err(failure);
        }
        let agreed = Plan::agree(context, &self.parameters, &order)?;
        let plan = self.states.plan.get_or_init(|| agreed);
        let mut reducer = self.reducer(context, local, plan, parts)?;
        for (index, gradient) in fired {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    /// Begins the exchange of sharded variables' gradients.
    fn parts_step(&self, context: &ReplicaContext) -> Result<InProgress<PartsStep<L>>, L::Error> {
        let step = PartsStep::begin(context, &self.parameters, self.states.parts_order())?;
        Ok(InProgress::new(context, step))
    }

    fn reducer(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
        parts: InProgress<PartsStep<L>>,
    ) -> Result<Reducer<L>, L::Error> {
        let scaling = self.states.each[local].lock().standing.scaling;
        let exchange = self.exchange(context, local, plan)?;
        Ok(Reducer::new(context, &self.parameters, plan, self.settings(scaling), exchange, parts))
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
        check_cut(context, &self.parameters, !fired.is_empty())?;
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
fn check_cut<L: TensorLibrary>(
    context: &ReplicaContext,
    parameters: &Parameters<L>,
    has_gradients: bool,
) -> Result<(), Error> {
    let waits = || context.has_graph_group() || parameters.variables().iter().any(|v| v.layout().is_some());
    let is_cut = !has_gradients && !context.has_examples() && waits();
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

/// A replica's parts of the gradients of sharded variables, divided by the loss scale.
struct Parts<L: TensorLibrary> {
    gradients: Vec<Reduced<L>>,
    /// The sum of the squares of all elements, over all replicas; 0 if the settings do not need it.
    squares: f64,
    /// The squares of the gradients of variables that are split among tensor ranks.
    squares_of_split: SquaresOfParts,
}

/// The gradients of the first backward.
struct First<L: TensorLibrary> {
    parts: InProgress<PartsStep<L>>,
    accumulated: Accumulated<L>,
    /// The gradients of variables that are not sharded.
    fired: Vec<Fired<L>>,
    /// The order in which all gradients became complete.
    order: Vec<usize>,
    failure: Option<L::Error>,
}

impl<L: TensorLibrary> First<L> {
    fn push(&mut self, parameters: &Parameters<L>, index: usize, gradient: L::Tensor) {
        if self.failure.is_none()
            && let Err(error) = self.try_push(parameters, index, gradient)
        {
            self.failure = Some(error);
        }
    }

    fn try_push(&mut self, parameters: &Parameters<L>, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        let gradient = self.accumulated.take_with(index, gradient)?;
        self.order.push(index);
        match is_exchanged(&parameters.variables()[index]) {
            true => self.parts.push(index, gradient)?,
            false => self.fired.push((index, gradient)),
        }
        Ok(())
    }
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

//! One step of an optimizer: backward, reduction, update.

use std::sync::Arc;
use std::time::Instant;

use distribute_collectives::ReduceOp;
use distribute_device::{BufferMut, BufferRef, DType, Element};
use distribute_rules::{Real, UpdateRule};
use distribute_strategy::{Recoverable, ReplicaContext};
use distribute_types::ErrorClass;
use distribute_values::{TensorStorage, with_storage};

use super::Optimizer;
use super::states::Change;
use crate::agreement::audit_replica;
use crate::exchange::{GradientShard, StepFlags, StepGradients, SumOnDevice, Summed, Sums, Update};
use crate::gradient::{Accumulated, Reduced, Scaling, SquaresOfParts, change, is_finite, row_len, square_sum};
use crate::library::{DeviceOutcome, dtype};
use crate::tape::Sink;
use crate::{Clip, DeviceExchange, DeviceStep, DeviceUpdate, Error, StepCounts, TensorLibrary, is_short};

/// Returns whether parameters are compared after the last of these steps.
pub(super) fn is_audit_due(steps: u64, audit_every: u64) -> bool {
    audit_every > 0 && (steps == 1 || steps.is_multiple_of(audit_every))
}

impl<L: TensorLibrary> Optimizer<L> {
    /// Makes a step with the gradients that `backward` passes to a sink.
    pub(super) fn step(
        &self,
        context: &ReplicaContext,
        local: usize,
        gradients: StepGradients,
        backward: impl FnOnce(Option<Scaling>, Sink<L::Tensor>) -> Result<(), L::Error>,
    ) -> Result<(), L::Error> {
        self.renew_masters(local)?;
        let updates = context.strategy().extended().local_updates();
        if let Some(updates) = updates {
            if !(updates.sums_gradients() || updates.averages_every_step() && self.is_linear()) {
                return self.local_step(context, local, updates, gradients, backward);
            }
            // The mean of the replicas' updates is the update by the sum of their gradients.
            let scaling = self.states.each[local].lock().standing.scaling;
            self.check_local(gradients, scaling)?;
            if updates.sums_gradients() {
                // From the variables before the first step.
                self.prepare_local_slots(updates, local)?;
            }
        }
        let started = Instant::now();
        let (counts, accumulated, scaling) = self.begin_step(context, local)?;
        let backward = |sink: Sink<L::Tensor>| backward(scaling, sink);
        let reducer = match self.states.plan_after(context.strategy().changes()) {
            Some(plan) => self.backward(context, local, &plan, gradients, backward, accumulated)?,
            None => self.first_backward(context, local, gradients, backward, accumulated)?,
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
                self.commit(context, local, counts, || self.apply_on_device(local, counts, scaling, &sum, parts))?
            }
        };
        if self.parameters.shared && committed {
            context.barrier()?;
        }
        if committed {
            self.audit_when_due(context, local)?;
            if let Some(updates) = updates.filter(|updates| updates.sums_gradients()) {
                self.exchange_when_due(context, local, updates)?;
            }
        }
        let mut state = self.states.each[local].lock();
        state.times.total += started.elapsed();
        state.times.communication += communication;
        Ok(())
    }

    /// Begins a step of one replica. Returns the state that it continues: the steps of each variable, the gradients
    /// that are accumulated, and the loss scale.
    pub(super) fn begin_step(
        &self,
        context: &ReplicaContext,
        local: usize,
    ) -> Result<(StepCounts, Accumulated<L>, Option<Scaling>), L::Error> {
        self.watch(context)?;
        let mut state = self.states.each[local].lock();
        // The caller may have ignored the failure of an earlier step.
        state.forget_step();
        state.follow(context.strategy().changes());
        state.leave_streams()?;
        state.undecided = true;
        let standing = &state.standing;
        Ok((standing.counts.clone(), standing.accumulated.clone(), standing.scaling))
    }

    /// Compares the parameters of all replicas, in the steps in which an audit is due.
    fn audit_when_due(&self, context: &ReplicaContext, local: usize) -> Result<(), L::Error> {
        // The count is equal on all replicas, which have made the same steps.
        let steps = self.states.each[local].lock().standing.steps;
        if !is_audit_due(steps, self.audit_every) {
            return Ok(());
        }
        let outcome = audit_replica(context, &self.parameters);
        // The step is made. In an elastic job the loss of a process must not make it look as if it were not.
        let is_cut_off = || context.group().failure().is_some_and(|failure| failure.is_retryable());
        if self.parameters.elastic && outcome.is_err() && is_cut_off() { Ok(()) } else { outcome }
    }

    /// Registers the state, so that a failed run reverts what steps change. Returns an error before anything changes if
    /// a step could not be committed.
    pub(super) fn watch(&self, context: &ReplicaContext) -> Result<(), L::Error> {
        context.check_ready()?;
        self.states.check()?;
        self.check_learning_rate()?;
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
    pub(super) fn commit(
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
            if !finite {
                // Nor does it leave anything for later steps to send.
                state.revert_compression();
            }
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
        if !is_sharded || !self.needs_squares(scaling) {
            return Ok(Parts { gradients, ..Parts::default() });
        }
        let squares = all_squares(context, self.own_squares(context, scaling, &gradients)?)?;
        Ok(Parts { gradients, squares, ..Parts::default() })
    }

    fn needs_squares(&self, scaling: Option<Scaling>) -> bool {
        scaling.is_some() || matches!(self.clip, Some(Clip::GlobalNorm(_)))
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

    /// Divides, limits and applies the gradients in the accelerator's memory, and parts of sharded variables' gradients
    /// one by one.
    fn apply_on_device(
        &self,
        local: usize,
        counts: &StepCounts,
        scaling: Option<Scaling>,
        sum: &SumOnDevice<L>,
        mut parts: Parts<L>,
    ) -> Result<Applied, L::Error> {
        let slots = |index: usize| -> Vec<L::Tensor> {
            self.slots[index].iter().map(|slot| slot.components()[local].clone()).collect()
        };
        let (rule, learning_rate, clip, other_squares) = (self.rule, self.learning_rate(), self.clip, parts.squares);
        let loss_scale = scaling.map(|scaling| scaling.scale);
        let step = DeviceStep { rule, learning_rate, loss_scale, clip, other_squares };
        let update = DeviceUpdate { parameters: &*self.parameters, local, counts, slots: &slots, step };
        let DeviceOutcome { finite, gradient_norm } = L::Devices::apply(sum, &update)?;
        if finite {
            if let Some(clip) = clip {
                clip.apply_with(&mut parts.gradients, gradient_norm, |reduced| square_sum::<L>(&reduced.gradient))?;
            }
            for reduced in parts.gradients {
                self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
            }
        }
        Ok(Applied { finite, gradient_norm })
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
        let plan = self.states.plan().ok_or(Error::NoGradient)?;
        let learning_rate = self.learning_rate();
        let (group, parameters, rule) = (context.group(), &*self.parameters, self.rule);
        let tensor = context.tensor_group();
        let mut finite = true;
        let mut squares = match self.needs_squares(scaling) {
            true => self.own_squares(context, scaling, &parts)?,
            false => [0.0; 2],
        };
        if let Some(scaling) = scaling {
            let shards = gradients.iter().all(|shard| shard.square_sum().is_finite());
            let mut all = [u8::from(shards && squares.iter().all(|sum| sum.is_finite()))];
            group.all_reduce(&mut all, ReduceOp::Min)?;
            if let Some(tensor) = &tensor {
                tensor.all_reduce(&mut all, ReduceOp::Min)?;
            }
            finite = all[0] == 1;
            gradients.iter_mut().for_each(|shard| shard.change(|x| x / scaling.scale));
        }
        let update = Update { group, plan: &plan, parameters, rule, local, counts, learning_rate, flags };
        let mut gradient_norm = None;
        if let (Some(Clip::GlobalNorm(_)), true) = (self.clip, finite) {
            let of_shards = update.squares(&gradients);
            squares.iter_mut().zip(of_shards).for_each(|(sum, own)| *sum += own);
            gradient_norm = Some(all_squares(context, squares)?.sqrt());
        }
        if let (Some(clip), true) = (self.clip, finite) {
            update.clip(clip, &mut gradients, gradient_norm);
            // Clip::Norm, which needs their squares, does not go with parts.
            clip.apply_with(&mut parts, gradient_norm, |reduced| square_sum::<L>(&reduced.gradient))?;
        }
        if let Some(tensor) = &tensor {
            // The groups of equal places fail independently of each other: see `SquaresOfParts::agree`.
            tensor.barrier()?;
        }
        self.commit(context, local, counts, || {
            if finite {
                for reduced in parts {
                    self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
                }
                let (mut slots, restored, are_old) = {
                    let mut state = self.states.each[local].lock();
                    let are_old = std::mem::take(&mut state.has_old_shards);
                    (std::mem::take(&mut state.shards), state.restored.take(), are_old)
                };
                if let Some(whole) = restored {
                    slots = self.shards_of(local, &plan, group, &whole)?;
                }
                if are_old {
                    self.renew_shards(local, &plan, group, &mut slots)?;
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

    pub(super) fn apply_whole(
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
                Some(library) => {
                    let whole = |reduced: Reduced<L>| {
                        let variable = &self.parameters.variables()[reduced.index];
                        reduced.into_whole(&variable.components()[local])
                    };
                    library.apply(local, learning_rate, all.map(whole).collect::<Result<_, L::Error>>()?)?;
                }
                None => {
                    for reduced in all {
                        self.apply(local, counts.of(reduced.index), learning_rate, reduced)?;
                    }
                }
            }
        }
        Ok(Applied { finite: true, gradient_norm })
    }

    fn apply(&self, local: usize, step: u64, learning_rate: f64, reduced: Reduced<L>) -> Result<(), L::Error> {
        let parameter = &self.parameters.variables()[reduced.index].components()[local];
        let reduced = if self.rule.is_elementwise() { reduced } else { reduced.into_whole(parameter)? };
        let rows = reduced.rows.as_deref().map(|indices| (indices, row_len(&parameter.shape())));
        let mut slots: Vec<L::Tensor> =
            self.slots[reduced.index].iter().map(|slot| slot.components()[local].clone()).collect();
        let master = if is_short(dtype::<L>(parameter)?) { slots.pop() } else { None };
        let mut tensors = vec![master.clone().unwrap_or_else(|| parameter.clone()), reduced.gradient];
        tensors.extend(slots);
        let mut outcome = Ok(());
        with_storage::<L, L::Tensor>(&tensors, &mut |buffers| {
            outcome = match buffers.first().map(|buffer| buffer.dtype()) {
                Some(DType::F64) => update::<f64>(buffers, self.rule, (step, learning_rate), rows),
                _ => update::<f32>(buffers, self.rule, (step, learning_rate), rows),
            };
        })?;
        outcome?;
        match master {
            Some(master) => Ok(round_to::<L>(parameter, &master)?),
            None => Ok(()),
        }
    }
}

/// Returns the sum over all replicas of the squares that each has summed: of variables that every rank of a tensor
/// group has the whole of, and of its parts of those that are split.
fn all_squares(context: &ReplicaContext, mut own: [f64; 2]) -> distribute_strategy::Result<f64> {
    context.group().all_reduce(&mut own, ReduceOp::Sum)?;
    if let Some(tensor) = context.tensor_group() {
        tensor.all_reduce(&mut own[1..], ReduceOp::Sum)?;
    }
    Ok(own.iter().sum())
}

/// Rounds a parameter of 16 bits from its f32 copy.
pub(super) fn round_to<L: TensorLibrary>(parameter: &L::Tensor, master: &L::Tensor) -> distribute_values::Result<()> {
    match parameter.dtype()? {
        DType::F16 => round::<L, _>(parameter, master, distribute_device::f16::from_f32),
        _ => round::<L, _>(parameter, master, distribute_device::bf16::from_f32),
    }
}

fn round<L: TensorLibrary, T: Element>(
    parameter: &L::Tensor,
    master: &L::Tensor,
    round: fn(f32) -> T,
) -> distribute_values::Result<()> {
    if !L::is_on_host(parameter) {
        // What the parameter was is not needed, so it does not cross.
        let short: Vec<T> = master.to_elements::<f32>()?.into_iter().map(round).collect();
        return parameter.overwrite(BufferRef::from(&short[..]));
    }
    let mut outcome = Ok(());
    with_storage::<L, L::Tensor>(&[parameter.clone(), master.clone()], &mut |buffers| {
        if let [parameter, master] = buffers {
            outcome = parameter.as_mut_slice::<T>().and_then(|parameter| {
                let master = master.as_slice::<f32>()?;
                parameter.iter_mut().zip(master).for_each(|(short, wide)| *short = round(*wide));
                Ok(())
            });
        }
    })?;
    Ok(outcome?)
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
pub(super) struct Parts<L: TensorLibrary> {
    gradients: Vec<Reduced<L>>,
    /// The sum of the squares of all elements, over all replicas; 0 if the settings do not need it.
    squares: f64,
    /// The squares of the gradients of variables that are split among tensor ranks.
    squares_of_split: SquaresOfParts,
}

impl<L: TensorLibrary> Default for Parts<L> {
    fn default() -> Parts<L> {
        Parts { gradients: Vec::new(), squares: 0.0, squares_of_split: SquaresOfParts::default() }
    }
}

/// The outcome of applying a step.
pub(super) struct Applied {
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

/// Splits the storage of parameter, gradient and slots into the arguments of a rule. `rows` has the indices of a
/// gradient's rows and the number of elements of a row, if it is not whole.
fn update<T: Real>(
    buffers: &mut [BufferMut<'_>],
    rule: UpdateRule,
    (step, learning_rate): (u64, f64),
    rows: Option<(&[i64], usize)>,
) -> distribute_values::Result<()> {
    if let [parameter, gradient, slots @ ..] = buffers {
        let mut slots = slots.iter_mut().map(|slot| slot.as_mut_slice::<T>()).collect::<Result<Vec<_>, _>>()?;
        let (parameter, gradient) = (parameter.as_mut_slice::<T>()?, gradient.as_slice::<T>()?);
        match rows {
            Some((indices, row_len)) => {
                rule.update_rows((step, learning_rate), parameter, row_len, (indices, gradient), &mut slots);
            }
            None => rule.update(step, learning_rate, parameter, gradient, &mut slots),
        }
    }
    Ok(())
}

//! Steps of replicas that update their variables by their own gradients, and their synchronization.

use std::any::Any;
use std::ops::Range;
use std::time::{Duration, Instant};

use distribute_collectives::{Compression, ProcessGroup, ReduceOp};
use distribute_device::{BufferMut, BufferRef, DType, Element};
use distribute_strategy::{
    ChangeSlots, Error as StrategyError, LocalExtent, LocalOccasion, LocalReplica, LocalUpdates, LocalVariable,
    ReadSlots, ReplicaContext, StepHeader, Strategy,
};
use distribute_values::{DistributedVariable, TensorStorage};

use super::local_slots::has_master;
use super::states::Change;
use super::step::{Parts, round_to};
use super::{Optimizer, ReplicaOptimizer};
use crate::agreement::audit_replica;
use crate::exchange::StepGradients;
use crate::gradient::{Accumulated, Reduced, Scaling, change};
use crate::library::dtype;
use crate::plan::warn_untrained;
use crate::tape::Sink;
use crate::{Error, SparseGradients, StepCounts, TensorLibrary, UpdateRule, Variable, is_short};

impl<L: TensorLibrary> Optimizer<L> {
    /// Makes the variables of all replicas equal if the strategy lets replicas [update their own
    /// copies](distribute_strategy::LocalUpdates) and they have done so since they were equal; otherwise does nothing.
    /// Every process calls this, outside `run`, before it reads the model; trainers do so themselves.
    ///
    /// # Errors
    /// [`Error::Diverged`] if copies differ after the synchronization, [`Error::Combination`] if the strategy leaves
    /// them apart; the collective's error if a process is missing or fails, and the library's if a variable cannot be
    /// read or written.
    pub fn synchronize(&self, strategy: &Strategy) -> Result<(), L::Error> {
        self.synchronize_on(strategy, LocalOccasion::Read)
    }

    /// Makes the variables and the state of all replicas equal, like [`synchronize`](Optimizer::synchronize), before
    /// both are saved. [`CheckpointManager`](https://docs.rs/distribute-train) calls it.
    ///
    /// # Errors
    /// The errors of [`synchronize`](Optimizer::synchronize) occur in the same cases.
    pub fn synchronize_to_save(&self, strategy: &Strategy) -> Result<(), L::Error> {
        self.synchronize_on(strategy, LocalOccasion::Save)
    }

    fn synchronize_on(&self, strategy: &Strategy, occasion: LocalOccasion) -> Result<(), L::Error> {
        let are_apart = self.parameters.are_apart() || (occasion == LocalOccasion::Save && self.states.are_apart());
        if strategy.extended().local_updates().is_none() || !are_apart {
            return Ok(());
        }
        self.states.check()?;
        strategy.run_with(self, |context, ReplicaOptimizer { optimizer, local }| {
            optimizer.synchronize_replica(context, local, occasion, None)
        })?;
        Ok(())
    }

    /// Returns whether the mean over replicas of this optimizer's updates is the update by the mean of their gradients.
    pub(super) fn is_linear(&self) -> bool {
        let is_plain = matches!(self.rule, UpdateRule::Sgd { momentum, .. } if momentum == 0.0);
        is_plain && self.clip.is_none() && self.library.is_none()
    }

    /// Makes a step with this replica's own gradients, which `backward` passes to a sink, and synchronizes if it is
    /// due.
    ///
    /// It is committed on all replicas of this process or on none, like other steps. After a failure in the update
    /// itself, a replica gets the values of another one.
    pub(super) fn local_step(
        &self,
        context: &ReplicaContext,
        local: usize,
        updates: &dyn LocalUpdates,
        gradients: StepGradients,
        backward: impl FnOnce(Option<Scaling>, Sink<L::Tensor>) -> Result<(), L::Error>,
    ) -> Result<(), L::Error> {
        let started = Instant::now();
        let (mut counts, accumulated, scaling) = self.begin_step(context, local)?;
        self.check_local(gradients, scaling)?;
        let settings = self.settings(None);
        let is_first = !self.states.each[local].lock().standing.has_met;
        if is_first {
            context.compare_settings(settings.lines())?;
        }
        self.prepare_local_slots(updates, local)?;
        let own = self.record(context, local, |sink| backward(None, sink))?;
        let own = self.own_gradients(context, own, accumulated, is_first)?;
        counts.advance(own.iter().map(|reduced| reduced.index));
        // From here on nothing fails on one replica of this process alone, but the update.
        context.merge_call((), |_, _| Ok(()))?;
        let are_several = context.num_replicas_in_sync() > 1;
        self.parameters.set_apart(local, are_several);
        self.states.each[local].lock().is_apart = are_several;
        self.commit(context, local, &counts, || self.apply_whole(local, &counts, None, own, Parts::default()))?;
        let steps = {
            let standing = &mut self.states.each[local].lock().standing;
            standing.has_met = true;
            standing.steps
        };
        let mut communication = Duration::ZERO;
        let header = context.step_header(settings.digest());
        if updates.is_due(steps) {
            let began = Instant::now();
            self.synchronize_replica(context, local, LocalOccasion::Due { steps }, Some(header))?;
            communication = began.elapsed();
        } else if context.strategy().topology().workers() == 1 {
            // The only process agrees with itself in every step.
            context.agree_on_step(header);
        }
        let mut state = self.states.each[local].lock();
        state.times.total += started.elapsed();
        state.times.communication += communication;
        Ok(())
    }

    /// Refuses settings that cannot act where gradients are not exchanged.
    pub(super) fn check_local(&self, gradients: StepGradients, scaling: Option<Scaling>) -> Result<(), Error> {
        let refuse = |what, why| Err(Error::Combination { what, other: "a strategy of local updates", why });
        match gradients {
            StepGradients::Summed { .. } => {
                return refuse("apply_aggregated_gradients", "replicas update by their own gradients; use minimize");
            }
            StepGradients::Own => {}
        }
        if scaling.is_some() {
            return refuse("scale_losses", "replicas would skip different steps; leave it out, or use bf16");
        }
        self.check_local_settings()
    }

    /// Refuses settings like [`check_local`](Optimizer::check_local), when the optimizer is built.
    pub(super) fn check_local_settings(&self) -> Result<(), Error> {
        let refuse = |what, why| Err(Error::Combination { what, other: "a strategy of local updates", why });
        if self.sharded {
            return refuse("zero1", "each replica updates its own copy, with its own state; leave it out");
        }
        if !matches!(self.compression, Compression::None) {
            return refuse("compress", "no gradients are exchanged; leave it out");
        }
        if self.sparse_gradients == SparseGradients::Rows {
            return refuse("SparseGradients::Rows", "no gradients are exchanged; leave it out");
        }
        if self.parameters.shared {
            return refuse("shared variables", "each replica updates its own copy; let shares_variables return false");
        }
        Ok(())
    }

    /// Returns this replica's gradients for its update: as many times as large as there are replicas, since a replica's
    /// loss is its share of the global one. A replica without examples has none.
    fn own_gradients(
        &self,
        context: &ReplicaContext,
        own: Vec<(usize, L::Tensor)>,
        mut accumulated: Accumulated<L>,
        is_first: bool,
    ) -> Result<Vec<Reduced<L>>, L::Error> {
        if !context.has_examples() && accumulated.is_empty() {
            return Ok(Vec::new());
        }
        let variables = self.parameters.variables();
        let mut all: Vec<Option<L::Tensor>> = vec![None; variables.len()];
        for (index, gradient) in own {
            all[index] = Some(accumulated.take_with(index, gradient)?);
        }
        for (index, gradient) in accumulated.into_rest()? {
            all[index] = Some(gradient);
        }
        let trained = |(index, _): &(usize, &Variable<L>)| variables[*index].is_trainable();
        let silent = variables.iter().enumerate().filter(trained).filter(|(index, _)| all[*index].is_none());
        let silent: Vec<&str> = silent.map(|(_, variable)| variable.name()).collect();
        if is_first && !silent.is_empty() && context.replica_id() == 0 {
            warn_untrained::<L>(&silent);
        }
        let replicas = context.num_replicas_in_sync() as f64;
        let mut gradients = Vec::with_capacity(all.len());
        for (index, gradient) in all.into_iter().enumerate() {
            let Some(gradient) = gradient.filter(|_| variables[index].is_trainable()) else { continue };
            let kind = dtype::<L>(&gradient)?;
            if !is_short(kind) && !matches!(kind, DType::F32 | DType::F64) {
                return Err(Error::UntrainableType { name: variables[index].name().to_owned(), dtype: kind }.into());
            }
            let reduced = Reduced::new(index, L::own(gradient)?)?;
            if replicas > 1.0 {
                change::<L>(&reduced.gradient, |x| x * replicas)?;
            }
            gradients.push(reduced);
        }
        // A loss that is cut from the model shows in the first step; later a replica may have nothing to learn from.
        if is_first && gradients.is_empty() { Err(Error::NoGradient.into()) } else { Ok(gradients) }
    }

    /// Lets a strategy whose replicas sum their gradients exchange what is due after a step that all of them have made.
    pub(super) fn exchange_when_due(
        &self,
        context: &ReplicaContext,
        local: usize,
        updates: &dyn LocalUpdates,
    ) -> Result<(), L::Error> {
        let steps = self.states.each[local].lock().standing.steps;
        if !updates.is_due(steps) {
            return Ok(());
        }
        self.synchronize_replica(context, local, LocalOccasion::Due { steps }, None)
    }

    /// Synchronizes this replica with all others. In a step, `header` is its header, by which workers compare their
    /// settings and learn of each other's requests.
    fn synchronize_replica(
        &self,
        context: &ReplicaContext,
        local: usize,
        occasion: LocalOccasion,
        header: Option<StepHeader>,
    ) -> Result<(), L::Error> {
        let Some(updates) = context.strategy().extended().local_updates() else { return Ok(()) };
        if let Some(header) = header {
            let mut words = header.to_words();
            context.group().all_reduce(&mut words, ReduceOp::Sum)?;
            let (header, settings) = (StepHeader::from_words(words), self.settings(None));
            context.check_settings(header, settings.digest(), || settings.lines())?;
            context.agree_on_step(header);
        }
        // Values that were written into the model since the last step are synchronized, not older copies in f32.
        self.renew_masters(local)?;
        self.prepare_local_slots(updates, local)?;
        let extent = updates.synchronize_for(occasion, &Synchronizing { optimizer: self, context, local })?;
        match (occasion, extent) {
            (_, LocalExtent::All)
            | (LocalOccasion::Read, LocalExtent::Variables)
            | (LocalOccasion::Due { .. }, LocalExtent::Variables | LocalExtent::Some) => {}
            _ => {
                let (what, other) = ("the strategy's synchronization", "a model that is read or saved");
                let why = "it has left copies apart; synchronize all of them on these occasions";
                return Err(Error::Combination { what, other, why }.into());
            }
        }
        if extent != LocalExtent::Some {
            if self.audit_every > 0 {
                audit_replica(context, &self.parameters)?;
            }
            self.parameters.set_apart(local, false);
        }
        if extent == LocalExtent::All {
            self.states.each[local].lock().is_apart = false;
        }
        // A later failure of the run does not undo it.
        Ok(context.commit()?)
    }
}

/// A replica that synchronizes with all others.
struct Synchronizing<'a, L: TensorLibrary> {
    optimizer: &'a Optimizer<L>,
    context: &'a ReplicaContext,
    local: usize,
}

impl<L: TensorLibrary> Synchronizing<'_, L> {
    /// Returns this replica's trained variables in the form in which they are updated.
    fn updated(&self) -> impl Iterator<Item = (&Variable<L>, L::Tensor)> {
        self.optimizer.updated(self.local)
    }

    /// Returns an error unless the model trains variables with these indices.
    fn check_trained(&self, variables: &Range<usize>) -> distribute_strategy::Result<()> {
        let trained = self.updated().count();
        if variables.start <= variables.end && variables.end <= trained {
            return Ok(());
        }
        let problem = format!("variables {variables:?} were asked for, but the model trains {trained}");
        Err(StrategyError::LocalUpdates { problem })
    }

    /// Passes the slots of a trained variable to `look`.
    fn with_slots<R>(
        &self,
        index: usize,
        look: impl FnOnce(&mut Vec<Vec<f32>>) -> R,
    ) -> distribute_strategy::Result<R> {
        let mut state = self.optimizer.states.each[self.local].lock();
        let problem = || "slots were asked for, but the strategy has declared none; return them in slots".to_owned();
        let slots = state.local.of(index).ok_or_else(|| StrategyError::LocalUpdates { problem: problem() })?;
        Ok(look(slots))
    }

    /// Replaces tensors of this replica by their means over all replicas, after all means have arrived.
    fn average(&self, tensors: &[L::Tensor]) -> distribute_strategy::Result<()> {
        let singles = Means::<f32>::of::<L>(self.context, tensors)?;
        let doubles = Means::<f64>::of::<L>(self.context, tensors)?;
        self.changing(|| {
            singles.write::<L>(tensors)?;
            doubles.write::<L>(tensors)
        })
    }

    /// Calls `write`, which changes variables; if it fails, the replica gets the values of another.
    fn changing(&self, write: impl FnOnce() -> distribute_strategy::Result<()>) -> distribute_strategy::Result<()> {
        let state = &self.optimizer.states.each[self.local];
        state.lock().change = Change::Begun;
        write()?;
        state.lock().change = Change::Whole;
        Ok(())
    }

    /// Sets the slots of which each replica has its own to their means over all replicas.
    fn average_slots(&self) -> distribute_strategy::Result<()> {
        let wanted = &self.optimizer.parameters.local_slots;
        let own: Vec<usize> = (0..wanted.len()).filter(|slot| wanted[*slot].is_own).collect();
        if own.is_empty() {
            return Ok(());
        }
        let state = &self.optimizer.states.each[self.local];
        let mut all: Vec<f32> = Vec::new();
        for slots in state.lock().local.all().iter() {
            own.iter().for_each(|slot| all.extend(&slots[*slot]));
        }
        self.context.group().all_reduce(&mut all, ReduceOp::Mean)?;
        // On all replicas of this process or on none, since the means replace values that differ.
        self.context.merge_call((), |_, _| Ok(()))?;
        let mut rest = &all[..];
        for slots in state.lock().local.all() {
            for slot in &own {
                let (mean, after) = rest.split_at(slots[*slot].len());
                slots[*slot].copy_from_slice(mean);
                rest = after;
            }
        }
        Ok(())
    }

    /// Rounds variables of 16 bits from their copies in f32.
    fn round(&self) -> distribute_strategy::Result<()> {
        for (variable, master) in self.updated().filter(|(variable, _)| has_master(variable)) {
            round_to::<L>(&variable.components()[self.local], &master)?;
        }
        Ok(())
    }
}

impl<L: TensorLibrary> LocalReplica for Synchronizing<'_, L> {
    fn group(&self) -> &ProcessGroup {
        self.context.group()
    }

    fn average_variables(&self) -> distribute_strategy::Result<()> {
        let tensors: Vec<L::Tensor> = self.updated().map(|(_, tensor)| tensor).collect();
        self.average(&tensors)?;
        self.changing(|| self.round())
    }

    fn average_state(&self) -> distribute_strategy::Result<()> {
        let all = self.optimizer.parameters.variables().iter().zip(&*self.optimizer.slots);
        let slots = all.flat_map(|(variable, slots)| {
            let masters = usize::from(variable.is_trainable() && has_master(variable)).min(slots.len());
            &slots[..slots.len() - masters]
        });
        let component = |slot: &DistributedVariable<L::Tensor>| slot.components()[self.local].clone();
        self.average(&slots.map(component).collect::<Vec<_>>())?;
        self.average_slots()?;
        let state = &self.optimizer.states.each[self.local];
        let variables = self.optimizer.parameters.variables().len();
        let mut counts: Vec<u64> = {
            let state = state.lock();
            (0..variables).map(|index| state.standing.counts.of(index)).collect()
        };
        self.context.group().all_reduce(&mut counts, ReduceOp::Max)?;
        state.lock().standing.counts = StepCounts::from_counts(counts);
        Ok(())
    }

    fn change_variables(
        &self,
        body: &mut dyn FnMut(&str, &mut BufferMut<'_>) -> distribute_strategy::Result<()>,
    ) -> distribute_strategy::Result<()> {
        self.changing(|| {
            for (variable, tensor) in self.updated() {
                let mut outcome = Ok(());
                tensor.write(&mut |mut buffer| outcome = body(variable.name(), &mut buffer))?;
                outcome?;
            }
            self.round()
        })
    }

    fn variables(&self) -> distribute_strategy::Result<Vec<LocalVariable>> {
        Ok(self.optimizer.local_variables(self.local)?)
    }

    fn read_slots(&self, variables: Range<usize>, body: &mut ReadSlots<'_>) -> distribute_strategy::Result<()> {
        self.check_trained(&variables)?;
        for (index, (_, tensor)) in self.updated().enumerate().skip(variables.start).take(variables.len()) {
            let values = tensor.to_elements::<f32>()?;
            self.with_slots(index, |slots| body(index, &values, slots))??;
        }
        Ok(())
    }

    fn change_slots(&self, variables: Range<usize>, body: &mut ChangeSlots<'_>) -> distribute_strategy::Result<()> {
        self.check_trained(&variables)?;
        let chosen = self.updated().enumerate().skip(variables.start).take(variables.len());
        // All replicas of this process have received what the others have sent, or none changes anything.
        self.context.merge_call((), |_, _| Ok(()))?;
        self.changing(|| {
            for (index, (variable, tensor)) in chosen {
                let mut values = tensor.to_elements::<f32>()?;
                self.with_slots(index, |slots| body(index, &mut values, slots))??;
                tensor.overwrite(BufferRef::from(&values[..]))?;
                if has_master(variable) {
                    round_to::<L>(&variable.components()[self.local], &tensor)?;
                }
            }
            Ok(())
        })
    }

    fn keep_in_progress(&self, work: Box<dyn Any + Send>) {
        self.optimizer.states.watch(self.context.strategy());
        let earlier = self.optimizer.states.each[self.local].lock().in_progress.replace(work);
        drop(earlier);
    }

    fn take_in_progress(&self) -> Option<Box<dyn Any + Send>> {
        self.optimizer.states.each[self.local].lock().in_progress.take()
    }
}

/// The means over all replicas of the tensors of one type, one after another.
struct Means<T>(Vec<T>);

impl<T: Element> Means<T> {
    /// Computes the means of those of the tensors that are of this type. Every replica calls this.
    fn of<L: TensorLibrary>(context: &ReplicaContext, tensors: &[L::Tensor]) -> distribute_strategy::Result<Means<T>> {
        let mut all: Vec<T> = Vec::new();
        for tensor in Self::chosen::<L>(tensors) {
            all.extend(tensor.to_elements::<T>()?);
        }
        if !all.is_empty() {
            context.group().all_reduce(&mut all, ReduceOp::Mean)?;
        }
        Ok(Means(all))
    }

    /// Writes them to the same tensors.
    fn write<L: TensorLibrary>(&self, tensors: &[L::Tensor]) -> distribute_strategy::Result<()> {
        let mut rest = &self.0[..];
        for tensor in Self::chosen::<L>(tensors) {
            let (own, after) = rest.split_at(tensor.shape().iter().product());
            tensor.overwrite(BufferRef::from(own))?;
            rest = after;
        }
        Ok(())
    }

    fn chosen<L: TensorLibrary>(tensors: &[L::Tensor]) -> impl Iterator<Item = &L::Tensor> {
        tensors.iter().filter(|tensor| tensor.dtype().is_ok_and(|dtype| dtype == T::DTYPE))
    }
}

#[cfg(test)]
mod tests;

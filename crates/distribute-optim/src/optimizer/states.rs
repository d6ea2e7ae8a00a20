//! The state that replicas keep for an optimizer, and its recovery after a failed run.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use distribute_collectives::FusedAllReduce;
use distribute_strategy::{Recoverable, RecoveryError, Strategy};
use distribute_values::DistributedVariable;
use parking_lot::Mutex;

use super::local_slots::LocalSlots;
use super::{LibraryOptimizer, StepTimes};
use crate::exchange::{PartsOrder, SlotShard, complete};
use crate::gradient::{Accumulated, Scaling};
use crate::parameters::overwrite;
use crate::plan::Plan;
use crate::{DeviceExchange, Error, Parameters, ShardLayout, StepCounts, TensorLibrary};

/// The state of an optimizer on the replicas of this process, except parameters and slots.
pub(super) struct States<L: TensorLibrary> {
    parameters: Arc<Parameters<L>>,
    /// Handles on the slots if every replica has whole ones.
    slots: Mutex<Vec<Vec<DistributedVariable<L::Tensor>>>>,
    library: Option<Arc<dyn LibraryOptimizer<L>>>,
    /// The plan, and the strategy's [changes](distribute_strategy::Strategy::changes) when it was made.
    plan: Mutex<Option<(u64, Arc<Plan>)>>,
    /// The order in which sharded variables' gradients are reduced, after the first step.
    parts_order: Mutex<Option<PartsOrder>>,
    /// The states of the local replicas.
    pub(super) each: Vec<Mutex<ReplicaState<L>>>,
    /// Like the parameters' `torn`, for the slots.
    torn: AtomicBool,
    /// Whether every failed run takes this state back, also one that makes no step.
    is_watched: AtomicBool,
}

pub(super) struct ReplicaState<L: TensorLibrary> {
    pub(super) standing: Standing<L>,
    /// The standing to which a failed run returns.
    noted: Standing<L>,
    /// How far the replica's update of parameters and slots has progressed.
    pub(super) change: Change,
    /// Whether a step has begun that is neither committed nor undone.
    pub(super) undecided: bool,
    /// Whether a collective may have failed in the streams of `on_device`, which later steps must not use.
    has_failed_streams: bool,
    /// The strategy's changes at the last step: what was created for other processes is created again.
    pub(super) changes: u64,
    /// Created in the first step.
    pub(super) fused: Option<FusedAllReduce>,
    /// Created in the first step: buckets in the memory of the replica's accelerator, if it is on one.
    pub(super) on_device: Option<Option<L::Devices>>,
    /// This replica's part of the slots, by bucket, if they are sharded.
    pub(super) shards: Vec<SlotShard>,
    /// Whole slots of a checkpoint, until this replica takes its parts from them.
    pub(super) restored: Option<Arc<HashMap<String, L::Tensor>>>,
    /// The number of times that values had been written into the model at the last step.
    pub(super) writes: u64,
    /// Whether parts of slots may be older than values that have been loaded since.
    pub(super) has_old_shards: bool,
    pub(super) times: StepTimes,
    /// The slots of [local updates](distribute_strategy::LocalUpdates).
    pub(super) local: LocalSlots,
    /// Operations of local updates that a later synchronization waits for.
    pub(super) in_progress: Option<Box<dyn Any + Send>>,
    /// Whether local updates have changed slots of this replica since those of all were equal.
    pub(super) is_apart: bool,
}

/// The state that a step changes, other than tensors in place; a clone of it is a snapshot.
#[derive(Debug)]
pub(super) struct Standing<L: TensorLibrary> {
    /// Steps of the optimizer, without skipped ones.
    pub(super) steps: u64,
    /// Steps of each variable.
    pub(super) counts: StepCounts,
    /// Gradients of this replica that are accumulated for the next step, by variable.
    pub(super) accumulated: Accumulated<L>,
    pub(super) gradient_norm: Option<f64>,
    pub(super) scaling: Option<Scaling>,
    /// Whether workers have compared their settings before their first step of [local
    /// updates](distribute_strategy::LocalUpdates).
    pub(super) has_met: bool,
}

impl<L: TensorLibrary> Default for Standing<L> {
    fn default() -> Standing<L> {
        let (counts, accumulated) = (StepCounts::default(), Accumulated::default());
        Standing { steps: 0, counts, accumulated, gradient_norm: None, scaling: None, has_met: false }
    }
}

impl<L: TensorLibrary> Clone for Standing<L> {
    fn clone(&self) -> Standing<L> {
        let Standing { steps, counts, accumulated, gradient_norm, scaling, has_met } = self;
        let (steps, gradient_norm, scaling, has_met) = (*steps, *gradient_norm, *scaling, *has_met);
        let (counts, accumulated) = (counts.clone(), accumulated.clone());
        Standing { steps, counts, accumulated, gradient_norm, scaling, has_met }
    }
}

impl<L: TensorLibrary> Default for ReplicaState<L> {
    fn default() -> ReplicaState<L> {
        ReplicaState {
            standing: Standing::default(),
            noted: Standing::default(),
            change: Change::Whole,
            undecided: false,
            has_failed_streams: false,
            changes: 0,
            fused: None,
            on_device: None,
            shards: Vec::new(),
            restored: None,
            writes: 0,
            has_old_shards: false,
            times: StepTimes::default(),
            local: LocalSlots::default(),
            in_progress: None,
            is_apart: false,
        }
    }
}

/// The progress of a replica's update of parameters and slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Change {
    /// No update is in progress.
    #[default]
    Whole,
    /// Some changes are made and others are not.
    Begun,
    /// This replica's own part is updated; other replicas' parts may be missing.
    OwnPart,
}

impl<L: TensorLibrary> States<L> {
    pub(super) fn new(
        parameters: &Arc<Parameters<L>>,
        slots: &[Vec<DistributedVariable<L::Tensor>>],
        library: Option<Arc<dyn LibraryOptimizer<L>>>,
    ) -> Arc<States<L>> {
        Arc::new(States {
            parameters: parameters.clone(),
            slots: Mutex::new(slots.to_vec()),
            library,
            plan: Mutex::default(),
            parts_order: Mutex::default(),
            each: parameters.tapes.iter().map(|_| Mutex::default()).collect(),
            torn: AtomicBool::new(false),
            is_watched: AtomicBool::new(false),
        })
    }

    /// Lets every failed run take this state back, also one that makes no step: it aborts the group in which operations
    /// are in progress.
    pub(super) fn watch(self: &Arc<Self>, strategy: &Strategy) {
        if !self.is_watched.swap(true, Ordering::Relaxed) {
            let weak = Arc::downgrade(self);
            strategy.recover(weak);
        }
    }

    /// Applies `look` to the first replica's state.
    pub(super) fn first<R>(&self, look: impl FnOnce(&ReplicaState<L>) -> R) -> Option<R> {
        self.each.first().map(|state| look(&state.lock()))
    }

    /// Returns the plan of the steps so far.
    pub(super) fn plan(&self) -> Option<Arc<Plan>> {
        self.plan.lock().as_ref().map(|(_, plan)| plan.clone())
    }

    /// Returns the plan if all present processes have agreed on it.
    pub(super) fn plan_after(&self, changes: u64) -> Option<Arc<Plan>> {
        self.plan.lock().as_ref().filter(|(of, _)| *of == changes).map(|(_, plan)| plan.clone())
    }

    /// Keeps the plan on which all present processes have agreed; returns the one that another replica has kept.
    pub(super) fn set_plan(&self, changes: u64, agreed: Arc<Plan>) -> Arc<Plan> {
        let mut plan = self.plan.lock();
        match &*plan {
            Some((of, plan)) if *of == changes => plan.clone(),
            _ => plan.insert((changes, agreed)).1.clone(),
        }
    }

    /// Returns the order in which sharded variables' gradients are reduced; `None` before the first step.
    pub(super) fn parts_order(&self) -> Option<PartsOrder> {
        self.parts_order.lock().clone()
    }

    /// Sets that order, which is the same on all replicas, after a step.
    pub(super) fn set_parts_order(&self, order: PartsOrder) {
        *self.parts_order.lock() = Some(order);
    }

    /// Drops the handles on whole slots.
    pub(super) fn shard(&self) {
        self.slots.lock().clear();
    }

    /// Returns an error if a failure has left no replica with complete parameters.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.parameters.check_whole()?;
        if self.torn.load(Ordering::Acquire) { Err(Error::Torn) } else { Ok(()) }
    }

    /// Marks everything as complete after a restore.
    pub(super) fn restored(&self) {
        self.torn.store(false, Ordering::Release);
        for state in &self.each {
            let mut state = state.lock();
            (state.change, state.undecided) = (Change::Whole, false);
            state.standing.accumulated.clear();
            // What compression has not sent yet belongs to the steps that are left behind.
            (state.fused, state.on_device) = (None, None);
            state.is_apart = false;
            let in_progress = state.in_progress.take();
            drop(state);
            drop(in_progress);
        }
    }

    /// Returns whether local updates have changed slots since those of all replicas were equal.
    pub(super) fn are_apart(&self) -> bool {
        self.each.iter().any(|state| state.lock().is_apart)
    }

    /// Copies the values of a replica that completed its update to the replicas that failed during theirs. The step was
    /// committed by then, so it counts on all of them.
    fn repair(&self) -> Result<(), L::Error> {
        let changes: Vec<Change> = self.each.iter().map(|state| state.lock().change).collect();
        let broken: Vec<usize> = (0..changes.len()).filter(|local| changes[*local] != Change::Whole).collect();
        if broken.is_empty() {
            return Ok(());
        }
        let whole = changes.iter().position(|change| *change == Change::Whole).filter(|_| !self.parameters.shared);
        let plan = self.plan();
        let sharded = self.slots.lock().is_empty() && plan.is_some() && self.has_shards();
        let all_own = broken.iter().all(|local| changes[*local] == Change::OwnPart);
        let outcome = match (whole, &plan) {
            // Together the replicas have all parts.
            (_, Some(plan)) if sharded && all_own && self.parameters.alone => complete(plan, &self.parameters),
            // From the same place of another tensor group, whose parts are those of this one.
            (Some(_), _) if !sharded => broken.iter().try_for_each(|local| {
                let ranks = self.parameters.tensor_ranks;
                let mut mates = (local % ranks..changes.len()).step_by(ranks);
                let whole = mates.find(|mate| changes[*mate] == Change::Whole).ok_or(Error::Torn)?;
                self.copy(&changes, whole, *local)
            }),
            _ => Err(Error::Torn.into()),
        };
        match outcome {
            Ok(()) => {
                let standing = whole.map(|whole| self.each[whole].lock().standing.clone());
                for local in broken {
                    let mut state = self.each[local].lock();
                    state.change = Change::Whole;
                    if let Some(standing) = &standing {
                        (state.standing, state.noted) = (standing.clone(), standing.clone());
                    }
                }
                Ok(())
            }
            Err(error) => {
                self.parameters.set_torn(true);
                self.torn.store(true, Ordering::Release);
                Err(error)
            }
        }
    }

    fn has_shards(&self) -> bool {
        self.first(|state| !state.shards.is_empty()).unwrap_or(false)
    }

    /// Copies parameters and slots from one replica to another; parts of sharded variables from one that mirrors it.
    fn copy(&self, changes: &[Change], from: usize, to: usize) -> Result<(), L::Error> {
        let slots = self.slots.lock();
        for (variable, slots) in self.parameters.variables().iter().zip(slots.iter()) {
            let mirrors = |layout: &ShardLayout| {
                let ranks = self.parameters.tensor_ranks;
                let is_mirror =
                    |local: &usize| local % ranks == to % ranks && layout.part_of(*local) == layout.part_of(to);
                (0..changes.len()).find(|local| changes[*local] == Change::Whole && is_mirror(local))
            };
            let from = match variable.layout() {
                Some(layout) if variable.is_trainable() => mirrors(layout).ok_or(Error::Torn)?,
                _ => from,
            };
            let all = slots.iter().map(DistributedVariable::components).chain([variable.components()]);
            for components in all.filter(|_| variable.is_trainable()) {
                overwrite::<L>(&components[to..=to], &L::detach(&components[from]))?;
            }
        }
        if let Some(library) = &self.library {
            library.copy(from, to);
        }
        let local = std::mem::take(&mut self.each[from].lock().local);
        self.each[to].lock().local.copy_from(&local);
        self.each[from].lock().local = local;
        Ok(())
    }
}

impl<L: TensorLibrary> Recoverable for States<L> {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        let mut state = self.each[local].lock();
        state.noted = state.standing.clone();
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        let in_progress = {
            let mut state = self.each[local].lock();
            state.standing = state.noted.clone();
            state.forget_step();
            // Also after the last step was committed: what has failed later may have used the same streams.
            state.has_failed_streams = true;
            // All else is as before the step. After an error the next step tries again, and has it.
            let _ = state.leave_streams();
            state.in_progress.take()
        };
        // It waits for operations, which end at once in a group that a failure has aborted.
        drop(in_progress);
        Ok(())
    }

    /// Fails the run if an update failed, even if the closure has ignored the error.
    fn commit(&self, local: usize, _: bool) -> Result<(), RecoveryError> {
        self.note(local)?;
        match self.each[local].lock().change {
            Change::Whole => Ok(()),
            _ => Err(Error::HalfUpdated { local }.into()),
        }
    }

    fn settle(&self) -> Result<(), RecoveryError> {
        Ok(self.repair()?)
    }
}

impl<L: TensorLibrary> ReplicaState<L> {
    /// Reverts what an uncommitted step has left, if there was one.
    pub(super) fn forget_step(&mut self) {
        if std::mem::take(&mut self.undecided) {
            self.has_failed_streams = true;
            self.revert_compression();
        }
    }

    /// Reverts what the last step has left in the compressors' state.
    pub(super) fn revert_compression(&self) {
        if let Some(fused) = &self.fused {
            fused.take_back();
        }
        if let Some(Some(devices)) = &self.on_device {
            devices.take_back();
        }
    }

    /// Drops what was created for other processes, if the strategy has changed since, and gradients that were
    /// accumulated meanwhile: the examples since the last step are divided anew, and make theirs again.
    pub(super) fn follow(&mut self, changes: u64) {
        if std::mem::replace(&mut self.changes, changes) != changes {
            (self.fused, self.on_device, self.has_failed_streams) = (None, None, false);
            self.standing.accumulated.clear();
            self.noted.accumulated.clear();
        }
    }

    /// Replaces the streams in which a collective may have failed. After an error, the next call tries again.
    pub(super) fn leave_streams(&mut self) -> Result<(), L::Error> {
        if let Some(Some(devices)) = self.on_device.as_mut().filter(|_| self.has_failed_streams) {
            devices.replace_streams()?;
        }
        self.has_failed_streams = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests;

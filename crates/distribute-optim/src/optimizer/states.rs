//! What replicas keep for an optimizer, and what becomes of it when a run fails.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use distribute_collectives::FusedAllReduce;
use distribute_strategy::{Recoverable, RecoveryError};
use distribute_values::DistributedVariable;
use parking_lot::Mutex;

use super::StepTimes;
use crate::exchange::{SlotShard, complete};
use crate::gradient::{Accumulated, Scaling};
use crate::parameters::overwrite;
use crate::plan::Plan;
use crate::{Error, Parameters, StepCounts, TensorLibrary};

/// The state of an optimizer on the replicas of this process, besides parameters and slots.
pub(super) struct States<L: TensorLibrary> {
    parameters: Arc<Parameters<L>>,
    /// Handles on the slots, where every replica has whole ones.
    slots: Mutex<Vec<Vec<DistributedVariable<L::Tensor>>>>,
    pub(super) plan: OnceLock<Arc<Plan>>,
    /// One per local replica.
    pub(super) each: Vec<Mutex<ReplicaState<L>>>,
    /// As the model's `torn`, of the slots.
    torn: AtomicBool,
}

pub(super) struct ReplicaState<L: TensorLibrary> {
    pub(super) standing: Standing<L>,
    /// What a failed run goes back to.
    noted: Standing<L>,
    /// How far the replica is in changing its parameters and slots.
    pub(super) change: Change,
    /// Whether a step has begun that is not decided yet.
    pub(super) undecided: bool,
    /// From the first step on.
    pub(super) fused: Option<FusedAllReduce>,
    /// From the first step on: buckets in the memory of the replica's accelerator, where it is on one.
    pub(super) on_device: Option<Option<L::Devices>>,
    /// This replica's part of the slots, by bucket, where they are sharded.
    pub(super) shards: Vec<SlotShard>,
    /// Whole slots of a checkpoint, until the parts are cut from them.
    pub(super) restored: Option<Arc<HashMap<String, L::Tensor>>>,
    pub(super) times: StepTimes,
}

/// What a step changes besides tensors in place: a clone of it is what was.
#[derive(Debug)]
pub(super) struct Standing<L: TensorLibrary> {
    /// Of the optimizer, those that were left out excepted.
    pub(super) steps: u64,
    /// Of each variable.
    pub(super) counts: StepCounts,
    /// Gradients of this replica alone that wait for the next step, by variable.
    pub(super) accumulated: Accumulated<L>,
    pub(super) gradient_norm: Option<f64>,
    pub(super) scaling: Option<Scaling>,
}

impl<L: TensorLibrary> Default for Standing<L> {
    fn default() -> Standing<L> {
        let (counts, accumulated) = (StepCounts::default(), Accumulated::default());
        Standing { steps: 0, counts, accumulated, gradient_norm: None, scaling: None }
    }
}

impl<L: TensorLibrary> Clone for Standing<L> {
    fn clone(&self) -> Standing<L> {
        let Standing { steps, counts, accumulated, gradient_norm, scaling } = self;
        let (steps, gradient_norm, scaling) = (*steps, *gradient_norm, *scaling);
        Standing { steps, counts: counts.clone(), accumulated: accumulated.clone(), gradient_norm, scaling }
    }
}

impl<L: TensorLibrary> Default for ReplicaState<L> {
    fn default() -> ReplicaState<L> {
        ReplicaState {
            standing: Standing::default(),
            noted: Standing::default(),
            change: Change::Whole,
            undecided: false,
            fused: None,
            on_device: None,
            shards: Vec::new(),
            restored: None,
            times: StepTimes::default(),
        }
    }
}

/// How far a replica is in a step's changes of parameters and slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Change {
    /// None is under way.
    #[default]
    Whole,
    /// Some are made and others not.
    Begun,
    /// The part that this replica keeps is changed; others' may be missing.
    OwnPart,
}

impl<L: TensorLibrary> States<L> {
    pub(super) fn new(
        parameters: &Arc<Parameters<L>>,
        slots: &[Vec<DistributedVariable<L::Tensor>>],
    ) -> Arc<States<L>> {
        Arc::new(States {
            parameters: parameters.clone(),
            slots: Mutex::new(slots.to_vec()),
            plan: OnceLock::new(),
            each: parameters.tapes.iter().map(|_| Mutex::default()).collect(),
            torn: AtomicBool::new(false),
        })
    }

    /// The first replica's.
    pub(super) fn first<R>(&self, look: impl FnOnce(&ReplicaState<L>) -> R) -> Option<R> {
        self.each.first().map(|state| look(&state.lock()))
    }

    /// Lets go of the whole slots.
    pub(super) fn shard(&self) {
        self.slots.lock().clear();
    }

    /// An error where a failure has left no replica with whole parameters.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.parameters.check_whole()?;
        if self.torn.load(Ordering::Acquire) { Err(Error::Torn) } else { Ok(()) }
    }

    /// Everything is whole again: it was restored.
    pub(super) fn restored(&self) {
        self.torn.store(false, Ordering::Release);
        for state in &self.each {
            let mut state = state.lock();
            (state.change, state.undecided) = (Change::Whole, false);
            state.standing.accumulated.clear();
        }
    }

    /// Gives replicas that failed in the middle of changing their parameters the values of one that did not: the step was
    /// certain by then, so the others have made it.
    fn repair(&self) -> Result<(), L::Error> {
        let changes: Vec<Change> = self.each.iter().map(|state| state.lock().change).collect();
        let broken: Vec<usize> = (0..changes.len()).filter(|local| changes[*local] != Change::Whole).collect();
        if broken.is_empty() {
            return Ok(());
        }
        let whole = changes.iter().position(|change| *change == Change::Whole).filter(|_| !self.parameters.shared);
        let sharded = self.slots.lock().is_empty() && self.plan.get().is_some_and(|_| self.has_shards());
        let all_own = broken.iter().all(|local| changes[*local] == Change::OwnPart);
        let outcome = match (whole, self.plan.get()) {
            // Between them they have all parts.
            (_, Some(plan)) if sharded && all_own && self.parameters.alone => complete(plan, &self.parameters),
            (Some(whole), _) if !sharded => broken.iter().try_for_each(|local| self.copy(whole, *local)),
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

    /// Copies parameters and slots from one replica to another.
    fn copy(&self, from: usize, to: usize) -> Result<(), L::Error> {
        let slots = self.slots.lock();
        for (variable, slots) in self.parameters.variables().iter().zip(slots.iter()) {
            let all = slots.iter().map(DistributedVariable::components).chain([variable.components()]);
            for components in all.filter(|_| variable.is_trainable()) {
                overwrite::<L>(&components[to..=to], &L::detach(&components[from]))?;
            }
        }
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
        let mut state = self.each[local].lock();
        state.standing = state.noted.clone();
        state.forget_step();
        Ok(())
    }

    /// An update that failed is a run that failed, whatever the closure made of the error.
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
    /// Takes back what a step that was not decided has left in compressors.
    pub(super) fn forget_step(&mut self) {
        if std::mem::take(&mut self.undecided)
            && let Some(fused) = &self.fused
        {
            fused.take_back();
        }
    }
}

#[cfg(test)]
mod tests;

//! What replicas keep for an optimizer, and what becomes of it when a run fails.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::Tensor;
use distribute_collectives::FusedAllReduce;
use distribute_strategy::{Recoverable, RecoveryError};
use distribute_values::DistributedVariable;

use super::loss_scale::Scaling;
use super::{StepCounts, StepTimes, lock};
use crate::gpu::GpuReduction;
use crate::model::Parts;
use crate::plan::Plan;
use crate::shards::{self, SlotShard};
use crate::tensor::overwrite;
use crate::{Error, Result};

/// The state of an optimizer on the replicas of this process, besides parameters and slots.
pub(super) struct States {
    parts: Arc<Parts>,
    /// Handles on the slots, where every replica has whole ones.
    slots: Mutex<Vec<Vec<DistributedVariable<Tensor>>>>,
    pub(super) plan: OnceLock<Arc<Plan>>,
    /// One per local replica.
    pub(super) each: Vec<Mutex<ReplicaState>>,
    /// As the model's `torn`, of the slots.
    torn: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct ReplicaState {
    pub(super) standing: Standing,
    /// What a failed run goes back to.
    noted: Standing,
    /// How far the replica is in changing its parameters and slots.
    pub(super) change: Change,
    /// Whether a step has begun that is not decided yet.
    pub(super) undecided: bool,
    /// From the first step on.
    pub(super) fused: Option<FusedAllReduce>,
    /// From the first step on: buckets in the memory of the replica's GPU, where it is on one.
    pub(super) on_gpu: Option<Option<GpuReduction>>,
    /// This replica's part of the slots, by bucket, where they are sharded.
    pub(super) shards: Vec<SlotShard>,
    /// Whole slots of a checkpoint, until the parts are cut from them.
    pub(super) restored: Option<Arc<HashMap<String, Tensor>>>,
    pub(super) times: StepTimes,
}

/// What a step changes besides tensors in place: a clone of it is what was.
#[derive(Clone, Debug, Default)]
pub(super) struct Standing {
    /// Of the optimizer, those that were left out excepted.
    pub(super) steps: u64,
    /// Of each variable.
    pub(super) counts: StepCounts,
    /// Gradients of this replica alone that wait for the next step, by variable. Their memory is never written.
    pub(super) accumulated: Vec<Option<Tensor>>,
    pub(super) gradient_norm: Option<f64>,
    pub(super) scaling: Option<Scaling>,
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

impl States {
    pub(super) fn new(parts: &Arc<Parts>, slots: &[Vec<DistributedVariable<Tensor>>]) -> Arc<States> {
        Arc::new(States {
            parts: parts.clone(),
            slots: Mutex::new(slots.to_vec()),
            plan: OnceLock::new(),
            each: parts.tapes.iter().map(|_| Mutex::default()).collect(),
            torn: AtomicBool::new(false),
        })
    }

    /// The first replica's.
    pub(super) fn first<R>(&self, look: impl FnOnce(&ReplicaState) -> R) -> Option<R> {
        self.each.first().map(|state| look(&lock(state)))
    }

    /// Lets go of the whole slots.
    pub(super) fn shard(&self) {
        lock(&self.slots).clear();
    }

    /// An error where a failure has left no replica with whole parameters.
    pub(super) fn check(&self) -> Result<()> {
        let torn = [&self.parts.torn, &self.torn].into_iter().any(|torn| torn.load(Ordering::Acquire));
        if torn { Err(Error::Torn) } else { Ok(()) }
    }

    /// Everything is whole again: it was restored.
    pub(super) fn restored(&self) {
        self.torn.store(false, Ordering::Release);
        for state in &self.each {
            let mut state = lock(state);
            (state.change, state.undecided) = (Change::Whole, false);
            state.standing.accumulated.clear();
        }
    }

    /// Gives replicas that failed in the middle of changing their parameters the values of one that did not: the step was
    /// certain by then, so the others have made it.
    fn mend(&self) -> Result<()> {
        let changes: Vec<Change> = self.each.iter().map(|state| lock(state).change).collect();
        let broken: Vec<usize> = (0..changes.len()).filter(|local| changes[*local] != Change::Whole).collect();
        if broken.is_empty() {
            return Ok(());
        }
        let whole = changes.iter().position(|change| *change == Change::Whole).filter(|_| !self.parts.shared);
        let sharded = lock(&self.slots).is_empty() && self.plan.get().is_some_and(|_| self.has_shards());
        let all_own = broken.iter().all(|local| changes[*local] == Change::OwnPart);
        let outcome = match (whole, self.plan.get()) {
            // Between them they have all parts.
            (_, Some(plan)) if sharded && all_own && self.parts.alone => shards::complete(plan, &self.parts),
            (Some(whole), _) if !sharded => broken.iter().try_for_each(|local| self.copy(whole, *local)),
            _ => Err(Error::Torn),
        };
        match outcome {
            Ok(()) => {
                let standing = whole.map(|whole| lock(&self.each[whole]).standing.clone());
                for local in broken {
                    let mut state = lock(&self.each[local]);
                    state.change = Change::Whole;
                    if let Some(standing) = &standing {
                        (state.standing, state.noted) = (standing.clone(), standing.clone());
                    }
                }
                Ok(())
            }
            Err(error) => {
                self.parts.torn.store(true, Ordering::Release);
                self.torn.store(true, Ordering::Release);
                Err(error)
            }
        }
    }

    fn has_shards(&self) -> bool {
        self.first(|state| !state.shards.is_empty()).unwrap_or(false)
    }

    /// Copies parameters and slots from one replica to another.
    fn copy(&self, from: usize, to: usize) -> Result<()> {
        let slots = lock(&self.slots);
        for (variable, slots) in self.parts.variables.iter().zip(slots.iter()) {
            let all = slots.iter().map(DistributedVariable::components).chain([&variable.components[..]]);
            for components in all.filter(|_| variable.trainable) {
                overwrite(&components[to..=to], &components[from].detach())?;
            }
        }
        Ok(())
    }
}

impl Recoverable for States {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        let mut state = lock(&self.each[local]);
        state.noted = state.standing.clone();
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        let mut state = lock(&self.each[local]);
        state.standing = state.noted.clone();
        state.forget_step();
        Ok(())
    }

    /// An update that failed is a run that failed, whatever the closure made of the error.
    fn commit(&self, local: usize, _: bool) -> Result<(), RecoveryError> {
        self.note(local)?;
        match lock(&self.each[local]).change {
            Change::Whole => Ok(()),
            _ => Err(Error::HalfUpdated { local }.into()),
        }
    }

    fn settle(&self) -> Result<(), RecoveryError> {
        Ok(self.mend()?)
    }
}

impl ReplicaState {
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
mod tests {
    use candle_core::{DType, Device, Module};
    use candle_nn::{Linear, linear};
    use distribute_strategy::{MirroredStrategy, Strategy};
    use distribute_train::checkpoint::{Checkpointed, Snapshot};

    use super::*;
    use crate::{Adam, CandleContext, CandleStrategy, Model, Optimizer};

    fn trained(sharded: bool) -> (Strategy, Model<Linear>, Optimizer) {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1", "CPU:2"]).build().unwrap();
        let model = strategy.scope(|vb| linear(5, 3, vb.pp("fc"))).unwrap();
        let optimizer = Adam::new(0.1).build(&model).unwrap();
        let optimizer = if sharded { optimizer.zero1().unwrap() } else { optimizer };
        step(&strategy, &model, &optimizer).unwrap();
        (strategy, model, optimizer)
    }

    fn step(strategy: &Strategy, model: &Model<Linear>, optimizer: &Optimizer) -> Result<()> {
        let step = strategy.run_with((model, optimizer), |context, (model, optimizer)| {
            let x = Tensor::ones((2, 5), DType::F32, &Device::Cpu)?;
            optimizer.minimize(context, &context.average_loss(&model.forward(&x)?.sqr()?.sum(1)?, 6)?)
        });
        step.map(drop)
    }

    /// Parameters and slots of one replica.
    fn values(model: &Model<Linear>, optimizer: &Optimizer, replica: usize) -> Vec<Vec<f32>> {
        let parameters = model.variables().iter().map(|variable| &variable.components()[replica]);
        let slots = optimizer.slots().map(|slot| &slot.components()[replica]);
        parameters.chain(slots).map(|tensor| tensor.flatten_all().unwrap().to_vec1().unwrap()).collect()
    }

    fn spoil(tensor: &Tensor) {
        overwrite(std::slice::from_ref(tensor), &tensor.ones_like().unwrap()).unwrap();
    }

    #[test]
    fn a_replica_that_failed_amid_its_update_gets_anothers_values() {
        let (strategy, model, optimizer) = trained(false);
        let (_, undisturbed, other) = trained(false);
        let expected = values(&undisturbed, &other, 0);
        for tensor in [&model.variables()[0].components()[1], &optimizer.slots[1][0].components()[1]] {
            spoil(tensor);
        }
        lock(&optimizer.states.each[1]).change = Change::Begun;
        optimizer.states.settle().unwrap();
        assert!((0..3).all(|replica| values(&model, &optimizer, replica) == expected));
        step(&strategy, &model, &optimizer).unwrap();
        model.audit(&strategy).unwrap();
    }

    #[test]
    fn parts_that_replicas_could_not_gather_come_from_their_owners() {
        let (strategy, model, optimizer) = trained(true);
        let expected = values(&model, &optimizer, 0);
        // As after an update of its own part alone: of 18 elements in a bucket, bias first, a third each.
        let component = |variable: usize, replica: usize| &model.variables()[variable].components()[replica];
        for replica in 0..3 {
            let plan = optimizer.states.plan.get().unwrap();
            for bucket in plan.buckets.buckets() {
                let mut at = 0;
                let members: Vec<usize> = bucket.members.iter().copied().filter(|index| *index < 2).collect();
                let len: usize = members.iter().map(|index| component(*index, replica).elem_count()).sum();
                let own = distribute_collectives::schedule::part(len, 3, replica);
                for index in members {
                    let count = component(index, replica).elem_count();
                    let kept: Vec<f32> = component(index, replica).flatten_all().unwrap().to_vec1().unwrap();
                    let spoilt: Vec<f32> =
                        (0..count).map(|i| if own.contains(&(at + i)) { kept[i] } else { f32::NAN }).collect();
                    let spoilt = Tensor::from_vec(spoilt, component(index, replica).shape(), &Device::Cpu).unwrap();
                    overwrite(std::slice::from_ref(component(index, replica)), &spoilt).unwrap();
                    at += count;
                }
            }
            lock(&optimizer.states.each[replica]).change = Change::OwnPart;
        }
        optimizer.states.settle().unwrap();
        assert!((0..3).all(|replica| values(&model, &optimizer, replica) == expected));
        step(&strategy, &model, &optimizer).unwrap();
    }

    #[test]
    fn a_model_that_nobody_has_whole_is_neither_trained_nor_saved() {
        let (strategy, model, optimizer) = trained(false);
        let mut snapshot = Snapshot::new(1);
        for part in [&model as &dyn Checkpointed, &optimizer] {
            part.save(&strategy, &mut snapshot).unwrap();
        }
        (0..3).for_each(|replica| lock(&optimizer.states.each[replica]).change = Change::Begun);
        assert!(optimizer.states.settle().is_err());
        let error = step(&strategy, &model, &optimizer).unwrap_err().to_string();
        assert!(error.contains("restore the newest checkpoint"), "{error}");
        for part in [&model as &dyn Checkpointed, &optimizer] {
            assert!(part.save(&strategy, &mut Snapshot::new(2)).is_err());
            part.load(&strategy, &snapshot).unwrap();
        }
        step(&strategy, &model, &optimizer).unwrap();
    }
}

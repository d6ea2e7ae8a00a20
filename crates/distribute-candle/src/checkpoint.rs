//! Models and optimizers in checkpoints.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use candle_core::Tensor;
use distribute_collectives::ReduceOp;
use distribute_strategy::Strategy;
use distribute_train::BoxError;
use distribute_train::checkpoint::{Checkpointed, Snapshot};
use distribute_values::{Axis, PerReplica};

use crate::optimizer::{Optimizer, OptimizerState};
use crate::tensor::overwrite;
use crate::{Candle, Error, Model, Result, Variable};

/// The files of a checkpoint.
pub(crate) const MODEL: &str = "model";
pub(crate) const OPTIMIZER: &str = "optimizer";

/// Every variable once, under its path: parameters as they are, statistics that replicas keep of their own examples as their mean.
/// Parameters are compared on all replicas first: nothing is saved of a model whose copies have come to differ.
impl<M> Checkpointed for Model<M> {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        if self.parts.torn.load(Ordering::Acquire) {
            return Err(Error::Torn.into());
        }
        self.audit(strategy)?;
        for variable in self.variables() {
            snapshot.put::<Candle, _>(MODEL, variable.name(), &whole(strategy, variable)?)?;
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for variable in self.variables() {
            let saved = snapshot.get::<Candle, _>(MODEL, variable.name(), &variable.components()[0])?;
            overwrite(variable.components(), &saved)?;
        }
        self.parts.torn.store(false, Ordering::Release);
        Ok(())
    }
}

/// The slots, whole also where replicas keep parts of them, and the count of steps, the learning rate and the loss scale.
impl Checkpointed for Optimizer {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        for (name, slot) in self.whole_slots(&strategy.groups())? {
            snapshot.put::<Candle, _>(OPTIMIZER, &name, &slot)?;
        }
        snapshot.put_state(OPTIMIZER, &self.state())?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for slot in self.slots() {
            let saved = snapshot.get::<Candle, _>(OPTIMIZER, slot.name(), &slot.components()[0])?;
            overwrite(slot.components(), &saved)?;
        }
        let mut whole = HashMap::new();
        for (name, like) in self.sharded_slots() {
            let saved = snapshot.get::<Candle, _>(OPTIMIZER, &name, like)?;
            whole.insert(name, saved);
        }
        if !whole.is_empty() {
            self.set_sharded_slots(whole);
        }
        if let Some(state) = snapshot.get_state::<OptimizerState>(OPTIMIZER)? {
            self.set_state(&state);
        }
        Ok(())
    }
}

/// One value of a variable, for all replicas of all processes.
pub(crate) fn whole(strategy: &Strategy, variable: &Variable) -> Result<Tensor> {
    let components = variable.components();
    if !variable.statistic || strategy.num_replicas_in_sync() == 1 || !components[0].dtype().is_float() {
        return Ok(components[0].clone());
    }
    Ok(strategy.reduce(ReduceOp::Mean, &PerReplica::new(components.to_vec()), Axis::None)?)
}

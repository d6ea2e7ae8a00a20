//! Checkpoints of models and optimizers.

use candle_core::Tensor;
use distribute_collectives::ReduceOp;
use distribute_strategy::Strategy;
use distribute_train::BoxError;
use distribute_train::checkpoint::{Checkpointed, MODEL, Snapshot};
use distribute_types::Classified;
use distribute_values::{Axis, PerReplica};

use crate::{Candle, Model, Result, Variable};

/// Saves every variable once, under its path: parameters unchanged, and the mean over replicas for statistics that
/// replicas compute from their own examples. Parameters of all replicas are compared first, so a model whose copies
/// differ is never saved. Of [`Dropout`](crate::Dropout) layers, it saves how often they were called in training.
impl<M> Checkpointed for Model<M> {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        self.parameters.check_equal()?;
        self.audit(strategy).map_err(Classified::new)?;
        for variable in self.variables() {
            let whole = whole(strategy, variable).map_err(Classified::new)?;
            snapshot.put_whole::<Candle, _>(strategy, MODEL, variable.name(), whole)?;
        }
        for (name, uses) in self.streams.uses() {
            snapshot.put_state(&dropout_key(name), &uses)?;
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for variable in self.variables() {
            let like = &variable.components()[0];
            let saved = snapshot.get_shaped::<Candle, _>(MODEL, variable.name(), like, &variable.shape())?;
            variable.overwrite(&saved)?;
        }
        for name in self.streams.uses().into_keys() {
            // Checkpoints of models that had no such layer have none.
            self.streams.set_uses(name, snapshot.get_state(&dropout_key(name))?.unwrap_or(0));
        }
        self.parameters.set_torn(false);
        Ok(())
    }
}

fn dropout_key(layer: &str) -> String {
    format!("dropout {layer}")
}

/// Returns one value of a variable for all replicas of all processes; of a sharded variable, in the chief's process
/// only.
pub(crate) fn whole(strategy: &Strategy, variable: &Variable) -> Result<Option<Tensor>> {
    let components = variable.components();
    if variable.layout().is_some() {
        return variable.whole_on_chief(strategy);
    }
    if !variable.is_statistic() || strategy.num_replicas_in_sync() == 1 || !components[0].dtype().is_float() {
        return variable.whole(strategy).map(Some);
    }
    Ok(Some(strategy.reduce(ReduceOp::Mean, &PerReplica::new(components.to_vec()), Axis::None)?))
}

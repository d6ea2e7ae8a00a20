//! Checkpoints of models.

use burn::module::Module;
use distribute_collectives::ReduceOp;
use distribute_optim::Trainable;
use distribute_optim::backend::Variable;
use distribute_strategy::Strategy;
use distribute_train::BoxError;
use distribute_train::checkpoint::{Checkpointed, MODEL, Snapshot};
use distribute_types::Classified;
use distribute_values::{Axis, PerReplica, TensorStorage};

use crate::integers::is_integers;
use crate::{Burn, BurnTensor, Model, Result};

/// Saves every variable once, under its path: parameters unchanged, and the mean over replicas for statistics that
/// replicas compute from their own examples. Parameters of all replicas are compared first, so a model whose copies
/// differ is never saved. Sharded variables are saved whole, gathered by the chief one after another, as are
/// those that are split among tensor ranks, whose parts its process has.
impl<M: Module + Sync + 'static> Checkpointed for Model<M> {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        self.parameters().check_equal()?;
        self.audit(strategy).map_err(Classified::new)?;
        self.read_statistics().map_err(Classified::new)?;
        for variable in self.variables() {
            let whole = match variable.layout().is_some() || variable.tensor_split().is_some() {
                true => variable.whole_on_chief(strategy),
                false => whole(strategy, variable).map(Some),
            };
            snapshot.put_whole::<Burn, _>(strategy, MODEL, variable.name(), whole.map_err(Classified::new)?)?;
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for variable in self.variables() {
            if is_integers(variable) && !snapshot.names(MODEL).contains(&variable.name()) {
                distribute_notice::warn!(
                    "the checkpoint has no value of {:?}, as those of earlier versions have none of integers and of \
                     truth values; the model keeps the one with which it was built",
                    variable.name()
                );
                continue;
            }
            let (like, shape) = (&variable.components()[0], variable.shape());
            let saved = snapshot.get_shaped::<Burn, _>(MODEL, variable.name(), like, &shape)?;
            variable.overwrite(&saved)?;
        }
        self.write_statistics();
        self.write_integers()?;
        self.parameters().set_torn(false);
        Ok(())
    }
}

/// Returns one value of a variable for all replicas of all processes.
fn whole(strategy: &Strategy, variable: &Variable<Burn>) -> Result<BurnTensor> {
    let components = variable.components();
    if !variable.is_statistic() || strategy.num_replicas_in_sync() == 1 || !components[0].dtype()?.is_float() {
        return Ok(components[0].clone());
    }
    Ok(strategy.reduce(ReduceOp::Mean, &PerReplica::new(components.to_vec()), Axis::None)?)
}

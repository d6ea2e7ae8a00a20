//! Checkpoints of optimizers.

use std::collections::HashMap;

use distribute_optim::backend::{TensorLibrary, overwrite_parts};
use distribute_optim::{Optimizer, OptimizerState};
use distribute_strategy::Strategy;
use distribute_types::Classified;
use distribute_values::TensorStorage;

use super::{Checkpointed, OPTIMIZER, Snapshot};
use crate::BoxError;

/// Saves the slots, as whole tensors even if replicas keep parts of them, the count of steps, the learning rate and the
/// loss scale.
impl<L: TensorLibrary> Checkpointed for Optimizer<L> {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        // Every process takes part to the end, whatever one slot's outcome is.
        let mut outcome = Ok(());
        let visited = self.visit_whole_slots(strategy, |name, slot| {
            if outcome.is_ok() {
                outcome = snapshot.put::<L, _>(OPTIMIZER, name, slot);
            }
        });
        visited.map_err(Classified::new)?;
        outcome?;
        snapshot.put_state(OPTIMIZER, &self.state())?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for (slot, layout) in self.slots_with_layouts() {
            let like = &slot.components()[0];
            let shape = layout.map_or_else(|| like.shape(), |layout| layout.shape().to_vec());
            let saved = snapshot.get_shaped::<L, _>(OPTIMIZER, slot.name(), like, &shape)?;
            overwrite_parts::<L>(slot.components(), layout, &saved)?;
        }
        let mut whole = HashMap::new();
        for (name, like) in self.sharded_slots().map_err(Classified::new)? {
            let saved = snapshot.get::<L, _>(OPTIMIZER, &name, &like)?;
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

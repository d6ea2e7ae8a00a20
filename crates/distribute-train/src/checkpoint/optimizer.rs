//! Checkpoints of optimizers.

use std::collections::HashMap;
use std::ops::ControlFlow;

use distribute_device::DType;
use distribute_optim::backend::TensorLibrary;
use distribute_optim::{Optimizer, OptimizerState};
use distribute_strategy::Strategy;
use distribute_types::Classified;
use distribute_values::{Host, HostTensor, TensorStorage};

use super::{Checkpointed, OPTIMIZER, Snapshot};
use crate::{BoxError, Error};

/// The name under which the state of a tensor library's own optimizer is saved.
const LIBRARY: &str = "library";

/// Saves the slots, as whole tensors even if replicas keep parts of them, the [slots of local
/// updates](Optimizer::local_slots), the count of steps, the learning rate and the loss scale.
impl<L: TensorLibrary> Checkpointed for Optimizer<L> {
    fn prepare(&self, strategy: &Strategy) -> Result<(), BoxError> {
        Ok(self.synchronize_to_save(strategy).map_err(Classified::new)?)
    }

    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        let visited = self.visit_whole_slots(strategy, |name, slot| {
            match snapshot.put_whole::<L, _>(strategy, OPTIMIZER, name, slot) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => ControlFlow::Break(error),
            }
        });
        if let ControlFlow::Break(error) = visited.map_err(Classified::new)? {
            return Err(error.into());
        }
        for (name, slot) in self.local_slots(strategy).map_err(Classified::new)? {
            snapshot.put_whole::<Host, _>(strategy, OPTIMIZER, &name, Some(slot))?;
        }
        if let Some(state) = self.library_state(strategy).map_err(Classified::new)? {
            let shape = [state.len()];
            snapshot.put_bytes(OPTIMIZER, LIBRARY, DType::U8, &shape, state);
        }
        snapshot.put_state(OPTIMIZER, &self.state())?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        self.restore_slots(|name, like, shape| snapshot.get_shaped::<L, _>(OPTIMIZER, name, like, shape))?;
        let mut whole = HashMap::new();
        for (name, like) in self.sharded_slots().map_err(Classified::new)? {
            let saved = snapshot.get::<L, _>(OPTIMIZER, &name, &like)?;
            whole.insert(name, saved);
        }
        if !whole.is_empty() {
            self.set_sharded_slots(whole);
        }
        let mut of_strategy = HashMap::new();
        for (name, shape) in self.local_slot_names() {
            // A checkpoint of another strategy has none, and the slots begin with the model's values.
            if snapshot.names(OPTIMIZER).contains(&name.as_str()) {
                let like = HostTensor::scalar(0.0f32);
                let saved: HostTensor<f32> = snapshot.get_shaped(OPTIMIZER, &name, &like, &shape)?;
                of_strategy.insert(name, saved.to_elements()?);
            }
        }
        self.set_local_slots(of_strategy)?;
        match snapshot.bytes(OPTIMIZER, LIBRARY)? {
            Some(state) => self.set_library_state(&state).map_err(Classified::new)?,
            // Only a tensor library's own optimizer does not report the size of its state.
            None if self.memory().state_bytes.is_none() => {
                let problem = format!("the checkpoint's {OPTIMIZER} has none of this name");
                return Err(Error::Restore { name: LIBRARY.to_owned(), problem }.into());
            }
            None => {}
        }
        if let Some(state) = snapshot.get_state::<OptimizerState>(OPTIMIZER)? {
            self.set_state(&state);
        }
        Ok(())
    }
}

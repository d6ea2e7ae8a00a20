//! Checkpoints of optimizers.

use std::collections::HashMap;
use std::ops::ControlFlow;

use distribute_device::DType;
use distribute_optim::backend::TensorLibrary;
use distribute_optim::{Optimizer, OptimizerState};
use distribute_strategy::Strategy;
use distribute_types::Classified;
use distribute_values::{Host, HostTensor, TensorStorage};
use serde::{Deserialize, Serialize};

use super::names::STATE;
use super::{Checkpointed, OPTIMIZER, Snapshot};
use crate::{BoxError, Error};

/// The name under which the state of a tensor library's own optimizer is saved.
const LIBRARY: &str = "library";

/// An optimizer's state with what tells it from others.
#[derive(Serialize, Deserialize)]
struct Saved {
    #[serde(flatten)]
    state: OptimizerState,
    /// The optimizer's [`key`]. Those of parameter servers and of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    variable: Option<String>,
}

/// Saves the slots, as whole tensors even if replicas keep parts of them, the [slots of local
/// updates](Optimizer::local_slots), the count of steps, the learning rate and the loss scale.
///
/// A checkpoint may have several optimizers, each of another model: the first is saved under the names that a single
/// one has, each further one under names with a variable of its model, by which it is found whatever the order of the
/// parts. Two optimizers of one model are [`Error::PutTwice`].
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
        let key = key(self.variable_names());
        let is_first = !snapshot.state.contains_key(OPTIMIZER);
        if is_first {
            // A second one of the same model would be found in place of this.
            snapshot.note_put(STATE, &further(OPTIMIZER, key))?;
        }
        let name = |of_first: &str| if is_first { of_first.to_owned() } else { further(of_first, key) };
        if let Some(state) = self.library_state(strategy).map_err(Classified::new)? {
            let shape = [state.len()];
            snapshot.put_bytes(OPTIMIZER, &name(LIBRARY), DType::U8, &shape, state);
        }
        let saved = Saved { state: self.state(), variable: Some(key.to_owned()) };
        snapshot.put_state(&name(OPTIMIZER), &saved)?;
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
        let key = key(self.variable_names());
        let (saved, is_first) = match snapshot.get_state::<Saved>(&further(OPTIMIZER, key))? {
            Some(saved) => (Some(saved), false),
            None => (snapshot.get_state::<Saved>(OPTIMIZER)?, true),
        };
        let Some(Saved { state, variable }) = saved else {
            let problem = "the checkpoint has no optimizer".to_owned();
            return Err(Error::Restore { name: OPTIMIZER.to_owned(), problem }.into());
        };
        if let Some(of) = variable.filter(|of| of != key) {
            let problem = format!("the checkpoint has that of a model with {of:?}, and none of one with {key:?}");
            return Err(Error::Restore { name: OPTIMIZER.to_owned(), problem }.into());
        }
        let library = if is_first { LIBRARY.to_owned() } else { further(LIBRARY, key) };
        match snapshot.bytes(OPTIMIZER, &library)? {
            Some(state) => self.set_library_state(&state).map_err(Classified::new)?,
            // Only a tensor library's own optimizer does not report the size of its state.
            None if self.memory().state_bytes.is_none() => {
                let problem = format!("the checkpoint's {OPTIMIZER} has none of this name");
                return Err(Error::Restore { name: library, problem }.into());
            }
            None => {}
        }
        self.set_state(&state);
        Ok(())
    }
}

/// Returns the name by which a model is told from the others of a checkpoint: the first of its variables' in
/// alphabetical order, which no other model has, and which stays the same if others are frozen.
pub(super) fn key<'a>(variables: impl Iterator<Item = &'a str>) -> &'a str {
    variables.min().unwrap_or_default()
}

/// Returns the name under which something of a further optimizer is saved.
fn further(of_first: &str, key: &str) -> String {
    format!("{of_first} {key}")
}

//! Checkpoints of averages.

use distribute_optim::Ema;
use distribute_optim::backend::TensorLibrary;
use distribute_strategy::Strategy;
use distribute_types::Classified;

use super::optimizer::key;
use super::{Checkpointed, OPTIMIZER, Snapshot};
use crate::{BoxError, Error};

/// Saves the averages, as whole tensors even if replicas keep parts of them, and the number of updates. The decay is
/// the program's.
///
/// While the averages are in the model's variables, saving and restoring end with
/// [`Swapped`](distribute_optim::Error::Swapped).
impl<L: TensorLibrary> Checkpointed for Ema<L> {
    fn prepare(&self, _: &Strategy) -> Result<(), BoxError> {
        Ok(self.check_not_swapped().map_err(Classified::new)?)
    }

    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        self.check_not_swapped().map_err(Classified::new)?;
        for average in self.averages() {
            let whole = average.whole_on_chief(strategy).map_err(Classified::new)?;
            snapshot.put_whole::<L, _>(strategy, OPTIMIZER, average.name(), whole)?;
        }
        snapshot.put_state(&state_key(self), &self.updates())?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        self.check_not_swapped().map_err(Classified::new)?;
        let key = state_key(self);
        let missing =
            || Error::Restore { name: key.clone(), problem: "the checkpoint has no such averages".to_owned() };
        let updates = snapshot.get_state(&key)?.ok_or_else(missing)?;
        for average in self.averages() {
            let like = &average.components()[0];
            let saved = snapshot.get_shaped::<L, _>(OPTIMIZER, average.name(), like, &average.shape())?;
            average.overwrite(&saved)?;
        }
        self.set_updates(updates);
        Ok(())
    }
}

/// Returns the key of the number of updates, which differs between the averages of different models.
fn state_key<L: TensorLibrary>(ema: &Ema<L>) -> String {
    format!("updates {}", key(ema.averages().map(|average| average.name())))
}

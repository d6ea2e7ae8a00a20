//! The calls of callbacks.

use super::Session;
use crate::Result;
use crate::callbacks::{Callback, Occasion, Training};
use crate::trainer::Trainee;

impl<T: Trainee> Session<'_, T> {
    /// Calls the callbacks.
    pub(super) fn tell(
        &mut self,
        callbacks: &mut [Box<dyn Callback>],
        values: &[(String, f64)],
        mut hook: impl FnMut(&mut dyn Callback, &mut Training<'_>) -> Result<()>,
    ) -> Result<()> {
        let (trainer, strategy) = (self.trainer, self.trainer.strategy());
        let mut stop = self.stop.take();
        for callback in callbacks {
            let before = trainer.learning_rate();
            let mut learning_rate = before;
            let mut training = Training {
                epoch: self.epoch,
                epochs: self.epochs,
                steps_per_epoch: self.steps_per_epoch,
                step: self.steps,
                examples: self.examples,
                values,
                without_validation: self.without_validation,
                without_training: self.without_training,
                learning_rate: &mut learning_rate,
                stop: &mut stop,
                strategy,
                run: self,
            };
            if let Err(error) = hook(callback.as_mut(), &mut training) {
                self.stop = stop;
                return Err(error);
            }
            // A callback may have restored a checkpoint, which has set the learning rate too.
            if learning_rate.to_bits() != before.to_bits() {
                trainer.set_learning_rate(learning_rate);
            }
        }
        self.stop = stop;
        Ok(())
    }

    /// Calls the callbacks that save. Notes and returns whether one has.
    pub(super) fn save(
        &mut self,
        callbacks: &mut [Box<dyn Callback>],
        values: &[(String, f64)],
        occasion: Occasion,
    ) -> Result<bool> {
        self.standing.keep_states(callbacks);
        let mut saved = false;
        self.tell(callbacks, values, |callback, training| {
            saved |= callback.save(training, occasion)?;
            Ok(())
        })?;
        if saved {
            self.saved = Some(self.steps);
        }
        Ok(saved)
    }
}

//! How a training run ends when a worker is told to stop.

use super::Session;
use crate::Result;
use crate::callbacks::{Callback, Occasion};
use crate::preemption::PreemptionHandler;
use crate::trainer::Trainee;

impl<T: Trainee> Session<'_, T> {
    /// Saves if a worker was told to stop, and returns an error if it has to leave.
    pub(super) fn heed(
        &mut self,
        preemption: &PreemptionHandler,
        callbacks: &mut [Box<dyn Callback>],
        values: &[(String, f64)],
    ) -> Result<()> {
        if self.trainer.strategy().elastic().is_some() {
            return self.leave(preemption, callbacks, values);
        }
        if preemption.should_save() {
            self.save(callbacks, values, Occasion::Notice)?;
        }
        if !preemption.should_stop() {
            return Ok(());
        }
        if !self.save(callbacks, values, Occasion::Leaving)? {
            distribute_notice::warn!(
                "told to stop, and no callback keeps checkpoints: add BackupAndRestore to resume next time"
            );
        }
        Err(preemption.ended(self.steps))
    }

    /// Leaves the other members of an elastic job, which have all of this process's state, if it was told to stop.
    fn leave(
        &mut self,
        preemption: &PreemptionHandler,
        callbacks: &mut [Box<dyn Callback>],
        values: &[(String, f64)],
    ) -> Result<()> {
        let strategy = self.trainer.strategy();
        if !preemption.is_told() {
            return Ok(());
        }
        if strategy.topology().workers() == 1 {
            self.save(callbacks, values, Occasion::Leaving)?;
        }
        self.leaves = true;
        strategy.leave_job()?;
        Err(preemption.ended(self.steps))
    }
}

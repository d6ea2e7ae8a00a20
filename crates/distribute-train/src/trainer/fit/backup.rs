//! How a training run is saved, and continues from what was saved.

use super::{Session, Standing};
use crate::callbacks::Run;
use crate::checkpoint::{CheckpointManager, Checkpointed};
use crate::trainer::{Trainee, sums_of_all};
use crate::{Error, Result};

impl<T: Trainee> Session<'_, T> {
    /// Continues after the steps that the variables have made since the restored checkpoint.
    ///
    /// # Errors
    /// [`Error::StepsUnknown`] if an epoch has ended in between.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let (known, made) = (self.steps, self.trainer.steps_made(self.steps)?);
        if made <= known {
            return Ok(());
        }
        if !self.is_in_epoch(made) {
            return Err(Error::StepsUnknown { made, known });
        }
        let ahead = made - known;
        distribute_notice::warn!(
            "continuing after step {made}, with the variables' own values; what callbacks and metrics of this epoch \
             would know of the {ahead} steps since step {known} is lost"
        );
        (self.steps, self.standing.steps) = (made, self.standing.steps + ahead);
        // The variables are no longer those of the end of an epoch.
        self.standing.unsaved = false;
        Ok(())
    }

    /// Returns whether a later step is one of the epoch in which the state is, and not its last one.
    fn is_in_epoch(&self, step: u64) -> bool {
        let Standing { epochs_done, steps, ended, all_steps, .. } = &self.standing;
        let ahead = step.saturating_sub(self.steps);
        let is_open = *epochs_done < self.epochs && ended.is_none() && !all_steps;
        ahead == 0 || is_open && self.steps_per_epoch.is_some_and(|all| steps + ahead < all)
    }
}

impl<T: Trainee> Run for Session<'_, T> {
    fn model(&self) -> &dyn Checkpointed {
        self.trainer.model()
    }

    fn claim(&mut self, checkpoints: &mut CheckpointManager) -> Result<()> {
        if let Some(run) = self.run {
            checkpoints.continue_run(run);
        }
        if self.joins {
            // The others have claimed the folder; all do again before the next checkpoint.
            return Ok(());
        }
        self.run = Some(self.folders.claim(self.trainer.strategy(), checkpoints)?);
        Ok(())
    }

    fn save(&mut self, checkpoints: &mut CheckpointManager) -> Result<()> {
        self.claim(checkpoints)?;
        self.settle()?;
        // A pass that is resumed after this has its position yet.
        let resumed = self.standing.position.take();
        self.standing.position = match &self.batches {
            Some(pass) => Some(pass.position()?),
            None => resumed.clone(),
        };
        self.standing.sums = match self.standing.steps {
            0 => Vec::new(),
            _ => sums_of_all(self.trainer.strategy(), &self.sums)?,
        };
        let (strategy, model, optimizer) = (self.trainer.strategy(), self.trainer.model(), self.trainer.optimizer());
        // The state says if the epoch has just ended: other callbacks' checkpoints may not be written by the time that
        // this one is, so all save again after a restart.
        let outcome = checkpoints.save(strategy, self.steps, &[model, optimizer], &self.standing);
        // Both are only for restoring; this run continues with its own pass and sums.
        (self.standing.position, self.standing.sums) = (resumed, Vec::new());
        outcome
    }

    fn restore(&mut self, checkpoints: &mut CheckpointManager) -> Result<Option<u64>> {
        if self.joins {
            // From the others, not from a file.
            return Ok(Some(self.steps));
        }
        let (strategy, model, optimizer) = (self.trainer.strategy(), self.trainer.model(), self.trainer.optimizer());
        let Some((steps, standing)) = checkpoints.restore(strategy, &[model, optimizer])? else { return Ok(None) };
        self.run = checkpoints.run();
        (self.steps, self.standing) = (steps, standing);
        let made = self.trainer.steps_made(steps)?;
        if self.is_in_epoch(made) {
            return Ok(Some(steps));
        }
        distribute_notice::warn!(
            "the variables have made {made} steps, and the checkpoint is that of step {steps}, of an epoch that has \
             ended since: training continues from the checkpoint"
        );
        self.trainer.prefer_checkpoint();
        let Some((steps, standing)) = checkpoints.restore(strategy, &[model, optimizer])? else { return Ok(None) };
        (self.steps, self.standing) = (steps, standing);
        Ok(Some(steps))
    }

    fn rises(&self, metric: &str) -> Option<bool> {
        self.trainer.metrics().rises(metric)
    }
}

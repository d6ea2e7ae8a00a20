//! How a training run ends when a worker is told to stop.

use distribute_strategy::Request;

use super::{End, Session};
use crate::callbacks::{Callback, Occasion};
use crate::preemption::{Departure, PreemptionHandler};
use crate::trainer::Trainee;
use crate::{Error, Result};

impl<T: Trainee> Session<'_, T> {
    /// Saves if a worker was told to stop, and returns an error if this one has to leave.
    pub(super) fn heed(
        &mut self,
        preemption: Option<&PreemptionHandler>,
        callbacks: &mut [Box<dyn Callback>],
        values: &[(String, f64)],
    ) -> Result<()> {
        if self.trainer.strategy().elastic().is_some() {
            return self.leave(preemption, callbacks, values);
        }
        let Some(preemption) = preemption else { return Ok(()) };
        if preemption.should_save() {
            self.save(callbacks, values, Occasion::Notice)?;
        }
        if !preemption.should_stop() {
            return Ok(());
        }
        self.save(callbacks, values, Occasion::Leaving)?;
        Err(preemption.end(self.steps, self.saved_end()))
    }

    /// Saves and returns an error if a worker was told to stop after its last step: started again, the program finds
    /// all epochs done. Without a callback that saves at the request the training ends as usual, since the program
    /// would train again. Every worker calls this, after the last epoch.
    pub(super) fn heed_at_end(
        &mut self,
        preemption: Option<&PreemptionHandler>,
        callbacks: &mut [Box<dyn Callback>],
        values: &[(String, f64)],
    ) -> Result<()> {
        let strategy = self.trainer.strategy();
        // The members of an elastic job end together.
        let Some(preemption) = preemption.filter(|_| strategy.elastic().is_none()) else { return Ok(()) };
        if !self.is_on_any(preemption.has_to_end())? {
            return Ok(());
        }
        let saved = self.save(callbacks, values, Occasion::Leaving)?;
        if !self.is_on_any(saved)? {
            return Ok(());
        }
        strategy.cancel_request(Request::Leave);
        Err(preemption.end(self.steps, self.saved_end()))
    }

    /// Leaves the other members of an elastic job, which have all of this process's state, if it was told to stop. If
    /// too few remain, all members save before.
    fn leave(
        &mut self,
        preemption: Option<&PreemptionHandler>,
        callbacks: &mut [Box<dyn Callback>],
        values: &[(String, f64)],
    ) -> Result<()> {
        let strategy = self.trainer.strategy();
        let is_told = preemption.is_some_and(PreemptionHandler::is_told);
        let Departure { saves, leaves } = self.departures.look(strategy, is_told);
        if saves {
            self.save(callbacks, values, Occasion::Leaving)?;
            self.departures.note_saved();
        }
        let Some(preemption) = preemption.filter(|_| leaves) else { return Ok(()) };
        let end = match self.departures.has_saved() {
            true => self.saved_end(),
            false => End::Left,
        };
        self.leaves = true;
        strategy.leave_job()?;
        Err(preemption.end(self.steps, end))
    }

    /// Returns the error of a process that was told to stop while it waited for the others to join it; other errors
    /// unchanged.
    pub(super) fn stopped(&self, error: Error, preemption: Option<&PreemptionHandler>) -> Error {
        match (&error, preemption) {
            (Error::Strategy(distribute_strategy::Error::Stopped(_)), Some(preemption)) => {
                preemption.end(self.steps, self.saved_end())
            }
            _ => error,
        }
    }

    fn saved_end(&self) -> End {
        if self.saved == Some(self.steps) { End::Saved } else { End::Unsaved }
    }
}

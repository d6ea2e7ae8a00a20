//! Processes that leave an elastic job, and what its members do before.

use distribute_strategy::{Request, Requests, Strategy};
use parking_lot::Mutex;

/// The requests of members of an elastic job to leave it. They travel with the gradients, so that all members know
/// after the same step how many leave.
#[derive(Debug, Default)]
pub(crate) struct Departures(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of changes of the members before those that this is about.
    changes: u64,
    departure: Departure,
    has_saved: bool,
}

/// The consequences of a step in which members of an elastic job may have asked to leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Departure {
    /// Whether all members save, because fewer than the job's smallest number remain.
    pub(crate) saves: bool,
    /// Whether this process leaves, after that.
    pub(crate) leaves: bool,
}

impl Departures {
    /// Returns what is to be done after a step, and asks to leave if this process `is_told` to. Under a strategy that
    /// is not elastic nothing is.
    pub(crate) fn look(&self, strategy: &Strategy, is_told: bool) -> Departure {
        let Some(sizes) = strategy.elastic() else { return Departure::default() };
        let mut state = self.0.lock();
        let changes = strategy.changes();
        if state.changes != changes {
            // The others know nothing of what was to be done with other members.
            *state = State { changes, ..State::default() };
        }
        let workers = u32::try_from(strategy.topology().workers()).unwrap_or(u32::MAX);
        let Requests { mut processes, mut own, .. } = strategy.take_requests(Request::Leave);
        if workers == 1 && is_told && !state.departure.leaves {
            // No other process has to know.
            (processes, own) = (1, true);
        }
        let departure = &mut state.departure;
        departure.saves |= processes > 0 && workers.saturating_sub(processes) < *sizes.start();
        // Where all save, one that has been told since the step began has its state saved too.
        departure.leaves |= own || (departure.saves && is_told);
        if is_told && !departure.leaves {
            strategy.request(Request::Leave);
        }
        *departure
    }

    /// Notes that all members have saved, or are about to.
    pub(crate) fn note_saved(&self) {
        let mut state = self.0.lock();
        (state.departure.saves, state.has_saved) = (false, true);
    }

    /// Returns whether all members have saved before this process leaves.
    pub(crate) fn has_saved(&self) -> bool {
        self.0.lock().has_saved
    }
}

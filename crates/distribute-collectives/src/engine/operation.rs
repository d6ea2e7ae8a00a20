//! One collective call of all ranks of a process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::task::Waker;
use std::time::Instant;

use crossbeam_utils::CachePadded;

use super::memory::Buffers;
use super::phases::Phases;
use super::plan::LocalPlan;
use crate::Error;
use crate::call::Call;
use crate::sync::lock;

/// One collective call of all local ranks: their entries, and the progress of the call.
pub(crate) struct Operation {
    /// Read continuously by waiting ranks.
    pub(super) phases: CachePadded<Phases>,
    entries: Vec<Mutex<Option<Entry>>>,
    /// Written once by the last rank to arrive, before Reducing.
    plan: OnceLock<LocalPlan>,
    failure: Mutex<Option<Error>>,
    /// Whether a rank polls its work as a future, so that wakers must be called at the end of the operation.
    is_polled: AtomicBool,
}

/// One rank's part of an operation.
pub(super) struct Entry {
    pub(super) call: Call,
    pub(super) buffers: Buffers,
    pub(super) started: Instant,
    pub(super) deadline: Instant,
    /// The waker of a polling rank, called when the operation is over.
    pub(super) waker: Option<Waker>,
}

/// A rank's call, its start and its deadline.
#[derive(Clone, Copy)]
pub(super) struct CallTimes {
    pub(super) call: Call,
    pub(super) started: Instant,
    pub(super) deadline: Instant,
}

impl Operation {
    pub(super) fn new(ranks: usize) -> Operation {
        Operation {
            phases: CachePadded::new(Phases::new()),
            entries: (0..ranks).map(|_| Mutex::new(None)).collect(),
            plan: OnceLock::new(),
            failure: Mutex::new(None),
            is_polled: AtomicBool::new(false),
        }
    }

    pub(super) fn enter(&self, local: usize, entry: Entry) {
        *lock(&self.entries[local]) = Some(entry);
    }

    /// Sets the plan. Only the last rank to arrive calls this, once.
    pub(super) fn set_plan(&self, plan: LocalPlan) -> &LocalPlan {
        self.plan.get_or_init(|| plan)
    }

    /// Records why the operation fails, unless a cause is recorded already.
    pub(super) fn set_failure(&self, error: &Error) {
        lock(&self.failure).get_or_insert_with(|| error.clone());
    }

    /// Registers the waker of a polling rank. Returns whether it is the rank's first.
    ///
    /// The caller must check the state afterwards: a change before the registration causes no wake-up.
    pub(super) fn register(&self, local: usize, waker: &Waker) -> bool {
        let mut entry = lock(&self.entries[local]);
        let Some(entry) = entry.as_mut() else { return false };
        let first = entry.waker.is_none();
        match &mut entry.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        // SeqCst, as for sleepers (`Phases::state`): either the thread that ends the operation sees the flag, or the
        // poll that follows sees the end.
        self.is_polled.store(true, Ordering::SeqCst);
        first
    }

    /// Wakes the polling ranks. Called after the last change of the state.
    pub(super) fn wake_polling_ranks(&self) {
        if self.is_polled() {
            for entry in &self.entries {
                // Called without the lock, since a waker may poll at once, which takes it.
                let waker = lock(entry).as_mut().and_then(|entry| entry.waker.take());
                waker.into_iter().for_each(Waker::wake);
            }
        }
    }

    pub(super) fn is_polled(&self) -> bool {
        // SeqCst: see `register`.
        self.is_polled.load(Ordering::SeqCst)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.phases.state().is_over()
    }

    pub(super) fn failure(&self) -> Option<Error> {
        lock(&self.failure).clone()
    }

    pub(super) fn plan(&self) -> Option<&LocalPlan> {
        self.plan.get()
    }

    /// Returns a rank's call if it has been made.
    pub(super) fn call_of(&self, local: usize) -> Option<CallTimes> {
        let entry = lock(&self.entries[local]);
        entry.as_ref().map(|Entry { call, started, deadline, .. }| CallTimes {
            call: *call,
            started: *started,
            deadline: *deadline,
        })
    }

    /// Returns the call of the first local rank.
    pub(super) fn leader_call(&self) -> Option<CallTimes> {
        self.call_of(0)
    }

    /// Returns the earliest deadline of the ranks that have arrived.
    pub(super) fn earliest_deadline(&self) -> Option<Instant> {
        self.entries.iter().filter_map(|entry| lock(entry).as_ref().map(|entry| entry.deadline)).min()
    }

    /// Lists the local ranks that have not made the call.
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.entries.len()).filter(|local| lock(&self.entries[*local]).is_none()).collect()
    }

    /// Locks all ranks' entries.
    pub(super) fn entries(&self) -> Vec<MutexGuard<'_, Option<Entry>>> {
        self.entries.iter().map(lock).collect()
    }
}

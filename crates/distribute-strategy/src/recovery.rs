//! The states that a run has saved, and which of its replicas have examples.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::{Error, Recoverable, RecoveryError, Result};

/// The state saved by a run.
pub(crate) struct Recovery {
    /// One list per local replica.
    states: Vec<Mutex<Vec<Arc<dyn Recoverable>>>>,
    /// Whether the batch of each local replica has examples.
    examples: Vec<AtomicBool>,
    /// Whether each has read its weight.
    weighed: Vec<AtomicBool>,
    /// Values to drop after the replicas' closures have ended.
    left: Mutex<Vec<Box<dyn Send>>>,
}

impl Recovery {
    /// Creates the record of a run that begins; [`begin`](Recovery::begin) saves the first states.
    pub(crate) fn new(replicas: usize, watched: &Mutex<Vec<Weak<dyn Recoverable>>>) -> Recovery {
        let watched: Vec<Arc<dyn Recoverable>> = watched.lock().iter().filter_map(Weak::upgrade).collect();
        Recovery {
            states: (0..replicas).map(|_| Mutex::new(watched.clone())).collect(),
            examples: (0..replicas).map(|_| AtomicBool::new(true)).collect(),
            weighed: (0..replicas).map(|_| AtomicBool::new(false)).collect(),
            left: Mutex::default(),
        }
    }

    /// Keeps a value until [`drop_left`](Recovery::drop_left).
    pub(crate) fn drop_after_run(&self, value: Box<dyn Send>) {
        self.left.lock().push(value);
    }

    /// Drops the values that replicas have left, after all of them have ended.
    pub(crate) fn drop_left(&self) {
        let left = std::mem::take(&mut *self.left.lock());
        drop(left);
    }

    /// Saves the state that every run saves, on the replica's thread.
    pub(crate) fn begin(&self, local: usize) -> Result<()> {
        let states = self.states[local].lock().clone();
        states.iter().try_for_each(|state| state.note(local)).map_err(Error::NotNoted)
    }

    /// Makes all states of a replica final: a later failure restores them as they are now.
    pub(crate) fn commit(&self, local: usize) -> Result<()> {
        let (states, has_examples) = (self.states[local].lock().clone(), self.has_examples(local));
        // Commits all of them despite an error, so that they belong to one step.
        let outcomes = states.iter().map(|state| state.commit(local, has_examples));
        outcomes.fold(Ok(()), Result::and).map_err(Error::NotNoted)
    }

    /// Begins another batch of a replica within its run.
    pub(crate) fn begin_batch(&self, local: usize, has_examples: bool) -> Result<()> {
        let (states, had_examples) = (self.states[local].lock().clone(), self.has_examples(local));
        let begun = |state: &Arc<dyn Recoverable>| state.begin_batch(local, had_examples, has_examples);
        states.iter().try_for_each(begun).map_err(Error::NotNoted)?;
        self.set_batch(local, has_examples);
        Ok(())
    }

    /// Sets whether the batch that a replica works on has examples.
    pub(crate) fn set_batch(&self, local: usize, has_examples: bool) {
        self.examples[local].store(has_examples, Ordering::Relaxed);
        self.weighed[local].store(false, Ordering::Relaxed);
    }

    pub(crate) fn has_examples(&self, local: usize) -> bool {
        // Written by the replica itself, or before it begins.
        self.examples[local].load(Ordering::Relaxed)
    }

    pub(crate) fn note_weighed(&self, local: usize) {
        self.weighed[local].store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_weighed(&self, local: usize) -> bool {
        self.weighed[local].load(Ordering::Relaxed)
    }

    /// Commits all replicas after the run has succeeded on all of them.
    pub(crate) fn end(&self) -> Result<()> {
        let outcome = (0..self.states.len()).try_for_each(|local| self.commit(local));
        // A failed commit is answered by `take_back`.
        outcome.inspect(|()| self.ended())
    }

    fn ended(&self) {
        for (local, states) in self.states.iter().enumerate() {
            states.lock().iter().for_each(|state| state.end(local));
        }
    }

    /// Saves a state that a replica is about to change, unless this run has saved it already.
    pub(crate) fn keep(&self, local: usize, state: &Arc<dyn Recoverable>) -> Result<()> {
        let mut states = self.states[local].lock();
        if states.iter().any(|known| same(known, state)) {
            return Ok(());
        }
        states.push(Arc::clone(state));
        drop(states);
        state.note(local).map_err(Error::NotNoted)
    }

    /// Restores all saved states on all replicas. Tries all of them and returns the first failure.
    pub(crate) fn take_back(&self) -> Result<(), RecoveryError> {
        let mut outcome = Ok(());
        let mut note = |result: Result<(), RecoveryError>| {
            if outcome.is_ok() {
                outcome = result;
            }
        };
        let mut all: Vec<Arc<dyn Recoverable>> = Vec::new();
        for (local, states) in self.states.iter().enumerate() {
            for state in states.lock().iter() {
                note(state.take_back(local));
                if !all.iter().any(|known| same(known, state)) {
                    all.push(Arc::clone(state));
                }
            }
        }
        for state in all {
            note(state.settle());
        }
        self.ended();
        outcome
    }
}

/// Compares addresses only, since one type may have several vtables.
fn same(one: &Arc<dyn Recoverable>, other: &Arc<dyn Recoverable>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

//! What the processes of a strategy tell each other in every step's reduction, so that it costs no operation of its own: whether
//! there are more data, and whether one of them has been asked to stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{ReplicaContext, Strategy};

/// One process's part in that, and what has come of it.
#[derive(Default)]
pub(crate) struct StepWord {
    state: Mutex<State>,
    stop: Arc<AtomicBool>,
    stop_agreed: AtomicBool,
}

#[derive(Default)]
struct State {
    tickets: u64,
    /// Gives an iterator's word when it is wanted: by then it is known more often whether there is more.
    word: Option<(u64, Arc<dyn Fn() -> u32 + Send + Sync>)>,
    agreed: Option<(u64, u32)>,
}

/// In a word, requests to stop are counted above this bit, what iterators say below.
const STOP: u32 = 16;

impl StepWord {
    /// An iterator's word for the next step; the sum is asked for under the ticket.
    pub(crate) fn announce(&self, word: Arc<dyn Fn() -> u32 + Send + Sync>) -> u64 {
        let mut state = self.lock();
        state.tickets += 1;
        state.word = Some((state.tickets, word));
        state.tickets
    }

    /// The sum of all processes' words under a ticket, if a step has carried them.
    pub(crate) fn agreed(&self, ticket: u64) -> Option<u32> {
        self.lock().agreed.filter(|(of, _)| *of == ticket).map(|(_, sum)| sum)
    }

    fn word(&self) -> u32 {
        let word = self.lock().word.as_ref().map(|(_, word)| Arc::clone(word));
        let input = word.map_or(0, |word| word());
        input | u32::from(self.stop.load(Ordering::Relaxed)) << STOP
    }

    fn agree(&self, sum: u32) {
        let mut state = self.lock();
        state.agreed = state.word.as_ref().map(|(ticket, _)| (*ticket, sum & ((1 << STOP) - 1)));
        if sum >> STOP > 0 {
            self.stop_agreed.store(true, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Strategy {
    /// Set it, from any thread or a signal handler, to ask all processes to stop after a step.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.replicas().step_word.stop)
    }

    /// Whether the processes have agreed to stop: it becomes true on all of them after the same step, the next one that an
    /// optimizer takes part in after one of them was asked.
    pub fn stop_agreed(&self) -> bool {
        self.replicas().step_word.stop_agreed.load(Ordering::Relaxed)
    }
}

impl ReplicaContext {
    /// What this replica has to add to a step's reductions: for authors of optimizers. The sum over all replicas goes to
    /// [`agree_on_step`](ReplicaContext::agree_on_step).
    pub fn step_word(&self) -> u32 {
        if self.local_replica_id() == 0 { self.strategy().replicas().step_word.word() } else { 0 }
    }

    /// Takes the sum of every replica's [`step_word`](ReplicaContext::step_word).
    pub fn agree_on_step(&self, sum: u32) {
        if self.local_replica_id() == 0 {
            self.strategy().replicas().step_word.agree(sum);
        }
    }
}

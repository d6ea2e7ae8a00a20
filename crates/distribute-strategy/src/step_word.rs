//! What the processes of a strategy tell each other in every step's reduction, so that it costs no operation of its own: whether
//! there are more data, and what one of them asks of all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{ReplicaContext, Strategy};

/// What a process may ask of all: they learn of it after the same step, the next one that an optimizer takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To save a checkpoint.
    Save,
    /// To save and leave, since a machine goes away.
    Leave,
    /// To end the training.
    End,
}

/// Requests that travel with each step.
const REQUESTS: usize = 3;

/// How many numbers travel with each step: what iterators say, a count for each request, and two words of settings.
pub const STEP_WORDS: usize = 1 + REQUESTS + 2;

/// One process's part in that, and what has come of it.
#[derive(Default)]
pub(crate) struct StepWord {
    state: Mutex<State>,
    asked: [Arc<AtomicBool>; REQUESTS],
    agreed: [AtomicBool; REQUESTS],
    /// Whether all have agreed in the last step to leave.
    leaving: AtomicBool,
}

#[derive(Default)]
struct State {
    tickets: u64,
    /// Gives an iterator's word when it is wanted: by then it is known more often whether there is more.
    word: Option<(u64, Arc<dyn Fn() -> u32 + Send + Sync>)>,
    agreed: Option<(u64, u32)>,
}

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

    /// Whether all processes leave after this step, each on its own.
    pub(crate) fn all_leave(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    fn words(&self, settings: [u32; 2]) -> [u32; STEP_WORDS] {
        let word = self.lock().word.as_ref().map(|(_, word)| Arc::clone(word));
        let mut words = [0; STEP_WORDS];
        words[0] = word.map_or(0, |word| word());
        for (word, asked) in words[1..].iter_mut().zip(&self.asked) {
            *word = u32::from(asked.load(Ordering::Relaxed));
        }
        words[1 + REQUESTS..].copy_from_slice(&settings);
        words
    }

    fn agree(&self, sums: [u32; STEP_WORDS]) {
        let mut state = self.lock();
        self.leaving.store(sums[1 + Request::Leave as usize] > 0, Ordering::Relaxed);
        state.agreed = state.word.as_ref().map(|(ticket, _)| (*ticket, sums[0]));
        for ((sum, asked), agreed) in sums[1..].iter().zip(&self.asked).zip(&self.agreed) {
            if *sum > 0 {
                asked.store(false, Ordering::Relaxed);
                agreed.store(true, Ordering::Relaxed);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Strategy {
    /// Asks it of all processes.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Request, Strategy};
    /// let strategy = Strategy::default_strategy()?;
    /// strategy.ask(Request::End);
    /// // After the next step of an optimizer, on every process: strategy.take_agreed(Request::End)
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn ask(&self, request: Request) {
        self.request_flag(request).store(true, Ordering::Relaxed);
    }

    /// Takes back what this process has asked for, if no step has carried it yet.
    pub fn withdraw(&self, request: Request) {
        self.request_flag(request).store(false, Ordering::Relaxed);
    }

    /// Set it, from any thread or a signal handler, to [`ask`](Strategy::ask).
    pub fn request_flag(&self, request: Request) -> Arc<AtomicBool> {
        Arc::clone(&self.replicas().step_word.asked[request as usize])
    }

    /// Whether some process has asked: true once on each of them, after the same step.
    pub fn take_agreed(&self, request: Request) -> bool {
        self.replicas().step_word.agreed[request as usize].swap(false, Ordering::Relaxed)
    }
}

impl ReplicaContext {
    /// What this replica has to add to a step's reductions: for authors of optimizers. The sums over all replicas go to
    /// [`check_settings`](ReplicaContext::check_settings) and [`agree_on_step`](ReplicaContext::agree_on_step).
    ///
    /// `settings` is a digest of the optimizer's own, alike on all replicas of a process.
    pub fn step_words(&self, settings: u64) -> [u32; STEP_WORDS] {
        match self.local_replica_id() {
            0 => self.strategy().replicas().step_word.words(self.settings_words(settings)),
            _ => [0; STEP_WORDS],
        }
    }

    /// Takes the sums of every replica's [`step_words`](ReplicaContext::step_words).
    pub fn agree_on_step(&self, sums: [u32; STEP_WORDS]) {
        if self.local_replica_id() == 0 {
            self.strategy().replicas().step_word.agree(sums);
        }
    }
}

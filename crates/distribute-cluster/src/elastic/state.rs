//! The state that the event loop shares with the threads of the user.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use super::generation::Generation;

type Callback = dyn Fn(u64) + Send + Sync;

/// Why a process has no further generation.
#[derive(Clone, Debug)]
pub(super) enum Ending {
    /// The job has ended for all of its processes.
    OfTheJob,
    /// No generation with this process was decided, for this reason.
    OfThisProcess(String),
    /// A process of the job has other options.
    Differs {
        /// Its address.
        address: String,
        /// The difference, as a clause.
        options: String,
    },
}

impl Ending {
    pub(super) fn of(reason: impl Into<String>) -> Ending {
        Ending::OfThisProcess(reason.into())
    }
}

/// The newest generations that a process knows. Locks are not held while callbacks run.
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    callbacks: Mutex<Vec<Arc<Callback>>>,
    /// The number of the newest of all.
    newest: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    /// The newest that has this process.
    own: Option<Arc<Generation>>,
    identity: u128,
    /// The number of the newest of all.
    known: u64,
    ended: Option<Ending>,
    has_left: bool,
}

impl Shared {
    pub(super) fn new() -> Shared {
        let newest = watch::channel(0).0;
        Shared { state: Mutex::default(), changed: Condvar::new(), callbacks: Mutex::default(), newest }
    }

    /// Follows the number of the newest generation.
    pub(super) fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// Takes a decided generation, with this process's identity if it is a member.
    pub(super) fn decided(&self, generation: Arc<Generation>, identity: Option<u128>) {
        let number = generation.number;
        let callbacks = {
            // One that is added meanwhile is added to those that know this generation already.
            let callbacks = self.callbacks.lock();
            let mut state = self.state.lock();
            state.known = number;
            if let Some(identity) = identity {
                (state.own, state.identity) = (Some(generation), identity);
            }
            self.changed.notify_all();
            callbacks.clone()
        };
        self.newest.send_replace(number);
        callbacks.iter().for_each(|callback| call(&**callback, number));
    }

    pub(super) fn left(&self) {
        self.state.lock().has_left = true;
        self.changed.notify_all();
    }

    pub(super) fn end(&self, ending: Ending) {
        if let Ending::OfThisProcess(reason) = &ending {
            tracing::warn!("the elastic job has ended for this process: {reason}");
        }
        self.state.lock().ended = Some(ending);
        self.changed.notify_all();
    }

    /// Adds a callback, and calls it if a newer generation is known than the newest that has this process.
    pub(super) fn on_change(&self, callback: Arc<Callback>) {
        let due = {
            let mut callbacks = self.callbacks.lock();
            callbacks.push(callback.clone());
            let state = self.state.lock();
            let own = state.own.as_ref().map_or(0, |own| own.number);
            (state.known > own).then_some(state.known)
        };
        if let Some(number) = due {
            call(&*callback, number);
        }
    }

    /// Returns the newest generation that has this process, and its rank there.
    pub(super) fn own(&self) -> Option<(Arc<Generation>, u32)> {
        let state = self.state.lock();
        let own = state.own.clone()?;
        let rank = own.rank_of(state.identity)?;
        Some((own, rank))
    }

    /// Waits for a generation after a number that has this process.
    ///
    /// # Errors
    /// The reason, if this process has ended or left, or if the time is over.
    pub(super) fn wait(&self, after: u64, timeout: Duration) -> Result<Arc<Generation>, Ending> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        loop {
            if let Some(own) = state.own.as_ref().filter(|own| own.number > after) {
                return Ok(own.clone());
            }
            if let Some(reason) = &state.ended {
                return Err(reason.clone());
            }
            if state.has_left {
                return Err(Ending::of("this process has left the job"));
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(Ending::of(match state.known > after || after == 0 {
                    true => format!("generation {} is decided, and does not have it", state.known),
                    false => format!("generation {after} has not ended; report its end with `suspect` first"),
                }));
            }
        }
    }

    /// Waits until this process has left or ended, or the time is over.
    pub(super) fn wait_until_left(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        while !state.has_left && state.ended.is_none() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.has_left
    }
}

/// Calls a user's function, whose panic is not to end the event loop.
fn call(callback: &Callback, number: u64) {
    if catch_unwind(AssertUnwindSafe(|| callback(number))).is_err() {
        tracing::warn!("the on_change callback of the elastic job panicked at generation {number}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use super::*;

    fn generation(number: u64) -> Arc<Generation> {
        Arc::new(Generation { number, members: Vec::new(), next_join: 0, trained: 0 })
    }

    #[test]
    fn a_callback_is_not_told_of_a_generation_that_its_process_has_seen() {
        for _ in 0..300 {
            let (shared, told) = (Arc::new(Shared::new()), Arc::new(AtomicU64::new(0)));
            let deciding = thread::spawn({
                let shared = shared.clone();
                move || shared.decided(generation(1), Some(1))
            });
            shared.wait(0, Duration::from_secs(10)).expect("it is decided");
            let telling = told.clone();
            shared.on_change(Arc::new(move |number| telling.store(number, Ordering::SeqCst)));
            deciding.join().expect("it does not panic");
            assert_eq!(told.load(Ordering::SeqCst), 0);
            shared.decided(generation(2), None);
            assert_eq!(told.load(Ordering::SeqCst), 2);
        }
    }

    #[test]
    fn a_callback_is_told_once_of_a_generation_without_its_process() {
        for _ in 0..300 {
            let (shared, calls) = (Arc::new(Shared::new()), Arc::new(AtomicU64::new(0)));
            let deciding = thread::spawn({
                let shared = shared.clone();
                move || shared.decided(generation(1), None)
            });
            let counting = calls.clone();
            shared.on_change(Arc::new(move |_| {
                counting.fetch_add(1, Ordering::SeqCst);
            }));
            deciding.join().expect("it does not panic");
            assert_eq!(calls.load(Ordering::SeqCst), 1);
        }
    }
}

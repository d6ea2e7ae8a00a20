//! The state that the event loop shares with the threads of the user.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// This process was told to stop while it waited.
    Stopped,
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
    /// The reason, if this process has ended or left, if it is told to stop by the flag, or if the time is over.
    pub(super) fn wait(
        &self,
        after: u64,
        timeout: Duration,
        stop: Option<&AtomicBool>,
    ) -> Result<Arc<Generation>, Ending> {
        let deadline = Instant::now() + timeout;
        // A process that has no state leaves nothing behind.
        let patience = if after == 0 { Duration::ZERO } else { LAST_WAIT };
        let mut stops_at = None;
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
            let now = Instant::now();
            if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) && now >= *stops_at.get_or_insert(now + patience) {
                return Err(Ending::Stopped);
            }
            // A signal handler sets the flag, and wakes no thread.
            let until = if stop.is_some() { deadline.min(now + LOOK) } else { deadline };
            if self.changed.wait_until(&mut state, until).timed_out() && until == deadline {
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

/// How long a process that is told to stop waits for the generation of those that are left with it, which they may be
/// about to decide: several windows.
const LAST_WAIT: Duration = Duration::from_secs(3);

/// The pause between two looks at the flag by which a process is told to stop.
const LOOK: Duration = Duration::from_millis(50);

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
            shared.wait(0, Duration::from_secs(10), None).expect("it is decided");
            let telling = told.clone();
            shared.on_change(Arc::new(move |number| telling.store(number, Ordering::SeqCst)));
            deciding.join().expect("it does not panic");
            assert_eq!(told.load(Ordering::SeqCst), 0);
            shared.decided(generation(2), None);
            assert_eq!(told.load(Ordering::SeqCst), 2);
        }
    }

    #[test]
    fn a_process_that_is_told_to_stop_waits_a_little_for_those_that_are_left() {
        let (shared, stop) = (Arc::new(Shared::new()), AtomicBool::new(true));
        let wait = |after: u64| shared.wait(after, Duration::from_secs(60), Some(&stop));
        let began = Instant::now();
        assert!(matches!(wait(0), Err(Ending::Stopped)) && began.elapsed() < LAST_WAIT / 2);
        let deciding = thread::spawn({
            let shared = shared.clone();
            move || {
                thread::sleep(Duration::from_millis(100));
                shared.decided(generation(2), Some(1));
            }
        });
        assert_eq!(wait(1).expect("it is decided").number, 2);
        deciding.join().expect("it does not panic");
        stop.store(false, Ordering::Relaxed);
        let late = shared.wait(2, Duration::from_millis(120), Some(&stop));
        assert!(matches!(late, Err(Ending::OfThisProcess(_))), "{late:?}");
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

//! The thread that asks whether this process is about to be stopped.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Watcher;
use crate::{Error, Result};

/// A watcher at work, until it is dropped.
#[derive(Debug)]
pub(super) struct Watching {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Whether the handler is dropped: requests are no longer made.
    is_over: bool,
    /// Whether the thread is in the user's function, which may take any time.
    is_asking: bool,
    has_event: bool,
    problem: Option<String>,
}

impl Watching {
    /// Starts the thread. It sets `request` after an event, and `leave` after a panic.
    ///
    /// # Errors
    /// [`Error::WatcherThread`] if the system gives no thread.
    pub(super) fn start(
        watcher: &Watcher,
        every: Duration,
        request: Arc<AtomicBool>,
        leave: Arc<AtomicBool>,
        is_elastic: bool,
    ) -> Result<Watching> {
        let (watcher, shared) = (watcher.clone(), Arc::<Shared>::default());
        let every = every.max(SHORTEST);
        let body = {
            let shared = Arc::clone(&shared);
            move || shared.watch(&watcher, every, [&request, &leave], is_elastic)
        };
        let thread = thread::Builder::new().name("distribute-watch".to_owned()).spawn(body);
        Ok(Watching { shared, thread: Some(thread.map_err(Error::WatcherThread)?) })
    }

    /// Returns whether the function has returned true.
    pub(super) fn has_event(&self) -> bool {
        self.shared.state.lock().has_event
    }

    /// Returns the message of the function's panic.
    pub(super) fn problem(&self) -> Option<String> {
        self.shared.state.lock().problem.clone()
    }

    /// Returns what the thread also holds.
    #[cfg(test)]
    pub(super) fn shared(&self) -> Arc<impl Sized + use<>> {
        Arc::clone(&self.shared)
    }
}

impl Shared {
    fn watch(&self, watcher: &Watcher, every: Duration, [request, leave]: [&AtomicBool; 2], is_elastic: bool) {
        let mut state = self.state.lock();
        while !state.is_over {
            state.is_asking = true;
            drop(state);
            let answer = catch_unwind(AssertUnwindSafe(|| watcher.is_ending()));
            state = self.state.lock();
            state.is_asking = false;
            if state.is_over {
                return;
            }
            // Requests are made under the lock, so that none is made after the drop.
            match answer {
                Ok(false) => drop(self.changed.wait_for(&mut state, every)),
                Ok(true) => {
                    tracing::info!("the function of TerminationConfig::watch announces the end of this process");
                    state.has_event = true;
                    request.store(true, Ordering::Relaxed);
                    return;
                }
                Err(panic) => {
                    let problem = message(&*panic);
                    distribute_notice::warn!("{}", warning(&problem, is_elastic));
                    state.problem = Some(problem);
                    leave.store(true, Ordering::Relaxed);
                    return;
                }
            }
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_over = true;
        self.shared.changed.notify_all();
        let is_asking = state.is_asking;
        drop(state);
        // A thread in the user's function ends after it; any other ends at once.
        if let Some(thread) = self.thread.take().filter(|_| !is_asking) {
            // Panics of the function were caught.
            let _ = thread.join();
        }
    }
}

/// Returns what is told of a panic at once.
fn warning(problem: &str, is_elastic: bool) -> String {
    // In an elastic job the others train on, and save only if too few of them remain.
    let end = match is_elastic {
        true => "this process leaves the job, and ends with an error",
        false => "training saves and stops after the next step",
    };
    format!("the function of TerminationConfig::watch panicked: {problem}; {end}")
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}

/// The shortest pause between two calls.
const SHORTEST: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_an_elastic_job_does_not_announce_the_end_of_the_training() {
        let [of_job, of_all] = [true, false].map(|is_elastic| warning("no such file", is_elastic));
        assert!(of_job.ends_with("panicked: no such file; this process leaves the job, and ends with an error"));
        assert!(of_all.ends_with("panicked: no such file; training saves and stops after the next step"));
    }
}

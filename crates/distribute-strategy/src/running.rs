//! Mutual exclusion of runs.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{Error, Result};

/// The run in progress, if any.
#[derive(Default)]
pub(crate) struct Running {
    present: Mutex<Option<Run>>,
    ended: Condvar,
}

/// A run in progress.
struct Run {
    thread: String,
    since: Instant,
}

/// Ends the run when it is dropped.
pub(crate) struct Entered<'a>(&'a Running);

impl Running {
    /// Begins a run after the one in progress has ended.
    ///
    /// # Errors
    /// [`Error::Busy`] if that does not end within `timeout`.
    pub(crate) fn enter(&self, timeout: Duration) -> Result<Entered<'_>> {
        let began = Instant::now();
        let mut present = self.lock();
        while let Some(run) = &*present {
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Error::Busy { thread: run.thread.clone(), running: run.since.elapsed(), waited: timeout });
            }
            self.ended.wait_for(&mut present, left);
        }
        let thread = std::thread::current().name().unwrap_or("without a name").to_owned();
        *present = Some(Run { thread, since: Instant::now() });
        Ok(Entered(self))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Run>> {
        self.present.lock()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
        self.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_waits_for_the_one_before_and_not_for_ever() {
        let running = Running::default();
        let entered = running.enter(Duration::from_secs(60)).unwrap();
        let error = running.enter(Duration::from_millis(20)).err().unwrap().to_string();
        assert!(error.contains("waited 20.0ms for another run"), "{error}");
        std::thread::scope(|scope| {
            let later = scope.spawn(|| running.enter(Duration::from_secs(60)).is_ok());
            drop(entered);
            assert!(later.join().unwrap());
        });
        assert!(running.enter(Duration::ZERO).is_ok());
    }
}

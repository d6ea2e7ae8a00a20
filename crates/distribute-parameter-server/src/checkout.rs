//! A dataset's iterator, used by one thread at a time without a lock held while user code runs.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::{Error, Result};

/// The iterator, with its type erased.
type Iterator = Box<dyn Any + Send>;

/// Holds the iterator while no thread uses it.
pub(crate) struct Checkout {
    state: Mutex<State>,
    returned: Condvar,
    timeout: Duration,
}

struct State {
    iterator: Option<Iterator>,
    /// The thread that uses it, if it is not here.
    taken_by: Option<ThreadId>,
}

impl Checkout {
    /// Creates the holder; `timeout` limits how long a thread waits for another one's element.
    pub(crate) fn new(iterator: Iterator, timeout: Duration) -> Checkout {
        let state = State { iterator: Some(iterator), taken_by: None };
        Checkout { state: Mutex::new(state), returned: Condvar::new(), timeout }
    }

    /// Uses the iterator as soon as no other thread does.
    ///
    /// # Errors
    /// [`Error::WrongTask`] if the dataset takes elements of itself, or another thread uses the iterator for longer
    /// than the limit; else the error of `uses`.
    pub(crate) fn with<R>(
        &self,
        dataset: &str,
        worker: u32,
        uses: impl FnOnce(&mut (dyn Any + Send)) -> Result<R>,
    ) -> Result<R> {
        let mut iterator = self.take(dataset, worker)?;
        let outcome = catch_unwind(AssertUnwindSafe(|| uses(&mut *iterator)));
        *self.state.lock() = State { iterator: Some(iterator), taken_by: None };
        self.returned.notify_one();
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn take(&self, dataset: &str, worker: u32) -> Result<Iterator> {
        let (this, begun) = (std::thread::current().id(), Instant::now());
        let failed = |problem| Err(Error::WrongTask { task: format!("worker:{worker}"), problem });
        let mut state = self.state.lock();
        loop {
            if let Some(iterator) = state.iterator.take() {
                state.taken_by = Some(this);
                return Ok(iterator);
            }
            if state.taken_by == Some(this) {
                return failed(format!("dataset {dataset:?} takes an element of itself while it makes one"));
            }
            let left = self.timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let seconds = self.timeout.as_secs();
                return failed(format!(
                    "another thread has been waiting for an element of dataset {dataset:?} for {seconds} s; look at \
                    what the \
                     dataset reads"
                ));
            }
            self.returned.wait_for(&mut state, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkout(timeout: Duration) -> Checkout {
        Checkout::new(Box::new(7u32), timeout)
    }

    #[test]
    fn a_dataset_that_takes_of_itself_is_an_error_and_no_deadlock() {
        let checkout = checkout(Duration::from_secs(60));
        let error = checkout.with("d", 3, |_| checkout.with("d", 3, |_| Ok(()))).unwrap_err().to_string();
        assert!(error.contains("worker:3") && error.contains("takes an element of itself"), "{error}");
        checkout.with("d", 3, |_| Ok(())).unwrap();
    }

    #[test]
    fn another_threads_element_is_waited_for_and_not_for_ever() {
        let checkout = checkout(Duration::from_millis(50));
        let (taken, is_taken) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let checkout = &checkout;
            scope.spawn(move || {
                let waits = |_: &mut (dyn Any + Send)| {
                    taken.send(()).unwrap();
                    let _ = released.recv();
                    Ok(())
                };
                checkout.with("d", 0, waits).unwrap();
            });
            is_taken.recv().unwrap();
            let error = checkout.with("d", 0, |_| Ok(())).unwrap_err().to_string();
            assert!(error.contains("another thread has been waiting for an element"), "{error}");
            drop(release);
        });
        let number = checkout.with("d", 0, |number| Ok(number.downcast_ref::<u32>().copied())).unwrap();
        assert_eq!(number, Some(7));
    }

    #[test]
    fn a_panic_brings_the_iterator_back() {
        let checkout = checkout(Duration::from_secs(60));
        let panics = || checkout.with("d", 0, |_| -> Result<()> { panic!("oh") });
        catch_unwind(AssertUnwindSafe(|| drop(panics()))).unwrap_err();
        checkout.with("d", 0, |_| Ok(())).unwrap();
    }
}

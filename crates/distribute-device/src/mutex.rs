//! A mutex that a panic of its holder does not poison: what it guards here is complete after each statement.
//!
//! parking_lot has the same, and four crates under it, which users of the collectives alone would build for this.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

/// A lock without poison.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Waits until no other thread holds the value. Holders keep it for a copy of memory at most.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `changed` is notified and `waits` returns false, or until the timeout has passed.
    pub(crate) fn wait_while(
        &self,
        changed: &Condvar,
        timeout: Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'_, T> {
        let held = changed.wait_timeout_while(self.lock(), timeout, waits);
        held.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_holder_leaves_the_value_to_others() {
        let mutex = Mutex::new(1);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut held = mutex.lock();
            *held = 2;
            panic!("the holder panics");
        }));
        assert!(panic.is_err());
        assert_eq!(*mutex.lock(), 2);
        assert_eq!(*mutex.wait_while(&Condvar::new(), Duration::ZERO, |value| *value == 2), 2);
    }
}

//! The locks and atomics of the whole crate.
//!
//! The engine's phases and the shared-memory ring use [`atomic`]: std's, or loom's under `--cfg distribute_loom`, which
//! explores the interleavings that the memory model allows for the models in `engine::phases` and
//! `transport::shm::ring` (`cargo xtask loom`).

use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(distribute_loom)]
pub(crate) use loom::sync::atomic;
#[cfg(not(distribute_loom))]
pub(crate) use std::sync::atomic;

/// Locks a mutex, whether poisoned or not.
///
/// Poisoning only means that a thread panicked; the data under this crate's locks are single values and stay valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

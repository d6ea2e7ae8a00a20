//! Locks and atomics, as the whole crate uses them.
//!
//! The engine's phases and the shared-memory ring are built from [`atomic`]: std's, or loom's under `--cfg
//! distribute_loom`, which runs the models in `engine::phases` and `transport::shm::ring` through the interleavings
//! that the memory model allows (`cargo xtask loom`).

use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(distribute_loom)]
pub(crate) use loom::sync::atomic;
#[cfg(not(distribute_loom))]
pub(crate) use std::sync::atomic;

/// Locks a mutex, poisoned or not.
///
/// Poison only means that some thread panicked; the data under this crate's locks are single values and stay valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

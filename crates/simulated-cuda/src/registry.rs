//! Handles that C callers hold: numbers that are never reused, so that a stale one is detected.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The objects of one kind that have a handle.
pub(crate) struct Registry<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> Registry<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Adds the object that `make` creates from its handle.
    pub(crate) fn insert(&self, make: impl FnOnce(usize) -> T) -> Arc<T> {
        let handle = new_handle();
        let object = Arc::new(make(handle));
        locked(&self.0).insert(handle, object.clone());
        object
    }

    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        locked(&self.0).get(&handle).cloned()
    }

    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        locked(&self.0).remove(&handle)
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        locked(&self.0).values().cloned().collect()
    }

    /// Removes the objects for which `keep` returns false.
    pub(crate) fn retain(&self, keep: impl Fn(&T) -> bool) {
        // Dropped after the lock is released, because their destructors may use other registries.
        let removed: Vec<_> = locked(&self.0).extract_if(.., |_, object| !keep(object)).collect();
        drop(removed);
    }
}

/// Returns a unique handle in a range without memory.
pub(crate) fn new_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x00C0_DA00_0000_0000);
    // Relaxed: only uniqueness matters.
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// Locks a mutex. Poisoning is ignored: the state is changed in single steps.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The key-value store of a job of one process.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::limits::LONGEST;
use super::lock::lock;
use super::store::Store;

/// A store shared by the threads of one process.
#[derive(Default)]
pub(super) struct Alone {
    values: Mutex<Store>,
    changed: Condvar,
}

impl Alone {
    pub(super) fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        lock(&self.values).put(key.to_owned(), value.to_vec().into())?;
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the value of a key as soon as another thread has put it; `None` at the timeout.
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Option<Vec<u8>> {
        let values = lock(&self.values);
        let absent = |values: &mut Store| values.get(key).is_none();
        let waited = self.changed.wait_timeout_while(values, timeout.min(LONGEST), absent);
        waited.unwrap_or_else(PoisonError::into_inner).0.get(key).map(|value| value.to_vec())
    }
}

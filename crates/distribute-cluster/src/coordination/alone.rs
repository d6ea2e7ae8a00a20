//! The values of a job of one process.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::lock;
use super::options::LONGEST;

/// A store for the threads of one process.
#[derive(Default)]
pub(super) struct Alone {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Alone {
    pub(super) fn put(&self, key: &str, value: &[u8]) {
        lock(&self.values).insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
    }

    /// The value of a key, as soon as another thread has put it.
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Option<Vec<u8>> {
        let values = lock(&self.values);
        let absent = |values: &mut HashMap<String, Vec<u8>>| !values.contains_key(key);
        let waited = self.changed.wait_timeout_while(values, timeout.min(LONGEST), absent);
        waited.unwrap_or_else(PoisonError::into_inner).0.get(key).cloned()
    }
}

//! The key-value store of a job of one process.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::limits::LONGEST;
use super::store::Store;

/// A store shared by the threads of one process.
#[derive(Default)]
pub(super) struct Alone {
    values: Mutex<Store>,
    changed: Condvar,
}

impl Alone {
    pub(super) fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.values.lock().put(key.to_owned(), value.to_vec().into())?;
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the value of a key as soon as another thread has put it; `None` at the timeout.
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Option<Vec<u8>> {
        let mut values = self.values.lock();
        let absent = |values: &mut Store| values.get(key).is_none();
        self.changed.wait_while_for(&mut values, absent, timeout.min(LONGEST));
        values.get(key).map(|value| value.to_vec())
    }
}

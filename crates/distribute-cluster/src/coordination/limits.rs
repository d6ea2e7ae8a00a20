//! Limits of what members store, and of how long they wait.

use std::time::Duration;

/// Size limit of a value that is put or exchanged, in bytes.
pub(super) const MAX_VALUE_BYTES: usize = 1 << 20;

/// Length limit of a key, or of the name of an exchange or barrier, in bytes.
pub(super) const MAX_KEY_BYTES: usize = 1 << 10;

/// The largest number of keys that the members of a job can put.
pub(super) const MAX_KEYS: usize = 1 << 17;

/// Size limit of all keys and values of a job together, in bytes.
pub(super) const MAX_STORED_BYTES: usize = 256 << 20;

/// Upper bound of durations; longer ones are treated as this.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Timeout of a call that does not wait for other members.
pub(super) const PUT_TIMEOUT: Duration = Duration::from_secs(30);

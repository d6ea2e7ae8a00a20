//! Options of logical CPUs.

use std::time::Duration;

/// Options of the streams of a [`CpuDevice`](crate::CpuDevice).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuOptions {
    /// The number of operations that a stream can queue before enqueuing blocks; 1024 by default, at least 1.
    pub queue_len: usize,
    /// How long enqueuing waits for room in the queue, and a stream for an event; 5 minutes by default.
    pub timeout: Duration,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions { queue_len: 1024, timeout: Duration::from_secs(300) }
    }
}

distribute_types::setters! {
    CpuOptions {
        queue_len: usize,
        timeout: Duration,
    }
}

//! Accounting of the memory in use through one handle of a device, and its limit.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{DeviceSpec, Error, Result};

/// The memory in use on a device, and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes allocated and not yet freed.
    pub used_bytes: u64,
    /// The logical device's limit, if it has one.
    pub limit_bytes: Option<u64>,
}

/// The sum of the allocations through one device handle.
#[derive(Debug)]
pub(crate) struct Account {
    /// All accesses are relaxed: the counter publishes no other memory.
    used_bytes: AtomicU64,
    limit_bytes: Option<u64>,
}

impl Account {
    pub(crate) fn new(limit_bytes: Option<u64>) -> Account {
        Account { used_bytes: AtomicU64::new(0), limit_bytes }
    }

    pub(crate) fn current(&self) -> MemoryUse {
        MemoryUse { used_bytes: self.used_bytes.load(Ordering::Relaxed), limit_bytes: self.limit_bytes }
    }

    pub(crate) fn take(&self, device: &DeviceSpec, asked_bytes: u64) -> Result<()> {
        let limit_bytes = self.limit_bytes.unwrap_or(u64::MAX);
        self.used_bytes
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(asked_bytes).filter(|sum| *sum <= limit_bytes)
            })
            .map_err(|used_bytes| Error::DeviceMemory {
                device: device.short(),
                asked_bytes,
                used_bytes,
                limit_bytes,
            })?;
        Ok(())
    }

    pub(crate) fn give_back(&self, len_bytes: u64) {
        self.used_bytes.fetch_sub(len_bytes, Ordering::Relaxed);
    }
}

//! Device memory of a logical CPU.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, MutexGuard};

use crate::account::Account;
use crate::mutex::Mutex;
use crate::{DeviceBuffer, DeviceMemory, DeviceSpec, Error, HostBuffer, Result};

/// An allocation. Clones are handles to it.
#[derive(Clone, Debug)]
pub(super) struct CpuMemory(Arc<Allocation>);

#[derive(Debug)]
struct Allocation {
    device: DeviceSpec,
    account: Arc<Account>,
    len_bytes: usize,
    /// Locked for the duration of one copy. A copy between two allocations locks the one at the lower address first.
    bytes: Mutex<HostBuffer>,
}

/// A part of an allocation, for a copy.
#[derive(Debug)]
pub(super) struct Region {
    memory: CpuMemory,
    range: Range<usize>,
}

impl CpuMemory {
    pub(super) fn allocate(device: DeviceSpec, account: &Arc<Account>, len_bytes: usize) -> Result<CpuMemory> {
        account.take(&device, len_bytes as u64)?;
        let bytes = HostBuffer::zeroed(len_bytes).inspect_err(|_| account.give_back(len_bytes as u64))?;
        let account = Arc::clone(account);
        Ok(CpuMemory(Arc::new(Allocation { device, account, len_bytes, bytes: Mutex::new(bytes) })))
    }

    fn lock(&self) -> MutexGuard<'_, HostBuffer> {
        // Poisoning is ignored: bytes are valid in any state.
        self.0.bytes.lock()
    }
}

impl DeviceMemory for CpuMemory {
    fn device(&self) -> &DeviceSpec {
        &self.0.device
    }

    fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.account.give_back(self.len_bytes as u64);
    }
}

impl Region {
    /// Returns the region of a CPU's buffer; `user` names the caller in the error.
    pub(super) fn of(buffer: &DeviceBuffer, user: &str) -> Result<Region> {
        let memory: &dyn Any = buffer.memory();
        match memory.downcast_ref::<CpuMemory>() {
            Some(memory) => Ok(Region { memory: memory.clone(), range: buffer.range() }),
            None => Err(Error::Foreign {
                what: "buffer",
                owner: buffer.device().to_string(),
                user: user.to_owned(),
                remedy: "copy through host memory with a stream of the buffer's device",
            }),
        }
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.range.len()
    }

    pub(super) fn with<R>(&self, action: impl FnOnce(&mut [u8]) -> R) -> R {
        action(&mut self.memory.lock().as_bytes_mut()[self.range.clone()])
    }

    /// Copies to a region of the same size.
    pub(super) fn copy_to(&self, destination: &Region) {
        let (from, to) = (Arc::as_ptr(&self.memory.0), Arc::as_ptr(&destination.memory.0));
        if from == to {
            let start = destination.range.start;
            self.memory.lock().as_bytes_mut().copy_within(self.range.clone(), start);
            return;
        }
        let (source, mut target);
        if from < to {
            source = self.memory.lock();
            target = destination.memory.lock();
        } else {
            target = destination.memory.lock();
            source = self.memory.lock();
        }
        let bytes = &source.as_bytes()[self.range.clone()];
        target.as_bytes_mut()[destination.range.clone()].copy_from_slice(bytes);
    }
}

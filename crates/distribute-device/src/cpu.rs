//! Logical devices on the host's CPU: memory is host memory, a stream is a thread.

mod event;
mod memory;
mod options;
mod stream;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use self::options::CpuOptions;

use self::event::CpuEvent;
use self::memory::CpuMemory;
use self::stream::CpuStream;
use crate::account::Account;
use crate::{Device, DeviceBuffer, DeviceKind, Error, Event, HostBuffer, LogicalDevice, MemoryUse, Result, Stream};

/// A logical CPU as a [`Device`].
///
/// Streams run concurrently, each on its own thread. A copy locks the memory at both of its ends, so streams that use
/// the same buffer take turns.
#[derive(Debug)]
pub struct CpuDevice {
    logical: LogicalDevice,
    options: CpuOptions,
    account: Arc<Account>,
    streams: AtomicU32,
}

impl CpuDevice {
    /// Creates a handle to a logical CPU; users call [`Devices::open`](crate::Devices::open).
    pub fn new(logical: LogicalDevice) -> CpuDevice {
        CpuDevice::with_options(logical, CpuOptions::default())
    }

    /// Creates a handle to a logical CPU with the given stream options.
    pub fn with_options(logical: LogicalDevice, options: CpuOptions) -> CpuDevice {
        let account = Arc::new(Account::new(logical.memory_limit_bytes()));
        CpuDevice { logical, options, account, streams: AtomicU32::new(0) }
    }

    /// Runs `action` on the bytes of a buffer of any logical CPU, to compute on it; no copy uses them meanwhile.
    ///
    /// To order it after a stream's operations, wait for an event first, or run it inside [`Stream::launch_host`].
    ///
    /// # Errors
    /// [`Error::Foreign`] if the buffer is not in the memory of a CPU.
    pub fn with_bytes<R>(buffer: &DeviceBuffer, action: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        Ok(memory::Region::of(buffer, "the host")?.with(action))
    }
}

impl Device for CpuDevice {
    fn logical(&self) -> &LogicalDevice {
        &self.logical
    }

    fn memory_use(&self) -> MemoryUse {
        self.account.current()
    }

    fn allocate(&self, len_bytes: usize) -> Result<DeviceBuffer> {
        let memory = CpuMemory::allocate(self.spec().clone(), &self.account, len_bytes)?;
        Ok(DeviceBuffer::new(Arc::new(memory)))
    }

    fn allocate_host(&self, len_bytes: usize) -> Result<HostBuffer> {
        HostBuffer::zeroed(len_bytes)
    }

    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        // Relaxed: the number only names the stream.
        let number = self.streams.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(CpuStream::start(self.spec().clone(), number, self.options)?))
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CpuEvent::unrecorded(self.spec().clone())))
    }

    fn can_access_peer(&self, other: &dyn Device) -> bool {
        other.kind() == DeviceKind::Cpu && (other as &dyn Any).is::<CpuDevice>()
    }

    fn enable_peer_access(&self, other: &dyn Device) -> Result<()> {
        if self.can_access_peer(other) {
            return Ok(());
        }
        let (owner, user) = (other.spec().to_string(), self.spec().to_string());
        Err(Error::Foreign { what: "device's memory", owner, user, remedy: "copy through host memory instead" })
    }
}

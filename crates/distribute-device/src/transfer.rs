//! Copies in progress between host and device.

use std::sync::Arc;
use std::time::Instant;

use crate::mutex::Mutex;
use crate::{Error, Event, HostBuffer, Result};

/// A copy in progress, which owns its host buffer and returns it when the copy has ended.
///
/// Dropping it does not stop the copy; the host buffer is then freed when the copy has ended.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use distribute_device::{Devices, HostBuffer};
///
/// let device = Devices::local().open(&"CPU:0".parse()?)?;
/// let (stream, memory) = (device.create_stream()?, device.allocate(4)?);
/// let deadline = Instant::now() + Duration::from_secs(10);
/// let staging = stream.copy_from_host(HostBuffer::from_slice(&[7u32])?, 0, &memory)?.wait(deadline)?;
/// let staging = stream.copy_to_host(&memory, staging, 0)?.wait(deadline)?;
/// assert_eq!(staging.as_slice::<u32>()?, [7]);
/// # Ok::<(), distribute_device::Error>(())
/// ```
#[derive(Debug)]
pub struct Transfer {
    ended: Arc<dyn Event>,
    slot: HostSlot,
}

/// The slot by which a stream and a [`Transfer`] share a host buffer; for backends.
///
/// The stream must hold a clone until the copy has ended, so that the buffer outlives the copy.
#[derive(Clone, Debug)]
pub struct HostSlot(Arc<Mutex<Option<HostBuffer>>>);

impl Transfer {
    /// Creates a transfer whose buffer can be taken from `slot` when `ended` is ready; for backends.
    pub fn new(ended: Arc<dyn Event>, slot: HostSlot) -> Transfer {
        Transfer { ended, slot }
    }

    /// Returns whether the copy has ended.
    ///
    /// # Errors
    /// [`Error::Stream`] if the copy, or an operation before it, failed.
    pub fn is_ready(&self) -> Result<bool> {
        self.ended.is_ready()
    }

    /// Waits for the copy and returns the host buffer.
    ///
    /// # Errors
    /// [`Error::Stream`] if the copy, or an operation before it, failed; [`Error::Deadline`] if `deadline` passes,
    /// after which the wait can be repeated; [`Error::TransferTaken`] after a wait that succeeded.
    pub fn wait(&mut self, deadline: Instant) -> Result<HostBuffer> {
        self.ended.wait(deadline)?;
        self.slot.take().ok_or(Error::TransferTaken)
    }
}

impl HostSlot {
    /// Creates a slot that holds `buffer`.
    pub fn new(buffer: HostBuffer) -> HostSlot {
        HostSlot(Arc::new(Mutex::new(Some(buffer))))
    }

    /// Runs `action` on the buffer inside the slot; `None` if the slot is empty.
    pub fn with<R>(&self, action: impl FnOnce(&mut HostBuffer) -> R) -> Option<R> {
        self.0.lock().as_mut().map(action)
    }

    /// Takes the buffer out; `None` if the slot is empty.
    pub fn take(&self) -> Option<HostBuffer> {
        self.0.lock().take()
    }
}

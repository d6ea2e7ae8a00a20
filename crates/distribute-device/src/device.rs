//! The interface of every backend: devices, streams, memory.
//!
//! The traits follow CUDA's model, so that a CUDA backend is a thin layer: a stream runs its operations in the order in
//! which they were enqueued, streams synchronize only through events, and enqueuing returns at once.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::{DeviceKind, DeviceSpec, Error, Event, HostBuffer, HostFn, LogicalDevice, MemoryUse, Result, Transfer};

/// A handle to a logical device.
///
/// # Source
/// CUDA driver API: a device's primary context (`cuDevicePrimaryCtxRetain`). Logical devices on one
/// GPU share it.
pub trait Device: Any + Debug + Send + Sync {
    /// Returns the logical device of this handle.
    fn logical(&self) -> &LogicalDevice;

    /// Returns the memory in use through this handle.
    fn memory_use(&self) -> MemoryUse;

    /// Allocates zeroed memory on the device.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if the allocation would exceed the device's limit, [`Error::HostMemory`] if the system
    /// of a CPU device has not enough memory.
    ///
    /// # Source
    /// `cuMemAllocAsync` from the device's pool, then `cuMemsetD8Async`.
    fn allocate(&self, len_bytes: usize) -> Result<DeviceBuffer>;

    /// Allocates zeroed host memory that this device copies from and to fastest: pinned for a GPU, pageable for a CPU.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the allocation fails.
    ///
    /// # Source
    /// `cuMemHostAlloc` with `CU_MEMHOSTALLOC_PORTABLE`, not write-combined.
    fn allocate_host(&self, len_bytes: usize) -> Result<HostBuffer>;

    /// Creates a stream, which runs concurrently with the device's other streams.
    ///
    /// # Errors
    /// [`Error::Thread`] if the stream needs a thread and it cannot be started.
    ///
    /// # Source
    /// `cuStreamCreate` with `CU_STREAM_NON_BLOCKING`.
    fn create_stream(&self) -> Result<Arc<dyn Stream>>;

    /// Creates an event, which is ready until it is first recorded.
    ///
    /// # Errors
    /// The errors of the backend; a CPU has none.
    ///
    /// # Source
    /// `cuEventCreate` with `CU_EVENT_DISABLE_TIMING`.
    fn create_event(&self) -> Result<Arc<dyn Event>>;

    /// Returns whether this device could access `other`'s memory directly after a call of
    /// [`Device::enable_peer_access`].
    ///
    /// Peer copies work without it, through the host.
    ///
    /// # Source
    /// `cuDeviceCanAccessPeer`; true for logical devices of one GPU, which share a context.
    fn can_access_peer(&self, other: &dyn Device) -> bool;

    /// Gives this device direct access to `other`'s memory, in this direction only; also to memory that libraries take
    /// from the driver's pools on `other`. Idempotent.
    ///
    /// # Errors
    /// [`Error::Foreign`] if [`Device::can_access_peer`] is false.
    ///
    /// # Source
    /// `cuCtxEnablePeerAccess`, where `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED` counts as success, and
    /// `cuMemPoolSetAccess`.
    fn enable_peer_access(&self, other: &dyn Device) -> Result<()>;

    /// Returns the full name.
    fn spec(&self) -> &DeviceSpec {
        self.logical().spec()
    }

    /// Returns the kind of device.
    fn kind(&self) -> DeviceKind {
        self.logical().physical().kind
    }
}

/// A queue of operations that run in order, asynchronously to the caller.
///
/// Enqueuing checks its arguments at once. The first failure of a running operation is stored, and
/// [`Stream::synchronize`], events recorded later and transfers return it. Operations after it are not run; on a GPU,
/// copies and kernels enqueued after a host function that fails are run nevertheless, since the driver cannot cancel
/// them. Dropping a stream lets the queued operations finish.
///
/// Several threads may enqueue concurrently; the order between their operations is unspecified.
///
/// # Source
/// CUDA driver API: `CUstream`.
pub trait Stream: Any + Debug + Send + Sync {
    /// Returns the device that runs the stream.
    fn device(&self) -> &DeviceSpec;

    /// Copies `destination.len_bytes()` bytes of `source`, starting at `offset_bytes`, to the device.
    ///
    /// The stream owns the host buffer until the copy has ended; the [`Transfer`] returns it.
    ///
    /// # Errors
    /// [`Error::ByteRange`] if the source is too short, [`Error::Foreign`] if the destination is on another device,
    /// [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyHtoDAsync`; with pageable memory the driver stages it, and the call may block.
    fn copy_from_host(&self, source: HostBuffer, offset_bytes: usize, destination: &DeviceBuffer) -> Result<Transfer>;

    /// Copies all of `source` to the host, into `destination` starting at `offset_bytes`.
    ///
    /// # Errors
    /// [`Error::ByteRange`] if the destination is too short, [`Error::Foreign`] if the source is on another device,
    /// [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyDtoHAsync`.
    fn copy_to_host(&self, source: &DeviceBuffer, destination: HostBuffer, offset_bytes: usize) -> Result<Transfer>;

    /// Copies within this device. Source and destination may overlap.
    ///
    /// # Errors
    /// [`Error::CopyLength`] if the sizes differ, [`Error::Foreign`] if a buffer is on another device,
    /// [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyDtoDAsync`; overlapping ranges are copied through a temporary buffer, since the driver does not define
    /// them.
    fn copy(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()>;

    /// Copies between two devices of one kind, one of which is this stream's.
    ///
    /// # Errors
    /// [`Error::CopyLength`] if the sizes differ, [`Error::Foreign`] if neither buffer is on this device or one is on a
    /// device of another kind, [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyPeerAsync`, which the driver stages through the host if there is no peer access.
    fn copy_peer(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()>;

    /// Sets every byte of the buffer.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the buffer is on another device, [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuMemsetD8Async`.
    fn fill(&self, destination: &DeviceBuffer, byte: u8) -> Result<()>;

    /// Runs a function on the host after all operations enqueued before have ended. It must not use the stream's
    /// device.
    ///
    /// An error that it returns, or a panic, fails the stream.
    ///
    /// # Errors
    /// [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuLaunchHostFunc`.
    fn launch_host(&self, function: HostFn) -> Result<()>;

    /// Records an event after all operations enqueued so far, replacing an earlier recording of the event.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the event is of another backend, [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuEventRecord`.
    fn record(&self, event: &dyn Event) -> Result<()>;

    /// Makes operations enqueued from now on wait for the current recording of `event`; the caller does not wait.
    ///
    /// An event that was never recorded is not waited for. If the other stream has failed, this one fails too.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the event is of another backend, [`Error::Deadline`] if the queue stays full.
    ///
    /// # Source
    /// `cuStreamWaitEvent`.
    fn wait(&self, event: &dyn Event) -> Result<()>;

    /// Waits until all operations enqueued so far have ended.
    ///
    /// # Errors
    /// [`Error::Stream`] with the first failure; [`Error::Deadline`] if `deadline` passes, in which case the operations
    /// continue.
    ///
    /// # Source
    /// `cuStreamSynchronize` has no deadline, so an event is recorded and polled instead.
    fn synchronize(&self, deadline: Instant) -> Result<()>;
}

/// An allocation on a device, as its backend implements it; users hold a [`DeviceBuffer`].
///
/// The memory is freed on drop, which must be safe while operations on it are queued: a stream keeps a handle to each
/// buffer until the operation on it has ended.
pub trait DeviceMemory: Any + Debug + Send + Sync {
    /// Returns the device of the allocation.
    fn device(&self) -> &DeviceSpec;

    /// Returns the size of the allocation.
    fn len_bytes(&self) -> usize;
}

/// A handle to memory on a device, or to a part of it.
///
/// Clones and slices share the memory, which lives until the last of them is dropped and the last operation on it has
/// ended. Operations of different streams on the same bytes run in an unspecified order unless an event orders them.
#[derive(Clone, Debug)]
pub struct DeviceBuffer {
    memory: Arc<dyn DeviceMemory>,
    range: Range<usize>,
}

impl DeviceBuffer {
    /// Creates a handle to a whole allocation; for backends.
    pub fn new(memory: Arc<dyn DeviceMemory>) -> DeviceBuffer {
        let range = 0..memory.len_bytes();
        DeviceBuffer { memory, range }
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> &DeviceSpec {
        self.memory.device()
    }

    /// Returns the size in bytes.
    pub fn len_bytes(&self) -> usize {
        self.range.len()
    }

    /// Returns whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns a handle to a range of bytes.
    ///
    /// # Errors
    /// [`Error::ByteRange`] if the range is not inside the buffer.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceBuffer> {
        let len_bytes = self.len_bytes();
        if range.start > range.end || range.end > len_bytes {
            return Err(Error::ByteRange { what: "device buffer", start: range.start, end: range.end, len_bytes });
        }
        let start = self.range.start + range.start;
        Ok(DeviceBuffer { memory: Arc::clone(&self.memory), range: start..start + range.len() })
    }

    /// Returns the allocation; for backends, which downcast it to their own type through [`Any`].
    pub fn memory(&self) -> &dyn DeviceMemory {
        &*self.memory
    }

    /// Returns the range within the allocation; for backends.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

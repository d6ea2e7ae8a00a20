//! What every backend offers: devices, streams, events, memory.
//!
//! The traits follow CUDA's model, so that a CUDA backend is a thin layer: a stream runs its
//! operations in the order in which they were enqueued, streams do not wait for each other unless
//! told to by events, and enqueuing returns at once.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::{DeviceKind, DeviceSpec, Error, HostBuffer, HostFn, LogicalDevice, Result, Transfer};

/// A handle to a logical device.
///
/// # Source
/// CUDA driver API: a device's primary context (`cuDevicePrimaryCtxRetain`). Logical devices on one
/// GPU share it.
pub trait Device: Any + Debug + Send + Sync {
    /// The logical device that this is a handle to.
    fn logical(&self) -> &LogicalDevice;

    /// How much memory is in use through this handle.
    fn memory_use(&self) -> MemoryUse;

    /// Memory on the device, all zero.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] where it would exceed the device's limit, [`Error::HostMemory`]
    /// where a CPU's system refuses.
    ///
    /// # Source
    /// `cuMemAllocAsync` from the device's pool, then `cuMemsetD8Async`.
    fn allocate(&self, len_bytes: usize) -> Result<DeviceBuffer>;

    /// Host memory that this device copies from and to fastest, all zero: pinned for a GPU, plain for a CPU.
    ///
    /// # Errors
    /// [`Error::HostMemory`] where the system refuses.
    ///
    /// # Source
    /// `cuMemHostAlloc` with `CU_MEMHOSTALLOC_PORTABLE`, not write-combined.
    fn allocate_host(&self, len_bytes: usize) -> Result<HostBuffer>;

    /// A new stream, which runs beside all others of the device.
    ///
    /// # Errors
    /// [`Error::Thread`] where a thread is needed and cannot be started.
    ///
    /// # Source
    /// `cuStreamCreate` with `CU_STREAM_NON_BLOCKING`.
    fn create_stream(&self) -> Result<Arc<dyn Stream>>;

    /// A new event, which is ready until it is recorded.
    ///
    /// # Errors
    /// Those of the backend; a CPU has none.
    ///
    /// # Source
    /// `cuEventCreate` with `CU_EVENT_DISABLE_TIMING`.
    fn create_event(&self) -> Result<Arc<dyn Event>>;

    /// Whether this device could reach `other`'s memory directly once
    /// [`Device::enable_peer_access`] was called.
    ///
    /// Peer copies work without it, through the host.
    ///
    /// # Source
    /// `cuDeviceCanAccessPeer`; true for logical devices of one GPU, which share a context.
    fn can_access_peer(&self, other: &dyn Device) -> bool;

    /// Lets this device reach `other`'s memory directly, one way. Doing it again does nothing.
    ///
    /// # Errors
    /// [`Error::Foreign`] unless [`Device::can_access_peer`].
    ///
    /// # Source
    /// `cuCtxEnablePeerAccess`, where `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED` counts as success.
    fn enable_peer_access(&self, other: &dyn Device) -> Result<()>;

    /// The full name.
    fn spec(&self) -> &DeviceSpec {
        self.logical().spec()
    }

    /// The kind.
    fn kind(&self) -> DeviceKind {
        self.logical().physical().kind
    }
}

/// Operations that run one after the other, while the caller goes on.
///
/// Enqueuing checks its arguments at once. What fails while running is kept: [`Stream::synchronize`], events
/// recorded later and transfers return the first failure. The operations after it are not run; on a GPU, copies and
/// kernels that were enqueued behind a host function that then fails are, since the driver cannot take them back.
/// Dropping a stream lets the queued operations finish.
///
/// Several threads may enqueue; their operations run in some order of the enqueuing.
///
/// # Source
/// CUDA driver API: `CUstream`.
pub trait Stream: Any + Debug + Send + Sync {
    /// The device that runs it.
    fn device(&self) -> &DeviceSpec;

    /// Copies `destination.len_bytes()` bytes of `source`, from `offset_bytes` on, to the device.
    ///
    /// The stream owns the host buffer until the copy has ended; the [`Transfer`] gives it back.
    ///
    /// # Errors
    /// [`Error::ByteRange`] where the source is too short, [`Error::Foreign`] where the destination
    /// is of another device, [`Error::Deadline`] where the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyHtoDAsync`; with pageable memory the driver stages it, and the call may block.
    fn copy_from_host(&self, source: HostBuffer, offset_bytes: usize, destination: &DeviceBuffer) -> Result<Transfer>;

    /// Copies all of `source` to the host, to `offset_bytes` of `destination` and on.
    ///
    /// # Errors
    /// [`Error::ByteRange`] where the destination is too short, [`Error::Foreign`] where the source
    /// is of another device, [`Error::Deadline`] where the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyDtoHAsync`.
    fn copy_to_host(&self, source: &DeviceBuffer, destination: HostBuffer, offset_bytes: usize) -> Result<Transfer>;

    /// Copies within this device. The two may overlap.
    ///
    /// # Errors
    /// [`Error::CopyLength`] unless they are of one size, [`Error::Foreign`] where one is of another device,
    /// [`Error::Deadline`] where the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyDtoDAsync`; ranges that overlap through a temporary, since the driver leaves them undefined.
    fn copy(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()>;

    /// Copies between two devices of one kind, one of which is this stream's.
    ///
    /// # Errors
    /// [`Error::CopyLength`] unless they are of one size, [`Error::Foreign`] where neither is of
    /// this device or one is of another kind, [`Error::Deadline`] where the queue stays full.
    ///
    /// # Source
    /// `cuMemcpyPeerAsync`, which the driver stages through the host where there is no peer access.
    fn copy_peer(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()>;

    /// Sets every byte.
    ///
    /// # Errors
    /// [`Error::Foreign`] where the buffer is of another device, [`Error::Deadline`] where the
    /// queue stays full.
    ///
    /// # Source
    /// `cuMemsetD8Async`.
    fn fill(&self, destination: &DeviceBuffer, byte: u8) -> Result<()>;

    /// Runs a function on the host when all that was enqueued before has ended. It must not use the
    /// stream's device.
    ///
    /// An error that it returns, or a panic, fails the stream.
    ///
    /// # Errors
    /// [`Error::Deadline`] where the queue stays full.
    ///
    /// # Source
    /// `cuLaunchHostFunc`.
    fn launch_host(&self, function: HostFn) -> Result<()>;

    /// Makes `event` stand for all that was enqueued so far, and no longer for what it stood for.
    ///
    /// # Errors
    /// [`Error::Foreign`] for an event of another backend, [`Error::Deadline`] where the queue stays full.
    ///
    /// # Source
    /// `cuEventRecord`.
    fn record(&self, event: &dyn Event) -> Result<()>;

    /// Makes what is enqueued from now on wait for what `event` stands for now; the caller does not wait.
    ///
    /// An event that was never recorded is not waited for. Where the other stream failed, this one fails too.
    ///
    /// # Errors
    /// [`Error::Foreign`] for an event of another backend, [`Error::Deadline`] where the queue stays full.
    ///
    /// # Source
    /// `cuStreamWaitEvent`.
    fn wait(&self, event: &dyn Event) -> Result<()>;

    /// Waits until all that was enqueued so far has ended.
    ///
    /// # Errors
    /// [`Error::Stream`] with the first failure, [`Error::Deadline`] when `deadline` passes; the
    /// operations go on.
    ///
    /// # Source
    /// `cuStreamSynchronize`, which knows no deadline: an event is recorded and queried instead.
    fn synchronize(&self, deadline: Instant) -> Result<()>;
}

/// A place in a stream that others can wait for.
///
/// # Source
/// CUDA driver API: `CUevent`.
pub trait Event: Any + Debug + Send + Sync {
    /// The device that made it.
    fn device(&self) -> &DeviceSpec;

    /// Whether what it stands for has ended; true before it is first recorded.
    ///
    /// # Errors
    /// [`Error::Stream`] where that failed.
    ///
    /// # Source
    /// `cuEventQuery`.
    fn is_ready(&self) -> Result<bool>;

    /// Waits for what it stands for now.
    ///
    /// # Errors
    /// [`Error::Stream`] where that failed, [`Error::Deadline`] when `deadline` passes.
    ///
    /// # Source
    /// `cuEventQuery` until the deadline, since `cuEventSynchronize` knows none.
    fn wait(&self, deadline: Instant) -> Result<()>;
}

/// An allocation on a device, as its backend sees it; users hold a [`DeviceBuffer`].
///
/// The memory is freed on drop, which must be safe while operations that use it are queued: a
/// stream keeps a handle to each buffer it was given until the operation has ended.
pub trait DeviceMemory: Any + Debug + Send + Sync {
    /// The device that it is on.
    fn device(&self) -> &DeviceSpec;

    /// The size of the allocation.
    fn len_bytes(&self) -> usize;
}

/// A handle to memory on a device, or to a part of it.
///
/// Clones and slices share the memory, which lives until the last of them is dropped and the last
/// operation on it has ended. Operations of different streams on the same bytes run in an
/// unspecified order unless an event orders them.
#[derive(Clone, Debug)]
pub struct DeviceBuffer {
    memory: Arc<dyn DeviceMemory>,
    range: Range<usize>,
}

/// Memory in use, and what there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Allocated and not yet freed.
    pub used_bytes: u64,
    /// The logical device's limit, if it has one.
    pub limit_bytes: Option<u64>,
}

impl DeviceBuffer {
    /// All of an allocation; for backends.
    pub fn new(memory: Arc<dyn DeviceMemory>) -> DeviceBuffer {
        let range = 0..memory.len_bytes();
        DeviceBuffer { memory, range }
    }

    /// The device that it is on.
    pub fn device(&self) -> &DeviceSpec {
        self.memory.device()
    }

    /// The size.
    pub fn len_bytes(&self) -> usize {
        self.range.len()
    }

    /// Whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// A part of it, in bytes from its beginning.
    ///
    /// # Errors
    /// [`Error::ByteRange`] where the part is not inside.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceBuffer> {
        let len_bytes = self.len_bytes();
        if range.start > range.end || range.end > len_bytes {
            return Err(Error::ByteRange { what: "device buffer", start: range.start, end: range.end, len_bytes });
        }
        let start = self.range.start + range.start;
        Ok(DeviceBuffer { memory: Arc::clone(&self.memory), range: start..start + range.len() })
    }

    /// The allocation; for backends, which find their own type in it by downcasting [`Any`].
    pub fn memory(&self) -> &dyn DeviceMemory {
        &*self.memory
    }

    /// Where in the allocation it is; for backends.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

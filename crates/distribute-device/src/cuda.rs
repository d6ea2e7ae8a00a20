//! NVIDIA GPUs: logical devices, streams, memory, and arithmetic on it.
//!
//! The build does not need CUDA. The driver (`libcuda.so.1`) is opened at run time, and the kernel compiler
//! (`libnvrtc.so`) when the first kernel is used; if one is missing, the error names it.
//!
//! | to | use |
//! |---|---|
//! | list GPUs and their connections | [`gpus`], [`GpuInfo`], [`Topology`] |
//! | allocate, copy, order work | [`CudaDevice`], [`CudaStream`], by the traits of this crate |
//! | combine, pack, scale, convert, sum squares, step an optimizer | the methods of [`CudaStream`] |
//! | measure | [`CudaStream::time`] |
//!
//! Compiled kernels are cached in `$DISTRIBUTE_KERNEL_CACHE`, by default `$XDG_CACHE_HOME/distribute/kernels`; an empty
//! value disables the cache.
//!
//! # Examples
//! The sum of two buffers, on a machine with a GPU:
//! ```no_run
//! use std::time::{Duration, Instant};
//! use distribute_device::cuda::{Combine, CudaDevice};
//! use distribute_device::{DType, Device, Devices, HostBuffer, Stream};
//!
//! let device = CudaDevice::new(Devices::local().find(&"GPU:0".parse()?)?.clone())?;
//! let stream = device.stream()?;
//! let (a, b) = (device.allocate(8)?, device.allocate(8)?);
//! stream.copy_from_host(HostBuffer::from_slice(&[1.0f32, 2.0])?, 0, &a)?;
//! stream.copy_from_host(HostBuffer::from_slice(&[0.5f32, 0.5])?, 0, &b)?;
//! stream.reduce(Combine::Sum, DType::F32, &[&a, &b], &[&a], 1)?;
//! let mut sum = stream.copy_to_host(&a, device.allocate_host(8)?, 0)?;
//! assert_eq!(sum.wait(Instant::now() + Duration::from_secs(10))?.as_slice::<f32>()?, [1.5, 2.5]);
//! # Ok::<(), distribute_device::Error>(())
//! ```
//!
//! # Source
//! CUDA driver API and NVRTC, through the crate cudarc.

#![expect(unsafe_code, reason = "calls of the driver, which takes pointers and handles on trust")]

mod compiler;
mod compute;
mod driver;
mod event;
mod failure;
mod gpu;
mod memory;
mod norms;
mod packing;
mod raw_stream;
mod source;
mod step;
mod stream;
mod tensors;
mod topology;

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

pub use self::compiler::compiler_version;
pub use self::compute::{Combine, MAX_BUFFERS};
pub use self::gpu::{GpuInfo, gpus};
pub use self::norms::{GradientChange, GradientLimit};
pub use self::step::{FusedStep, StepTensor};
pub use self::stream::{CudaStream, Timestamp};
pub use self::topology::{Link, Topology};

use self::event::CudaEvent;
use self::gpu::Gpu;
use self::memory::{CudaMemory, Pool, pinned};
use self::raw_stream::RawStream;
use crate::mutex::Mutex;
use crate::{Device, DeviceBuffer, Error, Event, HostBuffer, LogicalDevice, MemoryUse, Result, Stream};

/// A logical GPU as a [`Device`].
///
/// Logical devices on one physical GPU share its context and compiled kernels. Each has its own memory pool, whose
/// allocations count against its memory limit.
#[derive(Debug)]
pub struct CudaDevice {
    logical: LogicalDevice,
    gpu: Arc<Gpu>,
    pool: Arc<Pool>,
    streams: AtomicU32,
    collectives: Mutex<Option<Arc<CudaStream>>>,
}

impl CudaDevice {
    /// Creates a handle to a logical GPU, for methods that [`Devices::open`](crate::Devices::open) does not expose.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`] if there is no driver or no such GPU, [`Error::Cuda`] if a driver call fails.
    pub fn new(logical: LogicalDevice) -> Result<CudaDevice> {
        let gpu = Gpu::open(logical.physical().index)?;
        gpu.bind()?;
        let pool = Arc::new(Pool::new(&gpu, logical.memory_limit_bytes())?);
        Ok(CudaDevice { logical, gpu, pool, streams: AtomicU32::new(0), collectives: Mutex::default() })
    }

    /// Returns the driver's description of the physical GPU.
    pub fn info(&self) -> &GpuInfo {
        &self.gpu.info
    }

    /// Returns the free and the total memory of the physical GPU in bytes.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver call fails.
    ///
    /// # Source
    /// `cuMemGetInfo`.
    pub fn free_and_total_bytes(&self) -> Result<(u64, u64)> {
        let info = self.gpu.context.mem_get_info();
        let (free, total) = info.map_err(|error| self.gpu.failed("asking for free memory", error))?;
        Ok((free as u64, total as u64))
    }

    /// Makes this GPU's context current on the calling thread, for libraries that use the current context, such as
    /// NCCL.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver call fails.
    ///
    /// # Source
    /// `cuCtxSetCurrent`.
    pub fn make_current(&self) -> Result<()> {
        self.gpu.bind()
    }

    /// Creates a stream with the methods that only GPUs have.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a driver call fails.
    pub fn stream(&self) -> Result<CudaStream> {
        self.gpu.bind()?;
        Ok(self.named(RawStream::new(&self.gpu)?))
    }

    /// Returns the device's single stream for operations that must run in one order no matter which caller enqueues
    /// them: collectives of several groups, which would deadlock if two GPUs began them in different orders.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a driver call fails.
    ///
    /// # Source
    /// "Using multiple NCCL communicators concurrently" in NCCL's user guide.
    pub fn collective_stream(&self) -> Result<Arc<CudaStream>> {
        let mut held = self.collectives.lock();
        if let Some(stream) = &*held {
            return Ok(Arc::clone(stream));
        }
        Ok(Arc::clone(held.insert(Arc::new(self.stream()?))))
    }

    /// Discards a failed stream that [`collective_stream`](CudaDevice::collective_stream) returned; its next call
    /// creates a new one.
    pub fn replace_collective_stream(&self, failed: &Arc<CudaStream>) {
        let mut held = self.collectives.lock();
        if held.as_ref().is_some_and(|held| Arc::ptr_eq(held, failed)) {
            *held = None;
        }
    }

    /// Wraps a stream that another library created, such as a tensor library.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a driver call fails.
    ///
    /// # Safety
    /// `handle` is a `CUstream` of this GPU's primary context, or null for its default stream, and lives as long as
    /// `owner`.
    pub unsafe fn adopt_stream(&self, handle: *mut c_void, owner: Arc<dyn Any + Send + Sync>) -> Result<CudaStream> {
        self.gpu.bind()?;
        // SAFETY: guaranteed by the caller.
        let raw = unsafe { RawStream::lent(&self.gpu, handle, owner) };
        Ok(self.named(raw))
    }

    /// Wraps memory that another library allocated on this GPU, such as a tensor's.
    ///
    /// # Safety
    /// `address` is the address of `len_bytes` bytes in this GPU's primary context. They stay allocated as long as
    /// `owner` lives and until all operations on them that were enqueued in streams of this crate have ended.
    pub unsafe fn lend(&self, address: u64, len_bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> DeviceBuffer {
        let memory = CudaMemory::lent(self.spec().clone(), Arc::clone(&self.gpu), address, len_bytes, owner);
        DeviceBuffer::new(Arc::new(memory))
    }

    fn named(&self, raw: RawStream) -> CudaStream {
        // Relaxed: the number only names the stream.
        let number = self.streams.fetch_add(1, Ordering::Relaxed);
        let name = format!("stream {number} of {}", self.spec().short());
        CudaStream::new(self.spec().clone(), name, raw, Arc::clone(&self.pool))
    }
}

impl Device for CudaDevice {
    fn logical(&self) -> &LogicalDevice {
        &self.logical
    }

    fn memory_use(&self) -> MemoryUse {
        self.pool.account.current()
    }

    fn allocate(&self, len_bytes: usize) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::new(Arc::new(self.pool.allocate(self.spec().clone(), len_bytes)?)))
    }

    fn allocate_host(&self, len_bytes: usize) -> Result<HostBuffer> {
        pinned(&self.gpu, len_bytes)
    }

    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(self.stream()?))
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CudaEvent::unrecorded(self.spec().clone(), Arc::clone(&self.gpu))))
    }

    fn can_access_peer(&self, other: &dyn Device) -> bool {
        (other as &dyn Any).downcast_ref::<CudaDevice>().is_some_and(|other| self.gpu.can_reach(&other.gpu))
    }

    fn enable_peer_access(&self, other: &dyn Device) -> Result<()> {
        let other = match (other as &dyn Any).downcast_ref::<CudaDevice>() {
            Some(other) if self.gpu.can_reach(&other.gpu) => other,
            _ => {
                let (owner, user) = (other.spec().to_string(), self.spec().to_string());
                let remedy = "copy between them instead, which the driver does through the host";
                return Err(Error::Foreign { what: "device's memory", owner, user, remedy });
            }
        };
        if Arc::ptr_eq(&self.gpu, &other.gpu) {
            return Ok(());
        }
        self.gpu.bind()?;
        // SAFETY: both contexts live as long as their GPUs are held.
        let answer = unsafe { sys::cuCtxEnablePeerAccess(other.gpu.context.cu_ctx(), 0) };
        if answer != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            answer.result().map_err(|error| self.gpu.failed("enabling peer access", error))?;
        }
        // The access of memory pools is separate from that of the context.
        other.pool.open_to(&self.gpu)
    }
}

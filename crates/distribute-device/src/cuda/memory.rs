//! Memory of a GPU, and pinned host memory.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{DriverError, result, sys};

use super::event::Mark;
use super::gpu::Gpu;
use super::raw_stream::RawStream;
use crate::account::Account;
use crate::mutex::Mutex;
use crate::{DeviceMemory, DeviceSpec, Error, HostBuffer, HostMemory, Result};

/// How long an allocation waits for its memory to be zeroed.
const ZEROING: Duration = Duration::from_secs(60);

/// The source of one logical device's memory.
#[derive(Debug)]
pub(super) struct Pool {
    gpu: Arc<Gpu>,
    /// `None` if the GPU does not support memory pools.
    handle: Option<PoolHandle>,
    /// The stream that zeroes new memory.
    allocations: RawStream,
    /// The stream in which memory is freed after its users; allocations do not wait for it.
    frees: RawStream,
    pub(super) account: Arc<Account>,
}

#[derive(Debug)]
struct PoolHandle(sys::CUmemoryPool);

// SAFETY: a handle, which the driver lets any thread use.
unsafe impl Send for PoolHandle {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for PoolHandle {}

/// An allocation, or memory of another owner.
pub(super) struct CudaMemory {
    device: DeviceSpec,
    pub(super) gpu: Arc<Gpu>,
    pub(super) pointer: sys::CUdeviceptr,
    len_bytes: usize,
    owner: Owner,
    /// Streams with operations on the memory; it is freed after those.
    users: Mutex<Vec<Arc<RawStream>>>,
}

enum Owner {
    Pool(Arc<Pool>),
    Lent(#[expect(dead_code, reason = "kept until the memory is not used any more")] Arc<dyn Any + Send + Sync>),
}

impl Pool {
    pub(super) fn new(gpu: &Arc<Gpu>, limit_bytes: Option<u64>) -> Result<Pool> {
        let (allocations, frees) = (RawStream::new(gpu)?, RawStream::new(gpu)?);
        let handle = if gpu.has_pools { Some(create(gpu)?) } else { None };
        let account = Arc::new(Account::new(limit_bytes));
        Ok(Pool { gpu: Arc::clone(gpu), handle, allocations, frees, account })
    }

    /// Gives another GPU's kernels access to the memory of this pool, and to that of this GPU's other pools from which
    /// libraries take the memory that they lend: its default pool and its current one.
    pub(super) fn open_to(&self, other: &Gpu) -> Result<()> {
        let Some(handle) = &self.handle else { return Ok(()) };
        let access = sys::CUmemAccessDesc {
            location: location(other),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let failed = |error| self.gpu.failed("opening a memory pool to another GPU", error);
        let (mut default, mut current) = (std::ptr::null_mut(), std::ptr::null_mut());
        let device = self.gpu.context.cu_device();
        // SAFETY: the device comes from the driver, and `default` outlives the call.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut default, device) }.result().map_err(failed)?;
        // SAFETY: as above.
        unsafe { sys::cuDeviceGetMemPool(&raw mut current, device) }.result().map_err(failed)?;
        [handle.0, default, current].into_iter().try_for_each(|pool| {
            // SAFETY: the pools live, and the driver reads one description, which outlives the call.
            unsafe { sys::cuMemPoolSetAccess(pool, &raw const access, 1) }.result().map_err(failed)
        })
    }

    /// Allocates zeroed memory that any stream can use at once.
    pub(super) fn allocate(self: &Arc<Self>, device: DeviceSpec, len_bytes: usize) -> Result<CudaMemory> {
        self.account.take(&device, len_bytes as u64)?;
        let pointer = self.zeroed(&device, len_bytes).inspect_err(|_| self.account.give_back(len_bytes as u64))?;
        let (gpu, owner) = (Arc::clone(&self.gpu), Owner::Pool(Arc::clone(self)));
        Ok(CudaMemory { device, gpu, pointer, len_bytes, owner, users: Mutex::default() })
    }

    fn zeroed(&self, device: &DeviceSpec, len_bytes: usize) -> Result<sys::CUdeviceptr> {
        if len_bytes == 0 {
            return Ok(0);
        }
        self.gpu.bind()?;
        let pointer = self.raw(len_bytes).map_err(|error| self.refused(device, len_bytes, error))?;
        // SAFETY: the memory was allocated in this stream's order with that length.
        let zeroing = unsafe { result::memset_d8_async(pointer, 0, len_bytes, self.allocations.handle()) };
        zeroing.map_err(|error| self.gpu.failed("zeroing new memory", error))?;
        // Other streams may use the memory as soon as this function returns, so it waits for the zeroing.
        let mark = Mark::record(&self.gpu, &self.allocations)?;
        mark.wait(Instant::now() + ZEROING, || format!("zeroing {len_bytes} bytes of {}", device.short()))?;
        Ok(pointer)
    }

    fn raw(&self, len_bytes: usize) -> Result<sys::CUdeviceptr, DriverError> {
        match &self.handle {
            // SAFETY: pool and stream live; the memory is zeroed before anything reads it.
            Some(pool) => unsafe { result::mem_pool::alloc_async(pool.0, len_bytes, self.allocations.handle()) },
            // SAFETY: as above.
            None => unsafe { result::malloc_sync(len_bytes) },
        }
    }

    fn refused(&self, device: &DeviceSpec, len_bytes: usize, error: DriverError) -> Error {
        if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return self.gpu.failed("allocating memory", error);
        }
        let (free, total) = self.gpu.context.mem_get_info().unwrap_or_default();
        Error::DeviceMemory {
            device: device.short(),
            asked_bytes: len_bytes as u64,
            used_bytes: (total - free) as u64,
            limit_bytes: total as u64,
        }
    }

    /// Frees memory after the operations enqueued so far in the streams that use it.
    fn free(&self, memory: &CudaMemory) -> Result<()> {
        self.gpu.bind()?;
        for user in memory.users.lock().drain(..) {
            Mark::record(user.gpu(), &user)?.hold(&self.frees)?;
        }
        self.gpu.bind()?;
        let freed = match self.handle {
            // SAFETY: it came from this pool, and everything that uses it is before this in the stream's order.
            Some(_) => unsafe { result::free_async(memory.pointer, self.frees.handle()) },
            // SAFETY: it came from `malloc_sync`; the driver waits for what uses it.
            None => unsafe { result::free_sync(memory.pointer) },
        };
        freed.map_err(|error| self.gpu.failed("freeing memory", error))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok()
            && let Some(handle) = &self.handle
        {
            // SAFETY: all memory of the pool was freed in its stream's order, since memory holds its pool.
            let _ = unsafe { result::mem_pool::destroy(handle.0) };
        }
    }
}

impl CudaMemory {
    /// Wraps memory of another owner; see [`CudaDevice::lend`](super::CudaDevice::lend).
    pub(super) fn lent(
        device: DeviceSpec,
        gpu: Arc<Gpu>,
        pointer: u64,
        len_bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> CudaMemory {
        CudaMemory { device, gpu, pointer, len_bytes, owner: Owner::Lent(owner), users: Mutex::default() }
    }

    /// Records that a stream has an operation on this memory.
    pub(super) fn used_by(&self, stream: &Arc<RawStream>) {
        let mut users = self.users.lock();
        if !users.iter().any(|user| Arc::ptr_eq(user, stream)) {
            users.push(Arc::clone(stream));
        }
    }
}

impl DeviceMemory for CudaMemory {
    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, len_bytes) = (self.device.short(), self.len_bytes);
        f.debug_struct("CudaMemory").field("device", &device).field("len_bytes", &len_bytes).finish_non_exhaustive()
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if let Owner::Pool(pool) = &self.owner {
            if self.len_bytes > 0 {
                // Ignored: the memory of a failed context is freed when its process ends.
                let _ = pool.free(self);
            }
            pool.account.give_back(self.len_bytes as u64);
        }
    }
}

fn create(gpu: &Gpu) -> Result<PoolHandle> {
    // SAFETY: all fields are integers, pointers and structures of those, for which zero means the default.
    let mut properties: sys::CUmemPoolProps = unsafe { MaybeUninit::zeroed().assume_init() };
    properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(gpu);
    gpu.bind()?;
    // SAFETY: the properties are filled in and outlive the call.
    let handle = unsafe { result::mem_pool::create(&raw const properties) };
    let handle = handle.map_err(|error| gpu.failed("making a memory pool", error))?;
    // Freed memory stays in the pool for the next allocation.
    let mut keep = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: this attribute is a 64-bit number, which outlives the call.
    let answer = unsafe { result::mem_pool::set_attribute(handle, attribute, (&raw mut keep).cast()) };
    answer.map_err(|error| gpu.failed("setting up a memory pool", error))?;
    // New memory never waits for a stream that still uses freed memory.
    let mut wait: c_int = 0;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    // SAFETY: this attribute is a C integer, which outlives the call.
    let answer = unsafe { result::mem_pool::set_attribute(handle, attribute, (&raw mut wait).cast()) };
    answer.map_err(|error| gpu.failed("setting up a memory pool", error))?;
    Ok(PoolHandle(handle))
}

fn location(gpu: &Gpu) -> sys::CUmemLocation {
    // SAFETY: both fields are integers.
    let mut location: sys::CUmemLocation = unsafe { MaybeUninit::zeroed().assume_init() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    // The second integer is a field in older bindings and part of a union in newer ones.
    let id = (&raw mut location).cast::<c_int>().wrapping_add(1);
    // SAFETY: the structure consists of two C integers.
    unsafe { id.write(gpu.info.ordinal as c_int) };
    location
}

/// Pinned pages.
struct Pinned {
    gpu: Arc<Gpu>,
    pointer: *mut c_void,
    len_bytes: usize,
}

// SAFETY: the pages belong to this value alone, and the driver frees them from any thread.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Pinned {}

/// Allocates pinned host memory and zeroes it.
pub(super) fn pinned(gpu: &Arc<Gpu>, len_bytes: usize) -> Result<HostBuffer> {
    if len_bytes == 0 {
        return HostBuffer::zeroed(0);
    }
    gpu.bind()?;
    // Not write-combined, which would make reads slow; portable to all contexts.
    // SAFETY: nothing reads it before it is zeroed below.
    let pointer = unsafe { result::malloc_host(len_bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
    let pointer = pointer.map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::HostMemory { len_bytes },
        _ => gpu.failed("allocating pinned host memory", error),
    })?;
    // SAFETY: the pages were just allocated with that length.
    unsafe { pointer.cast::<u8>().write_bytes(0, len_bytes) };
    HostBuffer::from_memory(Box::new(Pinned { gpu: Arc::clone(gpu), pointer, len_bytes }))
}

impl HostMemory for Pinned {
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: the pages live as long as this value, are initialised, and only a mutable reference writes.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.len_bytes) }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; this reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.len_bytes) }
    }

    fn is_pinned(&self) -> bool {
        true
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: it came from `malloc_host`; streams hold the buffer until their copies have ended.
            let _ = unsafe { result::free_host(self.pointer) };
        }
    }
}

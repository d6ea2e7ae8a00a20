//! Streams as the driver has them.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream as Handle, sys};

use super::gpu::Gpu;
use crate::Result;

/// The driver's stream.
pub(super) struct RawStream {
    gpu: Arc<Gpu>,
    handle: Arc<Handle>,
    /// The owner of a stream that was lent.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for RawStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RawStream").field(&self.handle.cu_stream()).finish()
    }
}

impl RawStream {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<RawStream> {
        let handle = gpu.context.new_stream().map_err(|error| gpu.failed("making a stream", error))?;
        Ok(RawStream { gpu: Arc::clone(gpu), handle, _owner: None })
    }

    /// Wraps a stream of another owner.
    ///
    /// # Safety
    /// `handle` must be a stream of this GPU's primary context that lives as long as `owner`.
    pub(super) unsafe fn lent(gpu: &Arc<Gpu>, handle: *mut c_void, owner: Arc<dyn Any + Send + Sync>) -> RawStream {
        // SAFETY: guaranteed by the caller; the owner is kept with it.
        let handle = unsafe { gpu.context.wrap_borrowed_stream(handle.cast()) };
        RawStream { gpu: Arc::clone(gpu), handle, _owner: Some(owner) }
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle.cu_stream()
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

//! Elements of a tensor in the memory of a PJRT device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_flex::FlexTensor;
use distribute_device::pjrt::Buffer;
use distribute_device::{BufferRef, DType};

use crate::tensor::{made, refused};

/// A buffer with the elements of a tensor.
pub(crate) struct Resident {
    buffer: Arc<Buffer>,
    dtype: DType,
    shape: Vec<usize>,
    timeout: Duration,
}

impl Resident {
    /// `timeout` is how long a copy to the host may take.
    pub(crate) fn new(
        buffer: impl Into<Arc<Buffer>>,
        dtype: DType,
        shape: Vec<usize>,
        timeout: Duration,
    ) -> Arc<Resident> {
        Arc::new(Resident { buffer: buffer.into(), dtype, shape, timeout })
    }

    pub(crate) fn buffer(&self) -> Arc<Buffer> {
        self.buffer.clone()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Copies the elements to host memory.
    pub(crate) fn read(&self) -> distribute_values::Result<FlexTensor> {
        let read = self.buffer.read(Instant::now() + self.timeout);
        let host = read.map_err(|error| refused("read a tensor from a device", error.to_string()))?;
        made(&self.shape, BufferRef::from_bytes(self.dtype, host.as_bytes())?)
    }
}

impl std::fmt::Debug for Resident {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resident").field("shape", &self.shape).finish_non_exhaustive()
    }
}

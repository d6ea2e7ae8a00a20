//! The GPUs that checks run on.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use distribute_device::cuda::{CudaDevice, CudaStream, GpuInfo, gpus};
use distribute_device::{Device, DeviceBuffer, DeviceKind, Devices, HostBuffer, Stream};

use crate::{Error, Result};

/// Time limit of one operation.
const PATIENCE: Duration = Duration::from_secs(60);

/// The GPUs of this process.
#[derive(Debug)]
pub struct Gpus {
    infos: Vec<GpuInfo>,
    /// Kept open: a GPU that is opened again takes tenths of a second.
    first: OnceLock<Arc<CudaDevice>>,
}

impl Gpus {
    /// Returns the GPUs that the driver reports.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if there are none.
    pub fn find() -> Result<Gpus> {
        Ok(Gpus { infos: gpus().map_err(Error::Missing)?, first: OnceLock::new() })
    }

    /// Returns the driver's descriptions of them.
    pub fn infos(&self) -> &[GpuInfo] {
        &self.infos
    }

    /// Returns whether these are simulated in the host's memory.
    pub fn are_simulated(&self) -> bool {
        self.infos.iter().any(|info| info.name.contains("Simulated"))
    }

    /// Returns `count` logical devices, all on the first GPU.
    pub(crate) fn on_first(&self, count: usize, limit_bytes: Option<u64>) -> Result<Vec<Arc<CudaDevice>>> {
        let devices = Devices::local().split(DeviceKind::Gpu, 0, &vec![limit_bytes; count])?;
        let parts = devices.of_kind(DeviceKind::Gpu).take(count);
        let parts = parts.map(|logical| Ok(Arc::new(CudaDevice::new(logical.clone())?)));
        let parts = parts.collect::<Result<Vec<Arc<CudaDevice>>>>()?;
        if let Some(part) = parts.first() {
            self.first.get_or_init(|| Arc::clone(part));
        }
        Ok(parts)
    }

    /// Returns one device for each of the first `count` GPUs; `None` if there are fewer.
    pub(crate) fn on_each(&self, count: usize) -> Result<Option<Vec<Arc<CudaDevice>>>> {
        if self.infos.len() < count {
            return Ok(None);
        }
        let devices = Devices::local();
        let each = devices.of_kind(DeviceKind::Gpu).take(count);
        each.map(|logical| Ok(Arc::new(CudaDevice::new(logical.clone())?))).collect::<Result<Vec<_>>>().map(Some)
    }

    /// Returns the first GPU, and a stream on it.
    pub(crate) fn first(&self) -> Result<(Arc<CudaDevice>, CudaStream)> {
        let device = self.on_first(1, None)?.remove(0);
        let stream = device.stream()?;
        Ok((device, stream))
    }
}

/// Returns the deadline of an operation that starts now.
pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// Copies bytes to a new buffer on a device.
pub(crate) fn put(device: &CudaDevice, stream: &dyn Stream, bytes: &[u8]) -> Result<DeviceBuffer> {
    let buffer = device.allocate(bytes.len())?;
    write(device, stream, bytes, &buffer)?;
    Ok(buffer)
}

/// Overwrites a buffer.
pub(crate) fn write(device: &CudaDevice, stream: &dyn Stream, bytes: &[u8], buffer: &DeviceBuffer) -> Result<()> {
    let mut memory = device.allocate_host(bytes.len())?;
    memory.as_bytes_mut().copy_from_slice(bytes);
    stream.copy_from_host(memory, 0, buffer)?.wait(deadline())?;
    Ok(())
}

/// Reads the bytes of a buffer, after the work that was enqueued on the stream.
pub(crate) fn get(device: &CudaDevice, stream: &dyn Stream, buffer: &DeviceBuffer) -> Result<Vec<u8>> {
    let memory = device.allocate_host(buffer.len_bytes())?;
    let memory: HostBuffer = stream.copy_to_host(buffer, memory, 0)?.wait(deadline())?;
    Ok(memory.as_bytes().to_vec())
}

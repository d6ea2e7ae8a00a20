//! The GPUs that checks run on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_device::cuda::{CudaDevice, CudaStream, GpuInfo, gpus};
use distribute_device::{Device, DeviceBuffer, DeviceKind, Devices, HostBuffer, Stream};

use crate::{Error, Result};

/// How long any one operation may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The GPUs of this process.
#[derive(Debug)]
pub struct Gpus {
    infos: Vec<GpuInfo>,
}

impl Gpus {
    /// What the driver shows.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason where it shows none.
    pub fn find() -> Result<Gpus> {
        Ok(Gpus { infos: gpus().map_err(Error::Missing)? })
    }

    /// What the driver says of them.
    pub fn infos(&self) -> &[GpuInfo] {
        &self.infos
    }

    /// Whether these are stand-ins in the host's memory.
    pub fn are_simulated(&self) -> bool {
        self.infos.iter().any(|info| info.name.contains("Simulated"))
    }

    /// As many logical devices as asked for, all on the first GPU.
    pub(crate) fn on_first(&self, count: usize, limit_bytes: Option<u64>) -> Result<Vec<Arc<CudaDevice>>> {
        let devices = Devices::local().split(DeviceKind::Gpu, 0, &vec![limit_bytes; count])?;
        let first = devices.of_kind(DeviceKind::Gpu).take(count);
        first.map(|logical| Ok(Arc::new(CudaDevice::new(logical.clone())?))).collect()
    }

    /// One device for each of the first `count` GPUs; none where there are fewer.
    pub(crate) fn on_each(&self, count: usize) -> Result<Option<Vec<Arc<CudaDevice>>>> {
        if self.infos.len() < count {
            return Ok(None);
        }
        let devices = Devices::local();
        let each = devices.of_kind(DeviceKind::Gpu).take(count);
        each.map(|logical| Ok(Arc::new(CudaDevice::new(logical.clone())?))).collect::<Result<Vec<_>>>().map(Some)
    }

    /// The first GPU, and a stream on it.
    pub(crate) fn first(&self) -> Result<(Arc<CudaDevice>, CudaStream)> {
        let device = self.on_first(1, None)?.remove(0);
        let stream = device.stream()?;
        Ok((device, stream))
    }
}

/// The end of what is done now, if all is well.
pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// Bytes on a device.
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

/// The bytes of a buffer, behind what the stream was given.
pub(crate) fn get(device: &CudaDevice, stream: &dyn Stream, buffer: &DeviceBuffer) -> Result<Vec<u8>> {
    let memory = device.allocate_host(buffer.len_bytes())?;
    let memory: HostBuffer = stream.copy_to_host(buffer, memory, 0)?.wait(deadline())?;
    Ok(memory.as_bytes().to_vec())
}

//! Backends for the memory of NVIDIA GPUs.

#[path = "buffer_exchange.rs"]
mod buffer_exchange;
#[path = "kernels.rs"]
mod kernels;
#[path = "nccl.rs"]
mod nccl;

use std::any::Any;
use std::sync::Arc;

use distribute_device::cuda::{CudaDevice, CudaStream};
use distribute_device::{DType, Device, DeviceBuffer, Stream};
use nccl_sys::Version;

use self::kernels::KernelBackend;
use self::nccl::NcclBackend;
use super::choice::{BackendKind, Nccl};
use super::host::HostBackend;
use super::{Backend, device_error};
use crate::{ProcessGroup, Result, environment};

/// Returns the identity of a device's physical GPU.
pub(super) fn gpu(device: &dyn Device) -> Option<String> {
    cuda(device).map(|device| device.info().uuid.clone())
}

/// Returns this process's NCCL, or why it is not available.
pub(super) fn nccl() -> std::result::Result<Nccl, String> {
    let version = nccl_sys::Library::load().map_err(|error| error.to_string())?.version();
    let shares_gpus = version >= Version::new(2, 30, 0) && environment::nccl_shares_gpus();
    Ok(Nccl { version: version.to_string(), shares_gpus })
}

/// Opens the backend that was chosen.
pub(super) fn open(kind: BackendKind, group: &Arc<ProcessGroup>, device: &Arc<dyn Device>) -> Result<Box<dyn Backend>> {
    Ok(match kind {
        BackendKind::Host => Box::new(HostBackend::new(group, device)?),
        BackendKind::Kernels => Box::new(KernelBackend::new(group, device)?),
        BackendKind::Nccl => Box::new(NcclBackend::new(group, device)?),
    })
}

/// Copies tensors to their places in a bucket, on a GPU in one launch.
pub(super) fn pack(
    stream: &dyn Stream,
    tensors: &[(&DeviceBuffer, usize)],
    bucket: &DeviceBuffer,
) -> distribute_device::Result<()> {
    let any: &dyn Any = stream;
    match any.downcast_ref::<CudaStream>() {
        Some(stream) => stream.pack(tensors, bucket),
        None => super::copy_each(stream, tensors, bucket),
    }
}

/// Rounds values and the errors of earlier ones to 16 bits; see [`CudaStream::round_off`].
pub(super) fn round_off(
    stream: &dyn Stream,
    short: DType,
    values: &DeviceBuffer,
    errors: [&DeviceBuffer; 2],
    sent: &DeviceBuffer,
) -> distribute_device::Result<()> {
    of_gpu(stream)?.round_off(short, values, errors, sent)
}

/// Converts values of 16 bits to f32.
pub(super) fn widen(
    stream: &dyn Stream,
    short: DType,
    sent: &DeviceBuffer,
    values: &DeviceBuffer,
) -> distribute_device::Result<()> {
    of_gpu(stream)?.cast(short, sent, DType::F32, values)
}

fn of_gpu(stream: &dyn Stream) -> distribute_device::Result<&CudaStream> {
    let any: &dyn Any = stream;
    any.downcast_ref().ok_or_else(|| distribute_device::Error::Foreign {
        what: "stream",
        owner: stream.device().to_string(),
        user: "kernels of GPUs".to_owned(),
        remedy: "give a stream of a GPU",
    })
}

fn cuda(device: &dyn Device) -> Option<&CudaDevice> {
    let any: &dyn Any = device;
    any.downcast_ref()
}

/// Creates the group's own stream on a GPU.
fn own_stream(group: &ProcessGroup, device: &dyn Device) -> Result<CudaStream> {
    let stream = match cuda(device) {
        Some(device) => device.stream(),
        None => Err(no_gpu(device)),
    };
    stream.map_err(|error| device_error(group, error))
}

/// Returns the error for a device that is not a GPU although a backend for GPUs was chosen, which does not happen.
fn no_gpu(device: &dyn Device) -> distribute_device::Error {
    distribute_device::Error::Foreign {
        what: "device",
        owner: device.spec().to_string(),
        user: "collectives on GPUs".to_owned(),
        remedy: "give a device of the feature cuda",
    }
}

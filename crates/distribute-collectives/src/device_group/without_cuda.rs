//! Replacements for the GPU backends in a build without CUDA.

use std::sync::Arc;

use distribute_device::{DType, Device, DeviceBuffer, Stream};

use super::Backend;
use super::choice::{BackendKind, Nccl};
use super::host::HostBackend;
use crate::{ProcessGroup, Result};

/// Returns the identity of a device's physical GPU: none without CUDA.
pub(super) fn gpu(_: &dyn Device) -> Option<String> {
    None
}

/// Returns why NCCL is not available.
pub(super) fn nccl() -> std::result::Result<Nccl, String> {
    Err("this build has no NCCL (Cargo feature cuda)".to_owned())
}

/// Opens the host backend, the only one without GPUs.
pub(super) fn open(_: BackendKind, group: &Arc<ProcessGroup>, device: &Arc<dyn Device>) -> Result<Box<dyn Backend>> {
    Ok(Box::new(HostBackend::new(group, device)?))
}

/// Returns an error: there are no kernels without CUDA.
pub(super) fn round_off(
    stream: &dyn Stream,
    _: DType,
    _: &DeviceBuffer,
    _: [&DeviceBuffer; 2],
    _: &DeviceBuffer,
) -> distribute_device::Result<()> {
    Err(no_kernels(stream))
}

/// Returns an error: there are no kernels without CUDA.
pub(super) fn widen(
    stream: &dyn Stream,
    _: DType,
    _: &DeviceBuffer,
    _: &DeviceBuffer,
) -> distribute_device::Result<()> {
    Err(no_kernels(stream))
}

fn no_kernels(stream: &dyn Stream) -> distribute_device::Error {
    distribute_device::Error::Foreign {
        what: "stream",
        owner: stream.device().to_string(),
        user: "kernels of GPUs".to_owned(),
        remedy: "build with the feature cuda",
    }
}

/// Copies tensors to their places in a bucket.
pub(super) fn pack(
    stream: &dyn Stream,
    tensors: &[(&DeviceBuffer, usize)],
    bucket: &DeviceBuffer,
) -> distribute_device::Result<()> {
    super::copy_each(stream, tensors, bucket)
}

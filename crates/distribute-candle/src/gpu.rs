//! Replicas on GPUs: which candle device they compute on, and how their gradients are reduced and applied without leaving it.

#[cfg_attr(feature = "candle-cuda", path = "gpu/cuda.rs")]
#[cfg_attr(not(feature = "candle-cuda"), path = "gpu/without_cuda.rs")]
mod backend;

pub(crate) use backend::Gpus;

use candle_core::{Device, Tensor};
use distribute_device::DeviceKind;
use distribute_strategy::Strategy;

use crate::Result;

/// Where a local replica of a strategy computes.
pub(crate) fn candle_device(strategy: &Strategy, local: usize) -> Result<Device> {
    match strategy.devices().get(local).and_then(|device| device.kind()) {
        Some(DeviceKind::Gpu) => backend::candle_device(strategy, local),
        _ => Ok(Device::Cpu),
    }
}

/// A tensor on a replica's device; the same one where it is there already.
pub(crate) fn moved(tensor: &Tensor, strategy: &Strategy, local: usize) -> Result<Tensor> {
    Ok(tensor.to_device(&candle_device(strategy, local)?)?)
}

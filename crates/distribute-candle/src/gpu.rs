//! Replicas on GPUs: the candle device of each, and the reduction and application of gradients in its memory.

#[cfg_attr(feature = "candle-cuda", path = "gpu/cuda.rs")]
#[cfg_attr(not(feature = "candle-cuda"), path = "gpu/without_cuda.rs")]
mod backend;

pub(crate) use backend::Gpus;

use candle_core::{Device, Tensor};
use distribute_device::DeviceKind;
use distribute_strategy::Strategy;

use crate::{Error, Result};

/// Returns the candle device of a strategy's local replica.
pub(crate) fn candle_device(strategy: &Strategy, local: usize) -> Result<Device> {
    match strategy.devices().get(local).and_then(|device| device.kind()) {
        Some(DeviceKind::Gpu) => backend::candle_device(strategy, local),
        Some(DeviceKind::Tpu) => Err(Error::NoGpu {
            device: strategy.devices()[local].short(),
            problem: "candle computes on CPUs and GPUs; train a model of burn under TpuStrategy, or choose another \
                strategy"
                .to_owned(),
        }),
        _ => Ok(Device::Cpu),
    }
}

/// Returns a tensor on a replica's device: a copy, or the same tensor if it is on the device already.
pub(crate) fn moved(tensor: &Tensor, strategy: &Strategy, local: usize) -> Result<Tensor> {
    Ok(tensor.to_device(&candle_device(strategy, local)?)?)
}

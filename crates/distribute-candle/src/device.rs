//! The candle device of each replica.

#[cfg(feature = "candle-cuda")]
use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use distribute_device::DeviceKind;
use distribute_strategy::Strategy;
#[cfg(feature = "candle-cuda")]
use parking_lot::Mutex;

use crate::tensor::is_whole;
use crate::{Error, Result};

/// Returns the candle device of a strategy's local replica.
pub(crate) fn candle_device(strategy: &Strategy, local: usize) -> Result<Device> {
    match strategy.devices().get(local).and_then(|device| device.kind()) {
        Some(DeviceKind::Gpu) => candle_device_of(&strategy.open_device(local)?),
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
    Ok(on_device(tensor, &candle_device(strategy, local)?)?)
}

/// Returns a tensor on a device: a copy of its elements, or the same tensor if it is on the device already. candle
/// alone would copy the storage of the view, such as a whole dataset for each of its batches.
pub(crate) fn on_device(tensor: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    if tensor.device().same_device(device) || is_whole(tensor) {
        return tensor.to_device(device);
    }
    tensor.force_contiguous()?.to_device(device)
}

/// Returns candle's device for a GPU that is open.
#[cfg(feature = "candle-cuda")]
pub(crate) fn candle_device_of(device: &Arc<dyn distribute_device::Device>) -> Result<Device> {
    // Tensors of two candle devices cannot be combined, so each GPU and replica place has one device.
    static MADE: Mutex<Option<HashMap<(u32, String), Device>>> = Mutex::new(None);
    let (ordinal, name) = (device.logical().physical().index, device.spec().short());
    let mut made = MADE.lock();
    let made = made.get_or_insert_default();
    if let Some(device) = made.get(&(ordinal, name.clone())) {
        return Ok(device.clone());
    }
    let device = Device::new_cuda_with_stream(ordinal as usize)?;
    made.insert((ordinal, name), device.clone());
    Ok(device)
}

/// Returns an error: candle was built without CUDA.
#[cfg(not(feature = "candle-cuda"))]
pub(crate) fn candle_device_of(device: &Arc<dyn distribute_device::Device>) -> Result<Device> {
    let problem = match distribute_device::absence(DeviceKind::Gpu) {
        reason if reason.contains("no CUDA support") => reason,
        _ => "candle was built without CUDA (Cargo feature candle-cuda)".to_owned(),
    };
    Err(Error::NoGpu { device: device.spec().short(), problem })
}

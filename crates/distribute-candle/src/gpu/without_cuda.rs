//! Replacements in a build without candle's CUDA support.

use candle_core::Device;
use distribute_device::{DeviceKind, absence};
use distribute_strategy::Strategy;

use crate::{Error, Result};

/// The exchange of a library without GPUs.
pub(crate) use distribute_optim::backend::NoDevices as Gpus;

pub(super) fn candle_device(strategy: &Strategy, local: usize) -> Result<Device> {
    let device = strategy.devices().get(local).map_or_else(String::new, |device| device.short());
    let problem = match absence(DeviceKind::Gpu) {
        reason if reason.contains("no CUDA support") => reason,
        _ => "candle was built without CUDA (Cargo feature candle-cuda)".to_owned(),
    };
    Err(Error::NoGpu { device, problem })
}

//! The backend on which models run: burn's Flex, under its automatic differentiation.

use std::sync::Arc;

use burn::tensor::{Device, Distribution, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_backend::Shape;
use burn_backend::backend::BackendTypes;
use burn_flex::{Flex, FlexTensor, Layout};
use distribute_device::DeviceKind;
use distribute_strategy::Strategy;

use crate::data::numbers;
use crate::{Error, Result};

/// A backend under automatic differentiation.
pub(crate) type Diff = Autodiff<Flex>;

/// The same, on devices with `gradient_checkpointing`.
pub(crate) type Recomputing = Autodiff<Flex, BalancedCheckpointing>;

/// A tensor of [`Diff`] or [`Recomputing`], with its node in the graph.
pub(crate) type DiffTensor = <Diff as BackendTypes>::FloatTensorPrimitive;

/// Returns burn's device for a local replica, with automatic differentiation.
pub(crate) fn device_of(strategy: &Strategy, local: usize) -> Result<Device> {
    let spec = &strategy.devices()[local];
    match spec.kind() {
        None | Some(DeviceKind::Cpu) => Ok(Device::flex().autodiff()),
        // Models are recorded; initial values and batches are on the host.
        #[cfg(feature = "pjrt")]
        Some(DeviceKind::Tpu) if strategy.pjrt().is_some() => Ok(Device::flex().autodiff()),
        Some(_) => Err(Error::Device { device: spec.to_string() }),
    }
}

/// Draws a seed from burn's generator, which `Device::seed` sets.
pub(crate) fn drawn_seed() -> Result<u64> {
    let drawn = Tensor::<1>::random([4], Distribution::Uniform(0.0, 65536.0), &Device::flex());
    let parts: Vec<f32> = numbers(drawn.into_data())?;
    Ok(parts.iter().fold(0, |seed, part| (seed << 16) | u64::from(*part as u32 & 0xffff)))
}

/// The difference between the seeds of neighbouring replicas or workers: 2⁶⁴ over the golden ratio.
pub(crate) const SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns whether a tensor is contiguous and covers the whole of its buffer.
pub(crate) fn is_whole(tensor: &FlexTensor) -> bool {
    let layout = tensor.layout();
    let bytes = layout.num_elements() * tensor.dtype().size();
    tensor.is_contiguous() && layout.start_offset() == 0 && tensor.bytes().len() == bytes
}

/// Returns a tensor that is contiguous and covers the whole of its buffer: the same one, or a copy.
pub(crate) fn whole(tensor: FlexTensor) -> FlexTensor {
    if is_whole(&tensor) { tensor } else { tensor.to_contiguous() }
}

/// Returns whether two tensors have the same elements in memory, in the same order.
pub(crate) fn is_one(a: &FlexTensor, b: &FlexTensor) -> bool {
    Arc::ptr_eq(&a.data_arc(), &b.data_arc()) && a.dtype() == b.dtype() && a.layout() == b.layout()
}

/// Returns whether two tensors are one, or have the same shape, type and bits.
pub(crate) fn has_same_bits(a: &FlexTensor, b: &FlexTensor) -> bool {
    let are_alike = || a.dtype() == b.dtype() && a.layout().shape() == b.layout().shape();
    is_one(a, b) || (are_alike() && whole(a.clone()).bytes() == whole(b.clone()).bytes())
}

/// Returns a contiguous tensor on the same buffer with another shape of as many elements.
pub(crate) fn reshaped(tensor: &FlexTensor, shape: Shape) -> FlexTensor {
    FlexTensor::from_arc(tensor.data_arc(), Layout::contiguous(shape), tensor.dtype())
}

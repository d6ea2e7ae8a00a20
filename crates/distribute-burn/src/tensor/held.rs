//! The memory in which a tensor's elements are.

#[cfg(feature = "pjrt")]
use std::sync::Arc;

use burn_flex::FlexTensor;

#[cfg(feature = "pjrt")]
use crate::pjrt::Resident;

/// A copy in a device's memory; there is none without the feature `pjrt`.
#[cfg(not(feature = "pjrt"))]
pub(super) type DeviceCopy = std::convert::Infallible;
#[cfg(feature = "pjrt")]
pub(super) type DeviceCopy = Arc<Resident>;

/// The elements of a tensor: in host memory, in a device's, or equal copies in both.
#[derive(Debug)]
pub(super) enum Held {
    Host(FlexTensor),
    Both(
        FlexTensor,
        #[cfg_attr(not(feature = "pjrt"), expect(dead_code, reason = "there is no such copy"))] DeviceCopy,
    ),
    #[cfg(feature = "pjrt")]
    Device(DeviceCopy),
}

impl Held {
    /// Returns the elements in host memory, to which they are copied if they are not there.
    pub(super) fn on_host(&mut self) -> distribute_values::Result<&FlexTensor> {
        #[cfg(feature = "pjrt")]
        if let Held::Device(resident) = self {
            *self = Held::Both(resident.read()?, resident.clone());
        }
        match self {
            Held::Host(tensor) | Held::Both(tensor, _) => Ok(tensor),
            #[cfg(feature = "pjrt")]
            Held::Device(_) => Err(crate::tensor::refused("read a tensor", "it is not in host memory".to_owned())),
        }
    }

    /// Returns the elements in host memory and drops copies elsewhere.
    pub(super) fn only_on_host(&mut self) -> distribute_values::Result<&mut FlexTensor> {
        self.on_host()?;
        if let Held::Both(tensor, _) = self {
            *self = Held::Host(tensor.clone());
        }
        match self {
            Held::Host(tensor) | Held::Both(tensor, _) => Ok(tensor),
            #[cfg(feature = "pjrt")]
            Held::Device(_) => Err(crate::tensor::refused("write a tensor", "it is not in host memory".to_owned())),
        }
    }

    pub(super) fn into_host(mut self) -> distribute_values::Result<FlexTensor> {
        self.on_host().cloned()
    }
}

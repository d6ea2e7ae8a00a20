//! The memory in which a tensor's elements are.

#[cfg(feature = "pjrt")]
use std::sync::Arc;

use burn_flex::FlexTensor;
use distribute_device::DType;

#[cfg(feature = "pjrt")]
use crate::pjrt::Resident;
use crate::tensor::dtype_of;
#[cfg(feature = "pjrt")]
use crate::tensor::refused;

/// The elements of a tensor: in host memory, in a device's, or equal copies in both.
#[derive(Debug)]
pub(super) enum Held {
    Host(FlexTensor),
    #[cfg(feature = "pjrt")]
    Both(FlexTensor, Arc<Resident>),
    #[cfg(feature = "pjrt")]
    Device(Arc<Resident>),
}

impl Held {
    /// Returns the elements if they are in host memory.
    pub(super) fn host(&self) -> Option<&FlexTensor> {
        match self {
            Held::Host(tensor) => Some(tensor),
            #[cfg(feature = "pjrt")]
            Held::Both(tensor, _) => Some(tensor),
            #[cfg(feature = "pjrt")]
            Held::Device(_) => None,
        }
    }

    pub(super) fn dtype(&self) -> distribute_values::Result<DType> {
        match self {
            Held::Host(tensor) => dtype_of(tensor.dtype()),
            #[cfg(feature = "pjrt")]
            Held::Both(_, resident) | Held::Device(resident) => Ok(resident.dtype()),
        }
    }

    pub(super) fn shape(&self) -> Vec<usize> {
        match self {
            Held::Host(tensor) => tensor.layout().shape().as_slice().to_vec(),
            #[cfg(feature = "pjrt")]
            Held::Both(_, resident) | Held::Device(resident) => resident.shape().to_vec(),
        }
    }

    /// Returns the elements in host memory, to which they are copied if they are not there.
    pub(super) fn on_host(&mut self) -> distribute_values::Result<&FlexTensor> {
        #[cfg(feature = "pjrt")]
        if let Held::Device(resident) = self {
            *self = Held::Both(resident.read()?, resident.clone());
        }
        match self {
            Held::Host(tensor) => Ok(tensor),
            #[cfg(feature = "pjrt")]
            Held::Both(tensor, _) => Ok(tensor),
            #[cfg(feature = "pjrt")]
            Held::Device(_) => Err(refused("read a tensor", "it is not in host memory".to_owned())),
        }
    }

    /// Returns the elements in host memory and drops copies elsewhere.
    pub(super) fn only_on_host(&mut self) -> distribute_values::Result<&mut FlexTensor> {
        #[cfg(feature = "pjrt")]
        if !matches!(self, Held::Host(_)) {
            *self = Held::Host(self.on_host()?.clone());
        }
        match self {
            Held::Host(tensor) => Ok(tensor),
            #[cfg(feature = "pjrt")]
            Held::Both(..) | Held::Device(_) => {
                Err(refused("write a tensor", "it is not in host memory alone".to_owned()))
            }
        }
    }

    pub(super) fn into_host(self) -> distribute_values::Result<FlexTensor> {
        match self {
            // The only handle on the elements, which the caller may take.
            Held::Host(tensor) => Ok(tensor),
            #[cfg(feature = "pjrt")]
            Held::Both(tensor, _) => Ok(tensor),
            #[cfg(feature = "pjrt")]
            Held::Device(resident) => resident.read(),
        }
    }
}

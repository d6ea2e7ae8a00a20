//! The buffers that a fused all-reduce owns while the program continues.
#![expect(unsafe_code, reason = "a collective reduces inside the tensors' own storage")]

use distribute_collectives::OwnedBuffers;
use distribute_device::DType;
use distribute_values::TensorStorage;

use crate::library::dtype;
use crate::{Error, TensorLibrary};

/// A gradient, or the flags that are reduced with a step's gradients.
pub(crate) enum Payload<L: TensorLibrary> {
    Gradient(OwnedTensor<L>),
    Flags(Vec<u32>),
}

/// A contiguous tensor in host memory whose storage has no other user.
pub(crate) struct OwnedTensor<L: TensorLibrary> {
    tensor: L::Tensor,
    dtype: DType,
}

impl<L: TensorLibrary> Payload<L> {
    /// Takes a gradient that backward has just returned through [`TensorLibrary::own`], or zeros in its place.
    pub(crate) fn gradient(gradient: L::Tensor) -> Result<Payload<L>, L::Error> {
        // SAFETY: `own` guarantees that the gradient has its own storage, and backward keeps no handle on a gradient
        // that it returns.
        Ok(Payload::Gradient(unsafe { OwnedTensor::new(gradient)? }))
    }

    pub(crate) fn into_gradient(self) -> Option<L::Tensor> {
        match self {
            Payload::Gradient(OwnedTensor { tensor, .. }) => Some(tensor),
            Payload::Flags(_) => None,
        }
    }

    pub(crate) fn into_flags(self) -> Vec<u32> {
        match self {
            Payload::Gradient(_) => Vec::new(),
            Payload::Flags(flags) => flags,
        }
    }
}

impl<L: TensorLibrary> OwnedTensor<L> {
    /// Takes ownership of a tensor.
    ///
    /// # Safety
    /// Until the payload is returned or dropped, no other handle may read or write the tensor's storage.
    unsafe fn new(tensor: L::Tensor) -> Result<OwnedTensor<L>, L::Error> {
        if !L::is_on_host(&tensor) {
            return Err(Error::OnDevice.into());
        }
        // Fails here, where an error can be returned, and not when the collective accesses the memory.
        tensor.write(&mut |_| ())?;
        let dtype = dtype::<L>(&tensor)?;
        Ok(OwnedTensor { tensor, dtype })
    }
}

// SAFETY: flags are a vector's heap memory, which the payload owns. A tensor on the host does not move its elements
// while it lives. The payload keeps it alive, and the caller of `OwnedTensor::new` has guaranteed that its storage has
// no other user.
unsafe impl<L: TensorLibrary> OwnedBuffers for Payload<L> {
    fn dtype(&self) -> Option<DType> {
        Some(match self {
            Payload::Gradient(gradient) => gradient.dtype,
            Payload::Flags(_) => DType::U32,
        })
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        match self {
            Payload::Gradient(gradient) => {
                // Writing succeeded in `new`, and a tensor's type and layout never change.
                let _ = gradient.tensor.write(&mut |mut buffer| visitor(buffer.as_bytes_mut()));
            }
            Payload::Flags(flags) => visitor(bytemuck::cast_slice_mut(flags)),
        }
    }
}

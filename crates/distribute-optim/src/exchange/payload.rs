//! What a fused all-reduce works on while the program continues.
#![expect(unsafe_code, reason = "a collective reduces inside the tensors' own storage")]

use distribute_collectives::OwnedBuffers;
use distribute_device::DType;
use distribute_values::TensorStorage;

use crate::library::dtype;
use crate::{Error, TensorLibrary};

/// A gradient, or the flags that travel with a step's gradients.
pub(crate) enum Payload<L: TensorLibrary> {
    Gradient(OwnedTensor<L>),
    Flags(Vec<u32>),
}

/// A contiguous tensor in host memory whose storage nobody else uses.
pub(crate) struct OwnedTensor<L: TensorLibrary> {
    tensor: L::Tensor,
    dtype: DType,
}

impl<L: TensorLibrary> Payload<L> {
    /// Takes a gradient over that backward has just handed over, through [`TensorLibrary::own`], or zeros in its place.
    pub(crate) fn gradient(gradient: L::Tensor) -> Result<Payload<L>, L::Error> {
        // SAFETY: `own` promises that the storage is the gradient's own, and backward forgets a gradient that it hands over.
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
    /// Takes a tensor over.
    ///
    /// # Safety
    /// Until the payload is handed back or dropped, nobody else reads or writes the tensor's storage.
    unsafe fn new(tensor: L::Tensor) -> Result<OwnedTensor<L>, L::Error> {
        if !L::is_on_host(&tensor) {
            return Err(Error::OnDevice.into());
        }
        // Fails here, where errors can be told, rather than when the collective looks at the memory.
        tensor.write(&mut |_| ())?;
        let dtype = dtype::<L>(&tensor)?;
        Ok(OwnedTensor { tensor, dtype })
    }
}

// SAFETY: flags are a vector's heap memory, which the payload owns. A tensor on the host keeps its elements where they are while
// it lives; the payload keeps it alive, and whoever made it has promised that nobody else touches them meanwhile
// (`OwnedTensor::new`).
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
                // Writing was possible in `new`, and neither type nor layout of a tensor ever change.
                let _ = gradient.tensor.write(&mut |mut buffer| visitor(buffer.as_bytes_mut()));
            }
            Payload::Flags(flags) => visitor(bytemuck::cast_slice_mut(flags)),
        }
    }
}

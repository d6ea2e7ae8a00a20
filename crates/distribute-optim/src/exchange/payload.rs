//! The buffers that a fused all-reduce owns while the program continues.
#![expect(unsafe_code, reason = "a collective reduces inside the tensors' own storage")]

use std::ops::Range;

use bytemuck::cast_slice;
use distribute_collectives::OwnedBuffers;
use distribute_device::{DType, Element};
use distribute_values::TensorStorage;

use crate::library::dtype;
use crate::{Error, TensorLibrary};

/// The memory of a reduction: a gradient's own, or a vector's.
pub(crate) enum Payload<L: TensorLibrary, T: Element> {
    Gradient(OwnedTensor<L>),
    /// The flags that are reduced with a step's gradients; zeros in place of a gradient, or the copy of one on an
    /// accelerator.
    Elements(Vec<T>),
}

/// A contiguous tensor in host memory whose storage has no other user.
pub(crate) struct OwnedTensor<L: TensorLibrary> {
    tensor: L::Tensor,
    dtype: DType,
}

impl<L: TensorLibrary, T: Element> Payload<L, T> {
    /// Takes a gradient that backward has just returned through [`TensorLibrary::own`], or zeros in its place.
    pub(crate) fn gradient(gradient: L::Tensor) -> Result<Payload<L, T>, L::Error> {
        // SAFETY: `own` guarantees that the gradient has its own storage, and backward keeps no handle on a gradient
        // that it returns.
        Ok(Payload::Gradient(unsafe { OwnedTensor::new(gradient)? }))
    }

    /// Takes a gradient of which each replica gets a part. It is copied if it is on an accelerator, or if something
    /// else uses its storage. One of another type than `T` is an error.
    pub(crate) fn whole(gradient: L::Tensor) -> Result<Payload<L, T>, L::Error> {
        if !L::is_on_host(&gradient) || dtype::<L>(&gradient)? != T::DTYPE {
            return Ok(Payload::Elements(gradient.to_elements::<T>()?));
        }
        Payload::gradient(L::own(gradient)?)
    }

    pub(crate) fn into_gradient(self) -> Option<L::Tensor> {
        match self {
            Payload::Gradient(OwnedTensor { tensor, .. }) => Some(tensor),
            Payload::Elements(_) => None,
        }
    }

    pub(crate) fn into_elements(self) -> Vec<T> {
        match self {
            Payload::Gradient(_) => Vec::new(),
            Payload::Elements(elements) => elements,
        }
    }

    /// Returns a copy of some elements.
    pub(crate) fn elements(&mut self, range: Range<usize>) -> Vec<T> {
        let mut elements = Vec::new();
        self.visit(&mut |bytes| elements = cast_slice::<u8, T>(bytes).get(range.clone()).unwrap_or_default().to_vec());
        elements
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

// SAFETY: a tensor on the host does not move its elements while it lives. This keeps it alive, and the caller of `new`
// has guaranteed that its storage has no other user.
unsafe impl<L: TensorLibrary> OwnedBuffers for OwnedTensor<L> {
    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        // Writing succeeded in `new`, and a tensor's type and layout never change.
        let _ = self.tensor.write(&mut |mut buffer| visitor(buffer.as_bytes_mut()));
    }
}

// SAFETY: both kinds of memory keep the promises of `OwnedBuffers`.
unsafe impl<L: TensorLibrary, T: Element> OwnedBuffers for Payload<L, T> {
    fn dtype(&self) -> Option<DType> {
        match self {
            Payload::Gradient(gradient) => gradient.dtype(),
            Payload::Elements(elements) => elements.dtype(),
        }
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        match self {
            Payload::Gradient(gradient) => gradient.visit(visitor),
            Payload::Elements(elements) => elements.visit(visitor),
        }
    }
}

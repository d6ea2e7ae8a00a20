//! The buffers that a fused all-reduce owns while the program continues.
#![expect(unsafe_code, reason = "a collective reduces inside the tensors' own storage")]

use std::ops::Range;

use bytemuck::cast_slice;
use distribute_collectives::OwnedBuffers;
use distribute_device::{DType, Element};
use distribute_values::TensorStorage;

use crate::library::dtype;
use crate::{Error, TensorLibrary};

/// A gradient, or the flags that are reduced with a step's gradients.
pub(crate) enum Payload<L: TensorLibrary> {
    Gradient(OwnedTensor<L>),
    Flags(Vec<u32>),
}

/// The whole gradient of a sharded variable, of whose reduction this replica gets a part.
pub(crate) enum WholeGradient<L: TensorLibrary, T: Element> {
    Tensor(OwnedTensor<L>),
    /// Zeros, or the copy of a gradient on an accelerator.
    Elements(Vec<T>),
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

impl<L: TensorLibrary, T: Element> WholeGradient<L, T> {
    /// Takes a gradient that backward has just returned. It is copied if it is on an accelerator, or if something else
    /// uses its storage. One of another type than `T` is an error.
    pub(crate) fn new(gradient: L::Tensor) -> Result<WholeGradient<L, T>, L::Error> {
        if !L::is_on_host(&gradient) || dtype::<L>(&gradient)? != T::DTYPE {
            return Ok(WholeGradient::Elements(gradient.to_elements::<T>()?));
        }
        // SAFETY: `own` guarantees that the gradient has its own storage, and backward keeps no handle on a gradient
        // that it returns.
        Ok(WholeGradient::Tensor(unsafe { OwnedTensor::new(L::own(gradient)?)? }))
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
unsafe impl<L: TensorLibrary> OwnedBuffers for Payload<L> {
    fn dtype(&self) -> Option<DType> {
        match self {
            Payload::Gradient(gradient) => gradient.dtype(),
            Payload::Flags(flags) => OwnedBuffers::dtype(flags),
        }
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        match self {
            Payload::Gradient(gradient) => gradient.visit(visitor),
            Payload::Flags(flags) => flags.visit(visitor),
        }
    }
}

// SAFETY: both kinds of memory keep the promises of `OwnedBuffers`.
unsafe impl<L: TensorLibrary, T: Element> OwnedBuffers for WholeGradient<L, T> {
    fn dtype(&self) -> Option<DType> {
        match self {
            WholeGradient::Tensor(gradient) => gradient.dtype(),
            WholeGradient::Elements(elements) => elements.dtype(),
        }
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        match self {
            WholeGradient::Tensor(gradient) => gradient.visit(visitor),
            WholeGradient::Elements(elements) => elements.visit(visitor),
        }
    }
}

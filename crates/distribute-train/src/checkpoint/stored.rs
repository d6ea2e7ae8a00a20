//! A tensor's bytes in memory.

use std::borrow::Cow;

use distribute_device::DType;
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, View};

use super::tensor_file::{Described, dtype_from, dtype_of};

/// A tensor's bytes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stored {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

/// Returns the tensors of a safetensors document.
pub(super) fn tensors_of(bytes: &[u8]) -> Result<Vec<(String, Stored)>, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let stored = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = dtype_from(tensor.dtype()).ok_or_else(|| format!("{name} has type {:?}", tensor.dtype()))?;
        Ok((name, Stored { dtype, shape: tensor.shape().to_vec(), bytes: tensor.data().to_vec() }))
    };
    tensors.tensors().into_iter().map(stored).collect()
}

/// Returns memory whose length comes from a file or from another process, so a failed allocation must not abort.
pub(super) fn zeros(bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut all = Vec::new();
    all.try_reserve_exact(bytes).map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
    all.resize(bytes, 0);
    Ok(all)
}

impl Stored {
    pub(super) fn described<'a>(&'a self, name: &'a str) -> Described<'a> {
        Described { name, dtype: self.dtype, shape: &self.shape, bytes: self.bytes.len() }
    }
}

impl View for &Stored {
    fn dtype(&self) -> Dtype {
        dtype_of(self.dtype)
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

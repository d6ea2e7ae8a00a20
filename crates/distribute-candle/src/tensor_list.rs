//! Tensors that a collective works on while the program goes on.
#![expect(unsafe_code, reason = "a collective reduces inside the tensors' own storage")]

use candle_core::Tensor;
use distribute_collectives::OwnedBuffers;
use distribute_device::DType;
use distribute_values::TensorStorage;

use crate::{Candle, Result};

/// Contiguous tensors of one type whose storage nobody else uses.
pub(crate) struct TensorList {
    tensors: Vec<Tensor>,
    dtype: DType,
}

impl TensorList {
    /// Takes tensors of one type over.
    ///
    /// # Safety
    /// Until the list is handed back or dropped, nobody else reads or writes the tensors' storage.
    pub(crate) unsafe fn new(tensors: Vec<Tensor>, dtype: DType) -> Result<TensorList> {
        // Fails here, where errors can be told, rather than when the collective looks at the memory.
        for tensor in &tensors {
            if !tensor.device().is_cpu() {
                let problem =
                    "tensors on a GPU are reduced there by optimizers of mirrored strategies, without zero1; use those";
                return Err(candle_core::Error::Msg(problem.to_owned()).into());
            }
            TensorStorage::<Candle>::write(tensor, &mut |_| ())?;
        }
        Ok(TensorList { tensors, dtype })
    }

    pub(crate) fn into_tensors(self) -> Vec<Tensor> {
        self.tensors
    }
}

// SAFETY: the tensors are on the CPU. A tensor's elements are on the heap and do not move while the tensor lives; the list keeps
// it alive. Whoever made the list has promised that nobody else touches their storage meanwhile (`TensorList::new`).
unsafe impl OwnedBuffers for TensorList {
    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        for tensor in &self.tensors {
            // Writing was possible in `new`, and neither type nor layout of a tensor ever change.
            let _ = TensorStorage::<Candle>::write(tensor, &mut |mut buffer| visitor(buffer.as_bytes_mut()));
        }
    }
}

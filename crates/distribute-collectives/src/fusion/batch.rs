//! The memory of a bucket.

use distribute_device::DType;

use crate::engine::memory::OwnedBuffers;

/// Several tensors that form the memory of one operation.
#[derive(Debug)]
pub(crate) struct Batch<B> {
    pub(crate) tensors: Vec<B>,
    pub(crate) dtype: DType,
}

#[expect(unsafe_code, reason = "the memory of an operation that runs by itself")]
// SAFETY: each tensor fulfils the contract, and the batch owns them; their type was compared with the plan's.
unsafe impl<B: OwnedBuffers> OwnedBuffers for Batch<B> {
    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        for tensor in &mut self.tensors {
            tensor.visit(visitor);
        }
    }
}

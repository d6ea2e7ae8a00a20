//! Replicas on GPUs: collectives of a model's graph, and the reduction and application of gradients, in their memory.

#[cfg_attr(feature = "candle-cuda", path = "gpu/cuda.rs")]
#[cfg_attr(not(feature = "candle-cuda"), path = "gpu/without_cuda.rs")]
mod backend;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CudaStorage, Layout};

pub(crate) use backend::{Gpus, gathered, reduced};

/// Copies the elements of a view. candle's `try_clone` copies the storage from its beginning, whatever the layout is.
pub(crate) fn copied(storage: &CudaStorage, layout: &Layout) -> candle_core::Result<CudaStorage> {
    let mut copy = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(copy)
}

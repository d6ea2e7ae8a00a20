//! Replicas on GPUs: collectives of a model's graph, and the reduction and application of gradients, in their memory.

#[cfg_attr(feature = "candle-cuda", path = "gpu/cuda.rs")]
#[cfg_attr(not(feature = "candle-cuda"), path = "gpu/without_cuda.rs")]
mod backend;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, Layout, Result, Shape};

pub(crate) use backend::{Gpus, gathered, reduced};

/// Copies the elements of a view. candle's `try_clone` copies the storage from its beginning, whatever the layout is.
pub(crate) fn copied(storage: &CudaStorage, layout: &Layout) -> Result<CudaStorage> {
    let mut copy = zeros(storage.device(), layout.shape().elem_count(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(copy)
}

/// Moves elements to a GPU.
pub(crate) fn uploaded(device: &CudaDevice, elements: CpuStorage) -> Result<CudaStorage> {
    match is_empty(&elements) {
        true => zeros(device, 0, elements.dtype()),
        false => device.storage_from_cpu_storage_owned(elements),
    }
}

/// Allocates memory for elements, and for one if there are none: drivers without memory pools do not allocate 0 bytes.
/// A tensor may have fewer elements than its storage.
fn zeros(device: &CudaDevice, count: usize, dtype: DType) -> Result<CudaStorage> {
    device.zeros_impl(&Shape::from(count.max(1)), dtype)
}

fn is_empty(elements: &CpuStorage) -> bool {
    macro_rules! any {
        ($($variant:ident),*) => {
            match elements {
                $(CpuStorage::$variant(all) => all.is_empty(),)*
            }
        };
    }
    any!(U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3, F6E2M3, F6E3M2, F4, F8E8M0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_without_elements_is_known_as_such() {
        assert!(is_empty(&CpuStorage::F32(Vec::new())) && is_empty(&CpuStorage::I16(Vec::new())));
        assert!(!is_empty(&CpuStorage::BF16(vec![Default::default()])));
    }
}

//! The operations of candle by which parameters come and go.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, InplaceOp1, Layout, Result, Shape, Tensor};
use parking_lot::Mutex;

use super::blocks::Gathered;
use super::recompute::Recomputed;
use crate::gpu::{copied, uploaded};

/// Returns the storage of a parameter that is not in memory. It has a type that no operation of candle computes with,
/// so that reading the parameter is an error in all of them, whatever its shape is.
pub(super) fn resting() -> CpuStorage {
    CpuStorage::F8E8M0(Vec::new())
}

/// Returns the storage of an intermediate result that was dropped, of another such type.
pub(super) fn dropped() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

/// Drops the elements of a parameter.
pub(crate) fn rest(parameter: &Tensor) -> Result<()> {
    replace(parameter, resting())
}

/// Replaces the storage of a tensor, and thereby of all views of it.
pub(super) fn replace(tensor: &Tensor, storage: CpuStorage) -> Result<()> {
    swap(tensor, storage).map(drop)
}

/// Replaces the storage of a tensor, and thereby of all views of it. Returns the one before if it is on the CPU.
pub(super) fn swap(tensor: &Tensor, storage: CpuStorage) -> Result<CpuStorage> {
    let swap = Swap(Mutex::new(storage));
    tensor.inplace_op1(&swap)?;
    Ok(swap.0.into_inner())
}

struct Swap(Mutex<CpuStorage>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "distribute-swap"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        std::mem::swap(storage, &mut self.0.lock());
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let new = match std::mem::replace(&mut *self.0.lock(), resting()) {
            // A GPU has no such types. Its kernels compute with next to no integers of 16 bits.
            CpuStorage::F8E8M0(_) | CpuStorage::F4(_) => CpuStorage::I16(Vec::new()),
            new => new,
        };
        *storage = uploaded(storage.device(), new)?;
        Ok(())
    }
}

/// The result of a block, unchanged. Its backward precedes that of the block: it gathers the block's parameters, and
/// computes again what was dropped.
pub(super) struct Output {
    gathered: Option<Gathered>,
    recomputed: Option<Arc<Recomputed>>,
    /// The elements, until the forward pass moves them to the result; `None` if it copies them.
    elements: Mutex<Option<CpuStorage>>,
}

impl Output {
    /// Creates the operation that copies the result of a block.
    pub(super) fn copied(gathered: Gathered) -> Output {
        Output { gathered: Some(gathered), recomputed: None, elements: Mutex::default() }
    }

    /// Creates the operation that has these elements as its result.
    pub(super) fn recomputed(elements: CpuStorage, gathered: Option<Gathered>, recomputed: Arc<Recomputed>) -> Output {
        Output { gathered, recomputed: Some(recomputed), elements: Mutex::new(Some(elements)) }
    }

    fn name(&self) -> &str {
        self.gathered.as_ref().map_or("", Gathered::name)
    }
}

impl CustomOp1 for Output {
    fn name(&self) -> &'static str {
        "distribute-block"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        if let Some(elements) = self.elements.lock().take() {
            return Ok((elements, layout.shape().clone()));
        }
        let name = Output::name(self);
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("the result of block {name:?} is not contiguous")
        };
        macro_rules! copy {
            ($($variant:ident),*) => {
                match storage {
                    $(CpuStorage::$variant(all) => CpuStorage::$variant(all[start..end].to_vec()),)*
                    _ => candle_core::bail!(
                        "the result of block {name:?} is of a type without gradients; return f32, f64, f16 or bf16"
                    ),
                }
            };
        }
        Ok((copy!(F32, F64, F16, BF16), layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((copied(storage, layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.gathered.as_ref().map_or(Ok(()), Gathered::begin_backward)?;
        self.recomputed.as_ref().map_or(Ok(()), |recomputed| recomputed.begin_backward(result))?;
        Ok(Some(gradient.clone()))
    }
}

//! The operations of candle by which parameters come and go.

use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, InplaceOp1, Layout, Result, Shape, Tensor};
use parking_lot::Mutex;

use super::blocks::Unit;

/// Returns the storage of a parameter that is not in memory. It has a type that no operation of candle computes with,
/// so that reading the parameter is an error in all of them, whatever its shape is.
pub(super) fn resting() -> CpuStorage {
    CpuStorage::F8E8M0(Vec::new())
}

/// Drops the elements of a parameter.
pub(crate) fn rest(parameter: &Tensor) -> Result<()> {
    replace(parameter, resting())
}

/// Replaces the storage of a tensor, and thereby of all views of it.
pub(super) fn replace(tensor: &Tensor, storage: CpuStorage) -> Result<()> {
    tensor.inplace_op1(&Replace(Mutex::new(Some(storage))))
}

struct Replace(Mutex<Option<CpuStorage>>);

impl Replace {
    fn storage(&self) -> CpuStorage {
        self.0.lock().take().unwrap_or_else(resting)
    }
}

impl InplaceOp1 for Replace {
    fn name(&self) -> &'static str {
        "distribute-replace"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        *storage = self.storage();
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        *storage = storage.device().storage_from_cpu_storage_owned(self.storage())?;
        Ok(())
    }
}

/// The result of a block, unchanged. Its backward precedes that of the block, whose parameters it gathers.
pub(super) struct Output {
    pub(super) unit: Arc<Unit>,
    /// The block that ran before.
    pub(super) previous: Option<Arc<Unit>>,
}

impl CustomOp1 for Output {
    fn name(&self) -> &'static str {
        "distribute-block"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("the result of block {:?} is not contiguous", self.unit.name())
        };
        macro_rules! copy {
            ($($variant:ident),*) => {
                match storage {
                    $(CpuStorage::$variant(all) => CpuStorage::$variant(all[start..end].to_vec()),)*
                    _ => candle_core::bail!(
                        "the result of block {:?} is of a type without gradients; return f32, f64, f16 or bf16",
                        self.unit.name()
                    ),
                }
            };
        }
        Ok((copy!(F32, F64, F16, BF16), layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.unit.begin_backward(self.previous.as_ref())?;
        Ok(Some(gradient.clone()))
    }
}

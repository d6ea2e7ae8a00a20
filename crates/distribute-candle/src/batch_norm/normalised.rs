//! Batch normalisation by candle's operations: on GPUs, of 16 bits, and of channels of few elements.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, Error, Layout, Result, Shape, Storage, Tensor};
use parking_lot::Mutex;

use super::Batch;

/// The operation of a batch: forward returns the normalised values, backward returns the input's gradient.
pub(super) struct Normalised {
    batch: Batch,
    /// The normalised values, until forward copies them to the result: candle would keep an argument.
    y: Mutex<Option<Tensor>>,
}

impl Normalised {
    pub(super) fn new(batch: Batch, y: Tensor) -> Normalised {
        Normalised { batch, y: Mutex::new(Some(y)) }
    }

    fn take(&self) -> Result<Tensor> {
        self.y.lock().take().ok_or_else(|| Error::Msg("a batch was normalised twice".to_owned()))
    }

    fn in_host(&self) -> Result<(CpuStorage, Shape)> {
        let y = self.take()?;
        let (storage, layout) = y.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { candle_core::bail!("a batch is not in host memory") };
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn on_gpu(&self) -> Result<(CudaStorage, Shape)> {
        let y = self.take()?;
        let (storage, layout) = y.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { candle_core::bail!("a batch is not on the GPU of its input") };
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }
}

impl CustomOp1 for Normalised {
    fn name(&self) -> &'static str {
        "sync-batch-norm"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.in_host()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_gpu()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.batch.gradient(x, gradient).map(Some)
    }
}

/// The normalisation of an input to whose result a shortcut is added. The shortcut is an argument for the order of
/// backward alone, which is thereby that of [`rectified`](super::rectified::rectified): replicas may use either.
impl CustomOp2 for Normalised {
    fn name(&self) -> &'static str {
        "sync-batch-norm-before-shortcut"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.in_host()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_gpu()
    }

    fn bwd(
        &self,
        x: &Tensor,
        shortcut: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        // Replicas exchange sums if one graph needs them, and all have the same.
        let of_x = x.track_op().then(|| self.batch.gradient(x, gradient)).transpose()?;
        // candle drops the right operand of a sum of tensors without elements, so the sum gives it no gradient.
        let is_dropped = shortcut.elem_count() == 0 && shortcut.track_op();
        Ok((of_x, is_dropped.then(|| shortcut.zeros_like()).transpose()?))
    }
}

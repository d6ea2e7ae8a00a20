//! Kernels in host memory as operations of candle, forward and backward.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};

use crate::host::{Element, Stored, by_type, computed, dtype, elements, tensor, with};

/// An operation on rows of `size` elements, whose result has the shape of its argument.
pub(crate) trait RowWise: Send + Sync {
    const NAME: &'static str;
    /// Whether backward needs the result, rather than the argument.
    const KEEPS_RESULT: bool = false;

    fn forward<T: Element>(x: &[T], size: usize, out: &mut [T]);

    /// Computes the gradient of the argument, from what is kept and from the gradient of the result.
    fn backward<T: Element>(kept: &[T], size: usize, gradient: &[T], out: &mut [T]);
}

/// Computes an operation for a tensor in host memory.
pub(crate) fn row_wise<O: RowWise + 'static>(x: &Tensor, operation: O) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Rows(operation))
}

struct Rows<O>(O);

impl<O: RowWise> CustomOp1 for Rows<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element, O: RowWise>(storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
            let (x, size) = (elements::<T>(storage, layout)?, row_len(layout.shape()));
            Ok(T::to_cpu_storage_owned(computed(x.len(), |out| O::forward(x, size, out))))
        }
        Ok((by_type!(dtype(storage), run::<O>(storage, layout))?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        fn run<T: Element, O: RowWise>(kept: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let change = with([kept, gradient], |[elements, gradient]: [&[T]; 2]| {
                computed(elements.len(), |out| O::backward(elements, row_len(kept.shape()), gradient, out))
            })?;
            tensor(change, kept)
        }
        let kept = if O::KEEPS_RESULT { y } else { x };
        by_type!(kept.dtype(), run::<O>(kept, gradient)).map(Some)
    }
}

/// Returns the number of elements of the last axis.
pub(crate) fn row_len(shape: &Shape) -> usize {
    shape.dims().last().copied().unwrap_or(1)
}

/// An operation on a tensor with a weight, and with a bias or without.
pub(crate) trait Weighted: Send + Sync {
    const NAME: &'static str;

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)>;

    /// Computes the gradients of `x`, the weight and the bias, from the result `y` and its gradient; `None` for one
    /// that is not needed.
    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]>;
}

/// Computes an operation for tensors in host memory.
pub(crate) fn weighted<O: Weighted + 'static>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    operation: O,
) -> Result<Tensor> {
    let (x, weight, operation) = (x.contiguous()?, weight.contiguous()?, WithWeight(operation));
    match bias {
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, operation),
        None => x.apply_op2(&weight, operation),
    }
}

struct WithWeight<O>(O);

impl<O: Weighted> CustomOp2 for WithWeight<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, w: &CpuStorage, lw: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.forward((x, lx), (w, lw), None)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [x, weight, _] = self.0.backward(x, w, None, y, gradient)?;
        Ok((x, weight))
    }
}

impl<O: Weighted> CustomOp3 for WithWeight<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.forward((x, lx), (w, lw), Some((b, lb)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [x, weight, bias] = self.0.backward(x, w, Some(b), y, gradient)?;
        Ok((x, weight, bias))
    }
}

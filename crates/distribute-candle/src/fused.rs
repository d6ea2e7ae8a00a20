//! Kernels in host memory as operations of candle, forward and backward.

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};

use crate::host::{Element, Stored, by_type, dtype, elements, tensor, with};
use crate::relay::{Operation, apply};

/// An operation on rows of `size` elements, whose result has the shape of its argument.
pub(crate) trait RowWise: Send + Sync {
    const NAME: &'static str;
    /// Whether backward needs the result, rather than the argument.
    const KEEPS_RESULT: bool = false;

    fn forward<T: Element>(x: &[T], size: usize) -> Vec<T>;

    /// Computes the gradient of the argument, from what is kept and from the gradient of the result.
    fn backward<T: Element>(kept: &[T], size: usize, gradient: &[T]) -> Vec<T>;
}

/// Computes an operation for a tensor in host memory.
pub(crate) fn row_wise<O: RowWise + 'static>(x: &Tensor, operation: O) -> Result<Tensor> {
    apply([&x.contiguous()?], Rows(operation))
}

struct Rows<O>(O);

impl<O: RowWise> Operation<1> for Rows<O> {
    const NAME: &'static str = O::NAME;

    fn forward(&self, [(storage, layout)]: [Stored<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element, O: RowWise>(storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
            let (x, size) = (elements::<T>(storage, layout)?, row_len(layout.shape()));
            Ok(T::to_cpu_storage_owned(O::forward(x, size)))
        }
        Ok((by_type!(dtype(storage), run::<O>(storage, layout))?, layout.shape().clone()))
    }

    fn backward(&self, [x]: [&Tensor; 1], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        fn run<T: Element, O: RowWise>(kept: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let change = with([kept, gradient], |[elements, gradient]: [&[T]; 2]| {
                O::backward(elements, row_len(kept.shape()), gradient)
            })?;
            tensor(change, kept)
        }
        let kept = if O::KEEPS_RESULT { y } else { x };
        Ok([Some(by_type!(kept.dtype(), run::<O>(kept, gradient))?)])
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

    /// Returns what forward has kept for backward, as [`Operation::kept`] does.
    fn kept(&self) -> Option<&Tensor> {
        None
    }
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
        Some(bias) => apply([&x, &weight, &bias.contiguous()?], operation),
        None => apply([&x, &weight], operation),
    }
}

struct WithWeight<O>(O);

impl<O: Weighted> Operation<2> for WithWeight<O> {
    const NAME: &'static str = O::NAME;

    fn forward(&self, [x, weight]: [Stored<'_>; 2]) -> Result<(CpuStorage, Shape)> {
        self.0.forward(x, weight, None)
    }

    fn backward(&self, [x, weight]: [&Tensor; 2], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let [x, weight, _] = self.0.backward(x, weight, None, y, gradient)?;
        Ok([x, weight])
    }

    fn kept(&self) -> Option<&Tensor> {
        self.0.kept()
    }
}

impl<O: Weighted> Operation<3> for WithWeight<O> {
    const NAME: &'static str = O::NAME;

    fn forward(&self, [x, weight, bias]: [Stored<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        self.0.forward(x, weight, Some(bias))
    }

    fn backward(&self, [x, weight, bias]: [&Tensor; 3], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        self.0.backward(x, weight, Some(bias), y, gradient)
    }

    fn kept(&self) -> Option<&Tensor> {
        self.0.kept()
    }
}

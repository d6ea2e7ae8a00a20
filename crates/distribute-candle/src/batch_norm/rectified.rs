//! Batch normalisation and the rectified linear unit in one operation.

use candle_core::{CpuStorage, Result, Shape, Tensor};
use distribute_rows::relu;

use super::Batch;
use super::fused::{centres, changes, shape_of, weighted_scales};
use crate::host::{Element, Stored, by_type, computed, dtype, elements, tensor, with};
use crate::relay::{Operation, apply};

/// A batch in host memory, which is normalised, added to a shortcut if there is one, and rectified.
///
/// The second argument is the weight of each channel, and then the bias of each.
struct Rectified(Batch);

/// Computes the operation. The shortcut has the shape and the type of `x`.
pub(super) fn rectified(
    batch: Batch,
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    shortcut: Option<&Tensor>,
) -> Result<Tensor> {
    let (x, affine, operation) = (x.contiguous()?, Tensor::stack(&[weight, bias], 0)?, Rectified(batch));
    match shortcut {
        Some(shortcut) => apply([&x, &affine, &shortcut.contiguous()?], operation),
        None => apply([&x, &affine], operation),
    }
}

impl Rectified {
    fn computed(&self, x: Stored<'_>, affine: Stored<'_>, shortcut: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            of: &Batch,
            x: Stored<'_>,
            affine: Stored<'_>,
            shortcut: Option<Stored<'_>>,
        ) -> Result<CpuStorage> {
            let batch = shape_of(x.1.dims());
            let (x, affine) = (elements::<T>(x.0, x.1)?, elements::<T>(affine.0, affine.1)?);
            let shortcut = shortcut.map(|(storage, layout)| elements(storage, layout)).transpose()?;
            let (weight, bias) = affine.split_at(batch.channels);
            let (centres, scales) = (centres(of)?, weighted_scales(of, weight)?);
            let write = |out: &mut [T]| batch.forward_relu(x, &centres, &scales, bias, shortcut, out);
            Ok(T::to_cpu_storage_owned(computed(x.len(), write)))
        }
        let shape = x.1.shape().clone();
        Ok((by_type!(dtype(x.0), run(&self.0, x, affine, shortcut))?, shape))
    }

    /// Returns the gradients of `x`, weight and bias, and shortcut.
    fn gradients(&self, x: &Tensor, affine: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        fn passed<T: Element>(y: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let passed = with([y, gradient], |[elements, gradient]: [&[T]; 2]| {
                computed(elements.len(), |out| relu::backward(elements, gradient, out))
            })?;
            tensor(passed, y)
        }
        let weight = affine.get(0)?;
        let gradient = by_type!(y.dtype(), passed(y, gradient))?;
        let [of_x, of_weight, of_bias] = by_type!(x.dtype(), changes(&self.0, x, &weight, &gradient))?;
        let of_affine = match (of_weight, of_bias) {
            (Some(of_weight), Some(of_bias)) => Some(Tensor::stack(&[of_weight, of_bias], 0)?),
            _ => None,
        };
        Ok([of_x, of_affine, Some(gradient)])
    }
}

const NAME: &str = "sync-batch-norm-relu";

impl Operation<2> for Rectified {
    const NAME: &'static str = NAME;

    fn forward(&self, [x, affine]: [Stored<'_>; 2]) -> Result<(CpuStorage, Shape)> {
        self.computed(x, affine, None)
    }

    fn backward(&self, [x, affine]: [&Tensor; 2], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let [of_x, of_affine, _] = self.gradients(x, affine, y, gradient)?;
        Ok([of_x, of_affine])
    }
}

impl Operation<3> for Rectified {
    const NAME: &'static str = NAME;

    fn forward(&self, [x, affine, shortcut]: [Stored<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        self.computed(x, affine, Some(shortcut))
    }

    fn backward(&self, [x, affine, _]: [&Tensor; 3], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        self.gradients(x, affine, y, gradient)
    }
}

//! Batch normalisation and the rectified linear unit in one operation.

use candle_core::{CpuStorage, Result, Shape, Tensor};
use distribute_rows::relu;

use super::Batch;
use super::fused::{centres, changes, shape_of, weighted_scales};
use crate::fused::{Weighted, weighted};
use crate::host::{Element, Stored, by_type, dtype, elements, tensor, with};

/// A batch in host memory, which is normalised, added to a shortcut if there is one, and rectified.
///
/// Its weight has the weight of each channel, and then the bias of each; the shortcut is in the place of a bias.
struct Rectified(Batch);

/// Computes the operation. The shortcut has the shape and the type of `x`.
pub(super) fn rectified(
    batch: Batch,
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    shortcut: Option<&Tensor>,
) -> Result<Tensor> {
    weighted(x, &Tensor::stack(&[weight, bias], 0)?, shortcut, Rectified(batch))
}

impl Weighted for Rectified {
    const NAME: &'static str = "sync-batch-norm-relu";

    fn forward(&self, x: Stored<'_>, affine: Stored<'_>, shortcut: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
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
            Ok(T::to_cpu_storage_owned(batch.forward_relu(x, &centres, &scales, bias, shortcut)))
        }
        let shape = x.1.shape().clone();
        Ok((by_type!(dtype(x.0), run(&self.0, x, affine, shortcut))?, shape))
    }

    /// Returns the gradients of `x`, weight and bias, and shortcut.
    fn backward(
        &self,
        x: &Tensor,
        affine: &Tensor,
        shortcut: Option<&Tensor>,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        fn passed<T: Element>(y: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            tensor(with([y, gradient], |[elements, gradient]: [&[T]; 2]| relu::backward(elements, gradient))?, y)
        }
        let weight = affine.get(0)?;
        // Without a shortcut nothing else needs the gradient of what was rectified, which costs a pass over memory.
        let (gradient, rectified) = match shortcut {
            Some(_) => (by_type!(y.dtype(), passed(y, gradient))?, None),
            None => (gradient.clone(), Some(affine.get(1)?)),
        };
        let changes = by_type!(x.dtype(), changes(&self.0, x, &weight, &gradient, rectified.as_ref()))?;
        let [of_x, of_weight, of_bias] = changes;
        let of_affine = match (of_weight, of_bias) {
            (Some(of_weight), Some(of_bias)) => Some(Tensor::stack(&[of_weight, of_bias], 0)?),
            _ => None,
        };
        Ok([of_x, of_affine, Some(gradient)])
    }
}

//! Batch normalisation and the rectified linear unit in one operation.

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};
use distribute_rows::relu;

use super::Batch;
use super::fused::{centres, changes, shape_of, weighted_scales};
use crate::host::{Element, Stored, by_type, computed, dtype, elements, tensor, with};

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
        Some(shortcut) => x.apply_op3(&affine, &shortcut.contiguous()?, operation),
        None => x.apply_op2(&affine, operation),
    }
}

impl Rectified {
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
            let write = |out: &mut [T]| batch.forward_relu(x, &centres, &scales, bias, shortcut, out);
            Ok(T::to_cpu_storage_owned(computed(x.len(), write)))
        }
        let shape = x.1.shape().clone();
        Ok((by_type!(dtype(x.0), run(&self.0, x, affine, shortcut))?, shape))
    }

    /// Returns the gradients of `x`, weight and bias, and shortcut.
    fn backward(&self, x: &Tensor, affine: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
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

impl CustomOp2 for Rectified {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, a: &CpuStorage, la: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward((x, lx), (a, la), None)
    }

    fn bwd(&self, x: &Tensor, a: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [of_x, of_affine, _] = self.backward(x, a, y, gradient)?;
        Ok((of_x, of_affine))
    }
}

impl CustomOp3 for Rectified {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        a: &CpuStorage,
        la: &Layout,
        s: &CpuStorage,
        ls: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward((x, lx), (a, la), Some((s, ls)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        a: &Tensor,
        _: &Tensor,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [of_x, of_affine, of_shortcut] = self.backward(x, a, y, gradient)?;
        Ok((of_x, of_affine, of_shortcut))
    }
}

//! Batch normalisation in host memory.

use candle_core::{CpuStorage, DType, Device, Result, Shape, Tensor};
use distribute_kernels::batch_norm::{Batch as Kernel, Centre, Moments as OfChannel, Rectified, Slope};
use distribute_rows::Float;

use super::Batch;
use super::moments::Moments;
use crate::fused::Weighted;
use crate::host::{Element, Stored, by_type, dtype, elements, is_fused, tensor, with};

/// A batch in host memory, with a weight and a bias for each channel.
pub(super) struct Fused(pub(super) Batch);

impl Weighted for Fused {
    const NAME: &'static str = "sync-batch-norm";

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        let Some(bias) = bias else { candle_core::bail!("batch normalisation has a bias") };
        let shape = x.1.shape().clone();
        Ok((by_type!(dtype(x.0), normalised(&self.0, x, weight, bias))?, shape))
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: Option<&Tensor>,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        by_type!(x.dtype(), changes(&self.0, x, weight, gradient, None))
    }
}

/// Normalises, and applies weight and bias.
fn normalised<T: Element>(
    of: &Batch,
    (x, layout): Stored<'_>,
    weight: Stored<'_>,
    bias: Stored<'_>,
) -> Result<CpuStorage> {
    let x = elements::<T>(x, layout)?;
    let (weight, bias) = (elements::<T>(weight.0, weight.1)?, elements(bias.0, bias.1)?);
    let (centres, scales) = (centres(of)?, weighted_scales(of, weight)?);
    let batch = shape_of(layout.dims());
    Ok(T::to_cpu_storage_owned(batch.forward(x, &centres, &scales, bias)))
}

/// Returns what is subtracted from each channel's elements.
pub(super) fn centres<T: Element>(of: &Batch) -> Result<Vec<Centre<T>>> {
    let (near, rest) = of.centre()?;
    let numbers = near.to_vec1::<f64>()?.into_iter().zip(rest.to_vec1::<f64>()?);
    Ok(numbers.map(|(near, rest)| Centre { near: element(near), rest: element(rest) }).collect())
}

/// Returns the factor of each channel's deviations.
pub(super) fn weighted_scales<T: Element>(of: &Batch, weight: &[T]) -> Result<Vec<T>> {
    let scales = of.scales.to_vec1::<f64>()?;
    Ok(scales.iter().zip(weight).map(|(scale, weight)| element::<T>(*scale) * *weight).collect())
}

/// Returns the gradients of the input, the weight and the bias. With `rectified`, the bias, the gradient is that of the
/// rectified result.
pub(super) fn changes<T: Element>(
    batch: &Batch,
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    rectified: Option<&Tensor>,
) -> Result<[Option<Tensor>; 3]> {
    let shape = shape_of(x.dims());
    let (centres, scales) = (centres::<T>(batch)?, batch.scales.to_vec1::<f64>()?);
    let rectified = match rectified {
        Some(bias) => Some((weighted_scales(batch, &weight.to_vec1::<T>()?)?, bias.to_vec1::<T>()?)),
        None => None,
    };
    let rectified = rectified.as_ref().map(|(scales, shifts)| Rectified { scales, shifts });
    // A row that stands in for missing examples has no gradients.
    let sums = match batch.counts {
        true => with([x, gradient], |[x, gradient]: [&[T]; 2]| shape.sums(x, &centres, gradient, rectified))?,
        false => vec![[0.0; 2]; scales.len()],
    };
    let of_bias: Vec<T> = sums.iter().map(|[of_gradient, _]| element(*of_gradient)).collect();
    let normed = sums.iter().zip(&scales).map(|([_, of_product], scale)| element(of_product * scale));
    let of_weight: Vec<T> = normed.collect();
    let [of_weight, of_bias] = [tensor(of_weight, weight)?, tensor(of_bias, weight)?].map(Some);
    // Replicas exchange sums if one graph needs them, and all have the same.
    if !x.track_op() {
        return Ok([None, of_weight, of_bias]);
    }
    // The gradient of the normalised values is the result's times the weight.
    let weights = weight.detach().to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let of = |which: usize| sums.iter().zip(&weights).map(move |(sums, weight)| sums[which] * weight);
    let exchanged: Vec<f64> = of(0).chain(of(1)).collect();
    let exchanged = Tensor::from_vec(exchanged, 2 * scales.len(), &Device::Cpu)?;
    let (spread, shift) = batch.through_moments(exchanged)?;
    let change = if batch.counts {
        let through = spread.to_vec1::<f64>()?.into_iter().zip(shift.to_vec1::<f64>()?);
        let slopes: Vec<Slope<T>> = scales
            .iter()
            .zip(&weights)
            .zip(through)
            .map(|((scale, weight), (spread, shift))| Slope {
                of_gradient: element(scale * weight),
                of_deviation: element(-spread),
                constant: element(-shift),
            })
            .collect();
        let change =
            with([x, gradient], |[x, gradient]: [&[T]; 2]| shape.backward(x, &centres, gradient, &slopes, rectified))?;
        tensor(change, x)?
    } else {
        x.zeros_like()?
    };
    Ok([Some(change), of_weight, of_bias])
}

/// Returns the nearest value of the type of elements.
fn element<T: Element>(number: f64) -> T {
    <T as Float>::from_f64(number)
}

/// Returns whether a tensor, with channels in axis 1, is in host memory and so long behind that axis that a fused
/// operation is fast.
pub(super) fn has_planes(x: &Tensor) -> bool {
    is_fused(x) && x.elem_count() > 0 && shape_of(x.dims()).size >= 16
}

/// Returns a shape of (examples, channels, …) for kernels.
pub(super) fn shape_of(dims: &[usize]) -> Kernel {
    Kernel { examples: dims[0], channels: dims[1], size: dims[2..].iter().product() }
}

/// Returns the moments of a tensor's channels.
pub(super) fn moments<T: Element>(x: &Tensor) -> Result<Moments> {
    let batch = shape_of(x.dims());
    let moments = with([x], |[x]: [&[T]; 1]| batch.moments(x))?;
    let of = |f: fn(&OfChannel) -> f64| {
        Tensor::from_vec(moments.iter().map(f).collect::<Vec<f64>>(), batch.channels, &Device::Cpu)
    };
    let (origins, offsets) = (of(|channel| channel.origin)?, of(|channel| channel.offset)?);
    let deviations = of(|channel| channel.deviations)?;
    Ok(Moments { count: (batch.examples * batch.size) as f64, origins, offsets, deviations })
}

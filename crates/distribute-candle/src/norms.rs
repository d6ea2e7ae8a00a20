//! Normalisation over the last axis, with backward.

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::{LayerNormConfig, VarBuilder};
use distribute_rows::normalise::Normalise;

use crate::host::is_fused;
use crate::rows;
use crate::tensor::is_short;

/// Layer normalisation that can be trained. candle's uses a fused operation without backward, so layers before it get
/// no gradients.
///
/// Names of variables and settings are those of [`candle_nn::LayerNorm`], so checkpoints fit both. Inputs of 16 bits
/// are normalised in f32. A large mean loses no precision.
///
/// # Shapes
/// The last axis of the input is normalised: (…, size).
///
/// # Examples
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use distribute_candle::{Adam, CandleContext, CandleStrategy, Error, layer_norm};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().build()?;
/// let model = strategy.scope(|vb| layer_norm(4, 1e-5, vb.pp("norm")))?;
/// let optimizer = Adam::new(0.1).build(&model)?;
/// strategy.run_with((&model, &optimizer), |context, (norm, optimizer)| {
///     let x = Tensor::arange(0f32, 8.0, &Device::Cpu)?.reshape((2, 4))?;
///     optimizer.minimize(context, &context.average_loss(&norm.forward(&x)?.sqr()?.sum(1)?, 2)?)
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Ba, Kiros and Hinton, "Layer normalization", 2016.
#[derive(Clone, Debug)]
pub struct LayerNorm(candle_nn::LayerNorm);

/// Root mean square normalisation that can be trained; candle's uses a fused operation without backward.
///
/// It is like [`LayerNorm`], but does not subtract the mean, and has the names of [`candle_nn::RmsNorm`].
///
/// # Source
/// Zhang and Sennrich, "Root mean square layer normalization", 2019.
#[derive(Clone, Debug)]
pub struct RmsNorm(candle_nn::RmsNorm);

/// Creates a [`LayerNorm`] over an axis of `size` elements.
///
/// # Errors
/// [`candle_core::Error`] if the variables exist with other shapes.
pub fn layer_norm(size: usize, config: impl Into<LayerNormConfig>, vb: VarBuilder<'_>) -> Result<LayerNorm> {
    Ok(LayerNorm(candle_nn::layer_norm(size, config, vb)?))
}

/// Creates an [`RmsNorm`] over an axis of `size` elements; `epsilon` is added to the mean square.
///
/// # Errors
/// [`candle_core::Error`] if the variable exists with another shape.
pub fn rms_norm(size: usize, epsilon: f64, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    Ok(RmsNorm(candle_nn::rms_norm(size, epsilon, vb)?))
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalise(x, self.0.weight(), self.0.bias(), self.0.eps(), self.0.remove_mean())
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalise(x, self.0.weight(), None, self.0.eps(), false)
    }
}

fn normalise(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, epsilon: f64, remove_mean: bool) -> Result<Tensor> {
    let (dtype, size) = (x.dtype(), weight.dim(0)?);
    if x.rank() == 0 || x.dim(D::Minus1)? != size {
        candle_core::bail!("the input of a normalisation has shape {:?}; give (…, {size})", x.dims());
    }
    let wide = if is_short(dtype) { DType::F32 } else { dtype };
    let x = x.to_dtype(wide)?;
    if is_fused(&x) && size > 0 {
        let (weight, bias) = (weight.to_dtype(wide)?, bias.map(|bias| bias.to_dtype(wide)).transpose()?);
        return rows::normalise(&x, &weight, bias.as_ref(), Normalise { epsilon, remove_mean })?.to_dtype(dtype);
    }
    let x = match remove_mean && x.elem_count() > 0 {
        true => {
            // The result does not depend on a constant that is subtracted from all elements, so the constant needs no
            // gradient.
            let near = x.broadcast_sub(&x.detach().narrow(D::Minus1, 0, 1)?)?;
            near.broadcast_sub(&(near.sum_keepdim(D::Minus1)? / size as f64)?)?
        }
        false => x,
    };
    let mean_square = (x.sqr()?.sum_keepdim(D::Minus1)? / size as f64)?;
    let normed = x.broadcast_div(&(mean_square + epsilon)?.sqrt()?)?.broadcast_mul(&weight.to_dtype(wide)?)?;
    let normed = match bias {
        Some(bias) => normed.broadcast_add(&bias.to_dtype(wide)?)?,
        None => normed,
    };
    normed.to_dtype(dtype)
}

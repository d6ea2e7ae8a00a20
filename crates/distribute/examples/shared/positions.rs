//! Positions of tokens, for the examples that are decoders.

use candle_core::{Device, Result, Tensor};

/// A number that is added to the scores of what is not to be seen.
pub(crate) const HIDDEN: f64 = -1e9;

/// The positional encoding of Vaswani et al., 2017, section 3.5, with the sines before the cosines.
pub(crate) fn sinusoids(length: usize, width: usize) -> Result<Tensor> {
    let angle =
        |position: usize, at: usize| position as f64 / 10_000f64.powf((at % (width / 2)) as f64 * 2.0 / width as f64);
    let value =
        |position, at| if at < width / 2 { angle(position, at).sin() } else { angle(position, at).cos() } as f32;
    let values: Vec<f32> = (0..length * width).map(|at| value(at / width, at % width)).collect();
    Tensor::from_vec(values, (length, width), &Device::Cpu)
}

/// Hides, from each token, those after it.
pub(crate) fn later(length: usize) -> Result<Tensor> {
    let hidden = |at: usize| if at % length > at / length { HIDDEN as f32 } else { 0.0 };
    Tensor::from_vec((0..length * length).map(hidden).collect(), (length, length), &Device::Cpu)
}

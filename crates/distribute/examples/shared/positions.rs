//! Positions of tokens, for the examples that are encoders and decoders.

use candle_core::{Device, Result, Tensor};

/// The positional encoding of Vaswani et al., 2017, section 3.5, with the sines before the cosines.
pub(crate) fn sinusoids(length: usize, width: usize) -> Result<Tensor> {
    let angle =
        |position: usize, at: usize| position as f64 / 10_000f64.powf((at % (width / 2)) as f64 * 2.0 / width as f64);
    let value =
        |position, at| if at < width / 2 { angle(position, at).sin() } else { angle(position, at).cos() } as f32;
    let values: Vec<f32> = (0..length * width).map(|at| value(at / width, at % width)).collect();
    Tensor::from_vec(values, (length, width), &Device::Cpu)
}

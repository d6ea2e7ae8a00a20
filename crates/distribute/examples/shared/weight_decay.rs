//! Weight decay as a term of the loss.

use candle_core::{Device, Result as CandleResult, Tensor};

/// Returns half the sum of squares of some weights, times `decay`: its gradient is `decay` times the weight.
pub(crate) fn penalty<'a>(weights: impl IntoIterator<Item = &'a Tensor>, decay: f64) -> CandleResult<Tensor> {
    let none = Tensor::new(0f32, &Device::Cpu)?;
    let sum = weights.into_iter().try_fold(none, |sum, weight| sum + weight.sqr()?.sum_all()?)?;
    sum * (decay / 2.0)
}

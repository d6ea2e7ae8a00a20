//! The parts of a transformer's layers, for the examples whose variables have the usual names.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use distribute::candle::{Linear, linear};

use crate::heads::MultiHead;

/// Two linear layers, applied to each token.
pub(crate) struct FeedForward(Linear, Linear);

impl FeedForward {
    pub(crate) fn new(width: usize, vb: &VarBuilder<'_>) -> Result<FeedForward> {
        Ok(FeedForward(linear(width, 4 * width, vb.pp("dense1"))?, linear(4 * width, width, vb.pp("dense2"))?))
    }
}

impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.relu()?)
    }
}

/// Creates attention whose projections have the names `query`, `key`, `value` and `output`.
pub(crate) fn multi_head(width: usize, heads: usize, vb: &VarBuilder<'_>) -> Result<MultiHead> {
    let projection = |name| linear(width, width, vb.pp(name));
    let (query, key, value, output) =
        (projection("query")?, projection("key")?, projection("value")?, projection("output")?);
    Ok(MultiHead { query, key, value, output, heads })
}

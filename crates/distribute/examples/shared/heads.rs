//! Multi-head attention, for the examples that are encoders and decoders.

use candle_core::{Module, Result, Tensor};
use distribute::candle::Linear;

use crate::attention::{KeysAndValues, attention};

/// The projections of multi-head attention.
pub(crate) struct MultiHead {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    pub(crate) heads: usize,
}

impl MultiHead {
    /// Projects (batch, length, width) to keys and values.
    pub(crate) fn keys_and_values(&self, x: &Tensor) -> Result<KeysAndValues> {
        Ok((self.split(&self.key.forward(x)?)?, self.split(&self.value.forward(x)?)?))
    }

    /// Attends from x, of shape (batch, length, width), and returns the same shape.
    pub(crate) fn attend(&self, x: &Tensor, seen: &KeysAndValues, mask: Option<&Tensor>) -> Result<Tensor> {
        let attended = attention(&self.split(&self.query.forward(x)?)?, seen, mask)?;
        self.output.forward(&attended.transpose(1, 2)?.flatten_from(2)?)
    }

    fn split(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        x.reshape((batch, length, self.heads, ()))?.transpose(1, 2)?.contiguous()
    }
}

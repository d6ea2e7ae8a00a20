//! Multi-head attention, for the examples that are encoders and decoders.

use candle_core::{Module, Result, Tensor};
use distribute::candle::{AttentionMask, Linear, attention};

/// The projections of multi-head attention.
pub(crate) struct MultiHead {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    pub(crate) heads: usize,
}

impl MultiHead {
    /// Projects (batch, length, width) to keys and values, each of shape (batch, heads, length, width of a head).
    pub(crate) fn keys_and_values(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((self.split(&self.key.forward(x)?)?, self.split(&self.value.forward(x)?)?))
    }

    /// Attends from x, of shape (batch, length, width), and returns the same shape.
    pub(crate) fn attend(
        &self,
        x: &Tensor,
        (keys, values): &(Tensor, Tensor),
        mask: AttentionMask<'_>,
    ) -> Result<Tensor> {
        let attended = attention(&self.split(&self.query.forward(x)?)?, keys, values, mask)?;
        self.output.forward(&attended.transpose(1, 2)?.flatten_from(2)?)
    }

    fn split(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        x.reshape((batch, length, self.heads, ()))?.transpose(1, 2)
    }
}

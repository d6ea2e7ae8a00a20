//! Attention, for the examples that are transformers.

use candle_core::{Result, Tensor};
use distribute::candle::AttentionMask;

/// Keys and values of each head, each of shape (batch, heads, length, width of a head).
pub(crate) type KeysAndValues = (Tensor, Tensor);

/// Computes scaled dot-product attention. The mask, if there is one, is added to the scores: 0 for keys that a query
/// sees, and a large negative number for the others.
///
/// Queries and the result have the shape (batch, heads, queries, width of a head); the mask is broadcast to (batch,
/// heads, queries, keys).
pub(crate) fn attention(queries: &Tensor, (keys, values): &KeysAndValues, mask: Option<&Tensor>) -> Result<Tensor> {
    distribute::candle::attention(queries, keys, values, mask.map_or(AttentionMask::None, AttentionMask::Additive))
}

//! The cache of keys and values, for the examples that generate sequences.

use candle_core::{Result, Tensor};

/// Keys and values of each head, each of shape (batch, heads, length, width of a head).
pub(crate) type KeysAndValues = (Tensor, Tensor);

/// Keeps the keys and values of what was generated before, and returns them with those that follow.
pub(crate) fn remember(seen: &mut Option<KeysAndValues>, (keys, values): KeysAndValues) -> Result<KeysAndValues> {
    let all = match seen.as_ref() {
        Some(seen) => (Tensor::cat(&[&seen.0, &keys], 2)?, Tensor::cat(&[&seen.1, &values], 2)?),
        None => (keys, values),
    };
    // Generation runs no backward.
    *seen = Some((all.0.detach(), all.1.detach()));
    Ok(all)
}

//! The values of greatest magnitude.

use super::{Compressor, Payload};

/// Sends a share of the values, those of greatest magnitude, and keeps the others.
pub(super) struct TopK {
    pub(super) share: f64,
}

impl TopK {
    fn count(&self, len: usize) -> usize {
        ((len as f64 * self.share).ceil() as usize).clamp(1, len.max(1)).min(len)
    }
}

impl Compressor for TopK {
    /// Selects the values; the payload has indices, then values.
    fn begin(&mut self, values: &mut [f32]) -> Payload {
        let count = self.count(values.len());
        let mut chosen: Vec<u32> = (0..values.len() as u32).collect();
        if count < chosen.len() {
            let magnitude = |index: &u32| values[*index as usize].abs();
            // Ties are broken by position, so that the choice does not depend on the algorithm.
            chosen.select_nth_unstable_by(count, |a, b| magnitude(b).total_cmp(&magnitude(a)).then(a.cmp(b)));
            chosen.truncate(count);
            chosen.sort_unstable();
        }
        let mut words = chosen.clone();
        words.extend(chosen.iter().map(|index| std::mem::take(&mut values[*index as usize]).to_bits()));
        Payload::Gather(words)
    }

    fn go_on(&mut self, received: Payload, _: &mut [f32], sum: &mut [f32]) -> Option<Payload> {
        let count = self.count(sum.len());
        if let (Payload::Gather(words), true) = (received, count > 0) {
            for rank in words.chunks_exact(2 * count) {
                let (indices, values) = rank.split_at(count);
                for (index, value) in indices.iter().zip(values) {
                    if let Some(sum) = sum.get_mut(*index as usize) {
                        *sum += f32::from_bits(*value);
                    }
                }
            }
        }
        None
    }
}

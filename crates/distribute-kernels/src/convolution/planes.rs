//! Planes of results, which may be pooled where they are computed.

use distribute_rows::{Blocks, Float};

use crate::pooling::pairs::{Lines, Pairs};

/// Computes planes of results in blocks, and pools them if they have windows: returns the largest elements then, and
/// their places.
pub(super) fn planes<T: Float, S>(
    blocks: Blocks,
    pairs: Option<Pairs>,
    state: impl Fn() -> S + Sync,
    write: impl Fn(&mut S, usize, &mut [T]) + Sync,
) -> (Vec<T>, Vec<u8>) {
    let Some(pairs) = pairs else { return (blocks.computed(state, write).0, Vec::new()) };
    let [from, to] = pairs.counts();
    let scaled = |count: usize| count / from * to;
    let pooled = Blocks { count: scaled(blocks.count), size: scaled(blocks.size), ..blocks };
    let state = || (state(), vec![T::default(); blocks.size.min(blocks.count)], Lines::default());
    let (y, places) = pooled.computed(state, |(state, planes, lines), block, out| {
        let planes = &mut planes[..out.len() / to * from];
        write(state, block, planes);
        pairs.largest(planes, out, lines)
    });
    (y, places.concat())
}

//! Blocks of queries and keys.

use distribute_rows::{Float, greatest, simd, sum, sum_of_pairs};

/// The state of a block of queries while blocks of keys come one after another.
pub(super) struct Block<T> {
    /// Queries and keys of a block; the last one has fewer.
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Scores of queries × keys, then their exponentials.
    pub(super) scores: Vec<T>,
    rows: Vec<Row<T>>,
}

/// The state of a query.
#[derive(Clone, Copy)]
struct Row<T> {
    /// The greatest score so far.
    top: T,
    /// The sum of exponentials of scores less `top`.
    sum: T,
    /// The product of the result and its gradient.
    product: T,
}

impl<T: Float> Block<T> {
    pub(super) fn new(queries: usize, keys: usize) -> Block<T> {
        let (queries, keys) = (queries.clamp(1, QUERIES), keys.clamp(1, KEYS));
        let row = Row { top: T::NEG_INFINITY, sum: T::default(), product: T::default() };
        Block { queries, keys, scores: vec![T::default(); queries * keys], rows: vec![row; queries] }
    }

    /// Forgets the queries before.
    pub(super) fn start(&mut self) {
        for row in &mut self.rows {
            (row.top, row.sum) = (T::NEG_INFINITY, T::default());
        }
    }

    /// Makes exponentials of scores, and scales sums and results so far to the greatest score now.
    pub(super) fn weigh(&mut self, queries: usize, keys: usize, width: usize, out: &mut [T]) {
        simd(
            #[inline(always)]
            || {
                let rows = self.rows.iter_mut().zip(self.scores.chunks_exact_mut(keys)).take(queries);
                for ((row, scores), out) in rows.zip(out.chunks_exact_mut(width)) {
                    let top = greatest(scores);
                    let top = if top > row.top { top } else { row.top };
                    // While all scores are -∞, so is their greatest, which is not subtracted from itself.
                    let base = if top > T::NEG_INFINITY { top } else { T::default() };
                    for score in scores.iter_mut() {
                        *score = (*score - base).exp();
                    }
                    let keep = (row.top - base).exp();
                    (row.top, row.sum) = (top, row.sum * keep + sum(scores, |weight| weight));
                    if keep != T::ONE {
                        out.iter_mut().for_each(|out| *out = *out * keep);
                    }
                }
            },
        );
    }

    /// Divides results by sums, and writes the logarithms of sums of exponentials.
    pub(super) fn finish(&self, width: usize, out: &mut [T], sums: &mut [T]) {
        simd(
            #[inline(always)]
            || {
                for ((row, sum), out) in self.rows.iter().zip(sums).zip(out.chunks_exact_mut(width)) {
                    let scale = T::ONE / row.sum;
                    out.iter_mut().for_each(|out| *out = *out * scale);
                    *sum = row.top + row.sum.ln();
                }
            },
        );
    }

    /// Computes the products of results and their gradients, in vectors that are `row` elements apart.
    pub(super) fn products(&mut self, queries: usize, width: usize, [one, other]: [&[T]; 2], row: usize) {
        simd(
            #[inline(always)]
            || {
                for (nth, state) in self.rows.iter_mut().enumerate().take(queries) {
                    let (one, other) = (&one[nth * row..][..width], &other[nth * row..][..width]);
                    state.product = sum_of_pairs(one, other, |one, other| one * other);
                }
            },
        );
    }

    /// Makes weights of scores, and gradients of scores of the weights' gradients.
    pub(super) fn change(&mut self, queries: usize, keys: usize, sums: &[T], change: &mut [T]) {
        simd(
            #[inline(always)]
            || {
                let rows = self.rows.iter().zip(sums).take(queries);
                let blocks = self.scores.chunks_exact_mut(keys).zip(change.chunks_exact_mut(keys));
                for ((row, sum), (scores, change)) in rows.zip(blocks) {
                    for (score, change) in scores.iter_mut().zip(change) {
                        *score = (*score - *sum).exp();
                        *change = *score * (*change - row.product);
                    }
                }
            },
        );
    }
}

/// Queries and keys of a block: its scores and their gradients are 32 KB each in f32, so both stay in the second-level
/// cache.
const QUERIES: usize = 64;
const KEYS: usize = 128;

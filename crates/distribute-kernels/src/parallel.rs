//! Division of work among threads.

use distribute_rows::{Float, simd};
use rayon::prelude::*;

/// The number of parts of a sum over a batch, whatever the number of threads.
const PARTS: usize = 16;

/// Adds up what `f` adds to zeros for a range of `count` items, in parts, and writes the sum to `out`.
pub(crate) fn sum_of_parts<T: Float>(out: &mut [T], count: usize, f: impl Fn(std::ops::Range<usize>, &mut [T]) + Sync) {
    out.fill(T::default());
    let size = count.div_ceil(PARTS).max(1);
    if count <= size {
        return f(0..count, out);
    }
    let part = |from: usize| {
        let mut sum = vec![T::default(); out.len()];
        f(from..count.min(from + size), &mut sum);
        sum
    };
    for part in &mapped(count.div_ceil(size), |at| part(at * size)) {
        add(out, part);
    }
}

/// Returns the results of `f` for numbers from 0, in order. Without threads nothing waits for the only one of a pool.
pub(crate) fn mapped<R: Send>(count: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    match rayon::current_num_threads() {
        1 => (0..count).map(&f).collect(),
        _ => (0..count).into_par_iter().map(&f).collect(),
    }
}

/// Calls `f` with each run of `size` elements, the last of which may be shorter, and its number.
pub(crate) fn each_chunk<T: Float>(out: &mut [T], size: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    match rayon::current_num_threads() {
        _ if out.is_empty() => {}
        1 => out.chunks_mut(size).enumerate().for_each(|(at, out)| f(at, out)),
        _ => out.par_chunks_mut(size).enumerate().for_each(|(at, out)| f(at, out)),
    }
}

/// Returns how many of `count` items, whose results do not depend on each other, a thread takes at once.
pub(crate) fn share(count: usize) -> usize {
    count.div_ceil(4 * rayon::current_num_threads()).max(1)
}

/// Adds numbers to others, element by element.
pub(crate) fn add<T: Float>(sums: &mut [T], others: &[T]) {
    simd(
        #[inline(always)]
        || {
            for (sum, other) in sums.iter_mut().zip(others) {
                *sum += *other;
            }
        },
    );
}

/// Checks the length of a slice.
///
/// # Panics
/// If it does not have the expected length.
pub(crate) fn check(what: &str, len: usize, expected: usize) {
    assert!(len == expected, "{what} has {len} elements; give {expected}");
}

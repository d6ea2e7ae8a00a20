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
    let parts: Vec<Vec<T>> = (0..count.div_ceil(size)).into_par_iter().map(|part_of| part(part_of * size)).collect();
    for part in &parts {
        add(out, part);
    }
}

/// Adds numbers to others, element by element.
pub(crate) fn add<T: Float>(sums: &mut [T], others: &[T]) {
    simd(|| {
        for (sum, other) in sums.iter_mut().zip(others) {
            *sum += *other;
        }
    });
}

/// Checks the length of a slice.
///
/// # Panics
/// If it does not have the expected length.
pub(crate) fn check(what: &str, len: usize, expected: usize) {
    assert!(len == expected, "{what} has {len} elements; give {expected}");
}

//! Division of work among threads.

use std::ops::Range;

use distribute_rows::{Float, simd};

/// The most parts of a sum over a batch, whatever the number of threads.
const PARTS: usize = 16;

/// Returns the sum of `len` elements of what `f` adds to zeros for a range of `count` items, in parts of `least` items
/// or more.
pub(crate) fn sum_of_parts<T: Float>(
    len: usize,
    count: usize,
    least: usize,
    f: impl Fn(Range<usize>, &mut [T]) + Sync,
) -> Vec<T> {
    let size = count.div_ceil(PARTS).max(least).max(1);
    let part = |at: usize| {
        let mut sum = vec![T::default(); len];
        f(at * size..count.min((at + 1) * size), &mut sum);
        sum
    };
    let mut parts = mapped(count.div_ceil(size), part).into_iter();
    let mut sum = parts.next().unwrap_or_else(|| vec![T::default(); len]);
    parts.for_each(|part| add(&mut sum, &part));
    sum
}

/// Returns the results of `f` for numbers from 0, in order. Without threads nothing waits for the only one of a pool.
pub(crate) fn mapped<R: Send>(count: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    /// Calls `f` for numbers from `first`.
    fn each<R: Send>(first: usize, out: &mut [Option<R>], f: &(dyn Fn(usize) -> R + Sync)) {
        match out {
            [] => {}
            [out] => *out = Some(f(first)),
            _ => {
                let middle = out.len() / 2;
                let (out, other) = out.split_at_mut(middle);
                rayon::join(|| each(first, out, f), || each(first + middle, other, f));
            }
        }
    }

    if rayon::current_num_threads() == 1 {
        return (0..count).map(f).collect();
    }
    let mut out: Vec<Option<R>> = (0..count).map(|_| None).collect();
    each(0, &mut out, &f);
    out.into_iter().flatten().collect()
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

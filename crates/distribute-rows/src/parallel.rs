//! Division of rows among threads.

use rayon::prelude::*;

use crate::Float;

/// The number of elements below which a thread would cost more than it saves.
const LEAST: usize = 16 * 1024;

/// Calls `f` with the number of each row and its `size` results, which it computes from `cost` elements.
pub(crate) fn each_row<T: Send>(out: &mut [T], size: usize, cost: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if out.is_empty() {
        return;
    }
    let rows = LEAST.div_ceil(cost).max(1);
    let block = |(block, out): (usize, &mut [T])| {
        simd(
            #[inline(always)]
            || {
                for (row, out) in out.chunks_exact_mut(size).enumerate() {
                    f(block * rows + row, out);
                }
            },
        );
    };
    // A pool of one thread would only be waited for.
    if out.len() <= rows * size || rayon::current_num_threads() == 1 {
        return out.chunks_mut(rows * size).enumerate().for_each(block);
    }
    out.par_chunks_mut(rows * size).enumerate().for_each(block);
}

/// Calls `f` with the position of the first of a run of elements, and the results of the run.
pub(crate) fn each_element<T: Send>(out: &mut [T], f: impl Fn(usize, &mut [T]) + Sync) {
    const RUN: usize = 1024;
    let whole = out.len() / RUN * RUN;
    let (runs, rest) = out.split_at_mut(whole);
    each_row(
        runs,
        RUN,
        RUN,
        #[inline(always)]
        |run, out| f(run * RUN, out),
    );
    simd(
        #[inline(always)]
        || f(whole, rest),
    );
}

/// Returns zeros, which the threads of the pool write: new memory costs most where it is first written.
///
/// # Examples
/// ```
/// assert_eq!(distribute_rows::zeros::<f32>(3), [0.0; 3]);
/// ```
pub fn zeros<T: Float>(count: usize) -> Vec<T> {
    /// The number of elements that are worth a thread.
    const SHARE: usize = 1 << 16;
    if count <= SHARE || rayon::current_num_threads() == 1 {
        return vec![T::default(); count];
    }
    rayon::iter::repeat_n(T::default(), count).with_min_len(SHARE).collect()
}

/// Runs a function whose loops, and those of the functions inlined in it, use the processor's SIMD instructions.
///
/// Mark closures `#[inline(always)]`, those too that they call: one that is not inlined is compiled for the oldest
/// processor, which shows in no result.
///
/// # Examples
/// ```
/// let x = [1f32, 2.0, 3.0];
/// assert_eq!(distribute_rows::simd(#[inline(always)] || distribute_rows::sum(&x, |x| x * x)), 14.0);
/// ```
#[inline(always)]
pub fn simd<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Checks the length of a slice.
///
/// # Panics
/// If it does not have the expected length, or does not consist of rows of `size` elements.
pub(crate) fn check(what: &str, len: usize, size: usize, expected: usize) {
    assert!(size > 0 && len.is_multiple_of(size), "{what}: {len} elements do not make rows of {size}");
    assert!(len == expected, "{what} has {len} elements; give {expected}");
}

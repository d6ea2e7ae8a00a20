//! Division of rows and elements into blocks.

use crate::{Blocks, Float};

/// Returns rows of `size` results. `f` gets the number of a row and room for it, and writes each of its elements.
pub(crate) fn rows<T: Float>(count: usize, size: usize, f: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    let rows = rows_of_block(size);
    Blocks { count: count * size, size: rows * size, cost: rows * size }.results(|block, room| {
        simd(
            #[inline(always)]
            || {
                for (row, room) in room.chunks_exact_mut(size).enumerate() {
                    f(block * rows + row, room);
                }
            },
        );
    })
}

/// Returns the number of rows of a block, of `size` elements each.
pub(crate) fn rows_of_block(size: usize) -> usize {
    (BLOCK / size.max(1)).max(1)
}

/// Returns `count` results. `f` gets the position of the first of a run of elements, and room for the run, and writes
/// each of its elements.
pub(crate) fn each_element<T: Float>(count: usize, f: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    Blocks { count, size: BLOCK, cost: BLOCK }.results(|block, room| {
        simd(
            #[inline(always)]
            || f(block * BLOCK, room),
        );
    })
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

/// The elements of a block, which a first-level cache holds with those that it is computed from.
const BLOCK: usize = 4 * 1024;

//! The arithmetic of reductions on slices of host memory.
//!
//! Buffers are bytes that hold whole elements of a type that is given at run time. Sources are combined in the given
//! order, element by element, so results repeat bit for bit, whichever instructions the processor has.
//!
//! - Integer sums and products wrap, and integer means round towards zero.
//! - A minimum or maximum is NaN if any value is NaN. -0 is less than 0. Every result that is NaN has the same bits.
//! - f16 and bf16 are combined in f32.
//!
//! Loops are written over plain slices so that the compiler vectorises them, for AVX2 too where the processor has it.
//!
//! # Panics
//! All functions panic if a buffer does not hold whole elements or is not aligned for them, and may panic if lengths do
//! not fit together.
//!
//! # Examples
//! ```
//! use distribute_arithmetic::{Combine, combine};
//! use distribute_types::DType;
//!
//! let (mut target, source) = ([1u8, 200], [2u8, 100]);
//! combine(DType::U8, Combine::Sum, &mut target, &source);
//! assert_eq!(target, [3, 44]);
//! ```

use bytemuck::{cast_slice, cast_slice_mut};
use distribute_types::{DType, with_dtype};
use half::{bf16, f16};

use crate::number::Number;

mod number;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Elements that are accumulated at a time when more than two sources are combined: 4 KiB of f32, resident in L1.
const BLOCK: usize = 1024;

/// How two elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Their sum.
    Sum,
    /// The lesser one.
    Min,
    /// The greater one.
    Max,
    /// Their product.
    Product,
    /// The bits that both have. Floats have no bitwise operations: the result is the first of them.
    BitAnd,
    /// The bits that either has.
    BitOr,
    /// The bits that one of them has.
    BitXor,
}

/// A float of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortFloat {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

/// The result of several sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// One after another combined.
    Combined(Combine),
    /// Their sum, which does not overflow, divided by a number above 0.
    Mean(u32),
}

/// The buffers that receive the result of a combination.
#[derive(Clone, Copy, Debug)]
pub enum Keep {
    /// Every one.
    All,
    /// The one with this index.
    One(usize),
}

/// Calls `$body` with `$f` bound to the function that combines two elements.
macro_rules! with_op {
    ($op:expr, $t:ty, $f:ident => $body:expr) => {
        match $op {
            Combine::Sum => {
                let $f = <$t as Number>::sum;
                $body
            }
            Combine::Min => {
                let $f = <$t as Number>::min;
                $body
            }
            Combine::Max => {
                let $f = <$t as Number>::max;
                $body
            }
            Combine::Product => {
                let $f = <$t as Number>::product;
                $body
            }
            Combine::BitAnd => {
                let $f = <$t as Number>::bit_and;
                $body
            }
            Combine::BitOr => {
                let $f = <$t as Number>::bit_or;
                $body
            }
            Combine::BitXor => {
                let $f = <$t as Number>::bit_xor;
                $body
            }
        }
    };
}

/// Defines functions that run their `_here` form, compiled for the processor in use if that is a newer one.
///
/// Elements are combined one by one in every form, so results are equal bit for bit.
macro_rules! dispatched {
    ($($(#[$doc:meta])* $name:ident = $here:ident($($arg:ident: $type:ty),*);)*) => {
        $(
            $(#[$doc])*
            pub fn $name($($arg: $type),*) {
                #[cfg(target_arch = "x86_64")]
                if x86::is_newer() {
                    return x86::$name($($arg),*);
                }
                portable::$name($($arg),*);
            }
        )*

        /// The functions as every processor of the architecture can run them, with which those of newer ones are
        /// compared.
        pub mod portable {
            use super::*;

            $(
                $(#[$doc])*
                pub fn $name($($arg: $type),*) {
                    $here($($arg),*);
                }
            )*
        }

        #[cfg(target_arch = "x86_64")]
        mod x86 {
            #![expect(unsafe_code, reason = "only the caller knows which instructions the processor has")]

            use super::*;

            pub(super) fn is_newer() -> bool {
                std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c")
            }

            $(
                pub(super) fn $name($($arg: $type),*) {
                    #[target_feature(enable = "avx2,f16c")]
                    fn newer($($arg: $type),*) {
                        $here($($arg),*);
                    }
                    // SAFETY: `is_newer` was checked before.
                    unsafe { newer($($arg),*) }
                }
            )*
        }
    };
}

dispatched! {
    /// Combines each element of `target` with that of `source`, which has the same length.
    combine = combine_here(dtype: DType, op: Combine, target: &mut [u8], source: &[u8]);

    /// Divides every element by `n`, integers with rounding towards zero: the last step of a mean of f32 or f64. Of
    /// other types a sum may have overflowed; their means have an [accumulator](mean_accumulator).
    divide = divide_here(dtype: DType, target: &mut [u8], n: u32);

    /// Sums sources of equal length into the [accumulator](mean_accumulator) of a mean over `n` ranks.
    accumulate_mean = accumulate_mean_here(dtype: DType, n: u32, sources: &[&[u8]], accumulated: &mut [u8]);

    /// Writes the mean over `n` ranks from the sum of their accumulators.
    finish_mean = finish_mean_here(dtype: DType, n: u32, accumulated: &[u8], target: &mut [u8]);

    /// Reduces buffers of equal length in order, and stores the result in those that `keep` names.
    reduce_in_place = reduce_in_place_here(
        dtype: DType, reduce: Reduce, keep: Keep, buffers: &mut [&mut [u8]]
    );

    /// Reduces sources of equal length in order into `target`, which has that length too.
    reduce_to_one = reduce_to_one_here(
        dtype: DType, reduce: Reduce, sources: &[&[u8]], target: &mut [u8]
    );

    /// Rounds values; the rounding error is left in `values`, or 0 if it is not finite.
    round_off = round_off_here(to: ShortFloat, values: &mut [f32], short: &mut [u8]);

    /// Converts values of 16 bits.
    widen = widen_here(from: ShortFloat, short: &[u8], values: &mut [f32]);
}

#[inline(always)]
fn round_off_here(to: ShortFloat, values: &mut [f32], short: &mut [u8]) {
    #[inline(always)]
    fn all<T: Number<Wide = f32>>(values: &mut [f32], short: &mut [T]) {
        for (value, short) in values.iter_mut().zip(short) {
            *short = T::from_wide(*value);
            let left = *value - short.to_wide();
            // Infinity and NaN are sent once; they are not kept as an error.
            *value = if left.is_finite() { left } else { 0.0 };
        }
    }
    match to {
        ShortFloat::F16 => all::<f16>(values, cast_slice_mut(short)),
        ShortFloat::Bf16 => all::<bf16>(values, cast_slice_mut(short)),
    }
}

#[inline(always)]
fn widen_here(from: ShortFloat, short: &[u8], values: &mut [f32]) {
    #[inline(always)]
    fn all<T: Number<Wide = f32>>(short: &[T], values: &mut [f32]) {
        for (value, short) in values.iter_mut().zip(short) {
            *value = short.to_wide();
        }
    }
    match from {
        ShortFloat::F16 => all::<f16>(cast_slice(short), values),
        ShortFloat::Bf16 => all::<bf16>(cast_slice(short), values),
    }
}

#[inline(always)]
fn combine_here(dtype: DType, op: Combine, target: &mut [u8], source: &[u8]) {
    with_dtype!(dtype, T => with_op!(op, T, f => {
        let (target, source): (&mut [T], &[T]) = (cast_slice_mut(target), cast_slice(source));
        for (a, b) in target.iter_mut().zip(source) {
            *a = settled(f(a.to_wide(), b.to_wide()));
        }
    }));
}

#[inline(always)]
fn divide_here(dtype: DType, target: &mut [u8], n: u32) {
    with_dtype!(dtype, T => {
        cast_slice_mut::<_, T>(target).iter_mut().for_each(|a| *a = T::mean_of_exact(a.to_exact(), n));
    });
}

/// Returns the accumulator of a mean between processes, if it is not the data type itself: its element type, and the
/// number of its elements per value. A sum of 16-bit floats or of integers may overflow the type even if the mean does
/// not.
pub fn mean_accumulator(dtype: DType) -> Option<(DType, usize)> {
    match dtype {
        DType::F32 | DType::F64 => None,
        DType::F16 | DType::BF16 => Some((DType::F32, 1)),
        _ => Some((DType::I64, 2)),
    }
}

#[inline(always)]
fn accumulate_mean_here(dtype: DType, n: u32, sources: &[&[u8]], accumulated: &mut [u8]) {
    #[inline(always)]
    fn all<T: Number>(n: u32, sources: &[&[u8]], accumulated: &mut [T::MeanAccumulator]) {
        let mut exact = [T::Exact::default(); BLOCK];
        for (block, accumulated) in accumulated.chunks_mut(BLOCK).enumerate() {
            let exact = &mut exact[..accumulated.len()];
            let bytes = block * BLOCK * size_of::<T>()..(block * BLOCK + accumulated.len()) * size_of::<T>();
            for (index, source) in sources.iter().enumerate() {
                accumulate(exact, cast_slice::<_, T>(&source[bytes.clone()]), index == 0, &T::to_exact, &T::add_exact);
            }
            accumulated.iter_mut().zip(exact).for_each(|(accumulated, sum)| *accumulated = T::to_accumulator(*sum, n));
        }
    }
    with_dtype!(dtype, T => all::<T>(n, sources, cast_slice_mut(accumulated)));
}

#[inline(always)]
fn finish_mean_here(dtype: DType, n: u32, accumulated: &[u8], target: &mut [u8]) {
    #[inline(always)]
    fn all<T: Number>(n: u32, accumulated: &[T::MeanAccumulator], target: &mut [T]) {
        target.iter_mut().zip(accumulated).for_each(|(target, sum)| *target = T::mean_of_accumulated(*sum, n));
    }
    with_dtype!(dtype, T => all::<T>(n, cast_slice(accumulated), cast_slice_mut(target)));
}

#[inline(always)]
fn reduce_in_place_here(dtype: DType, reduce: Reduce, keep: Keep, buffers: &mut [&mut [u8]]) {
    with_dtype!(dtype, T => match reduce {
        Reduce::Combined(op) => with_op!(op, T, f => in_place(buffers, keep, T::to_wide, f, settled::<T>)),
        Reduce::Mean(n) => in_place(buffers, keep, T::to_exact, T::add_exact, |sum| settled_mean::<T>(sum, n)),
    });
}

#[inline(always)]
fn reduce_to_one_here(dtype: DType, reduce: Reduce, sources: &[&[u8]], target: &mut [u8]) {
    with_dtype!(dtype, T => match reduce {
        Reduce::Combined(op) => with_op!(op, T, f => to_one(sources, target, T::to_wide, f, settled::<T>)),
        Reduce::Mean(n) => to_one(sources, target, T::to_exact, T::add_exact, |sum| settled_mean::<T>(sum, n)),
    });
}

/// Returns the result of a combination.
#[inline(always)]
fn settled<T: Number>(wide: T::Wide) -> T {
    T::from_wide(T::settle(wide))
}

/// Returns the mean of `n` sources.
#[inline(always)]
fn settled_mean<T: Number>(sum: T::Exact, n: u32) -> T {
    settled(T::mean_of_exact(sum, n).to_wide())
}

#[inline(always)]
fn in_place<T: Number, W: Copy + Default>(
    buffers: &mut [&mut [u8]],
    keep: Keep,
    widen: impl Fn(T) -> W,
    combine: impl Fn(W, W) -> W,
    finish: impl Fn(W) -> T,
) {
    if let ([a, b], Keep::All) = (&mut *buffers, keep) {
        let (a, b): (&mut [T], &mut [T]) = (cast_slice_mut(a), cast_slice_mut(b));
        for (x, y) in a.iter_mut().zip(b) {
            let result = finish(combine(widen(*x), widen(*y)));
            *x = result;
            *y = result;
        }
        return;
    }
    let len = buffers.first().map_or(0, |buffer| buffer.len() / size_of::<T>());
    let mut wide = [W::default(); BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let wide = &mut wide[..BLOCK.min(len - start)];
        let bytes = start * size_of::<T>()..(start + wide.len()) * size_of::<T>();
        for (index, buffer) in buffers.iter().enumerate() {
            accumulate(wide, cast_slice(&buffer[bytes.clone()]), index == 0, &widen, &combine);
        }
        for (index, buffer) in buffers.iter_mut().enumerate() {
            if matches!(keep, Keep::All) || matches!(keep, Keep::One(one) if one == index) {
                store(wide, cast_slice_mut(&mut buffer[bytes.clone()]), &finish);
            }
        }
    }
}

#[inline(always)]
fn to_one<T: Number, W: Copy + Default>(
    sources: &[&[u8]],
    target: &mut [u8],
    widen: impl Fn(T) -> W,
    combine: impl Fn(W, W) -> W,
    finish: impl Fn(W) -> T,
) {
    let len = target.len() / size_of::<T>();
    let mut wide = [W::default(); BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let wide = &mut wide[..BLOCK.min(len - start)];
        let bytes = start * size_of::<T>()..(start + wide.len()) * size_of::<T>();
        for (index, source) in sources.iter().enumerate() {
            accumulate(wide, cast_slice(&source[bytes.clone()]), index == 0, &widen, &combine);
        }
        store(wide, cast_slice_mut(&mut target[bytes]), &finish);
    }
}

#[inline(always)]
fn accumulate<T: Number, W: Copy>(
    wide: &mut [W],
    source: &[T],
    first: bool,
    widen: &impl Fn(T) -> W,
    combine: &impl Fn(W, W) -> W,
) {
    if first {
        for (acc, x) in wide.iter_mut().zip(source) {
            *acc = widen(*x);
        }
    } else {
        for (acc, x) in wide.iter_mut().zip(source) {
            *acc = combine(*acc, widen(*x));
        }
    }
}

#[inline(always)]
fn store<T: Number, W: Copy>(wide: &[W], target: &mut [T], finish: &impl Fn(W) -> T) {
    for (x, acc) in target.iter_mut().zip(wide) {
        *x = finish(*acc);
    }
}

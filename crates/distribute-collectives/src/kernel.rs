//! The arithmetic of reductions, on contiguous memory.
//!
//! Loops are written over plain slices so that the compiler vectorises them. Sources are always combined in the given
//! order, so results repeat bit for bit.

use bytemuck::{cast_slice, cast_slice_mut};
use distribute_device::{DType, Element};
use distribute_types::with_dtype;
use half::{bf16, f16};

use crate::ReduceOp;

/// Elements that are accumulated at a time when more than two sources are combined: 4 KiB of f32, resident in L1.
const BLOCK: usize = 1024;

/// An element with the arithmetic that reductions need. It is accumulated in `Wide`.
pub(crate) trait Number: Element {
    type Wide: Copy + Default;
    /// The type in which a mean is accumulated: no sum of 2³¹ elements overflows it.
    type Exact: Copy + Default;
    /// The type in which a mean is accumulated between processes: `f32` for 16-bit floats; quotient and remainder as
    /// `i64` for integers.
    type MeanAccumulator: bytemuck::Pod;
    fn to_wide(self) -> Self::Wide;
    fn from_wide(wide: Self::Wide) -> Self;
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn product(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// Maps every NaN to one bit pattern: the compiler decides which of two operands' patterns an addition keeps.
    fn settle(a: Self::Wide) -> Self::Wide;
    fn to_exact(self) -> Self::Exact;
    fn add_exact(a: Self::Exact, b: Self::Exact) -> Self::Exact;
    fn mean_of_exact(sum: Self::Exact, n: u32) -> Self;
    fn to_accumulator(sum: Self::Exact, n: u32) -> Self::MeanAccumulator;
    fn mean_of_accumulated(sum: Self::MeanAccumulator, n: u32) -> Self;
    /// Bits are combined in integers only, which is checked before; floats are returned unchanged.
    fn bit_and(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn bit_or(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn bit_xor(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! floats {
    ($($type:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Number for $type {
            type Wide = $wide;
            type Exact = $wide;
            type MeanAccumulator = $wide;
            #[inline(always)]
            fn to_wide(self) -> $wide { $widen(self) }
            #[inline(always)]
            fn from_wide(wide: $wide) -> Self { $narrow(wide) }
            #[inline(always)]
            fn sum(a: $wide, b: $wide) -> $wide { a + b }
            #[inline(always)]
            fn product(a: $wide, b: $wide) -> $wide { a * b }
            #[inline(always)]
            fn min(a: $wide, b: $wide) -> $wide {
                // -0 is less than 0, in either order; equal values otherwise have equal bits.
                let least = if a < b { a } else { b };
                let least = if a == b { <$wide>::from_bits(a.to_bits() | b.to_bits()) } else { least };
                if a.is_nan() | b.is_nan() { <$wide>::NAN } else { least }
            }
            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide {
                let greatest = if a > b { a } else { b };
                let greatest = if a == b { <$wide>::from_bits(a.to_bits() & b.to_bits()) } else { greatest };
                if a.is_nan() | b.is_nan() { <$wide>::NAN } else { greatest }
            }
            #[inline(always)]
            fn settle(a: $wide) -> $wide { if a.is_nan() { <$wide>::NAN } else { a } }
            #[inline(always)]
            fn to_exact(self) -> $wide { self.to_wide() }
            #[inline(always)]
            fn add_exact(a: $wide, b: $wide) -> $wide { a + b }
            #[inline(always)]
            fn mean_of_exact(sum: $wide, n: u32) -> $type { <$type>::from_wide(sum / (n as $wide)) }
            #[inline(always)]
            fn to_accumulator(sum: $wide, _: u32) -> $wide { sum }
            #[inline(always)]
            fn mean_of_accumulated(sum: $wide, n: u32) -> $type { <$type>::from_wide(sum / (n as $wide)) }
            #[inline(always)]
            fn bit_and(a: $wide, _: $wide) -> $wide { a }
            #[inline(always)]
            fn bit_or(a: $wide, _: $wide) -> $wide { a }
            #[inline(always)]
            fn bit_xor(a: $wide, _: $wide) -> $wide { a }
        }
    )*};
}

macro_rules! integers {
    ($($type:ty, $exact:ty;)*) => {$(
        impl Number for $type {
            type Wide = $type;
            type Exact = $exact;
            type MeanAccumulator = [i64; 2];
            #[inline(always)]
            fn to_wide(self) -> $type { self }
            #[inline(always)]
            fn from_wide(wide: $type) -> Self { wide }
            #[inline(always)]
            fn sum(a: $type, b: $type) -> $type { a.wrapping_add(b) }
            #[inline(always)]
            fn product(a: $type, b: $type) -> $type { a.wrapping_mul(b) }
            #[inline(always)]
            fn min(a: $type, b: $type) -> $type { Ord::min(a, b) }
            #[inline(always)]
            fn max(a: $type, b: $type) -> $type { Ord::max(a, b) }
            #[inline(always)]
            fn settle(a: $type) -> $type { a }
            #[inline(always)]
            fn to_exact(self) -> $exact { <$exact>::from(self) }
            #[inline(always)]
            fn add_exact(a: $exact, b: $exact) -> $exact { a + b }
            #[inline(always)]
            fn mean_of_exact(sum: $exact, n: u32) -> $type { (sum / <$exact>::from(n)) as $type }
            #[inline(always)]
            fn to_accumulator(sum: $exact, n: u32) -> [i64; 2] {
                [sum.div_euclid(n.into()) as i64, sum.rem_euclid(n.into()) as i64]
            }
            #[inline(always)]
            fn mean_of_accumulated([quotient, remainder]: [i64; 2], n: u32) -> $type {
                ((i128::from(quotient) * i128::from(n) + i128::from(remainder)) / i128::from(n)) as $type
            }
            #[inline(always)]
            fn bit_and(a: $type, b: $type) -> $type { a & b }
            #[inline(always)]
            fn bit_or(a: $type, b: $type) -> $type { a | b }
            #[inline(always)]
            fn bit_xor(a: $type, b: $type) -> $type { a ^ b }
        }
    )*};
}

floats! {
    f32, f32, std::convert::identity, std::convert::identity;
    f64, f64, std::convert::identity, std::convert::identity;
    f16, f32, widen_f16, narrow_f16;
    bf16, f32, widen_bf16, narrow_bf16;
}

/// Written without branches, so that loops of it are vectorised. The exponent is adjusted by a multiplication, which
/// also normalises denormals.
#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let moved = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if moved >= 65536.0 { 0x7f80_0000 } else { 0 };
    f32::from_bits(moved.to_bits() | special | (bits & 0x8000) << 16)
}

/// Rounds to nearest even; a NaN stays a NaN. Written without branches, so that loops of it are vectorised.
///
/// # Source
/// Giesen, "Half-precision floats: conversion", 2012: `float_to_half_fast3_rtne`.
#[inline(always)]
fn narrow_f16(x: f32) -> f16 {
    let sign = x.to_bits() & 0x8000_0000;
    let bits = x.to_bits() ^ sign;
    let special = if bits > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    // This addition leaves the rounded denormal in the lowest bits.
    let denormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + ((bits >> 13) & 1)) >> 13;
    let small = if bits < 113 << 23 { denormal } else { normal };
    let narrow = if bits >= (127 + 16) << 23 { special } else { small };
    f16::from_bits((narrow | sign >> 16) as u16)
}

/// Written without the branch for signalling NaNs, so that loops of it are vectorised.
#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to nearest even; a NaN stays a NaN. Written without branches, so that loops of it are vectorised.
#[inline(always)]
fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}
integers!(i8, i64; u8, i64; i32, i64; u32, i64; i64, i128; u64, i128;);

/// Calls `$body` with `$f` bound to the combining function of a reduction; `Mean` combines as `Sum`.
macro_rules! with_op {
    ($op:expr, $t:ty, $f:ident => $body:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Mean => {
                let $f = <$t as Number>::sum;
                $body
            }
            ReduceOp::Min => {
                let $f = <$t as Number>::min;
                $body
            }
            ReduceOp::Max => {
                let $f = <$t as Number>::max;
                $body
            }
            ReduceOp::Product => {
                let $f = <$t as Number>::product;
                $body
            }
            ReduceOp::BitAnd => {
                let $f = <$t as Number>::bit_and;
                $body
            }
            ReduceOp::BitOr => {
                let $f = <$t as Number>::bit_or;
                $body
            }
            ReduceOp::BitXor => {
                let $f = <$t as Number>::bit_xor;
                $body
            } // Carried by its own function.
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
            pub(crate) fn $name($($arg: $type),*) {
                #[cfg(target_arch = "x86_64")]
                if x86::is_newer() {
                    return x86::$name($($arg),*);
                }
                $here($($arg),*);
            }
        )*

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
    /// Computes `target = target ∘ source`, element by element. `Mean` adds; [`divide`] follows at the end.
    ///
    /// Both must hold whole elements, be aligned for the type, and have equal lengths.
    combine = combine_here(dtype: DType, op: ReduceOp, target: &mut [u8], source: &[u8]);

    /// Divides every element by `n`: the last step of a mean of `f32` or `f64`. Means of other types have an
    /// [accumulator](mean_accumulator).
    divide = divide_here(dtype: DType, target: &mut [u8], n: u32);

    /// Sums sources of equal length into the [accumulator](mean_accumulator) of a mean over `n` ranks.
    accumulate_mean = accumulate_mean_here(dtype: DType, n: u32, sources: &[&[u8]], accumulated: &mut [u8]);

    /// Writes the mean over `n` ranks from the sum of their accumulators.
    finish_mean = finish_mean_here(dtype: DType, n: u32, accumulated: &[u8], target: &mut [u8]);

    /// Combines buffers of equal length in order and stores the result in those that `keep` names.
    reduce_in_place = reduce_in_place_here(
        dtype: DType, op: ReduceOp, divisor: Option<u32>, keep: Keep, buffers: &mut [&mut [u8]]
    );

    /// Combines sources of equal length in order into `target`, which is not a source.
    reduce_to_one = reduce_to_one_here(
        dtype: DType, op: ReduceOp, divisor: Option<u32>, sources: &[&[u8]], target: &mut [u8]
    );

    /// Rounds values to a shorter type; the rounding error is left in `values`, unless it is not finite.
    round_off = round_off_here(dtype: DType, values: &mut [f32], short: &mut [u8]);

    /// Converts values of a shorter type.
    widen = widen_here(dtype: DType, short: &[u8], values: &mut [f32]);
}

#[inline(always)]
fn round_off_here(dtype: DType, values: &mut [f32], short: &mut [u8]) {
    #[inline(always)]
    fn all<T: Number<Wide = f32>>(values: &mut [f32], short: &mut [T]) {
        for (value, short) in values.iter_mut().zip(short) {
            *short = T::from_wide(*value);
            let left = *value - short.to_wide();
            // Infinity and NaN are sent once; they are not kept as an error.
            *value = if left.is_finite() { left } else { 0.0 };
        }
    }
    match dtype {
        DType::F16 => all::<f16>(values, cast_slice_mut(short)),
        DType::BF16 => all::<bf16>(values, cast_slice_mut(short)),
        _ => {}
    }
}

#[inline(always)]
fn widen_here(dtype: DType, short: &[u8], values: &mut [f32]) {
    #[inline(always)]
    fn all<T: Number<Wide = f32>>(short: &[T], values: &mut [f32]) {
        for (value, short) in values.iter_mut().zip(short) {
            *value = short.to_wide();
        }
    }
    match dtype {
        DType::F16 => all::<f16>(cast_slice(short), values),
        DType::BF16 => all::<bf16>(cast_slice(short), values),
        _ => {}
    }
}

#[inline(always)]
fn combine_here(dtype: DType, op: ReduceOp, target: &mut [u8], source: &[u8]) {
    with_dtype!(dtype, T => with_op!(op, T, f => {
        let (target, source): (&mut [T], &[T]) = (cast_slice_mut(target), cast_slice(source));
        for (a, b) in target.iter_mut().zip(source) {
            *a = T::from_wide(T::settle(f(a.to_wide(), b.to_wide())));
        }
    }));
}

#[inline(always)]
fn divide_here(dtype: DType, target: &mut [u8], n: u32) {
    match dtype {
        DType::F32 => cast_slice_mut::<_, f32>(target).iter_mut().for_each(|a| *a /= n as f32),
        DType::F64 => cast_slice_mut::<_, f64>(target).iter_mut().for_each(|a| *a /= f64::from(n)),
        _ => {}
    }
}

/// Returns the accumulator of a mean between processes, if it is not the data type itself: its element type, and the
/// number of its elements per value. A sum of 16-bit floats or of integers may overflow the type even if the mean does
/// not.
pub(crate) fn mean_accumulator(dtype: DType) -> Option<(DType, usize)> {
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

/// The buffers that receive the result of a combination.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keep {
    All,
    One(usize),
}

#[inline(always)]
fn reduce_in_place_here(dtype: DType, op: ReduceOp, divisor: Option<u32>, keep: Keep, buffers: &mut [&mut [u8]]) {
    with_dtype!(dtype, T => match divisor {
        None => with_op!(op, T, f => in_place(buffers, keep, T::to_wide, f, T::from_wide)),
        Some(n) => in_place(buffers, keep, T::to_exact, T::add_exact, |sum| T::mean_of_exact(sum, n)),
    });
}

#[inline(always)]
fn reduce_to_one_here(dtype: DType, op: ReduceOp, divisor: Option<u32>, sources: &[&[u8]], target: &mut [u8]) {
    with_dtype!(dtype, T => match divisor {
        None => with_op!(op, T, f => to_one(sources, target, T::to_wide, f, T::from_wide)),
        Some(n) => to_one(sources, target, T::to_exact, T::add_exact, |sum| T::mean_of_exact(sum, n)),
    });
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

#[cfg(test)]
mod tests;

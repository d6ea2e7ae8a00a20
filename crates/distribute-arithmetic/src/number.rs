//! The arithmetic of one element.

use distribute_types::Element;
use half::{bf16, f16};

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
                // Rounded down, quotients of u64 need all 64 bits, and those of i64 may leave them for a moment.
                let floor = quotient.wrapping_add(remainder / i64::from(n));
                let is_negative = <$type>::MIN != 0 && floor < 0;
                floor.wrapping_add(i64::from(is_negative && remainder % i64::from(n) > 0)) as $type
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
pub(crate) fn widen_f16(x: f16) -> f32 {
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
pub(crate) fn narrow_f16(x: f32) -> f16 {
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
pub(crate) fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to nearest even; a NaN stays a NaN. Written without branches, so that loops of it are vectorised.
#[inline(always)]
pub(crate) fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}
integers!(i8, i64; u8, i64; i32, i64; u32, i64; i64, i128; u64, i128;);

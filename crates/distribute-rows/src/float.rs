//! The types of elements.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A type of elements: `f32` or `f64`.
pub trait Float:
    Copy
    + 'static
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Into<f64>
    + private::Sealed
{
    /// 1.
    const ONE: Self;

    /// -∞.
    const NEG_INFINITY: Self;

    /// Returns the nearest value of this type.
    fn from_f64(value: f64) -> Self;

    /// Returns this value times a factor plus a term, rounded once: slow on processors without such an instruction.
    fn mul_add(self, factor: Self, term: Self) -> Self;

    /// Returns e to the power of this value: within 2e-7 of it, relatively, for `f32`.
    fn exp(self) -> Self;

    /// Returns the natural logarithm.
    fn ln(self) -> Self;

    /// Returns the square root.
    fn sqrt(self) -> Self;
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

impl Float for f32 {
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }

    #[inline(always)]
    fn mul_add(self, factor: f32, term: f32) -> f32 {
        f32::mul_add(self, factor, term)
    }

    /// Splits the exponent into a multiple of ln 2 and a rest, for which a polynomial is good enough. There is no
    /// branch and no call, so that compilers make SIMD instructions of it.
    ///
    /// # Source
    /// The polynomial is that of `expf` of the Cephes library.
    #[inline(always)]
    fn exp(self) -> f32 {
        // Beyond, the result is 0 or ∞ in any case. NaN stays.
        let x = self.clamp(-104.0, 89.0);
        // A sum with this number is rounded to an integer, which its low bits hold.
        const ROUND: f32 = 12_582_912.0;
        let rounded = x * std::f32::consts::LOG2_E + ROUND;
        let power = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
        let n = rounded - ROUND;
        // ln 2 in two parts, the first of which has few digits.
        let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
        let p = 1.987_569_1e-4;
        let p = p * r + 1.398_199_9e-3;
        let p = p * r + 8.333_452e-3;
        let p = p * r + 4.166_579_6e-2;
        let p = p * r + 1.666_666_5e-1;
        let p = p * r + 0.5;
        let p = p * r * r + r + 1.0;
        // In two steps, because 2^-149 and 2^128 are beyond the normal numbers.
        let half = power >> 1;
        let scale = |power: i32| f32::from_bits((power.wrapping_add(127) as u32).wrapping_shl(23));
        p * scale(half) * scale(power.wrapping_sub(half))
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        f32::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
}

impl Float for f64 {
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn mul_add(self, factor: f64, term: f64) -> f64 {
        f64::mul_add(self, factor, term)
    }

    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
}

/// The number of partial sums of a row, enough for the widest registers.
const LANES: usize = 16;

/// Returns the sum of a function of each element. It is made of partial sums, so that it is fast, and precise for long
/// rows.
#[inline(always)]
pub fn sum<T: Float>(row: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::default(); LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += f(*x);
    }
    of_lanes(lanes, |one, other| one + other)
}

/// Returns the sum of a function of each two elements at the same position.
#[inline(always)]
pub fn sum_of_pairs<T: Float>(one: &[T], other: &[T], f: impl Fn(T, T) -> T) -> T {
    let [sum] = sums_of_pairs(one, other, |x, y| [f(x, y)]);
    sum
}

/// Returns the sums of functions of each two elements at the same position, each as [`sum_of_pairs`] has it.
#[inline(always)]
pub fn sums_of_pairs<T: Float, const N: usize>(one: &[T], other: &[T], f: impl Fn(T, T) -> [T; N]) -> [T; N] {
    let mut lanes = [[T::default(); LANES]; N];
    let (ones, others) = (one.chunks_exact(LANES), other.chunks_exact(LANES));
    let rest = ones.remainder().iter().zip(others.remainder());
    for (ones, others) in ones.zip(others) {
        for (lane, (x, y)) in ones.iter().zip(others).enumerate() {
            let terms = f(*x, *y);
            for at in 0..N {
                lanes[at][lane] += terms[at];
            }
        }
    }
    for (lane, (x, y)) in rest.enumerate() {
        let terms = f(*x, *y);
        for at in 0..N {
            lanes[at][lane] += terms[at];
        }
    }
    lanes.map(|lanes| of_lanes(lanes, |one, other| one + other))
}

/// Returns the greatest element; NaN does not count. -∞ if there is none.
#[inline(always)]
pub fn greatest<T: Float>(row: &[T]) -> T {
    let of_two = |one: T, other: T| if other > one { other } else { one };
    let mut lanes = [T::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = of_two(*lane, *x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = of_two(*lane, *x);
    }
    of_lanes(lanes, of_two)
}

/// Combines partial results in pairs.
#[inline(always)]
fn of_lanes<T: Float>(mut lanes: [T; LANES], f: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = f(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

//! Elements, and the types in which they are summed.

use bytemuck::Pod;
use half::{bf16, f16};

use super::float8::{E4m3, E5m2};

/// An element of a reduction.
pub(super) trait Element: Pod {
    /// The type of the computation; the result is rounded once, at the end.
    type Sum: Copy;

    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn multiply(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn max(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn min(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn divide(sum: Self::Sum, ranks: usize) -> Self::Sum;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Element for $type {
            type Sum = Self;

            fn widen(self) -> Self {
                self
            }

            fn narrow(sum: Self) -> Self {
                sum
            }

            fn add(a: Self, b: Self) -> Self {
                a.wrapping_add(b)
            }

            fn multiply(a: Self, b: Self) -> Self {
                a.wrapping_mul(b)
            }

            fn max(a: Self, b: Self) -> Self {
                Ord::max(a, b)
            }

            fn min(a: Self, b: Self) -> Self {
                Ord::min(a, b)
            }

            fn divide(sum: Self, ranks: usize) -> Self {
                Self::try_from(ranks).map_or(0, |ranks| sum / ranks)
            }
        }
    )*};
}

macro_rules! floats {
    ($($type:ty as $sum:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Element for $type {
            type Sum = $sum;

            fn widen(self) -> $sum {
                $widen(self)
            }

            fn narrow(sum: $sum) -> Self {
                $narrow(sum)
            }

            fn add(a: $sum, b: $sum) -> $sum {
                a + b
            }

            fn multiply(a: $sum, b: $sum) -> $sum {
                a * b
            }

            fn max(a: $sum, b: $sum) -> $sum {
                a.max(b)
            }

            fn min(a: $sum, b: $sum) -> $sum {
                a.min(b)
            }

            fn divide(sum: $sum, ranks: usize) -> $sum {
                sum / ranks as $sum
            }
        }
    )*};
}

integers!(i8, u8, i32, u32, i64, u64);

floats! {
    f32 as f32, std::convert::identity, std::convert::identity;
    f64 as f64, std::convert::identity, std::convert::identity;
    f16 as f32, f16::to_f32, f16::from_f32;
    bf16 as f32, bf16::to_f32, bf16::from_f32;
    E4m3 as f32, E4m3::to_f32, E4m3::from_f32;
    E5m2 as f32, E5m2::to_f32, E5m2::from_f32;
}

//! Element-wise arithmetic on buffers of any type.

use std::ops::Range;

use distribute_collectives::ReduceOp;
use distribute_device::{BufferMut, BufferRef, Element};
use distribute_types::{bf16_from_f64, f16_from_f64, with_dtype};

use crate::{Assignment, Result};

pub(crate) type F16 = distribute_device::f16;
pub(crate) type BF16 = distribute_device::bf16;

/// Arithmetic for variables and for reductions over axes.
pub(crate) trait Arithmetic: Element + PartialOrd {
    /// The type in which reductions over axes compute: f64 for floating-point types, the type itself for integers.
    type Wide: Wide;

    /// Converts to the wide type, exactly.
    fn widen(self) -> Self::Wide;
    /// Rounds to the nearest value of this type.
    fn narrow(wide: Self::Wide) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Divides; `None` if an integer is divided by zero.
    fn div(self, other: Self) -> Option<Self>;
    /// Returns part `index` of `self` split over `n`: floats divide; integers spread the remainder over the first
    /// parts.
    fn share(self, n: usize, index: usize) -> Self;
    /// Divides a sum by a count.
    fn ratio(self, count: u64) -> Self;
}

/// The type in which elements are reduced, over axes and over replicas, before they are rounded once.
pub(crate) trait Wide: Element {
    /// Returns the identity of an operation, which is the result of a reduction over nothing.
    fn identity(op: ReduceOp) -> Self;
    /// Combines two values. Sums and products of integers wrap; the minimum and the maximum of a NaN and a number are
    /// NaN, and -0 is less than 0.
    fn combine(self, op: ReduceOp, other: Self) -> Self;
    /// Divides a sum by a count of elements; NaN for no elements.
    fn mean(self, count: f64) -> Self;
}

impl Wide for f64 {
    fn identity(op: ReduceOp) -> f64 {
        match op {
            ReduceOp::Product => 1.0,
            ReduceOp::Min => f64::INFINITY,
            ReduceOp::Max => f64::NEG_INFINITY,
            // The identity of IEEE 754's addition, since -0 + -0 is -0.
            _ => -0.0,
        }
    }

    fn combine(self, op: ReduceOp, other: f64) -> f64 {
        match op {
            ReduceOp::Product => self * other,
            ReduceOp::Min | ReduceOp::Max if self.is_nan() || other.is_nan() => f64::NAN,
            ReduceOp::Min => {
                if self.total_cmp(&other).is_le() {
                    self
                } else {
                    other
                }
            }
            ReduceOp::Max => {
                if self.total_cmp(&other).is_ge() {
                    self
                } else {
                    other
                }
            }
            _ => self + other,
        }
    }

    fn mean(self, count: f64) -> f64 {
        self / count
    }
}

macro_rules! floats {
    ($($type:ty, $from:expr, $to:expr;)*) => {$(
        impl Arithmetic for $type {
            type Wide = f64;

            fn widen(self) -> f64 { $to(self) }
            fn narrow(wide: f64) -> Self { $from(wide) }
            fn add(self, other: Self) -> Self { self + other }
            fn sub(self, other: Self) -> Self { self - other }
            fn mul(self, other: Self) -> Self { self * other }
            fn div(self, other: Self) -> Option<Self> { Some(self / other) }
            fn share(self, n: usize, _: usize) -> Self { $from($to(self) / n as f64) }
            fn ratio(self, count: u64) -> Self { $from($to(self) / count as f64) }
        }
    )*};
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Wide for $type {
            fn identity(op: ReduceOp) -> Self {
                match op {
                    ReduceOp::Product => 1,
                    ReduceOp::Min => <$type>::MAX,
                    ReduceOp::Max => <$type>::MIN,
                    ReduceOp::BitAnd => !0,
                    _ => 0,
                }
            }

            fn combine(self, op: ReduceOp, other: Self) -> Self {
                match op {
                    ReduceOp::Product => self.wrapping_mul(other),
                    ReduceOp::Min => Ord::min(self, other),
                    ReduceOp::Max => Ord::max(self, other),
                    ReduceOp::BitAnd => self & other,
                    ReduceOp::BitOr => self | other,
                    ReduceOp::BitXor => self ^ other,
                    _ => self.wrapping_add(other),
                }
            }

            /// Not called: means of integers are errors.
            fn mean(self, _: f64) -> Self { self }
        }

        impl Arithmetic for $type {
            type Wide = Self;

            fn widen(self) -> Self { self }
            fn narrow(wide: Self) -> Self { wide }
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            fn sub(self, other: Self) -> Self { self.wrapping_sub(other) }
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn div(self, other: Self) -> Option<Self> {
                if other == 0 { None } else { Some(self.wrapping_div(other)) }
            }
            fn share(self, n: usize, index: usize) -> Self {
                let (value, n) = (i128::from(self), n as i128);
                let (each, rest) = (value.div_euclid(n), value.rem_euclid(n));
                (each + i128::from((index as i128) < rest)) as $type
            }
            fn ratio(self, count: u64) -> Self { (i128::from(self) / i128::from(count)) as $type }
        }
    )*};
}

floats! {
    f32, |x: f64| x as f32, f64::from;
    f64, std::convert::identity, std::convert::identity;
    F16, f16_from_f64, F16::to_f64;
    BF16, bf16_from_f64, BF16::to_f64;
}
integers!(i8, u8, i32, u32, i64, u64);

/// Computes `target = target ∘ value`, element by element.
pub(crate) fn assign(assignment: Assignment, mut target: BufferMut<'_>, value: BufferRef<'_>) -> Result<()> {
    with_dtype!(value.dtype(), T => {
        let (target, value) = (target.as_mut_slice::<T>()?, value.as_slice::<T>()?);
        for (a, b) in target.iter_mut().zip(value) {
            *a = match assignment {
                Assignment::Set => *b,
                Assignment::Add => a.add(*b),
                Assignment::Sub => a.sub(*b),
            };
        }
    });
    Ok(())
}

/// Computes `target = share index of n of value`, element by element.
pub(crate) fn assign_share(n: usize, index: usize, mut target: BufferMut<'_>, value: BufferRef<'_>) -> Result<()> {
    with_dtype!(value.dtype(), T => {
        for (a, b) in target.as_mut_slice::<T>()?.iter_mut().zip(value.as_slice::<T>()?) {
            *a = b.share(n, index);
        }
    });
    Ok(())
}

/// Reduces a row-major tensor over some of its axes; the result has the shape of the other axes.
pub(crate) fn fold_axes<T: Arithmetic>(
    op: ReduceOp,
    elements: &[T],
    shape: &[usize],
    axes: &[usize],
) -> (Vec<usize>, Vec<T::Wide>) {
    let kept: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
    let out_shape: Vec<usize> = kept.iter().map(|axis| shape[*axis]).collect();
    let mut folded = vec![T::Wide::identity(op); out_shape.iter().product()];
    let mut position = vec![0usize; shape.len()];
    for element in elements {
        let index = kept.iter().fold(0, |index, axis| index * shape[*axis] + position[*axis]);
        folded[index] = folded[index].combine(op, element.widen());
        for axis in (0..shape.len()).rev() {
            position[axis] += 1;
            if position[axis] < shape[axis] {
                break;
            }
            position[axis] = 0;
        }
    }
    (out_shape, folded)
}

/// Copies rows of a source block into a wider row-major block, which joins parts along an axis.
pub(crate) fn place<T: Element>(target: &mut [T], target_len: usize, at: Range<usize>, inner: usize, source: &[T]) {
    let width = at.len() * inner;
    if width == 0 {
        return;
    }
    for (outer, row) in source.chunks_exact(width).enumerate() {
        let start = (outer * target_len + at.start) * inner;
        target[start..start + width].copy_from_slice(row);
    }
}

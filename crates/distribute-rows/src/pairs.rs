//! Sums and products of the elements of two tensors, in pairs.

use crate::parallel::{check, each_element};
use crate::{Float, compiled};

/// Adds elements in pairs.
///
/// # Shapes
/// `x` and `y` have the same length.
pub fn add<T: Compiled>(x: &[T], y: &[T]) -> Vec<T> {
    <T as Compiled>::add(x, y)
}

/// Multiplies elements in pairs.
///
/// # Shapes
/// `x` and `y` have the same length.
pub fn multiply<T: Compiled>(x: &[T], y: &[T]) -> Vec<T> {
    <T as Compiled>::multiply(x, y)
}

/// Returns what a function makes of elements in pairs.
#[inline(always)]
pub(crate) fn each<T: Float>(x: &[T], y: &[T], of: impl Fn(T, T) -> T + Sync + Send) -> Vec<T> {
    check("the second", y.len(), 1, x.len());
    each_element(
        x.len(),
        #[inline(always)]
        |at, out| {
            for ((out, x), y) in out.iter_mut().zip(&x[at..]).zip(&y[at..]) {
                *out = of(*x, *y);
            }
        },
    )
}

fn add_generic<T: Float>(x: &[T], y: &[T]) -> Vec<T> {
    each(
        x,
        y,
        #[inline(always)]
        |x, y| x + y,
    )
}

fn multiply_generic<T: Float>(x: &[T], y: &[T]) -> Vec<T> {
    each(
        x,
        y,
        #[inline(always)]
        |x, y| x * y,
    )
}

compiled! {
    fn add(x: &[Self], y: &[Self]) -> Vec<Self> = self::add_generic;
    fn multiply(x: &[Self], y: &[Self]) -> Vec<Self> = self::multiply_generic;
}

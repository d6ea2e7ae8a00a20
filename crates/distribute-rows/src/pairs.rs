//! Sums and products of the elements of two tensors, in pairs.

use crate::parallel::{check, each_element};
use crate::{Float, compiled};

/// Adds elements in pairs.
///
/// # Shapes
/// `x`, `y` and `out` have the same length.
pub fn add<T: Compiled>(x: &[T], y: &[T], out: &mut [T]) {
    <T as Compiled>::add(x, y, out)
}

/// Multiplies elements in pairs.
///
/// # Shapes
/// `x`, `y` and `out` have the same length.
pub fn multiply<T: Compiled>(x: &[T], y: &[T], out: &mut [T]) {
    <T as Compiled>::multiply(x, y, out)
}

#[inline(always)]
fn each<T: Float>(x: &[T], y: &[T], out: &mut [T], of: impl Fn(T, T) -> T + Sync) {
    check("the first", x.len(), 1, out.len());
    check("the second", y.len(), 1, out.len());
    each_element(
        out,
        #[inline(always)]
        |at, out| {
            for ((out, x), y) in out.iter_mut().zip(&x[at..]).zip(&y[at..]) {
                *out = of(*x, *y);
            }
        },
    );
}

fn add_generic<T: Float>(x: &[T], y: &[T], out: &mut [T]) {
    each(
        x,
        y,
        out,
        #[inline(always)]
        |x, y| x + y,
    );
}

fn multiply_generic<T: Float>(x: &[T], y: &[T], out: &mut [T]) {
    each(
        x,
        y,
        out,
        #[inline(always)]
        |x, y| x * y,
    );
}

compiled! {
    fn add(x: &[Self], y: &[Self], out: &mut [Self]) = self::add_generic;
    fn multiply(x: &[Self], y: &[Self], out: &mut [Self]) = self::multiply_generic;
}

//! The rectified linear unit.

use crate::parallel::{check, each_element};
use crate::{Float, compiled};

/// Returns 0 in place of a number below it; NaN stays.
#[inline(always)]
pub fn rectified<T: Float>(x: T) -> T {
    if x < T::default() { T::default() } else { x }
}

/// Replaces elements below 0 by 0; NaN stays.
///
/// # Shapes
/// `x` and `out` have the same length.
pub fn forward<T: Compiled>(x: &[T], out: &mut [T]) {
    T::forward(x, out)
}

fn forward_generic<T: Float>(x: &[T], out: &mut [T]) {
    check("the input", x.len(), 1, out.len());
    each_element(
        out,
        #[inline(always)]
        |at, out| {
            for (out, x) in out.iter_mut().zip(&x[at..]) {
                *out = rectified(*x);
            }
        },
    );
}

/// Computes the gradient of the input: that of the result where the result is not 0.
///
/// # Shapes
/// `y`, the result of [`forward`], its gradient and `out` have the same length.
pub fn backward<T: Compiled>(y: &[T], gradient: &[T], out: &mut [T]) {
    T::backward(y, gradient, out)
}

fn backward_generic<T: Float>(y: &[T], gradient: &[T], out: &mut [T]) {
    check("the result", y.len(), 1, out.len());
    check("the gradient", gradient.len(), 1, out.len());
    each_element(
        out,
        #[inline(always)]
        |at, out| {
            for ((out, y), gradient) in out.iter_mut().zip(&y[at..]).zip(&gradient[at..]) {
                *out = if *y == T::default() { T::default() } else { *gradient };
            }
        },
    );
}

compiled! {
    fn forward(x: &[Self], out: &mut [Self]) = self::forward_generic;
    fn backward(y: &[Self], gradient: &[Self], out: &mut [Self]) = self::backward_generic;
}

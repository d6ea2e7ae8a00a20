//! The rectified linear unit.

use crate::parallel::each_element;
use crate::{Float, compiled, pairs};

/// Returns 0 in place of a number below it; NaN stays.
#[inline(always)]
pub fn rectified<T: Float>(x: T) -> T {
    if x < T::default() { T::default() } else { x }
}

/// Replaces elements below 0 by 0; NaN stays.
///
/// # Shapes
/// The result is as long as `x`.
pub fn forward<T: Compiled>(x: &[T]) -> Vec<T> {
    T::forward(x)
}

fn forward_generic<T: Float>(x: &[T]) -> Vec<T> {
    each_element(
        x.len(),
        #[inline(always)]
        |at, out| {
            for (out, x) in out.iter_mut().zip(&x[at..]) {
                *out = rectified(*x);
            }
        },
    )
}

/// Computes the gradient of the input: that of the result where the result is not 0.
///
/// # Shapes
/// `y`, the result of [`forward`], and its gradient have the same length.
pub fn backward<T: Compiled>(y: &[T], gradient: &[T]) -> Vec<T> {
    T::backward(y, gradient)
}

fn backward_generic<T: Float>(y: &[T], gradient: &[T]) -> Vec<T> {
    pairs::each(
        y,
        gradient,
        #[inline(always)]
        |y, gradient| if y == T::default() { T::default() } else { gradient },
    )
}

compiled! {
    fn forward(x: &[Self]) -> Vec<Self> = self::forward_generic;
    fn backward(y: &[Self], gradient: &[Self]) -> Vec<Self> = self::backward_generic;
}

//! Softmax.

use crate::float::{greatest, sum, sum_of_pairs};
use crate::parallel::{check, rows};
use crate::{Float, compiled};

/// Computes the softmax of each row: its exponentials, divided by their sum. A row of -∞ alone gives NaN.
///
/// # Shapes
/// `x` and the result: rows of `size` elements.
pub fn forward<T: Compiled>(x: &[T], size: usize) -> Vec<T> {
    T::forward(x, size)
}

fn forward_generic<T: Float>(x: &[T], size: usize) -> Vec<T> {
    check("the input", x.len(), size, x.len());
    rows(
        x.len() / size,
        size,
        #[inline(always)]
        |row, out| {
            let x = &x[row * size..][..size];
            // Exponentials of differences from the greatest element do not overflow.
            let top = greatest(x);
            for (out, x) in out.iter_mut().zip(x) {
                *out = (*x - top).exp();
            }
            let scale = T::ONE / sum(out, |x| x);
            for out in out {
                *out = *out * scale;
            }
        },
    )
}

/// Computes the gradient of the input.
///
/// # Shapes
/// `y`, the result of [`forward`], its gradient and that of the input: rows of `size` elements.
pub fn backward<T: Compiled>(y: &[T], size: usize, gradient: &[T]) -> Vec<T> {
    T::backward(y, size, gradient)
}

fn backward_generic<T: Float>(y: &[T], size: usize, gradient: &[T]) -> Vec<T> {
    check("the gradient", gradient.len(), size, y.len());
    rows(
        y.len() / size,
        size,
        #[inline(always)]
        |row, out| {
            let (y, gradient) = (&y[row * size..][..size], &gradient[row * size..][..size]);
            let mean = sum_of_pairs(y, gradient, |y, gradient| y * gradient);
            for ((out, y), gradient) in out.iter_mut().zip(y).zip(gradient) {
                *out = *y * (*gradient - mean);
            }
        },
    )
}

compiled! {
    fn forward(x: &[Self], size: usize) -> Vec<Self> = self::forward_generic;
    fn backward(y: &[Self], size: usize, gradient: &[Self]) -> Vec<Self> = self::backward_generic;
}

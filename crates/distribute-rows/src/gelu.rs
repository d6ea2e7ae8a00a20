//! The Gaussian error linear unit, in its approximation by tanh.

use crate::parallel::{check, each_element};
use crate::{Float, compiled};

/// Computes `x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³)))` for each element.
///
/// # Shapes
/// `x` and `out` have the same length.
///
/// # Source
/// Hendrycks and Gimpel, "Gaussian error linear units", 2016.
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
                *out = *x * gate(*x);
            }
        },
    );
}

/// Computes the gradient of the input.
///
/// # Shapes
/// `x`, `gradient` and `out` have the same length.
pub fn backward<T: Compiled>(x: &[T], gradient: &[T], out: &mut [T]) {
    T::backward(x, gradient, out)
}

fn backward_generic<T: Float>(x: &[T], gradient: &[T], out: &mut [T]) {
    check("the input", x.len(), 1, out.len());
    check("the gradient", gradient.len(), 1, out.len());
    let (two, three) = (T::from_f64(2.0 * SCALE), T::from_f64(3.0 * CUBIC));
    each_element(
        out,
        #[inline(always)]
        |at, out| {
            for ((out, x), gradient) in out.iter_mut().zip(&x[at..]).zip(&gradient[at..]) {
                let gate = gate(*x);
                let slope = two * (T::ONE + three * *x * *x);
                // Where the gate is 0 or 1 its slope is 0, however large x³ is.
                let open = gate * (T::ONE - gate);
                let change = if open > T::default() { *x * open * slope } else { T::default() };
                *out = *gradient * (gate + change);
            }
        },
    );
}

const SCALE: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// Returns `½ (1 + tanh(…))`, which is `1 / (1 + exp(-2 …))`.
#[inline(always)]
fn gate<T: Float>(x: T) -> T {
    let inner = T::from_f64(-2.0 * SCALE) * (x + T::from_f64(CUBIC) * x * x * x);
    T::ONE / (T::ONE + inner.exp())
}

compiled! {
    fn forward(x: &[Self], out: &mut [Self]) = self::forward_generic;
    fn backward(x: &[Self], gradient: &[Self], out: &mut [Self]) = self::backward_generic;
}

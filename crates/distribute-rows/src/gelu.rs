//! The Gaussian error linear unit, in its approximation by tanh.

use crate::parallel::each_element;
use crate::{Float, compiled, pairs};

/// Computes `x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³)))` for each element.
///
/// # Shapes
/// The result is as long as `x`.
///
/// # Source
/// Hendrycks and Gimpel, "Gaussian error linear units", 2016.
pub fn forward<T: Compiled>(x: &[T]) -> Vec<T> {
    T::forward(x)
}

fn forward_generic<T: Float>(x: &[T]) -> Vec<T> {
    each_element(
        x.len(),
        #[inline(always)]
        |at, out| {
            for (out, x) in out.iter_mut().zip(&x[at..]) {
                *out = *x * gate(*x);
            }
        },
    )
}

/// Computes the gradient of the input.
///
/// # Shapes
/// `x` and `gradient` have the same length.
pub fn backward<T: Compiled>(x: &[T], gradient: &[T]) -> Vec<T> {
    T::backward(x, gradient)
}

fn backward_generic<T: Float>(x: &[T], gradient: &[T]) -> Vec<T> {
    pairs::each(
        x,
        gradient,
        #[inline(always)]
        |x, gradient| {
            // Constants that were captured would be loaded for each element, and keep it from being one of a vector.
            let (two, three) = (T::from_f64(2.0 * SCALE), T::from_f64(3.0 * CUBIC));
            let gate = gate(x);
            let slope = two * (T::ONE + three * x * x);
            // Where the gate is 0 or 1 its slope is 0, however large x³ is.
            let open = gate * (T::ONE - gate);
            let change = if open > T::default() { x * open * slope } else { T::default() };
            gradient * (gate + change)
        },
    )
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
    fn forward(x: &[Self]) -> Vec<Self> = self::forward_generic;
    fn backward(x: &[Self], gradient: &[Self]) -> Vec<Self> = self::backward_generic;
}

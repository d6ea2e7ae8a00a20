//! Softmax cross-entropy with class indices.

use crate::float::{greatest, sum};
use crate::parallel::{check, rows, rows_of_block, simd};
use crate::{Blocks, Float, compiled};

/// The logarithm of the sum of a row's exponentials, in two parts: their sum would lose the digits of the smaller one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogSum<T> {
    /// The greatest logit.
    top: T,
    /// The logarithm of the sum of exponentials of differences from it.
    rest: T,
}

/// Returns the cross-entropy of each row of logits and its class, and the sums that [`backward`] needs.
///
/// # Shapes
/// `logits`: rows of `size` elements; `classes` and both results: one for each row.
///
/// # Panics
/// If a class is not below `size`.
pub fn forward<T: Compiled>(logits: &[T], size: usize, classes: &[usize]) -> (Vec<T>, Vec<LogSum<T>>) {
    T::forward(logits, size, classes)
}

fn forward_generic<T: Float>(logits: &[T], size: usize, classes: &[usize]) -> (Vec<T>, Vec<LogSum<T>>) {
    check("the logits", logits.len(), size, classes.len() * size);
    let rows = rows_of_block(size);
    let blocks = Blocks { count: classes.len(), size: rows, cost: rows * size };
    let (losses, sums) = blocks.computed(
        || (),
        |(), block, losses| {
            simd(
                #[inline(always)]
                || {
                    let mut sums = vec![LogSum::default(); losses.len()];
                    for (at, (loss, of_row)) in losses.iter_mut().zip(&mut sums).enumerate() {
                        let row = block * rows + at;
                        let x = &logits[row * size..][..size];
                        let top = greatest(x);
                        let rest = sum(x, |x| (x - top).exp()).ln();
                        *of_row = LogSum { top, rest };
                        *loss = rest + (top - x[classes[row]]);
                    }
                    sums
                },
            )
        },
    );
    (losses, sums.concat())
}

/// Computes the gradient of the logits.
///
/// # Shapes
/// `logits`, `classes` and `sums` are those of [`forward`]; `gradient`: one for each loss. The result is like the
/// logits.
///
/// # Panics
/// If a class is not below `size`.
pub fn backward<T: Compiled>(
    logits: &[T],
    size: usize,
    classes: &[usize],
    sums: &[LogSum<T>],
    gradient: &[T],
) -> Vec<T> {
    T::backward(logits, size, classes, sums, gradient)
}

fn backward_generic<T: Float>(
    logits: &[T],
    size: usize,
    classes: &[usize],
    sums: &[LogSum<T>],
    gradient: &[T],
) -> Vec<T> {
    check("the logits", logits.len(), size, gradient.len() * size);
    assert_eq!((classes.len(), sums.len()), (gradient.len(), gradient.len()), "one for each row");
    rows(
        gradient.len(),
        size,
        #[inline(always)]
        |row, out| {
            let (x, gradient) = (&logits[row * size..][..size], gradient[row]);
            let LogSum { top, rest } = sums[row];
            for (out, x) in out.iter_mut().zip(x) {
                *out = (*x - top - rest).exp() * gradient;
            }
            let class = &mut out[classes[row]];
            *class = *class - gradient;
        },
    )
}

compiled! {
    fn forward(
        logits: &[Self],
        size: usize,
        classes: &[usize],
    ) -> (Vec<Self>, Vec<LogSum<Self>>) = self::forward_generic;
    fn backward(
        logits: &[Self],
        size: usize,
        classes: &[usize],
        sums: &[LogSum<Self>],
        gradient: &[Self],
    ) -> Vec<Self> = self::backward_generic;
}

//! Softmax cross-entropy with class indices.

use crate::float::{greatest, sum};
use crate::parallel::{check, each_row};
use crate::{Float, compiled};

/// The logarithm of the sum of a row's exponentials, in two parts: their sum would lose the digits of the smaller one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogSum<T> {
    /// The greatest logit.
    top: T,
    /// The logarithm of the sum of exponentials of differences from it.
    rest: T,
}

/// Computes the cross-entropy of each row of logits and its class, and the sums that [`backward`] needs.
///
/// # Shapes
/// `logits`: rows of `size` elements; `classes`, `losses` and `sums`: one for each row.
///
/// # Panics
/// If a class is not below `size`.
pub fn forward<T: Compiled>(logits: &[T], size: usize, classes: &[usize], losses: &mut [T], sums: &mut [LogSum<T>]) {
    T::forward(logits, size, classes, losses, sums)
}

fn forward_generic<T: Float>(logits: &[T], size: usize, classes: &[usize], losses: &mut [T], sums: &mut [LogSum<T>]) {
    check("the logits", logits.len(), size, classes.len() * size);
    assert_eq!((losses.len(), sums.len()), (classes.len(), classes.len()), "one result for each row");
    each_row(
        sums,
        1,
        size,
        #[inline(always)]
        |row, out| {
            let x = &logits[row * size..][..size];
            let top = greatest(x);
            out[0] = LogSum { top, rest: sum(x, |x| (x - top).exp()).ln() };
        },
    );
    for (row, (loss, class)) in losses.iter_mut().zip(classes).enumerate() {
        let LogSum { top, rest } = sums[row];
        *loss = rest + (top - logits[row * size..][..size][*class]);
    }
}

/// Computes the gradient of the logits.
///
/// # Shapes
/// `logits`, `classes` and `sums` are those of [`forward`]; `gradient`: one for each loss; `out`: like the logits.
///
/// # Panics
/// If a class is not below `size`.
pub fn backward<T: Compiled>(
    logits: &[T],
    size: usize,
    classes: &[usize],
    sums: &[LogSum<T>],
    gradient: &[T],
    out: &mut [T],
) {
    T::backward(logits, size, classes, sums, gradient, out)
}

fn backward_generic<T: Float>(
    logits: &[T],
    size: usize,
    classes: &[usize],
    sums: &[LogSum<T>],
    gradient: &[T],
    out: &mut [T],
) {
    check("the logits", logits.len(), size, out.len());
    check("the gradient", gradient.len() * size, size, out.len());
    assert_eq!((classes.len(), sums.len()), (gradient.len(), gradient.len()), "one for each row");
    each_row(
        out,
        size,
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
    );
}

compiled! {
    fn forward(
        logits: &[Self],
        size: usize,
        classes: &[usize],
        losses: &mut [Self],
        sums: &mut [LogSum<Self>],
    ) = self::forward_generic;
    fn backward(
        logits: &[Self],
        size: usize,
        classes: &[usize],
        sums: &[LogSum<Self>],
        gradient: &[Self],
        out: &mut [Self],
    ) = self::backward_generic;
}

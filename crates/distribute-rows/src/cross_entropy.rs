//! Softmax cross-entropy with class indices.

use crate::Float;
use crate::float::{greatest, sum};
use crate::parallel::{check, each_row};

/// Computes the cross-entropy of each row of logits and its class, and the logarithm of the row's sum of exponentials,
/// which [`backward`] needs.
///
/// # Shapes
/// `logits`: rows of `size` elements; `classes`, `losses` and `sums`: one for each row.
///
/// # Panics
/// If a class is not below `size`.
pub fn forward<T: Float>(logits: &[T], size: usize, classes: &[u32], losses: &mut [T], sums: &mut [T]) {
    check("the logits", logits.len(), size, classes.len() * size);
    assert_eq!((losses.len(), sums.len()), (classes.len(), classes.len()), "one result for each row");
    each_row(sums, 1, size, |row, out| {
        let x = &logits[row * size..][..size];
        let top = greatest(x);
        out[0] = top + sum(x, |x| (x - top).exp()).ln();
    });
    for (row, (loss, class)) in losses.iter_mut().zip(classes).enumerate() {
        *loss = sums[row] - logits[row * size..][..size][*class as usize];
    }
}

/// Computes the gradient of the logits.
///
/// # Shapes
/// `logits`, `classes` and `sums` are those of [`forward`]; `gradient`: one for each loss; `out`: like the logits.
///
/// # Panics
/// If a class is not below `size`.
pub fn backward<T: Float>(logits: &[T], size: usize, classes: &[u32], sums: &[T], gradient: &[T], out: &mut [T]) {
    check("the logits", logits.len(), size, out.len());
    check("the gradient", gradient.len() * size, size, out.len());
    assert_eq!((classes.len(), sums.len()), (gradient.len(), gradient.len()), "one for each row");
    each_row(out, size, size, |row, out| {
        let (x, sum, gradient) = (&logits[row * size..][..size], sums[row], gradient[row]);
        for (out, x) in out.iter_mut().zip(x) {
            *out = (*x - sum).exp() * gradient;
        }
        let class = &mut out[classes[row] as usize];
        *class = *class - gradient;
    });
}

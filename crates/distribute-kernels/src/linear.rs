//! Linear layers.

use distribute_rows::{Float, compiled};

use crate::parallel::{add, check, each_chunk, sum_of_parts};
use crate::product::{Matrix, Target, parallel_product};

/// A linear layer: `x · weightᵀ + bias` for each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Elements of a row of the input.
    pub inputs: usize,
    /// Elements of a row of the result.
    pub outputs: usize,
}

impl Linear {
    /// Computes the result.
    ///
    /// # Shapes
    /// `x`: rows × inputs. `weight`: outputs × inputs. `bias`: outputs. `out`: rows × outputs.
    pub fn forward<T: Compiled>(&self, x: &[T], weight: &[T], bias: Option<&[T]>, out: &mut [T]) {
        T::forward(self, x, weight, bias, out)
    }

    fn forward_generic<T: Float>(&self, x: &[T], weight: &[T], bias: Option<&[T]>, out: &mut [T]) {
        let rows = self.rows("the result", out.len(), self.outputs);
        self.check(rows, "the input", x.len(), weight.len());
        if let Some(bias) = bias.filter(|_| rows > 0) {
            check("the bias", bias.len(), self.outputs);
            each_chunk(out, ROWS * self.outputs, |_, rows| {
                rows.chunks_exact_mut(self.outputs).for_each(|row| row.copy_from_slice(bias));
            });
        }
        let (x, weight) = (Matrix::new(x, self.inputs), Matrix::new(weight, self.inputs));
        let out = Target { data: out, row: self.outputs, add: bias.is_some() };
        parallel_product(out, [rows, self.inputs, self.outputs], x, weight.transposed(), T::ONE);
    }

    /// Computes the gradient of the input.
    ///
    /// # Shapes
    /// `gradient`, that of the result: rows × outputs. `out`: rows × inputs.
    pub fn backward_input<T: Compiled>(&self, weight: &[T], gradient: &[T], out: &mut [T]) {
        T::backward_input(self, weight, gradient, out)
    }

    fn backward_input_generic<T: Float>(&self, weight: &[T], gradient: &[T], out: &mut [T]) {
        let rows = self.rows("the gradient", gradient.len(), self.outputs);
        self.check(rows, "the gradient of the input", out.len(), weight.len());
        let (gradient, weight) = (Matrix::new(gradient, self.outputs), Matrix::new(weight, self.inputs));
        let out = Target { data: out, row: self.inputs, add: false };
        parallel_product(out, [rows, self.outputs, self.inputs], gradient, weight, T::ONE);
    }

    /// Computes the gradient of the weight.
    ///
    /// # Shapes
    /// `x`: rows × inputs. `gradient`, that of the result: rows × outputs. `out`: outputs × inputs.
    pub fn backward_weight<T: Compiled>(&self, x: &[T], gradient: &[T], out: &mut [T]) {
        T::backward_weight(self, x, gradient, out)
    }

    fn backward_weight_generic<T: Float>(&self, x: &[T], gradient: &[T], out: &mut [T]) {
        let rows = self.rows("the gradient", gradient.len(), self.outputs);
        self.check(rows, "the input", x.len(), out.len());
        let (gradient, x) = (Matrix::new(gradient, self.outputs), Matrix::new(x, self.inputs));
        let out = Target { data: out, row: self.inputs, add: false };
        parallel_product(out, [self.outputs, rows, self.inputs], gradient.transposed(), x, T::ONE);
    }

    /// Computes the gradient of the bias.
    ///
    /// # Shapes
    /// `gradient`, that of the result: rows × outputs. `out`: outputs.
    pub fn backward_bias<T: Compiled>(&self, gradient: &[T], out: &mut [T]) {
        T::backward_bias(self, gradient, out)
    }

    fn backward_bias_generic<T: Float>(&self, gradient: &[T], out: &mut [T]) {
        let rows = self.rows("the gradient", gradient.len(), self.outputs);
        check("the gradient of the bias", out.len(), self.outputs);
        sum_of_parts(out, rows, |rows, sum| {
            for row in rows {
                add(sum, &gradient[row * self.outputs..][..self.outputs]);
            }
        });
    }

    /// Returns the number of rows of a slice.
    fn rows(&self, what: &str, len: usize, size: usize) -> usize {
        assert!(size > 0 && len.is_multiple_of(size), "{what}: {len} elements do not make rows of {size}");
        len / size
    }

    fn check(&self, rows: usize, what: &str, len: usize, weights: usize) {
        check(what, len, rows * self.inputs);
        check("the weight", weights, self.outputs * self.inputs);
    }
}

/// The number of rows that a thread fills at once.
const ROWS: usize = 64;

compiled! {
    fn forward(
        of: &Linear,
        x: &[Self],
        weight: &[Self],
        bias: Option<&[Self]>,
        out: &mut [Self],
    ) = Linear::forward_generic;
    fn backward_input(
        of: &Linear,
        weight: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) = Linear::backward_input_generic;
    fn backward_weight(
        of: &Linear,
        x: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) = Linear::backward_weight_generic;
    fn backward_bias(of: &Linear, gradient: &[Self], out: &mut [Self]) = Linear::backward_bias_generic;
}

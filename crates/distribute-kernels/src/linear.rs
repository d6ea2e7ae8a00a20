//! Linear layers.

use distribute_rows::{Blocks, Float, compiled};

use crate::parallel::{add, check, sum_of_parts};
use crate::product::{Matrix, Target, parallel_product, parallel_product_of};

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
    /// `x`: rows × inputs. `weight`: outputs × inputs. `bias`: outputs. The result: rows × outputs.
    pub fn forward<T: Compiled>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        T::forward(self, x, weight, bias)
    }

    fn forward_generic<T: Float>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let rows = self.rows("the input", x.len(), self.inputs);
        self.check(weight);
        let size = [rows, self.inputs, self.outputs];
        let (x, weight) = (Matrix::new(x, self.inputs), Matrix::new(weight, self.inputs).transposed());
        let Some(bias) = bias else { return parallel_product_of(size, x, weight) };
        check("the bias", bias.len(), self.outputs);
        let block = ROWS * self.outputs;
        let blocks = Blocks { count: rows * self.outputs, size: block, cost: block };
        let mut out = blocks.results(|_, rows| {
            rows.chunks_exact_mut(self.outputs).for_each(|row| row.copy_from_slice(bias));
        });
        let target = Target { data: &mut out, row: self.outputs, add: true };
        parallel_product(target, size, x, weight, T::ONE);
        out
    }

    /// Computes the gradient of the input.
    ///
    /// # Shapes
    /// `gradient`, that of the result: rows × outputs. The gradient of the input: rows × inputs.
    pub fn backward_input<T: Compiled>(&self, weight: &[T], gradient: &[T]) -> Vec<T> {
        T::backward_input(self, weight, gradient)
    }

    fn backward_input_generic<T: Float>(&self, weight: &[T], gradient: &[T]) -> Vec<T> {
        let rows = self.rows("the gradient", gradient.len(), self.outputs);
        self.check(weight);
        let (gradient, weight) = (Matrix::new(gradient, self.outputs), Matrix::new(weight, self.inputs));
        parallel_product_of([rows, self.outputs, self.inputs], gradient, weight)
    }

    /// Computes the gradient of the weight.
    ///
    /// # Shapes
    /// `x`: rows × inputs. `gradient`, that of the result: rows × outputs. The gradient of the weight: outputs ×
    /// inputs.
    pub fn backward_weight<T: Compiled>(&self, x: &[T], gradient: &[T]) -> Vec<T> {
        T::backward_weight(self, x, gradient)
    }

    fn backward_weight_generic<T: Float>(&self, x: &[T], gradient: &[T]) -> Vec<T> {
        let rows = self.rows("the gradient", gradient.len(), self.outputs);
        check("the input", x.len(), rows * self.inputs);
        let (gradient, x) = (Matrix::new(gradient, self.outputs), Matrix::new(x, self.inputs));
        parallel_product_of([self.outputs, rows, self.inputs], gradient.transposed(), x)
    }

    /// Computes the gradient of the bias.
    ///
    /// # Shapes
    /// `gradient`, that of the result: rows × outputs. The gradient of the bias: outputs.
    pub fn backward_bias<T: Compiled>(&self, gradient: &[T]) -> Vec<T> {
        T::backward_bias(self, gradient)
    }

    fn backward_bias_generic<T: Float>(&self, gradient: &[T]) -> Vec<T> {
        let rows = self.rows("the gradient", gradient.len(), self.outputs);
        sum_of_parts(self.outputs, rows, 1, |rows, sum| {
            for row in rows {
                add(sum, &gradient[row * self.outputs..][..self.outputs]);
            }
        })
    }

    /// Returns the number of rows of a slice.
    fn rows(&self, what: &str, len: usize, size: usize) -> usize {
        assert!(size > 0 && len.is_multiple_of(size), "{what}: {len} elements do not make rows of {size}");
        len / size
    }

    fn check<T>(&self, weight: &[T]) {
        check("the weight", weight.len(), self.outputs * self.inputs);
    }
}

/// The number of rows that a thread fills at once.
const ROWS: usize = 64;

compiled! {
    fn forward(of: &Linear, x: &[Self], weight: &[Self], bias: Option<&[Self]>) -> Vec<Self> = Linear::forward_generic;
    fn backward_input(of: &Linear, weight: &[Self], gradient: &[Self]) -> Vec<Self> = Linear::backward_input_generic;
    fn backward_weight(of: &Linear, x: &[Self], gradient: &[Self]) -> Vec<Self> = Linear::backward_weight_generic;
    fn backward_bias(of: &Linear, gradient: &[Self]) -> Vec<Self> = Linear::backward_bias_generic;
}

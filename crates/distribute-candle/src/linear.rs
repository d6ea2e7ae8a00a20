//! Linear layers, whose products need no copies in host memory.

use candle_core::{CpuStorage, D, Module, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use distribute_kernels::linear::Linear as Kernel;

use crate::fused::{Weighted, weighted};
use crate::host::{Element, Stored, by_type, computed, dtype, elements, gradient_of, is_fused, with};

/// Linear layer, like [`candle_nn::Linear`], faster in host memory: the bias is part of the product, backward copies
/// no transposed matrix, and the gradient of an input that has no variables is not computed.
///
/// Names of variables and initial values are those of [`candle_nn::Linear`], so checkpoints fit both. Elsewhere, and
/// for 16-bit types, these are candle's operations.
///
/// # Shapes
/// Input: (…, inputs). Weight: (outputs, inputs). Bias: (outputs). Result: (…, outputs).
///
/// # Examples
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use distribute_candle::Linear;
///
/// let weight = Tensor::new(&[[10f32, 1.0]], &Device::Cpu)?;
/// let bias = Tensor::new(&[0.5f32], &Device::Cpu)?;
/// let y = Linear::new(weight, Some(bias)).forward(&Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[12.5], [34.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear(candle_nn::Linear);

impl Linear {
    /// Creates a layer of a weight and a bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Linear {
        Linear(candle_nn::Linear::new(weight, bias))
    }

    /// Returns the weight.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// Returns the bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.0.bias()
    }
}

/// Creates a [`Linear`] with a bias.
///
/// # Errors
/// [`candle_core::Error`] if the variables exist with other shapes.
pub fn linear(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    Ok(Linear(candle_nn::linear(inputs, outputs, vb)?))
}

/// Creates a [`Linear`] without a bias.
///
/// # Errors
/// [`candle_core::Error`] if the variable exists with another shape.
pub fn linear_no_bias(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    Ok(Linear(candle_nn::linear_no_bias(inputs, outputs, vb)?))
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (self.weight(), self.bias());
        let (outputs, inputs) = weight.dims2()?;
        let same = |tensor: &Tensor| tensor.dtype() == x.dtype() && tensor.device().same_device(x.device());
        if !is_fused(x) || outputs == 0 || inputs == 0 || !same(weight) || !bias.is_none_or(same) {
            return self.0.forward(x);
        }
        if x.rank() == 0 || x.dim(D::Minus1)? != inputs {
            candle_core::bail!("the input of a linear layer has shape {:?}; give (…, {inputs})", x.dims());
        }
        weighted(x, weight, bias, Product(Kernel { inputs, outputs }))
    }
}

struct Product(Kernel);

impl Weighted for Product {
    const NAME: &'static str = "linear";

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(of: Kernel, x: Stored<'_>, w: Stored<'_>, b: Option<Stored<'_>>) -> Result<CpuStorage> {
            let (x, weight) = (elements::<T>(x.0, x.1)?, elements(w.0, w.1)?);
            let bias = b.map(|(storage, layout)| elements(storage, layout)).transpose()?;
            let y = computed(x.len() / of.inputs * of.outputs, |out| of.forward(x, weight, bias, out));
            Ok(T::to_cpu_storage_owned(y))
        }
        let mut shape = x.1.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.0.outputs;
        }
        Ok((by_type!(dtype(x.0), run(self.0, x, weight, bias))?, Shape::from(shape)))
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        fn run<T: Element>(
            of: Kernel,
            [x, weight, gradient]: [&Tensor; 3],
            bias: Option<&Tensor>,
        ) -> Result<[Option<Tensor>; 3]> {
            with([x, weight, gradient], |[elements, factors, gradient]: [&[T]; 3]| {
                let of_x = || computed(elements.len(), |out| of.backward_input(factors, gradient, out));
                let of_weight = || computed(factors.len(), |out| of.backward_weight(elements, gradient, out));
                let of_bias = || computed(of.outputs, |out| of.backward_bias(gradient, out));
                Ok([gradient_of(Some(x), of_x)?, gradient_of(Some(weight), of_weight)?, gradient_of(bias, of_bias)?])
            })?
        }
        by_type!(x.dtype(), run(self.0, [x, weight, gradient], bias))
    }
}

//! Linear layers, whose products need no copies in host memory.

use candle_core::{CpuStorage, D, DType, Layout, Module, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use distribute_kernels::linear::Linear as Kernel;
use distribute_rows::gelu;

use crate::fused::{Weighted, weighted};
use crate::host::{Element, Kept, Stored, by_type, dtype, elements, gradient_of, is_fused, with};
use crate::short::add_bias;
use crate::tensor::is_short;

/// Linear layer, like [`candle_nn::Linear`], faster in host memory: the bias is part of the product, backward copies
/// no transposed matrix, and the gradient of an input that has no variables is not computed.
///
/// Names of variables and initial values are those of [`candle_nn::Linear`], so checkpoints fit both. Elsewhere, and
/// for 16-bit types, these are candle's operations; the gradient of a bias of 16 bits is added up in f32.
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

    /// Computes the layer and then [`gelu`](crate::gelu), in host memory as one operation, so that backward has one
    /// gradient less to add up.
    ///
    /// # Errors
    /// [`candle_core::Error`] if the input does not fit.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device, Module, Tensor};
    /// use distribute_candle::{Linear, gelu};
    ///
    /// let layer = Linear::new(Tensor::new(&[[10f32, 1.0]], &Device::Cpu)?, None);
    /// let x = Tensor::new(&[[-0.1f32, 0.2], [3.0, 4.0]], &Device::Cpu)?;
    /// assert_eq!(layer.forward_gelu(&x)?.to_vec2::<f32>()?, gelu(&layer.forward(&x)?)?.to_vec2::<f32>()?);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_gelu(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (self.weight(), self.bias());
        match self.kernel(x)? {
            Some(kernel) if x.dtype() == DType::F64 => weighted(x, weight, bias, ProductGelu::<f64>::new(kernel)),
            Some(kernel) => weighted(x, weight, bias, ProductGelu::<f32>::new(kernel)),
            None => crate::gelu(&self.by_candle(x)?),
        }
    }

    /// Returns the kernel that computes the layer for an input; `None` where candle does.
    fn kernel(&self, x: &Tensor) -> Result<Option<Kernel>> {
        let (outputs, inputs) = self.weight().dims2()?;
        let same = |tensor: &Tensor| tensor.dtype() == x.dtype() && tensor.device().same_device(x.device());
        let fits = |bias: &Tensor| same(bias) && bias.dims() == [outputs];
        if !is_fused(x) || outputs == 0 || inputs == 0 || !same(self.weight()) || !self.bias().is_none_or(fits) {
            return Ok(None);
        }
        if x.rank() == 0 || x.dim(D::Minus1)? != inputs {
            candle_core::bail!("the input of a linear layer has shape {:?}; give (…, {inputs})", x.dims());
        }
        Ok(Some(Kernel { inputs, outputs }))
    }

    fn by_candle(&self, x: &Tensor) -> Result<Tensor> {
        if !is_short(x.dtype()) {
            return self.0.forward(x);
        }
        // Of matrices that are apart, candle would add up each one's gradient of the weight in 16 bits.
        let y = candle_nn::Linear::new(self.weight().clone(), None).forward(&x.contiguous()?)?;
        self.bias().map_or(Ok(y.clone()), |bias| add_bias(&y, bias))
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
        match self.kernel(x)? {
            Some(kernel) => weighted(x, self.weight(), self.bias(), Product(kernel)),
            None => self.by_candle(x),
        }
    }
}

struct Product(Kernel);

impl Weighted for Product {
    const NAME: &'static str = "linear";

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(of: Kernel, x: Stored<'_>, w: Stored<'_>, b: Option<Stored<'_>>) -> Result<CpuStorage> {
            product(of, x, w, b).map(T::to_cpu_storage_owned)
        }
        Ok((by_type!(dtype(x.0), run(self.0, x, weight, bias))?, shape(self.0, x.1)))
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        fn run<T: Element>(
            of: Kernel,
            arguments: [&Tensor; 2],
            bias: Option<&Tensor>,
            gradient: &Tensor,
        ) -> Result<[Option<Tensor>; 3]> {
            with([gradient], |[gradient]: [&[T]; 1]| gradients(of, arguments, bias, gradient))?
        }
        by_type!(x.dtype(), run(self.0, [x, weight], bias, gradient))
    }
}

/// A product and the Gaussian error linear unit of it.
struct ProductGelu<T> {
    of: Kernel,
    /// The product, from forward for backward.
    product: Kept<T>,
}

impl<T: Element> ProductGelu<T> {
    fn new(of: Kernel) -> ProductGelu<T> {
        ProductGelu { of, product: Kept::none() }
    }
}

impl<T: Element> Weighted for ProductGelu<T> {
    const NAME: &'static str = "linear-gelu";

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        let product = product::<T>(self.of, x, weight, bias)?;
        let y = gelu::forward(&product);
        self.product.set(product)?;
        Ok((T::to_cpu_storage_owned(y), shape(self.of, x.1)))
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let arguments = [self.product.tensor()?, gradient];
        let of_product = with(arguments, |[product, gradient]: [&[T]; 2]| gelu::backward(product, gradient))?;
        gradients(self.of, [x, weight], bias, &of_product)
    }

    fn kept(&self) -> Option<&Tensor> {
        self.product.get()
    }
}

fn product<T: Element>(of: Kernel, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<Vec<T>> {
    let (x, weight) = (elements::<T>(x.0, x.1)?, elements(weight.0, weight.1)?);
    let bias = bias.map(|(storage, layout)| elements(storage, layout)).transpose()?;
    Ok(of.forward(x, weight, bias))
}

/// Returns the shape of the result.
fn shape(of: Kernel, x: &Layout) -> Shape {
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = of.outputs;
    }
    Shape::from(shape)
}

/// Computes the gradients of the arguments and of the bias from that of the product.
fn gradients<T: Element>(
    of: Kernel,
    [x, weight]: [&Tensor; 2],
    bias: Option<&Tensor>,
    gradient: &[T],
) -> Result<[Option<Tensor>; 3]> {
    with([x, weight], |[elements, factors]: [&[T]; 2]| {
        let of_x = || of.backward_input(factors, gradient);
        let of_weight = || of.backward_weight(elements, gradient);
        let of_bias = || of.backward_bias(gradient);
        Ok([gradient_of(Some(x), of_x)?, gradient_of(Some(weight), of_weight)?, gradient_of(bias, of_bias)?])
    })?
}

//! Convolution and pooling of images, with fast forward and backward in host memory.

use candle_core::{CpuStorage, D, DType, Layout, Module, Result, Shape, Tensor, ToUsize2};
use candle_nn::{Conv2dConfig, VarBuilder};
use distribute_kernels::convolution::{Convolution, Pooled};
use distribute_kernels::pooling::Pooling;
use distribute_rows::relu as ramp;

use crate::fused::{Weighted, weighted};
use crate::host::{Element, Kept, Stored, by_type, dtype, elements, gradient_of, is_fused, tensor, with};
use crate::relay::{Operation, apply};
use crate::rows::relu;
use crate::short::add_bias;
use crate::tensor::is_short;

/// Convolution in two dimensions, like [`candle_nn::Conv2d`], several times faster in host memory, above all backward.
///
/// Names of variables, initial values and settings are those of [`candle_nn::Conv2d`], so checkpoints fit both.
/// Elsewhere, and for 16-bit types, these are candle's operations; the gradient of a bias of 16 bits is added up in
/// f32.
///
/// In host memory, kernels of 3 × 3 with a stride of 1 and 16 channels and filters or more are computed by Winograd's
/// algorithm: rounding errors are two to three times those of a plain sum, and elements next to one that depends on an
/// infinite number may be NaN where a plain sum would be finite.
///
/// # Shapes
/// Input: (images, channels, height, width). Weight: (filters, channels / groups, kernel, kernel). Bias: (filters).
/// Result: (images, filters, height, width), whose height is that of the input plus `2 · padding − dilation · (kernel −
/// 1) − 1`, divided by the stride, plus 1; so is its width.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use distribute_candle::Conv2d;
///
/// let blur = Conv2d::new(Tensor::ones((1, 1, 3, 3), DType::F32, &Device::Cpu)?, None, Default::default());
/// let y = blur.forward(&Tensor::ones((2, 1, 5, 4), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [2, 1, 3, 2]);
/// assert_eq!(y.max_all()?.to_scalar::<f32>()?, 9.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Conv2d(candle_nn::Conv2d);

impl Conv2d {
    /// Creates a layer of a weight and a bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv2dConfig) -> Conv2d {
        Conv2d(candle_nn::Conv2d::new(weight, bias, config))
    }

    /// Returns the settings.
    pub fn config(&self) -> &Conv2dConfig {
        self.0.config()
    }

    /// Returns the weight.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// Returns the bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.0.bias()
    }

    /// Computes the convolution and applies the rectified linear unit: the same as [`relu`](crate::relu) of
    /// [`forward`](Module::forward).
    ///
    /// For f32 and f64 in host memory this is one operation, which passes over memory less often, forward and backward.
    ///
    /// # Errors
    /// [`candle_core::Error`] if the input does not fit.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use distribute_candle::Conv2d;
    ///
    /// let negate = Conv2d::new(Tensor::new(&[[[[-1f32]]]], &Device::Cpu)?, None, Default::default());
    /// let y = negate.forward_relu(&Tensor::new(&[[[[-2f32, 3.0]]]], &Device::Cpu)?)?;
    /// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [2.0, 0.0]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_relu(&self, x: &Tensor) -> Result<Tensor> {
        self.fused(x, true).unwrap_or_else(|| relu(&self.by_candle(x)?))
    }

    /// Computes the convolution, applies the rectified linear unit and pools: the same as
    /// [`max_pool2d`] of [`forward_relu`](Self::forward_relu).
    ///
    /// For windows of 2 × 2 of f32 and f64 in host memory this is one operation, which takes a third of the memory, and
    /// finds the gradient of the bias in the pooling's, which is smaller than the convolution's.
    ///
    /// # Errors
    /// [`candle_core::Error`] if the input does not fit, or the convolution's result is smaller than a window.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use distribute_candle::Conv2d;
    ///
    /// let negate = Conv2d::new(Tensor::new(&[[[[-1f32]]]], &Device::Cpu)?, None, Default::default());
    /// let x = Tensor::new(&[[[[-2f32, 3.0], [-5.0, 1.0]]]], &Device::Cpu)?;
    /// assert_eq!(negate.forward_relu_max_pool(&x, 2)?.flatten_all()?.to_vec1::<f32>()?, [5.0]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_relu_max_pool(&self, x: &Tensor, window: impl ToUsize2) -> Result<Tensor> {
        let window = window.to_usize2();
        match self.kernel(x).filter(|of| window == (2, 2) && of.output_size().iter().all(|size| *size >= 2)) {
            Some(of) => weighted(x, self.weight(), self.bias(), ConvolvePool::new(Pooled::new(of))),
            None => max_pool2d(&self.forward_relu(x)?, window),
        }
    }

    fn by_candle(&self, x: &Tensor) -> Result<Tensor> {
        match self.bias() {
            Some(bias) if is_short(x.dtype()) => {
                let y = candle_nn::Conv2d::new(self.weight().clone(), None, *self.config()).forward(x)?;
                add_bias(&y, &bias.reshape((1, bias.dims1()?, 1, 1))?)
            }
            _ => self.0.forward(x),
        }
    }

    /// Computes the convolution as one operation; `None` where it is not one.
    fn fused(&self, x: &Tensor, rectified: bool) -> Option<Result<Tensor>> {
        self.kernel(x).map(|of| weighted(x, self.weight(), self.bias(), Convolve { of, rectified }))
    }

    /// Returns the kernel that computes the layer for an input; `None` where candle does.
    fn kernel(&self, x: &Tensor) -> Option<Convolution> {
        let same = |tensor: &Tensor| tensor.dtype() == x.dtype() && tensor.device().same_device(x.device());
        let fits = is_fused(x) && same(self.weight()) && self.bias().is_none_or(same);
        self.operation(x.dims()).filter(|_| fits)
    }

    /// Returns the operation on an input of this shape; `None` if there is no result, which candle's own reports.
    fn operation(&self, input: &[usize]) -> Option<Convolution> {
        let (&[_, channels, height, width], &[filters, depth, rows, columns]) = (input, self.weight().dims()) else {
            return None;
        };
        let &Conv2dConfig { padding, stride, dilation, groups, .. } = self.config();
        let fits = |size: usize, kernel: usize| {
            kernel > 0 && dilation > 0 && dilation * (kernel - 1) < size + 2 * padding && size > 0
        };
        let grouped = groups > 0 && filters > 0 && depth > 0 && channels == depth * groups && filters % groups == 0;
        let biased = self.bias().is_none_or(|bias| bias.dims() == [filters]);
        let (size, kernel) = ([height, width], [rows, columns]);
        (grouped && biased && stride > 0 && fits(height, rows) && fits(width, columns)).then_some(Convolution {
            channels,
            filters,
            size,
            kernel,
            stride,
            padding,
            dilation,
            groups,
        })
    }
}

/// Creates a [`Conv2d`] with a bias, for square kernels.
///
/// # Errors
/// [`candle_core::Error`] if the variables exist with other shapes.
pub fn conv2d(
    channels: usize,
    filters: usize,
    kernel: usize,
    config: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    Ok(Conv2d(candle_nn::conv2d(channels, filters, kernel, config, vb)?))
}

/// Creates a [`Conv2d`] without a bias, for square kernels.
///
/// # Errors
/// [`candle_core::Error`] if the variable exists with another shape.
pub fn conv2d_no_bias(
    channels: usize,
    filters: usize,
    kernel: usize,
    config: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    Ok(Conv2d(candle_nn::conv2d_no_bias(channels, filters, kernel, config, vb)?))
}

/// Computes the largest element of each window, whose stride is its size.
///
/// The gradient of a window is that of its largest element; candle's own
/// [`max_pool2d`](candle_core::Tensor::max_pool2d) divides it by the number of the window's elements.
///
/// # Shapes
/// `x`: (images, channels, height, width). The result has height and width divided by those of the window, rounded
/// down.
///
/// # Errors
/// [`candle_core::Error`] if `x` has other than four axes, or is smaller than a window.
///
/// # Examples
/// ```
/// use candle_core::{Device, Var};
///
/// let x = Var::new(&[[[[1f32, 4.0], [2.0, 3.0]]]], &Device::Cpu)?;
/// let y = distribute_candle::max_pool2d(&x, 2)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [4.0]);
/// let change = y.backward()?.get(&x).map(|change| change.flatten_all()?.to_vec1::<f32>()).transpose()?;
/// assert_eq!(change, Some(vec![0.0, 1.0, 0.0, 0.0]));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn max_pool2d(x: &Tensor, window: impl ToUsize2) -> Result<Tensor> {
    let window = window.to_usize2();
    max_pool2d_with_stride(x, window, window)
}

/// Computes the largest element of each window like [`max_pool2d`]; windows are `stride` apart and may overlap.
///
/// # Shapes
/// `x`: (images, channels, height, width). The result's height is that of `x` less that of the window, divided by the
/// stride, rounded down, plus 1; so is its width.
///
/// # Errors
/// [`candle_core::Error`] if `x` has other than four axes, or is smaller than a window, or the stride is 0. Outside of
/// host memory, and for 16-bit types, backward fails if windows overlap.
pub fn max_pool2d_with_stride(x: &Tensor, window: impl ToUsize2, stride: impl ToUsize2) -> Result<Tensor> {
    let (images, channels, height, width) = x.dims4()?;
    let (window, stride) = (window.to_usize2(), stride.to_usize2());
    let fits = (1..=height).contains(&window.0) && (1..=width).contains(&window.1) && stride.0 > 0 && stride.1 > 0;
    if !fits {
        candle_core::bail!("windows of {window:?} by {stride:?} do not fit images of {:?}", (height, width));
    }
    let pooling = Pooling { size: [height, width], window: window.into(), stride: stride.into() };
    if is_fused(x) {
        return apply([&x.contiguous()?], Pool(pooling));
    }
    if window.0 > stride.0 || window.1 > stride.1 {
        return x.max_pool2d_with_stride(window, stride);
    }
    let [rows, columns] = pooling.output_size();
    let x = cut(&cut(x, 2, rows * stride.0)?, 3, columns * stride.1)?;
    let windows = x.contiguous()?.reshape(vec![images, channels, rows, stride.0, columns, stride.1])?;
    let windows = windows.narrow(3, 0, window.0)?.narrow(5, 0, window.1)?.transpose(3, 4)?.contiguous()?;
    let windows = windows.reshape((images, channels, rows, columns, window.0 * window.1))?;
    if window == (1, 1) {
        return windows.squeeze(D::Minus1);
    }
    // The gradient of candle's maximum would reach all elements that are equally large, and its maximum pass NaN over.
    let detached = windows.detach();
    let invalid = detached.ne(&detached)?.to_dtype(DType::F32)?;
    // In a window with NaN all other elements count as equally small.
    let valid = invalid.max_keepdim(D::Minus1)?.broadcast_as(invalid.shape())?.eq(0.0)?;
    let largest = valid.where_cond(&detached, &invalid.to_dtype(detached.dtype())?)?.argmax_keepdim(D::Minus1)?;
    windows.gather(&largest, D::Minus1)?.squeeze(D::Minus1)
}

/// Returns the first elements of an axis, and zeros where there are fewer.
fn cut(x: &Tensor, axis: usize, len: usize) -> Result<Tensor> {
    match len.checked_sub(x.dim(axis)?) {
        Some(missing) => x.pad_with_zeros(axis, 0, missing),
        None => x.narrow(axis, 0, len),
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fused(x, false).unwrap_or_else(|| self.by_candle(x))
    }
}

/// A convolution, and the rectified linear unit of it if that is wanted.
struct Convolve {
    of: Convolution,
    rectified: bool,
}

impl Weighted for Convolve {
    const NAME: &'static str = "convolution";

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            Convolve { of, rectified }: &Convolve,
            x: Stored<'_>,
            weight: Stored<'_>,
            bias: Option<Stored<'_>>,
        ) -> Result<CpuStorage> {
            let (x, weight) = (elements::<T>(x.0, x.1)?, elements(weight.0, weight.1)?);
            let bias = bias.map(|(storage, layout)| elements(storage, layout)).transpose()?;
            Ok(T::to_cpu_storage_owned(match rectified {
                true => of.forward_relu(x, weight, bias),
                false => of.forward(x, weight, bias),
            }))
        }
        let [height, width] = self.of.output_size();
        let shape = Shape::from((x.1.dims()[0], self.of.filters, height, width));
        Ok((by_type!(dtype(x.0), run(self, x, weight, bias))?, shape))
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        fn run<T: Element>(
            Convolve { of, rectified }: &Convolve,
            [x, weight, y, gradient]: [&Tensor; 4],
            bias: Option<&Tensor>,
        ) -> Result<[Option<Tensor>; 3]> {
            with([x, weight, y, gradient], |[elements, factors, y, gradient]: [&[T]; 4]| {
                let passed = rectified.then(|| ramp::backward(y, gradient));
                let gradient = passed.as_deref().unwrap_or(gradient);
                let of_bias = || of.backward_bias(gradient);
                gradients(of, ([x, weight], [elements, factors]), gradient, (bias, of_bias))
            })?
        }
        by_type!(x.dtype(), run(self, [x, weight, y, gradient], bias))
    }
}

/// Returns the gradients of the input, the weight and the bias that are needed, from that of the convolution.
fn gradients<T: Element>(
    of: &Convolution,
    ([x, weight], [elements, factors]): ([&Tensor; 2], [&[T]; 2]),
    gradient: &[T],
    (bias, of_bias): (Option<&Tensor>, impl FnOnce() -> Vec<T>),
) -> Result<[Option<Tensor>; 3]> {
    let of_x = || of.backward_input(factors, gradient);
    let of_weight = || of.backward_weight(elements, gradient);
    Ok([gradient_of(Some(x), of_x)?, gradient_of(Some(weight), of_weight)?, gradient_of(bias, of_bias)?])
}

/// A convolution, the rectified linear unit of it, and max-pooling.
struct ConvolvePool {
    of: Pooled,
    /// Where the largest elements of windows are, from forward for backward.
    places: Kept<u8>,
}

impl ConvolvePool {
    fn new(of: Pooled) -> ConvolvePool {
        ConvolvePool { of, places: Kept::none() }
    }
}

impl Weighted for ConvolvePool {
    const NAME: &'static str = "convolution-max-pooling";

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            of: &ConvolvePool,
            x: Stored<'_>,
            weight: Stored<'_>,
            bias: Option<Stored<'_>>,
        ) -> Result<CpuStorage> {
            let bias = bias.map(|(storage, layout)| elements(storage, layout)).transpose()?;
            let (y, places) = of.of.forward::<T>(elements(x.0, x.1)?, elements(weight.0, weight.1)?, bias);
            of.places.set(places)?;
            Ok(T::to_cpu_storage_owned(y))
        }
        let [height, width] = self.of.output_size();
        let shape = Shape::from((x.1.dims()[0], self.of.convolution().filters, height, width));
        Ok((by_type!(dtype(x.0), run(self, x, weight, bias))?, shape))
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        fn run<T: Element>(
            of: &ConvolvePool,
            given: [&Tensor; 4],
            bias: Option<&Tensor>,
        ) -> Result<[Option<Tensor>; 3]> {
            let [x, weight, ..] = given;
            with(given, |[elements, factors, y, gradient]: [&[T]; 4]| {
                let change = with([of.places.tensor()?], |[places]: [&[u8]; 1]| of.of.backward(places, y, gradient))?;
                let given = ([x, weight], [elements, factors]);
                gradients(of.of.convolution(), given, &change.convolved, (bias, || change.bias))
            })?
        }
        by_type!(x.dtype(), run(self, [x, weight, y, gradient], bias))
    }

    fn kept(&self) -> Option<&Tensor> {
        self.places.get()
    }
}

struct Pool(Pooling);

impl Operation<1> for Pool {
    const NAME: &'static str = "max-pooling";

    fn forward(&self, [(storage, layout)]: [Stored<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(of: &Pooling, storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
            Ok(T::to_cpu_storage_owned(of.forward(elements::<T>(storage, layout)?)))
        }
        let [height, width] = self.0.output_size();
        let shape = Shape::from((layout.dims()[0], layout.dims()[1], height, width));
        Ok((by_type!(dtype(storage), run(&self.0, storage, layout))?, shape))
    }

    fn backward(&self, [x]: [&Tensor; 1], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        fn run<T: Element>(of: &Pooling, x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            tensor(with([x, gradient], |[elements, gradient]: [&[T]; 2]| of.backward(elements, gradient))?, x)
        }
        Ok([Some(by_type!(x.dtype(), run(&self.0, x, gradient))?)])
    }
}

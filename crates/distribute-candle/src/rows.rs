//! Operations on rows in host memory: fused, on all of the replica's threads, and with the backward that candle's own
//! fused operations lack.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CudaStorage, CustomOp2, D, DType, Error, Layout, Result, Shape, Tensor};
use distribute_rows::cross_entropy::LogSum;
use distribute_rows::normalise::{Gradients, Normalise};
use distribute_rows::{cross_entropy, gelu as curve, pairs, relu as ramp, softmax as weights};

use crate::fused::{RowWise, Weighted, row_len, row_wise, weighted};
use crate::gpu::copied;
use crate::host::{Element, Stored, by_type, dtype, elements, is_fused, tensor, with};
use crate::relay::{Operation, apply};
use crate::tensor::is_short;

/// Computes the softmax over the last axis, which can be trained; candle's fused one has no backward.
///
/// In host memory, f32 and f64 take two passes over it; otherwise these are candle's operations. Rows of 16 bits are
/// converted to f32 and back, because candle would round the sum of their exponentials after each addition.
///
/// # Shapes
/// The result has the shape of `x`.
///
/// # Errors
/// [`candle_core::Error`] if `x` is a scalar.
///
/// # Examples
/// ```
/// use candle_core::{Device, Var};
///
/// let scores = Var::new(&[0f32, 0.0, f32::NEG_INFINITY], &Device::Cpu)?;
/// let weights = distribute_candle::softmax(&scores)?;
/// assert_eq!(weights.to_vec1::<f32>()?, [0.5, 0.5, 0.0]);
/// assert!(weights.get(0)?.backward()?.get(&scores).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    match x.dim(D::Minus1)? {
        0 => candle_nn::ops::softmax(x, D::Minus1),
        _ if is_short(x.dtype()) => softmax(&x.to_dtype(DType::F32)?)?.to_dtype(x.dtype()),
        _ if is_fused(x) => row_wise(x, Softmax),
        _ => candle_nn::ops::softmax(x, D::Minus1),
    }
}

/// Computes the Gaussian error linear unit, in its approximation by tanh, like [`Tensor::gelu`], faster in host memory.
///
/// # Shapes
/// The result has the shape of `x`.
///
/// # Errors
/// [`candle_core::Error`] if the type is not one of floats.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[-100f32, 0.0, 1.0], &Device::Cpu)?;
/// assert_eq!(distribute_candle::gelu(&x)?.to_vec1::<f32>()?, [0.0, 0.0, 0.841192]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if is_fused(x) { row_wise(x, Gelu) } else { x.gelu() }
}

/// Computes the rectified linear unit, like [`Tensor::relu`], faster in host memory: backward is one pass over it.
///
/// NaN stays, and elements of 0 have no gradient.
///
/// # Shapes
/// The result has the shape of `x`.
///
/// # Errors
/// [`candle_core::Error`] if the type is not one of floats.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[-1f32, 0.0, 2.0], &Device::Cpu)?;
/// assert_eq!(distribute_candle::relu(&x)?.to_vec1::<f32>()?, [0.0, 0.0, 2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn relu(x: &Tensor) -> Result<Tensor> {
    if is_fused(x) {
        return row_wise(x, Relu);
    }
    // candle's would turn NaN into 0 in 16 bits and on GPUs.
    x.le(0.0)?.where_cond(&x.zeros_like()?, x)
}

/// Adds two tensors of one shape, like `x + y`, faster in host memory: the gradients of both are the result's itself,
/// so backward computes nothing. Both stay in the graph of a batch without rows, of which candle drops the right one.
///
/// # Shapes
/// The result has the shape of `x` and `y`.
///
/// # Errors
/// [`candle_core::Error`] if shapes, types or devices differ.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
///
/// let [x, y] = [Tensor::new(&[1f32, 2.0], &Device::Cpu)?, Tensor::new(&[0.5f32, 0.5], &Device::Cpu)?];
/// assert_eq!(distribute_candle::add(&x, &y)?.to_vec1::<f32>()?, [1.5, 2.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let alike = x.shape() == y.shape() && x.dtype() == y.dtype() && x.device().same_device(y.device());
    match alike {
        true if is_fused(x) => apply([&x.contiguous()?, &y.contiguous()?], Add),
        true if x.elem_count() == 0 => x.apply_op2(y, AddNothing),
        _ => x + y,
    }
}

/// Normalises the last axis of a tensor that [`is_fused`].
pub(crate) fn normalise(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, how: Normalise) -> Result<Tensor> {
    weighted(x, weight, bias, Norm(how))
}

/// Computes the cross-entropy of each row of logits that [`is_fused`], and of its class, which is below their number.
pub(crate) fn cross_entropy_of_classes(logits: &Tensor, classes: Vec<usize>) -> Result<Tensor> {
    let logits = logits.contiguous()?;
    match logits.dtype() {
        DType::F64 => apply([&logits], CrossEntropy::<f64> { classes, sums: OnceLock::new() }),
        _ => apply([&logits], CrossEntropy::<f32> { classes, sums: OnceLock::new() }),
    }
}

struct Softmax;

impl RowWise for Softmax {
    const NAME: &'static str = "softmax-rows";
    const KEEPS_RESULT: bool = true;

    fn forward<T: Element>(x: &[T], size: usize) -> Vec<T> {
        weights::forward(x, size)
    }

    fn backward<T: Element>(y: &[T], size: usize, gradient: &[T]) -> Vec<T> {
        weights::backward(y, size, gradient)
    }
}

struct Gelu;

impl RowWise for Gelu {
    const NAME: &'static str = "gelu-rows";

    fn forward<T: Element>(x: &[T], _: usize) -> Vec<T> {
        curve::forward(x)
    }

    fn backward<T: Element>(x: &[T], _: usize, gradient: &[T]) -> Vec<T> {
        curve::backward(x, gradient)
    }
}

struct Relu;

impl RowWise for Relu {
    const NAME: &'static str = "relu-rows";
    const KEEPS_RESULT: bool = true;

    fn forward<T: Element>(x: &[T], _: usize) -> Vec<T> {
        ramp::forward(x)
    }

    fn backward<T: Element>(y: &[T], _: usize, gradient: &[T]) -> Vec<T> {
        ramp::backward(y, gradient)
    }
}

struct Norm(Normalise);

impl Weighted for Norm {
    const NAME: &'static str = "normalise-rows";

    fn forward(&self, x: Stored<'_>, weight: Stored<'_>, bias: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(how: Normalise, x: Stored<'_>, w: Stored<'_>, b: Option<Stored<'_>>) -> Result<CpuStorage> {
            let (x, weight) = (elements::<T>(x.0, x.1)?, elements(w.0, w.1)?);
            let bias = b.map(|(storage, layout)| elements(storage, layout)).transpose()?;
            Ok(T::to_cpu_storage_owned(how.forward(x, weight, bias)))
        }
        Ok((by_type!(dtype(x.0), run(self.0, x, weight, bias))?, x.1.shape().clone()))
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        fn run<T: Element>(how: Normalise, [x, weight, gradient]: [&Tensor; 3]) -> Result<[Tensor; 3]> {
            let Gradients { input, weight: of_weight, bias } =
                with([x, weight, gradient], |[elements, factors, gradient]: [&[T]; 3]| {
                    how.backward(elements, factors, gradient)
                })?;
            Ok([tensor(input, x)?, tensor(of_weight, weight)?, tensor(bias, weight)?])
        }
        let [of_x, of_weight, of_bias] = by_type!(x.dtype(), run(self.0, [x, weight, gradient]))?;
        Ok([Some(of_x), Some(of_weight), bias.map(|_| of_bias)])
    }
}

struct Add;

impl Operation<2> for Add {
    const NAME: &'static str = "add";

    fn forward(&self, [x, y]: [Stored<'_>; 2]) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(x: Stored<'_>, y: Stored<'_>) -> Result<CpuStorage> {
            let (x, y) = (elements::<T>(x.0, x.1)?, elements(y.0, y.1)?);
            Ok(T::to_cpu_storage_owned(pairs::add(x, y)))
        }
        Ok((by_type!(dtype(x.0), run(x, y))?, x.1.shape().clone()))
    }

    fn backward(&self, _: [&Tensor; 2], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        Ok([Some(gradient.clone()), Some(gradient.clone())])
    }
}

/// The sum of two tensors without elements.
struct AddNothing;

impl CustomOp2 for AddNothing {
    fn name(&self) -> &'static str {
        "add-nothing"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((x.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((copied(x, layout)?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of = |tensor: &Tensor| tensor.track_op().then(|| gradient.clone());
        Ok((of(x), of(y)))
    }
}

struct CrossEntropy<T> {
    classes: Vec<usize>,
    /// The sums of each row, from forward for backward.
    sums: OnceLock<Vec<LogSum<T>>>,
}

impl<T: Element> Operation<1> for CrossEntropy<T> {
    const NAME: &'static str = "cross-entropy-rows";

    fn forward(&self, [(storage, layout)]: [Stored<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        let (logits, size, rows) = (elements::<T>(storage, layout)?, row_len(layout.shape()), self.classes.len());
        let (losses, sums) = cross_entropy::forward(logits, size, &self.classes);
        let _ = self.sums.set(sums);
        Ok((T::to_cpu_storage_owned(losses), Shape::from(rows)))
    }

    fn backward(&self, [logits]: [&Tensor; 1], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let sums = self.sums.get().ok_or_else(|| Error::Msg("backward comes before forward".to_owned()))?;
        let size = row_len(logits.shape());
        let change = with([logits, gradient], |[elements, gradient]: [&[T]; 2]| {
            cross_entropy::backward(elements, size, &self.classes, sums, gradient)
        })?;
        Ok([Some(tensor(change, logits)?)])
    }
}

//! Operations on rows in host memory: fused, on all of the replica's threads, and with the backward that candle's own
//! fused operations lack.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, D, DType, Error, Layout, Result, Shape, Tensor};
use distribute_rows::cross_entropy::LogSum;
use distribute_rows::normalise::Normalise;
use distribute_rows::{cross_entropy, gelu as curve, relu as ramp, softmax as weights};

use crate::host::{Element, Stored, by_type, computed, dtype, elements, is_fused, tensor, with};

/// Computes the softmax over the last axis, which can be trained; candle's fused one has no backward.
///
/// In host memory, f32 and f64 take two passes over it; otherwise these are candle's operations.
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
    if x.dim(D::Minus1)? == 0 || !is_fused(x) {
        return candle_nn::ops::softmax(x, D::Minus1);
    }
    x.contiguous()?.apply_op1(Softmax)
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
    if is_fused(x) { x.contiguous()?.apply_op1(Gelu) } else { x.gelu() }
}

/// Computes the rectified linear unit, like [`Tensor::relu`], faster in host memory: backward is one pass over it.
///
/// In host memory NaN stays, and elements of 0 have no gradient.
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
    if is_fused(x) { x.contiguous()?.apply_op1(Relu) } else { x.relu() }
}

/// Normalises the last axis of a tensor that [`is_fused`].
pub(crate) fn normalise(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, how: Normalise) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    match bias {
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, Norm(how)),
        None => x.apply_op2(&weight, Norm(how)),
    }
}

/// Computes the cross-entropy of each row of logits that [`is_fused`], and of its class, which is below their number.
pub(crate) fn cross_entropy_of_classes(logits: &Tensor, classes: Vec<usize>) -> Result<Tensor> {
    let logits = logits.contiguous()?;
    match logits.dtype() {
        DType::F64 => logits.apply_op1(CrossEntropy::<f64> { classes, sums: OnceLock::new() }),
        _ => logits.apply_op1(CrossEntropy::<f32> { classes, sums: OnceLock::new() }),
    }
}

/// Returns the number of elements of the last axis.
fn row_len(shape: &Shape) -> usize {
    shape.dims().last().copied().unwrap_or(1)
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax-rows"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
            let x = elements::<T>(storage, layout)?;
            let size = row_len(layout.shape());
            Ok(T::to_cpu_storage_owned(computed(x.len(), |out| weights::forward(x, size, out))))
        }
        Ok((by_type!(dtype(storage), run(storage, layout))?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        fn run<T: Element>(y: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let size = row_len(y.shape());
            let change = with([y, gradient], |[elements, gradient]: [&[T]; 2]| {
                computed(elements.len(), |out| weights::backward(elements, size, gradient, out))
            })?;
            tensor(change, y)
        }
        by_type!(y.dtype(), run(y, gradient)).map(Some)
    }
}

struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu-rows"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
            let x = elements::<T>(storage, layout)?;
            Ok(T::to_cpu_storage_owned(computed(x.len(), |out| curve::forward(x, out))))
        }
        Ok((by_type!(dtype(storage), run(storage, layout))?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        fn run<T: Element>(x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let change = with([x, gradient], |[elements, gradient]: [&[T]; 2]| {
                computed(elements.len(), |out| curve::backward(elements, gradient, out))
            })?;
            tensor(change, x)
        }
        by_type!(x.dtype(), run(x, gradient)).map(Some)
    }
}

struct Relu;

impl CustomOp1 for Relu {
    fn name(&self) -> &'static str {
        "relu-rows"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
            let x = elements::<T>(storage, layout)?;
            Ok(T::to_cpu_storage_owned(computed(x.len(), |out| ramp::forward(x, out))))
        }
        Ok((by_type!(dtype(storage), run(storage, layout))?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        fn run<T: Element>(y: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let change = with([y, gradient], |[elements, gradient]: [&[T]; 2]| {
                computed(elements.len(), |out| ramp::backward(elements, gradient, out))
            })?;
            tensor(change, y)
        }
        by_type!(y.dtype(), run(y, gradient)).map(Some)
    }
}

struct Norm(Normalise);

impl Norm {
    fn forward(&self, x: (&CpuStorage, &Layout), w: Stored<'_>, b: Option<Stored<'_>>) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(how: Normalise, x: Stored<'_>, w: Stored<'_>, b: Option<Stored<'_>>) -> Result<CpuStorage> {
            let (x, weight) = (elements::<T>(x.0, x.1)?, elements(w.0, w.1)?);
            let bias = b.map(|(storage, layout)| elements(storage, layout)).transpose()?;
            Ok(T::to_cpu_storage_owned(computed(x.len(), |out| how.forward(x, weight, bias, out))))
        }
        Ok((by_type!(dtype(x.0), run(self.0, x, w, b))?, x.1.shape().clone()))
    }

    fn backward(&self, x: &Tensor, weight: &Tensor, gradient: &Tensor) -> Result<[Tensor; 3]> {
        fn run<T: Element>(how: Normalise, x: &Tensor, weight: &Tensor, gradient: &Tensor) -> Result<[Tensor; 3]> {
            let (change, sums) = with([x, weight, gradient], |[elements, factors, gradient]: [&[T]; 3]| {
                let mut change = vec![T::default(); elements.len()];
                let sums = how.backward(elements, factors, gradient, &mut change);
                (change, sums)
            })?;
            Ok([tensor(change, x)?, tensor(sums.weight, weight)?, tensor(sums.bias, weight)?])
        }
        by_type!(x.dtype(), run(self.0, x, weight, gradient))
    }
}

impl CustomOp2 for Norm {
    fn name(&self) -> &'static str {
        "normalise-rows"
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, w: &CpuStorage, lw: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward((x, lx), (w, lw), None)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [x, weight, _] = self.backward(x, w, gradient)?;
        Ok((Some(x), Some(weight)))
    }
}

impl CustomOp3 for Norm {
    fn name(&self) -> &'static str {
        "normalise-rows"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward((x, lx), (w, lw), Some((b, lb)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [x, weight, bias] = self.backward(x, w, gradient)?;
        Ok((Some(x), Some(weight), Some(bias)))
    }
}

struct CrossEntropy<T> {
    classes: Vec<usize>,
    /// The sums of each row, from forward for backward.
    sums: OnceLock<Vec<LogSum<T>>>,
}

impl<T: Element> CustomOp1 for CrossEntropy<T> {
    fn name(&self) -> &'static str {
        "cross-entropy-rows"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (logits, size, rows) = (elements::<T>(storage, layout)?, row_len(layout.shape()), self.classes.len());
        let mut sums = vec![LogSum::default(); rows];
        let losses = computed(rows, |losses| cross_entropy::forward(logits, size, &self.classes, losses, &mut sums));
        let _ = self.sums.set(sums);
        Ok((T::to_cpu_storage_owned(losses), Shape::from(rows)))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let sums = self.sums.get().ok_or_else(|| Error::Msg("backward comes before forward".to_owned()))?;
        let size = row_len(logits.shape());
        let change = with([logits, gradient], |[elements, gradient]: [&[T]; 2]| {
            computed(elements.len(), |out| {
                cross_entropy::backward(elements, size, &self.classes, sums, gradient, out);
            })
        })?;
        tensor(change, logits).map(Some)
    }
}

//! Losses per example, which are summed and divided by the global batch.
//!
//! All losses compute in f32 or f64, whatever the type of the outputs, because sums, squares and exponentials overflow
//! early in 16 bits.

use burn::tensor::activation::{log_sigmoid, log_softmax};
use burn::tensor::{DType, FloatDType, Int, Tensor};

use crate::data::numbers;
use crate::{Error, Result};

mod probabilities;

pub use probabilities::FromProbabilities;

/// A loss function that returns one value per example. Functions of outputs and targets are losses too, such as
/// `|outputs: Tensor<2>, targets: Tensor<2>| (outputs - targets).abs().mean_dim(1).squeeze_dim(1)`.
///
/// # Shapes
/// Outputs and targets have one example per row; the result has one number per example.
pub trait Loss<const D: usize, Y>: Send + Sync {
    /// Computes the loss of each example.
    ///
    /// # Errors
    /// [`Error::Shapes`] if outputs and targets do not fit together, [`Error::Class`] for a target that is not a class.
    fn per_example(&self, outputs: Tensor<D>, targets: Y) -> Result<Tensor<1>>;
}

impl<const D: usize, Y, F: Fn(Tensor<D>, Y) -> Tensor<1> + Send + Sync> Loss<D, Y> for F {
    fn per_example(&self, outputs: Tensor<D>, targets: Y) -> Result<Tensor<1>> {
        Ok(self(outputs, targets))
    }
}

/// Softmax cross-entropy of logits and class indices. The loss of an example that is a sequence is the mean over its
/// positions. For outputs that are probabilities: [`FromProbabilities`].
///
/// # Shapes
/// Logits (examples, …, classes), targets (examples, …).
#[derive(Clone, Copy, Debug, Default)]
pub struct SparseCategoricalCrossentropy;

/// Binary cross-entropy of logits and targets from 0 to 1, of equal shapes; the mean over an example's outputs.
#[derive(Clone, Copy, Debug, Default)]
pub struct BinaryCrossentropy;

/// Mean squared error of outputs and targets of equal shapes; the mean over an example's outputs.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanSquaredError;

macro_rules! sparse {
    ($($outputs:literal, $targets:literal);*) => {$(
        impl Loss<$outputs, Tensor<$targets, Int>> for SparseCategoricalCrossentropy {
            fn per_example(&self, outputs: Tensor<$outputs>, targets: Tensor<$targets, Int>) -> Result<Tensor<1>> {
                let examples = targets.dims()[0];
                let (logits, targets) = of_positions(outputs, targets)?;
                Ok(rows(cross_entropy_per_example(logits, targets)?, examples))
            }
        }
    )*};
}

// The rank of the targets follows from that of the outputs.
sparse!(2, 1; 3, 2; 4, 3);

impl<const D: usize> Loss<D, Tensor<D>> for BinaryCrossentropy {
    fn per_example(&self, outputs: Tensor<D>, targets: Tensor<D>) -> Result<Tensor<1>> {
        let (outputs, targets) = alike(outputs, targets)?;
        // ln(1 + exp(x)) - x t, which never overflows.
        Ok(of_examples(log_sigmoid(outputs.clone().neg()).neg() - outputs * targets))
    }
}

impl<const D: usize> Loss<D, Tensor<D>> for MeanSquaredError {
    fn per_example(&self, outputs: Tensor<D>, targets: Tensor<D>) -> Result<Tensor<1>> {
        let (outputs, targets) = alike(outputs, targets)?;
        Ok(of_examples((outputs - targets).square()))
    }
}

/// Returns a row of classes and a target for each position of each example.
fn of_positions<const D: usize, const T: usize>(
    outputs: Tensor<D>,
    targets: Tensor<T, Int>,
) -> Result<(Tensor<2>, Tensor<1, Int>)> {
    let (of_outputs, of_targets) = (outputs.dims(), targets.dims());
    if of_outputs[..T] != of_targets {
        let (outputs, targets) = (of_outputs.to_vec(), of_targets.to_vec());
        return Err(Error::Shapes { outputs, targets, expected: "the shape of the outputs but the last" });
    }
    let (count, classes) = (of_targets.iter().product::<usize>(), of_outputs[T]);
    Ok((outputs.reshape([count, classes]), targets.reshape([count])))
}

/// Computes the cross-entropy of each example's logits and target, in f32 or f64.
///
/// # Shapes
/// `logits`: (examples, classes); `targets`: (examples), class indices. Result: (examples).
///
/// # Errors
/// [`Error::Shapes`] if there are not as many targets as rows of logits; [`Error::Class`] for the first target that is
/// not a class.
///
/// # Examples
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use distribute_burn::cross_entropy_per_example;
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_floats([[0.0, 0.0], [0.0, 9.0]], &device);
/// let losses = cross_entropy_per_example(logits, Tensor::<1, Int>::from_ints([0, 1], &device))?;
/// assert!((losses.clone().slice([0..1]).into_scalar::<f32>() - 2f32.ln()).abs() < 1e-6);
/// assert!(losses.slice([1..2]).into_scalar::<f32>() < 1e-3);
/// # Ok::<(), distribute_burn::Error>(())
/// ```
pub fn cross_entropy_per_example(logits: Tensor<2>, targets: Tensor<1, Int>) -> Result<Tensor<1>> {
    let [examples, classes] = logits.dims();
    check_rows(&logits, &targets)?;
    if examples == 0 {
        return Ok(no_losses(logits));
    }
    check_classes(&targets, classes)?;
    let of_classes = log_softmax(at_least_32_bits(logits), 1);
    Ok(of_classes.gather(1, targets.reshape([examples, 1])).neg().reshape([examples]))
}

/// Refuses another number of targets than rows of logits.
pub(crate) fn check_rows(logits: &Tensor<2>, targets: &Tensor<1, Int>) -> Result<()> {
    let (of_logits, of_targets) = (logits.dims(), targets.dims());
    if of_targets == of_logits[..1] {
        return Ok(());
    }
    let (outputs, targets) = (of_logits.to_vec(), of_targets.to_vec());
    Err(Error::Shapes { outputs, targets, expected: "as many rows as the outputs" })
}

/// Returns the losses of a replica without examples, which takes part in the step.
pub(crate) fn no_losses(logits: Tensor<2>) -> Tensor<1> {
    at_least_32_bits(logits).sum_dim(1).reshape([0])
}

/// Refuses a target that is not a class, where burn panics.
pub(crate) fn check_classes(targets: &Tensor<1, Int>, classes: usize) -> Result<()> {
    #[cfg(feature = "pjrt")]
    if let Some(noted) = crate::pjrt::targets_checked(targets, classes) {
        return noted;
    }
    match first_outside(targets, classes)? {
        None => Ok(()),
        Some((at, class)) => Err(Error::Class { at, class, classes }),
    }
}

/// Returns the first index that is not below `count`, with its position.
pub(crate) fn first_outside<const D: usize>(indices: &Tensor<D, Int>, count: usize) -> Result<Option<(usize, i64)>> {
    let all: Vec<i64> = numbers(indices.clone().into_data())?;
    let outside = |index: &i64| usize::try_from(*index).map_or(true, |index| index >= count);
    Ok(all.iter().position(outside).map(|at| (at, all[at])))
}

/// Converts outputs and targets to one type, f32 or f64.
fn alike<const D: usize>(outputs: Tensor<D>, targets: Tensor<D>) -> Result<(Tensor<D>, Tensor<D>)> {
    if outputs.dims() != targets.dims() {
        let (outputs, targets) = (outputs.dims().to_vec(), targets.dims().to_vec());
        return Err(Error::Shapes { outputs, targets, expected: "the shape of the outputs" });
    }
    let outputs = at_least_32_bits(outputs);
    let wide = if outputs.dtype() == DType::F64 { FloatDType::F64 } else { FloatDType::F32 };
    let targets = if targets.dtype() == outputs.dtype() { targets } else { targets.cast(wide) };
    Ok((outputs, targets))
}

/// Converts a tensor of 16 bits to f32.
pub(crate) fn at_least_32_bits<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let is_short = matches!(tensor.dtype(), DType::F16 | DType::BF16);
    if is_short { tensor.cast(FloatDType::F32) } else { tensor }
}

/// Returns the mean of each example's values.
fn of_examples<const D: usize>(values: Tensor<D>) -> Tensor<1> {
    let shape = values.dims();
    rows(values.reshape([shape.iter().product::<usize>()]), shape[0])
}

/// Returns the mean of each of `count` rows.
fn rows(values: Tensor<1>, count: usize) -> Tensor<1> {
    let width = values.dims()[0].checked_div(count).unwrap_or(1);
    if width == 1 { values } else { values.reshape([count, width]).mean_dim(1).reshape([count]) }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn tensor(rows: [[f32; 2]; 2]) -> Tensor<2> {
        Tensor::from_floats(rows, &Device::flex())
    }

    fn of(loss: impl Loss<2, Tensor<2>>, outputs: [[f32; 2]; 2], targets: [[f32; 2]; 2]) -> Vec<f32> {
        numbers(loss.per_example(tensor(outputs), tensor(targets)).unwrap().into_data()).unwrap()
    }

    fn close(got: &[f32], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        assert!(got.iter().zip(expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5), "{got:?} {expected:?}");
    }

    #[test]
    fn losses_by_hand() {
        let (outputs, targets) = ([[1.0, 3.0], [0.0, -2.0]], [[1.0, 0.0], [0.0, 1.0]]);
        close(&of(MeanSquaredError, outputs, targets), &[4.5, 4.5]);
        let soft = |x: f64| (1.0 + x.exp()).ln();
        let expected = [(soft(-1.0) + soft(3.0)) / 2.0, (soft(0.0) + soft(2.0)) / 2.0];
        close(&of(BinaryCrossentropy, outputs, targets), &expected);
        close(&of(BinaryCrossentropy, [[1e4, -1e4], [0.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]]), &[5e3, 2f64.ln()]);
        let own = |outputs: Tensor<2>, targets: Tensor<2>| (outputs - targets).abs().max_dim(1).squeeze_dim(1);
        close(&of(own, outputs, targets), &[3.0, 3.0]);
        let classes = |classes: [i32; 2]| Tensor::<1, Int>::from_ints(classes, &Device::flex());
        let sparse = SparseCategoricalCrossentropy.per_example(tensor(outputs), classes([0, 1])).unwrap();
        close(&numbers(sparse.into_data()).unwrap(), &[soft(2.0), soft(2.0)]);
        let outside = SparseCategoricalCrossentropy.per_example(tensor(outputs), classes([0, 2]));
        assert!(matches!(outside, Err(Error::Class { at: 1, class: 2, classes: 2 })));
    }

    #[test]
    fn the_gradient_of_a_logit_of_zero_is_that_of_a_sigmoid() {
        let outputs = Tensor::<2>::zeros([1, 2], &Device::flex().autodiff()).require_grad();
        let targets = Tensor::<2>::from_floats([[1.0, 0.0]], &Device::flex().autodiff());
        let loss = BinaryCrossentropy.per_example(outputs.clone(), targets).unwrap();
        let gradient = outputs.grad(&loss.sum().backward()).unwrap();
        close(&numbers(gradient.into_data()).unwrap(), &[-0.25, 0.25]);
    }

    #[test]
    fn the_loss_of_a_sequence_is_the_mean_over_its_positions() {
        let device = Device::flex();
        let logits = Tensor::<3>::from_floats([[[0.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 0.0]]], &device);
        let targets = Tensor::<2, Int>::from_ints([[0, 0], [1, 1]], &device);
        let losses = SparseCategoricalCrossentropy.per_example(logits, targets).unwrap();
        let soft = |x: f64| (1.0 + x.exp()).ln();
        let expected = [(2f64.ln() + soft(1.0)) / 2.0, (soft(2.0) + 2f64.ln()) / 2.0];
        close(&numbers(losses.into_data()).unwrap(), &expected);
    }

    #[test]
    fn what_does_not_fit_is_refused_in_words() {
        let device = Device::flex();
        let (wide, narrow) = (Tensor::<2>::zeros([2, 3], &device), Tensor::<2>::zeros([2, 1], &device));
        for loss in [&MeanSquaredError as &dyn Loss<2, Tensor<2>>, &BinaryCrossentropy] {
            let error = loss.per_example(wide.clone(), narrow.clone()).unwrap_err().to_string();
            assert!(error.contains("[2, 3]") && error.contains("[2, 1]"), "{error}");
        }
        let classes = Tensor::<1, Int>::zeros([3], &device);
        assert!(matches!(SparseCategoricalCrossentropy.per_example(wide, classes), Err(Error::Shapes { .. })));
    }

    #[test]
    fn no_examples_have_no_losses() {
        let device = Device::flex();
        let none = Tensor::<2>::zeros([0, 3], &device);
        let classes = Tensor::<1, Int>::zeros([0], &device);
        assert_eq!(SparseCategoricalCrossentropy.per_example(none.clone(), classes).unwrap().dims(), [0]);
        for loss in [&MeanSquaredError as &dyn Loss<2, Tensor<2>>, &BinaryCrossentropy] {
            assert_eq!(loss.per_example(none.clone(), none.clone()).unwrap().dims(), [0]);
        }
    }
}

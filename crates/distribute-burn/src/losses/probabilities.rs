//! Cross-entropies of probabilities instead of logits.

use burn::tensor::{Int, Tensor};

use super::{
    BinaryCrossentropy, Loss, SparseCategoricalCrossentropy, alike, at_least_32_bits, check_classes, check_rows,
    no_losses, of_examples, of_positions, rows,
};
use crate::Result;

/// The cross-entropy of a model whose outputs are probabilities, after a softmax or a sigmoid, instead of logits.
///
/// Wraps [`SparseCategoricalCrossentropy`] or [`BinaryCrossentropy`]; targets and shapes are those of the wrapped loss.
/// Probabilities of classes are divided by their sum first. All probabilities are clamped to 1e-7..=1 - 1e-7, so that
/// no loss is infinite; an output outside of this range gets no gradient from its logarithm. The loss of a row of
/// classes that are all 0 is NaN. Prefer logits where a model can return them: they lose no precision near 0 and 1.
///
/// # Errors
/// [`Error::Shapes`](crate::Error::Shapes) if outputs and targets do not fit together,
/// [`Error::Class`](crate::Error::Class) for a target that is not a class.
///
/// # Examples
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use distribute_burn::{FromProbabilities, Loss, SparseCategoricalCrossentropy};
/// let device = Device::flex();
/// let outputs = Tensor::<2>::from_floats([[0.25, 0.75]], &device);
/// let losses = FromProbabilities(SparseCategoricalCrossentropy)
///     .per_example(outputs, Tensor::<1, Int>::from_ints([1], &device))?;
/// assert!((losses.into_scalar::<f32>() + 0.75f32.ln()).abs() < 1e-6);
/// # Ok::<(), distribute_burn::Error>(())
/// ```
///
/// # Source
/// `from_logits=False` of `tf.keras.losses`, which divides and clamps in the same way.
#[derive(Clone, Copy, Debug, Default)]
pub struct FromProbabilities<L>(pub L);

macro_rules! sparse {
    ($($outputs:literal, $targets:literal);*) => {$(
        impl Loss<$outputs, Tensor<$targets, Int>> for FromProbabilities<SparseCategoricalCrossentropy> {
            fn per_example(&self, outputs: Tensor<$outputs>, targets: Tensor<$targets, Int>) -> Result<Tensor<1>> {
                let examples = targets.dims()[0];
                let (outputs, targets) = of_positions(outputs, targets)?;
                Ok(rows(cross_entropy_of_probabilities(outputs, targets)?, examples))
            }
        }
    )*};
}

sparse!(2, 1; 3, 2; 4, 3);

impl<const D: usize> Loss<D, Tensor<D>> for FromProbabilities<BinaryCrossentropy> {
    fn per_example(&self, outputs: Tensor<D>, targets: Tensor<D>) -> Result<Tensor<1>> {
        let (outputs, targets) = alike(outputs, targets)?;
        let outputs = outputs.clamp(EPSILON, 1.0 - EPSILON);
        let no = (outputs.clone().neg() + 1.0).log() * (targets.clone().neg() + 1.0);
        Ok(of_examples((outputs.log() * targets + no).neg()))
    }
}

fn cross_entropy_of_probabilities(outputs: Tensor<2>, targets: Tensor<1, Int>) -> Result<Tensor<1>> {
    let [examples, classes] = outputs.dims();
    check_rows(&outputs, &targets)?;
    if examples == 0 {
        return Ok(no_losses(outputs));
    }
    check_classes(&targets, classes)?;
    let outputs = at_least_32_bits(outputs);
    let outputs = (outputs.clone() / outputs.sum_dim(1)).clamp(EPSILON, 1.0 - EPSILON);
    Ok(outputs.log().gather(1, targets.reshape([examples, 1])).neg().reshape([examples]))
}

const EPSILON: f64 = 1e-7;

#[cfg(test)]
mod tests {
    use burn::tensor::activation::{sigmoid, softmax};
    use burn::tensor::{Device, FloatDType};

    use super::*;
    use crate::Error;
    use crate::data::numbers;

    const SPARSE: FromProbabilities<SparseCategoricalCrossentropy> = FromProbabilities(SparseCategoricalCrossentropy);
    const BINARY: FromProbabilities<BinaryCrossentropy> = FromProbabilities(BinaryCrossentropy);

    fn tensor(rows: [[f32; 3]; 2]) -> Tensor<2> {
        Tensor::from_floats(rows, &Device::flex())
    }

    fn classes(classes: [i32; 2]) -> Tensor<1, Int> {
        Tensor::from_ints(classes, &Device::flex())
    }

    fn of(losses: Result<Tensor<1>>) -> Vec<f64> {
        numbers(losses.unwrap().into_data()).unwrap()
    }

    fn close(got: &[f64], expected: &[f64], within: f64) {
        assert_eq!(got.len(), expected.len());
        let fits = |(a, b): (&f64, &f64)| (a - b).abs() <= within * b.abs().max(1.0);
        assert!(got.iter().zip(expected).all(fits), "{got:?} {expected:?}");
    }

    #[test]
    fn losses_are_those_of_the_logits() {
        let logits = || tensor([[1.0, 3.0, -2.0], [0.0, 0.5, 0.25]]);
        let expected = of(SparseCategoricalCrossentropy.per_example(logits(), classes([0, 2])));
        close(&of(SPARSE.per_example(softmax(logits(), 1), classes([0, 2]))), &expected, 1e-6);
        // A row whose sum is not 1 is divided by it.
        close(&of(SPARSE.per_example(softmax(logits(), 1) * 2.0, classes([0, 2]))), &expected, 1e-6);
        let targets = || tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]]);
        let expected = of(BinaryCrossentropy.per_example(logits(), targets()));
        close(&of(BINARY.per_example(sigmoid(logits()), targets())), &expected, 1e-6);
        let sequences = |outputs: Tensor<2>| outputs.reshape([1, 2, 3]);
        let targets = || classes([0, 2]).reshape([1, 2]);
        let expected = of(SparseCategoricalCrossentropy.per_example(sequences(logits()), targets()));
        close(&of(SPARSE.per_example(sequences(softmax(logits(), 1)), targets())), &expected, 1e-6);
    }

    #[test]
    fn probabilities_of_0_and_1_have_finite_losses() {
        let most = -(1e-7f64).ln();
        let certain = || tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]);
        close(&of(SPARSE.per_example(certain(), classes([0, 2]))), &[1e-7, most], 1e-6);
        let losses = of(BINARY.per_example(certain(), tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])));
        // The number of f32 next to 1 is 1 - 1.2e-7.
        close(&losses, &[2.0 * most / 3.0, 0.0], 0.01);
        let short = certain().cast(FloatDType::F16);
        assert!(of(SPARSE.per_example(short, classes([0, 2]))).iter().all(|loss| loss.is_finite()));
    }

    #[test]
    fn gradients_are_those_of_differences() {
        let device = Device::flex().autodiff();
        let outputs = [[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]];
        let soft = || Tensor::<2>::from_floats([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], &device);
        let sparse = || Tensor::<1, Int>::from_ints([2, 1], &device);
        let losses: [Box<dyn Fn(Tensor<2>) -> Tensor<1>>; 2] = [
            Box::new(|outputs| SPARSE.per_example(outputs, sparse()).unwrap().sum()),
            Box::new(|outputs| BINARY.per_example(outputs, soft()).unwrap().sum()),
        ];
        for total in losses {
            let variable = Tensor::<2>::from_floats(outputs, &device).require_grad();
            let gradient = variable.grad(&total(variable.clone()).backward()).unwrap();
            let gradient: Vec<f64> = numbers(gradient.into_data()).unwrap();
            let differences: Vec<f64> = (0..6)
                .map(|at| {
                    let moved = |by: f64| {
                        let mut outputs = outputs;
                        outputs.as_flattened_mut()[at] += by as f32;
                        let outputs = Tensor::<2>::from_floats(outputs, &device);
                        f64::from(total(outputs).into_scalar::<f32>())
                    };
                    (moved(1e-3) - moved(-1e-3)) / 2e-3
                })
                .collect();
            close(&gradient, &differences, 2e-3);
        }
    }

    #[test]
    fn an_output_that_is_nan_has_a_loss_that_is_nan() {
        let outputs = || tensor([[f32::NAN, 0.5, 0.5], [0.5, 0.25, 0.25]]);
        let targets = tensor([[0.0, 1.0, 0.0]; 2]);
        for losses in [SPARSE.per_example(outputs(), classes([1, 1])), BINARY.per_example(outputs(), targets)] {
            let losses = of(losses);
            assert!(losses[0].is_nan() && losses[1].is_finite(), "{losses:?}");
        }
    }

    #[test]
    fn classes_outside_and_other_shapes_are_errors() {
        let outputs = || tensor([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]]);
        let outside = SPARSE.per_example(outputs(), classes([0, 3]));
        assert!(matches!(outside, Err(Error::Class { at: 1, class: 3, classes: 3 })));
        let three = Tensor::<1, Int>::zeros([3], &Device::flex());
        assert!(matches!(SPARSE.per_example(outputs(), three), Err(Error::Shapes { .. })));
        let narrow = Tensor::<2>::zeros([2, 1], &Device::flex());
        assert!(matches!(BINARY.per_example(outputs(), narrow), Err(Error::Shapes { .. })));
    }

    #[test]
    fn no_examples_have_no_losses() {
        let none = Tensor::<2>::zeros([0, 3], &Device::flex());
        let classes = Tensor::<1, Int>::zeros([0], &Device::flex());
        assert_eq!(SPARSE.per_example(none.clone(), classes).unwrap().dims(), [0]);
        assert_eq!(BINARY.per_example(none.clone(), none).unwrap().dims(), [0]);
    }
}

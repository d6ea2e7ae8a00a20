//! Cross-entropies of probabilities instead of logits.

use candle_core::{D, Result, Tensor};

use super::{
    BinaryCrossentropy, CategoricalCrossentropy, EPSILON, Loss, SparseCategoricalCrossentropy, at_least_32_bits,
    check_rows, clamped, rows, wide,
};
use crate::context::{check_shapes, nll_per_example};

/// The cross-entropy of a model whose outputs are probabilities, after a softmax or a sigmoid, instead of logits.
///
/// Wraps [`SparseCategoricalCrossentropy`], [`CategoricalCrossentropy`] or [`BinaryCrossentropy`]; targets and shapes
/// are those of the wrapped loss. Probabilities of classes are divided by their sum first. All probabilities are
/// clamped to 1e-7..=1 - 1e-7, so that no loss is infinite; an output outside of this range gets no gradient from its
/// logarithm. The loss of a row of classes that are all 0 is NaN. Prefer logits where a model can return them: they
/// lose no precision near 0 and 1.
///
/// # Errors
/// [`candle_core::Error`] if shapes or types do not fit, or a target is not a class, as for logits.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use distribute_candle::{FromProbabilities, Loss, SparseCategoricalCrossentropy};
/// let outputs = Tensor::new(&[[0.25f32, 0.75], [0.5, 0.5]], &Device::Cpu)?;
/// let classes = Tensor::new(&[1u32, 0], &Device::Cpu)?;
/// let losses = FromProbabilities(SparseCategoricalCrossentropy).per_example(&outputs, &classes)?;
/// assert!((losses.to_vec1::<f32>()?[0] + 0.75f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Source
/// `from_logits=False` of `tf.keras.losses`, which divides and clamps in the same way.
#[derive(Clone, Copy, Debug, Default)]
pub struct FromProbabilities<L>(pub L);

impl Loss for FromProbabilities<SparseCategoricalCrossentropy> {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_rows(outputs)?;
        let outputs = at_least_32_bits(outputs)?;
        check_shapes(&outputs, targets)?;
        if outputs.dim(0)? == 0 {
            // A replica without examples takes part in the step.
            return outputs.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1);
        }
        nll_per_example(&of_classes(&outputs)?.log()?, targets)
    }
}

impl Loss for FromProbabilities<CategoricalCrossentropy> {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_rows(outputs)?;
        let (outputs, targets) = wide(outputs, targets)?;
        if outputs.dim(0)? == 0 {
            return rows(&outputs);
        }
        (of_classes(&outputs)?.log()? * targets)?.sum(D::Minus1)?.neg()
    }
}

impl Loss for FromProbabilities<BinaryCrossentropy> {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (outputs, targets) = wide(outputs, targets)?;
        let outputs = clamped(&outputs, 1.0 - EPSILON)?;
        let (yes, no) = ((outputs.log()? * &targets)?, ((1.0 - outputs)?.log()? * (1.0 - targets)?)?);
        rows(&(yes + no)?.neg()?)
    }
}

/// Returns each row's probabilities, with a sum of 1, clamped.
fn of_classes(outputs: &Tensor) -> Result<Tensor> {
    clamped(&outputs.broadcast_div(&outputs.sum_keepdim(D::Minus1)?)?, 1.0 - EPSILON)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    const SPARSE: FromProbabilities<SparseCategoricalCrossentropy> = FromProbabilities(SparseCategoricalCrossentropy);
    const CATEGORICAL: FromProbabilities<CategoricalCrossentropy> = FromProbabilities(CategoricalCrossentropy);
    const BINARY: FromProbabilities<BinaryCrossentropy> = FromProbabilities(BinaryCrossentropy);

    fn tensor(rows: &[[f64; 3]]) -> Tensor {
        Tensor::from_slice(rows.as_flattened(), (rows.len(), 3), &Device::Cpu).unwrap()
    }

    fn classes(classes: &[u32]) -> Tensor {
        Tensor::new(classes, &Device::Cpu).unwrap()
    }

    fn numbers(losses: &Tensor) -> Vec<f64> {
        losses.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    fn close(got: &[f64], expected: &[f64], within: f64) {
        assert_eq!(got.len(), expected.len());
        let fits = |(a, b): (&f64, &f64)| (a - b).abs() <= within * b.abs().max(1.0);
        assert!(got.iter().zip(expected).all(fits), "{got:?} {expected:?}");
    }

    #[test]
    fn losses_are_those_of_the_logits() {
        let logits = tensor(&[[1.0, 3.0, -2.0], [0.0, 0.5, 0.25]]);
        let softmax = candle_nn::ops::softmax(&logits, D::Minus1).unwrap();
        let targets = classes(&[0, 2]);
        let expected = SparseCategoricalCrossentropy.per_example(&logits, &targets).unwrap();
        close(&numbers(&SPARSE.per_example(&softmax, &targets).unwrap()), &numbers(&expected), 1e-12);
        // A row whose sum is not 1 is divided by it.
        let twice = (&softmax * 2.0).unwrap();
        close(&numbers(&SPARSE.per_example(&twice, &targets).unwrap()), &numbers(&expected), 1e-12);
        let soft = tensor(&[[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]]);
        let expected = CategoricalCrossentropy.per_example(&logits, &soft).unwrap();
        close(&numbers(&CATEGORICAL.per_example(&softmax, &soft).unwrap()), &numbers(&expected), 1e-12);
        let sigmoid = candle_nn::ops::sigmoid(&logits).unwrap();
        let expected = BinaryCrossentropy.per_example(&logits, &soft).unwrap();
        close(&numbers(&BINARY.per_example(&sigmoid, &soft).unwrap()), &numbers(&expected), 1e-12);
    }

    #[test]
    fn probabilities_of_0_and_1_have_finite_losses() {
        let most = -(1e-7f64).ln();
        let certain = tensor(&[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]);
        let losses = numbers(&SPARSE.per_example(&certain, &classes(&[0, 2])).unwrap());
        close(&losses, &[1e-7, most], 1e-9);
        let targets = tensor(&[[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]);
        close(&numbers(&CATEGORICAL.per_example(&certain, &targets).unwrap()), &[most, 1e-7], 1e-9);
        close(&numbers(&BINARY.per_example(&certain, &targets).unwrap()), &[(2.0 * most + 1e-7) / 3.0, 1e-7], 1e-9);
        // Also where 1 - 1e-7 is the number next to 1.
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let short = certain.to_dtype(dtype).unwrap();
            assert!(
                numbers(&SPARSE.per_example(&short, &classes(&[0, 2])).unwrap()).iter().all(|loss| loss.is_finite())
            );
            let losses = BINARY.per_example(&short, &targets).unwrap();
            assert_eq!(losses.dtype(), DType::F32);
            assert!(numbers(&losses).iter().all(|loss| loss.is_finite()));
        }
    }

    #[test]
    fn gradients_are_those_of_differences() {
        let outputs = [[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]];
        let soft = tensor(&[[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]);
        let sparse = classes(&[2, 1]);
        let losses: [(&dyn Loss, &Tensor); 3] = [(&SPARSE, &sparse), (&CATEGORICAL, &soft), (&BINARY, &soft)];
        for (loss, targets) in losses {
            let total = |outputs: &Tensor| loss.per_example(outputs, targets).unwrap().sum_all().unwrap();
            let variable = Var::from_tensor(&tensor(&outputs)).unwrap();
            let gradients = total(variable.as_tensor()).backward().unwrap();
            let gradient = numbers(&gradients.get(&variable).unwrap().flatten_all().unwrap());
            let differences: Vec<f64> = (0..6)
                .map(|at| {
                    let moved = |by: f64| {
                        let mut outputs = outputs;
                        outputs.as_flattened_mut()[at] += by;
                        total(&tensor(&outputs)).to_scalar::<f64>().unwrap()
                    };
                    (moved(1e-6) - moved(-1e-6)) / 2e-6
                })
                .collect();
            close(&gradient, &differences, 1e-7);
        }
    }

    #[test]
    fn an_output_that_is_nan_has_a_loss_that_is_nan() {
        let (outputs, targets) = (tensor(&[[f64::NAN, 0.5, 0.5], [0.5, 0.25, 0.25]]), tensor(&[[0.0, 1.0, 0.0]; 2]));
        for losses in [
            SPARSE.per_example(&outputs, &classes(&[1, 1])),
            CATEGORICAL.per_example(&outputs, &targets),
            BINARY.per_example(&outputs, &targets),
        ] {
            let losses = numbers(&losses.unwrap());
            assert!(losses[0].is_nan() && losses[1].is_finite(), "{losses:?}");
        }
    }

    #[test]
    fn classes_outside_and_other_shapes_are_errors() {
        let outputs = tensor(&[[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]]);
        let error = SPARSE.per_example(&outputs, &classes(&[0, 3])).unwrap_err().to_string();
        assert!(error.contains("the target of example 1 is 3, but there are 3 classes"), "{error}");
        assert!(CATEGORICAL.per_example(&outputs, &tensor(&[[0.0; 3]])).is_err());
        assert!(BINARY.per_example(&outputs, &tensor(&[[0.0; 3]])).is_err());
    }

    #[test]
    fn no_examples_have_no_losses() {
        let none = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(SPARSE.per_example(&none, &classes(&[])).unwrap().dims(), [0]);
        assert_eq!(CATEGORICAL.per_example(&none, &none).unwrap().dims(), [0]);
        assert_eq!(BINARY.per_example(&none, &none).unwrap().dims(), [0]);
    }
}

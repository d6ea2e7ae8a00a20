//! Losses per example, which are summed and divided by the global batch.
//!
//! All losses compute in f32 or f64, whatever the type of the outputs, because sums, squares and exponentials overflow
//! early in 16 bits. The loss of an output that is NaN is NaN.

use candle_core::{D, DType, Result, Tensor};

use crate::cross_entropy_per_example;
use crate::tensor::is_short;

mod probabilities;

pub use probabilities::FromProbabilities;

/// A loss function that returns one value per example. Functions of outputs and targets are losses too.
///
/// # Shapes
/// Outputs and targets have one example per row; the result has one number per example, or one for each of its
/// positions, as of sequences. Trainings minimise, and report, the mean over examples of the mean over an example's
/// positions.
pub trait Loss: Send + Sync {
    /// Computes the loss of each example.
    ///
    /// # Errors
    /// [`candle_core::Error`] if shapes or types do not fit.
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor>;
}

impl<F: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync> Loss for F {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self(outputs, targets)
    }
}

/// Softmax cross-entropy of logits and class indices, computed by [`cross_entropy_per_example`]. For outputs that are
/// probabilities: [`FromProbabilities`].
#[derive(Clone, Copy, Debug, Default)]
pub struct SparseCategoricalCrossentropy;

/// Softmax cross-entropy of logits and probabilities of classes. A class of probability 0 adds nothing, even if its
/// logit is -∞.
#[derive(Clone, Copy, Debug, Default)]
pub struct CategoricalCrossentropy;

/// Binary cross-entropy of logits and targets from 0 to 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct BinaryCrossentropy;

/// Mean squared error.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanSquaredError;

/// Mean absolute error.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanAbsoluteError;

/// Huber loss: half the squared difference up to δ, and linear beyond.
#[derive(Clone, Copy, Debug)]
pub struct Huber {
    /// Threshold between the quadratic and the linear part (Huber's δ); above 0.
    pub delta: f64,
}

/// Kullback-Leibler divergence of the target distribution from the output distribution, which are the rows of the last
/// axis: outputs of (N, T, classes) have losses of (N, T). Probabilities are clamped to 1e-7..=1, as in tf.keras.
#[derive(Clone, Copy, Debug, Default)]
pub struct KlDivergence;

/// Hinge loss of outputs and targets that are -1 or 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hinge;

impl Loss for SparseCategoricalCrossentropy {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_rows(outputs)?;
        cross_entropy_per_example(outputs, targets)
    }
}

impl Loss for CategoricalCrossentropy {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_rows(outputs)?;
        let (outputs, targets) = wide(outputs, targets)?;
        if outputs.dim(0)? == 0 {
            return rows(&outputs);
        }
        let weighted = (candle_nn::ops::log_softmax(&outputs, D::Minus1)? * &targets)?;
        targets.eq(0.0)?.where_cond(&targets.zeros_like()?, &weighted)?.sum(D::Minus1)?.neg()
    }
}

impl Loss for BinaryCrossentropy {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (outputs, targets) = wide(outputs, targets)?;
        // max(x, 0) - x t + ln(1 + exp(-|x|)), which never overflows.
        let linear = (outputs.relu()? - (&outputs * targets)?)?;
        rows(&(linear + log_of_one_more(&outputs.abs()?.neg()?.exp()?)?)?)
    }
}

/// Computes ln(1 + x) for x above -1, also where 1 + x is rounded to 1.
fn log_of_one_more(x: &Tensor) -> Result<Tensor> {
    let sum = (x + 1.0)?;
    let log = sum.log()?;
    // What rounding took from x changes the logarithm in proportion (Kahan); the derivative needs no correction.
    let (x, rounded, rough) = (x.detach(), (sum.detach() - 1.0)?, log.detach());
    let exact = rounded.eq(0.0)?.where_cond(&x, &((&rough * &x)? / &rounded)?)?;
    log + (exact - rough)?
}

impl Loss for MeanSquaredError {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (outputs, targets) = wide(outputs, targets)?;
        rows(&(outputs - targets)?.sqr()?)
    }
}

impl Loss for MeanAbsoluteError {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (outputs, targets) = wide(outputs, targets)?;
        rows(&distance(&outputs, &targets)?)
    }
}

impl Loss for Huber {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if self.delta.is_nan() || self.delta <= 0.0 {
            candle_core::bail!("the delta of Huber is {}; give one above 0, such as 1.0", self.delta);
        }
        let (outputs, targets) = wide(outputs, targets)?;
        let difference = distance(&outputs, &targets)?;
        // The quadratic part, up to delta, and the linear rest.
        let small = difference.clamp(0.0, self.delta)?;
        let beyond = (&difference - &small)?;
        rows(&((small.sqr()? * 0.5)? + (beyond * self.delta)?)?)
    }
}

impl Loss for KlDivergence {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_rows(outputs)?;
        let (outputs, targets) = wide(outputs, targets)?;
        let (outputs, targets) = (clamped(&outputs, 1.0)?, clamped(&targets, 1.0)?);
        (&targets * (targets.log()? - outputs.log()?)?)?.sum(D::Minus1)
    }
}

impl Loss for Hinge {
    fn per_example(&self, outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (outputs, targets) = wide(outputs, targets)?;
        let margin = (1.0 - (outputs * targets)?)?;
        // relu() would turn NaN into 0.
        rows(&margin.lt(0.0)?.where_cond(&margin.zeros_like()?, &margin)?)
    }
}

/// Refuses outputs of one axis where each example has a row of classes: the sum over it would be one loss of all.
fn check_rows(outputs: &Tensor) -> Result<()> {
    if outputs.rank() < 2 {
        candle_core::bail!(
            "the outputs have shape {:?}; give one row of classes for each example, as in (N, classes)",
            outputs.dims()
        );
    }
    Ok(())
}

/// Converts outputs and targets to one type, f32 or f64.
fn wide(outputs: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
    let outputs = at_least_32_bits(outputs)?;
    let targets = targets.to_dtype(outputs.dtype())?;
    Ok((outputs, targets))
}

/// Converts a tensor of 16 bits to f32.
pub(crate) fn at_least_32_bits(tensor: &Tensor) -> Result<Tensor> {
    if is_short(tensor.dtype()) { tensor.to_dtype(DType::F32) } else { Ok(tensor.clone()) }
}

const EPSILON: f64 = 1e-7;

/// Returns |outputs - targets|. Its gradient is 0 at 0, where that of candle's `abs` is 1.
fn distance(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let difference = (outputs - targets)?;
    &difference * difference.detach().sign()?
}

/// Clamps probabilities; a bound itself has a gradient, as in TensorFlow, and NaN stays NaN. candle's `clamp` halves
/// the gradient at a bound, and its kernels for GPUs replace NaN by one.
fn clamped(probabilities: &Tensor, most: f64) -> Result<Tensor> {
    let bound = |bound: f64| {
        Tensor::full(bound, probabilities.shape(), probabilities.device())?.to_dtype(probabilities.dtype())
    };
    let at_least = probabilities.lt(EPSILON)?.where_cond(&bound(EPSILON)?, probabilities)?;
    probabilities.gt(most)?.where_cond(&bound(most)?, &at_least)
}

/// Returns the mean of each row.
fn rows(values: &Tensor) -> Result<Tensor> {
    match values.dims() {
        [_] => Ok(values.clone()),
        _ => {
            let flat = values.flatten_from(1)?;
            // candle refuses the mean of an empty tensor, but a replica without examples takes part in the step.
            flat.sum(D::Minus1)? / flat.dim(1)?.max(1) as f64
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

    fn of(loss: impl Loss, outputs: &[[f32; 2]], targets: &[[f32; 2]]) -> Vec<f32> {
        let tensor =
            |rows: &[[f32; 2]]| Tensor::from_slice(rows.as_flattened(), (rows.len(), 2), &Device::Cpu).unwrap();
        loss.per_example(&tensor(outputs), &tensor(targets)).unwrap().to_vec1().unwrap()
    }

    fn close(got: Vec<f32>, expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        assert!(got.iter().zip(expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5), "{got:?} {expected:?}");
    }

    #[test]
    fn losses_by_hand() {
        let (outputs, targets) = ([[1.0, 3.0], [0.0, -2.0]], [[1.0, 0.0], [0.0, 1.0]]);
        close(of(MeanSquaredError, &outputs, &targets), &[4.5, 4.5]);
        close(of(MeanAbsoluteError, &outputs, &targets), &[1.5, 1.5]);
        close(of(Huber { delta: 1.0 }, &outputs, &targets), &[1.25, 1.25]);
        let soft = |x: f64| (1.0 + x.exp()).ln();
        close(
            of(BinaryCrossentropy, &outputs, &targets),
            &[(soft(-1.0) + soft(3.0)) / 2.0, (soft(0.0) + soft(2.0)) / 2.0],
        );
        close(of(BinaryCrossentropy, &[[1e4, -1e4]], &[[1.0, 1.0]]), &[5e3]);
        for x in [0.0, 1.0, 9.0, 15.0, 16.0, 17.0, 30.0, 80.0] {
            let (loss, expected) = (of(BinaryCrossentropy, &[[x, x]], &[[1.0, 1.0]])[0], (-f64::from(x)).exp().ln_1p());
            assert!((f64::from(loss) / expected - 1.0).abs() < 1e-6, "{x}: {loss} instead of {expected}");
        }
        close(of(CategoricalCrossentropy, &outputs, &targets), &[soft(2.0), soft(2.0)]);
        close(of(KlDivergence, &[[0.25, 0.75]], &[[0.5, 0.5]]), &[0.5 * 2f64.ln() + 0.5 * (0.5f64 / 0.75).ln()]);
        close(of(Hinge, &[[0.5, -2.0]], &[[1.0, 1.0]]), &[1.75]);
        let own = |outputs: &Tensor, targets: &Tensor| (outputs - targets)?.abs()?.max(D::Minus1);
        close(of(own, &outputs, &targets), &[3.0, 3.0]);
    }

    #[test]
    fn targets_are_one_for_each_row_of_outputs() {
        let classes = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::U32, &Device::Cpu).unwrap();
        let zeros = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        for (outputs, targets) in [(vec![8, 3], vec![4]), (vec![2, 9, 3], vec![2, 8]), (vec![0, 3], vec![2])] {
            let (outputs, targets) = (zeros(&outputs), classes(&targets));
            for loss in [&SparseCategoricalCrossentropy as &dyn Loss, &FromProbabilities(SparseCategoricalCrossentropy)]
            {
                let told = loss.per_example(&outputs, &targets).unwrap_err().to_string();
                assert!(told.contains("give one target for each row"), "{told}");
            }
        }
        let losses = SparseCategoricalCrossentropy.per_example(&zeros(&[2, 9, 3]), &classes(&[2, 9])).unwrap();
        assert_eq!(losses.dims(), [2, 9]);
    }

    #[test]
    fn the_greatest_number_of_a_type_is_a_class_like_others() {
        let logits = Tensor::zeros((1, 2, 256), candle_core::DType::F32, &Device::Cpu).unwrap();
        let classes = Tensor::new(&[[254u8, 255]], &Device::Cpu).unwrap();
        let losses = SparseCategoricalCrossentropy.per_example(&logits, &classes).unwrap();
        close(losses.flatten_all().unwrap().to_vec1().unwrap(), &[256f64.ln(); 2]);
    }

    #[test]
    fn an_output_that_is_right_has_no_gradient() {
        let outputs = candle_core::Var::new(&[[0f32, 1.0, -1.0]], &Device::Cpu).unwrap();
        let targets = Tensor::zeros((1, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        let (wide, narrow) = (Huber { delta: 1.0 }, Huber { delta: 0.5 });
        for (loss, scale) in [(&MeanAbsoluteError as &dyn Loss, 1.0), (&wide, 1.0), (&narrow, 0.5)] {
            let loss = loss.per_example(&outputs, &targets).unwrap().sum_all().unwrap();
            let gradient = loss.backward().unwrap().get(&outputs).unwrap().to_vec2::<f32>().unwrap();
            close(gradient.concat(), &[0.0, scale / 3.0, -scale / 3.0]);
        }
    }

    #[test]
    fn divergences_are_of_the_last_axis_and_bounds_have_gradients() {
        let outputs = candle_core::Var::new(&[[[1f32, 0.0], [0.5, 0.5]]], &Device::Cpu).unwrap();
        let targets = Tensor::new(&[[[0.5f32, 0.5], [0.25, 0.75]]], &Device::Cpu).unwrap();
        let losses = KlDivergence.per_example(&outputs, &targets).unwrap();
        assert_eq!(losses.dims(), [1, 2]);
        let gradients = losses.sum_all().unwrap().backward().unwrap();
        let gradient = gradients.get(&outputs).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        close(gradient, &[-0.5, 0.0, -0.5, -1.5]);
    }

    #[test]
    fn distributions_of_one_axis_are_refused() {
        let row = Tensor::new(&[0.25f32, 0.75], &Device::Cpu).unwrap();
        let losses: [&dyn Loss; 3] =
            [&KlDivergence, &CategoricalCrossentropy, &FromProbabilities(CategoricalCrossentropy)];
        for loss in losses {
            for outputs in [&row, &row.sum_all().unwrap()] {
                let told = loss.per_example(outputs, outputs).unwrap_err().to_string();
                assert!(told.contains("give one row of classes for each example"), "{told}");
            }
        }
    }

    #[test]
    fn no_examples_have_no_losses() {
        let (none, classes) = (Tensor::zeros((0, 3), candle_core::DType::F32, &Device::Cpu).unwrap(), [0u32; 0]);
        let classes = Tensor::new(&classes, &Device::Cpu).unwrap();
        let losses: [&dyn Loss; 5] =
            [&CategoricalCrossentropy, &BinaryCrossentropy, &MeanSquaredError, &Huber { delta: 1.0 }, &Hinge];
        for loss in losses {
            assert_eq!(loss.per_example(&none, &none).unwrap().dims(), [0]);
        }
        assert_eq!(SparseCategoricalCrossentropy.per_example(&none, &classes).unwrap().dims(), [0]);
    }
}

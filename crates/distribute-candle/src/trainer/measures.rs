//! The loss and the metrics of a training, as sums over examples.

use candle_core::{DType, Tensor};
use distribute_train::metrics::Metrics;
use distribute_train::trainer::{LOSS_SUMS, class_of};

use super::Examples;
use crate::losses::{Loss, at_least_32_bits};
use crate::{Error, Result, sums};

/// A loss and metrics.
pub(crate) struct Measures {
    loss: Box<dyn Loss>,
    metrics: Metrics,
}

impl Measures {
    pub(crate) fn new(loss: impl Loss + 'static, metrics: Metrics) -> Measures {
        Measures { loss: Box::new(loss), metrics }
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Computes the loss of each example.
    pub(crate) fn losses(&self, outputs: &Tensor, examples: &Examples) -> Result<Tensor> {
        let losses = self.loss.per_example(outputs, &examples.targets)?;
        match &examples.weights {
            Some(weights) => weighted(&losses, weights),
            None => Ok(losses),
        }
    }

    /// Adds examples to the [`sums`](distribute_train::trainer::sums).
    pub(crate) fn add(&self, sums: &mut [f64], outputs: &Tensor, examples: &Examples, losses: &Tensor) -> Result<()> {
        let count = losses.elem_count();
        if count == 0 {
            return Ok(());
        }
        let of_examples = of_examples(losses)?;
        sums[0] += of_examples.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        sums[1] += of_examples.elem_count() as f64;
        if sums.len() == LOSS_SUMS {
            return Ok(());
        }
        let weights = match &examples.weights {
            Some(weights) => Some(sums::floats(&alike(weights, losses)?.broadcast_as(losses.shape())?)?),
            None => None,
        };
        sums::show(outputs, &examples.targets, weights.as_deref(), count, |predictions| {
            self.metrics.update(&mut sums[LOSS_SUMS..], predictions)
        })
    }
}

/// Returns one loss for each example, of at least 32 bits: the mean of those of its positions, if it has several. The
/// sum of these, divided by the number of examples, is the mean that [`Measures::add`] reports.
pub(crate) fn of_examples(losses: &Tensor) -> Result<Tensor> {
    let losses = at_least_32_bits(losses)?;
    if losses.rank() < 2 || losses.elem_count() == 0 {
        return Ok(losses);
    }
    Ok(losses.flatten_from(1)?.mean(1)?)
}

/// Multiplies losses by the weights of their examples' classes.
pub(crate) fn weighted_by_class(losses: &Tensor, weights: &[f32], classes: &Tensor) -> Result<Tensor> {
    weighted(losses, &weights_of_classes(weights, classes)?)
}

/// Returns each example's weight, by its class.
fn weights_of_classes(weights: &[f32], classes: &Tensor) -> Result<Tensor> {
    let weight = |class: usize| weights.get(class).copied().unwrap_or(1.0);
    let of_examples: Vec<f32> = match classes.dtype().is_float() {
        true => {
            let targets = sums::floats(classes)?.into_iter();
            targets.map(|target| Ok(weight(class_of(target)?))).collect::<Result<_>>()?
        }
        false => sums::classes(classes)?.into_iter().map(|class| weight(class as usize)).collect(),
    };
    let examples = of_examples.len();
    Ok(Tensor::from_vec(of_examples, examples, classes.device())?)
}

/// Multiplies losses by the weights of their examples.
fn weighted(losses: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(losses.broadcast_mul(&alike(weights, losses)?.to_dtype(losses.dtype())?)?)
}

/// Reshapes the weights of examples to the number of dimensions of their losses.
fn alike(weights: &Tensor, losses: &Tensor) -> Result<Tensor> {
    let rows = losses.dim(0)?;
    if weights.elem_count() != rows {
        let given = weights.dims().to_vec();
        return Err(Error::Weights { given, examples: rows });
    }
    let mut shape = vec![1; losses.dims().len()];
    shape[0] = rows;
    Ok(weights.reshape(shape)?)
}

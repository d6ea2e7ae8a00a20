//! Heads of canned models: the interpretation of outputs as classes or values, with losses, predictions and metrics.

use candle_core::{D, DType, Device, Tensor};
use distribute_candle::{BinaryCrossentropy, Loss, MeanSquaredError, SparseCategoricalCrossentropy};
use distribute_input::Column;
use distribute_train::metrics::{Accuracy, Auc, BinaryAccuracy, Mean, Precision, Recall};

use super::{EstimatorSpec, Labels, Mode};
use crate::{Error, Result};

/// The interpretation of a canned model's outputs.
///
/// # Source
/// `tf.estimator.Head`: `RegressionHead`, `BinaryClassHead`, `MultiClassHead`.
#[derive(Clone, Debug)]
pub(super) enum Head {
    /// Values; the number per example.
    Regression(usize),
    /// Classes, and the texts that name them in labels, if any.
    Classes { count: usize, vocabulary: Vec<String> },
}

impl Head {
    /// Returns the number of outputs that the model must have.
    pub(super) fn outputs(&self) -> usize {
        match self {
            Head::Regression(values) => *values,
            // Two classes have one logit.
            Head::Classes { count: 2, .. } => 1,
            Head::Classes { count, .. } => *count,
        }
    }

    pub(super) fn check(&self, what: &'static str) -> Result<()> {
        let problem = match self {
            Head::Regression(0) => "label_dimension is 0; give at least 1".to_owned(),
            Head::Classes { count: count @ ..2, .. } => format!("n_classes is {count}; give at least 2"),
            Head::Classes { count, vocabulary } if !vocabulary.is_empty() && vocabulary.len() != *count => {
                format!("label_vocabulary has {} words for {count} classes; give one for each class", vocabulary.len())
            }
            _ => return Ok(()),
        };
        Err(Error::Configuration { what, problem })
    }

    /// Computes predictions from logits, and with labels losses and metrics.
    pub(super) fn spec(&self, logits: &Tensor, labels: Option<&Labels>, mode: Mode) -> Result<EstimatorSpec> {
        match self {
            Head::Regression(values) => regression(logits, labels, *values, mode),
            Head::Classes { count: 2, vocabulary } => binary(logits, labels, vocabulary, mode),
            Head::Classes { count, vocabulary } => classes(logits, labels, *count, vocabulary, mode),
        }
    }
}

fn regression(logits: &Tensor, labels: Option<&Labels>, width: usize, mode: Mode) -> Result<EstimatorSpec> {
    let spec = EstimatorSpec::new();
    let spec = if mode == Mode::Predict { spec.prediction("predictions", logits) } else { spec };
    let Some(labels) = labels else { return Ok(spec) };
    let right = wide_as(&values_of(labels, width, logits.device())?, logits)?;
    let losses = MeanSquaredError.per_example(logits, &right)?;
    let spec = spec.loss(&losses);
    Ok(if mode == Mode::Eval { means(spec, &losses, &right, logits) } else { spec })
}

fn binary(logits: &Tensor, labels: Option<&Labels>, words: &[String], mode: Mode) -> Result<EstimatorSpec> {
    let mut spec = EstimatorSpec::new();
    let yes = candle_nn::ops::sigmoid(logits)?;
    if mode == Mode::Predict {
        let probabilities = Tensor::cat(&[&(1.0 - &yes)?, &yes], 1)?;
        let class = logits.gt(&logits.zeros_like()?)?.to_dtype(DType::I64)?;
        spec = spec.prediction("logits", logits).prediction("logistic", &yes);
        spec = spec.prediction("probabilities", &probabilities).prediction("class_ids", &class);
    }
    let Some(labels) = labels else { return Ok(spec) };
    let ids = class_ids(labels, 2, words)?;
    let right = Tensor::from_vec(ids, logits.dims(), logits.device())?.to_dtype(logits.dtype())?;
    let losses = BinaryCrossentropy.per_example(logits, &right)?;
    spec = spec.loss(&losses);
    if mode == Mode::Eval {
        spec = means(spec, &losses, &right, &yes);
        spec = spec.metric("accuracy", BinaryAccuracy::default(), &yes, &right);
        spec = spec.metric("precision", Precision::default(), &yes, &right);
        spec = spec.metric("recall", Recall::default(), &yes, &right);
        spec = spec.metric("auc", Auc::default(), &yes, &right);
    }
    Ok(spec)
}

fn classes(
    logits: &Tensor,
    labels: Option<&Labels>,
    count: usize,
    words: &[String],
    mode: Mode,
) -> Result<EstimatorSpec> {
    let mut spec = EstimatorSpec::new();
    if mode == Mode::Predict {
        // candle refuses the maximum of an empty tensor.
        let (probabilities, class) = match logits.dim(0)? {
            0 => (logits.clone(), Tensor::zeros((0, 1), DType::I64, logits.device())?),
            _ => (candle_nn::ops::softmax(logits, D::Minus1)?, logits.argmax_keepdim(D::Minus1)?.to_dtype(DType::I64)?),
        };
        spec = spec.prediction("logits", logits).prediction("probabilities", &probabilities);
        spec = spec.prediction("class_ids", &class);
    }
    let Some(labels) = labels else { return Ok(spec) };
    let ids = class_ids(labels, count, words)?;
    let right = Tensor::from_vec(ids, logits.dim(0)?, logits.device())?;
    let losses = SparseCategoricalCrossentropy.per_example(logits, &right)?;
    spec = spec.loss(&losses);
    if mode == Mode::Eval {
        spec = spec.metric("average_loss", Mean, &losses, &losses).metric("accuracy", Accuracy, logits, &right);
    }
    Ok(spec)
}

/// Converts values of f32 to f64 if the outputs are of this type. Those of 16 bits would round them.
pub(super) fn wide_as(values: &Tensor, outputs: &Tensor) -> Result<Tensor> {
    Ok(if outputs.dtype() == DType::F64 { values.to_dtype(DType::F64)? } else { values.clone() })
}

/// Adds the metrics that are means.
fn means(spec: EstimatorSpec, losses: &Tensor, labels: &Tensor, predictions: &Tensor) -> EstimatorSpec {
    let spec = spec.metric("average_loss", Mean, losses, losses).metric("label/mean", Mean, labels, labels);
    spec.metric("prediction/mean", Mean, predictions, predictions)
}

/// Returns labels as values, `width` per example.
fn values_of(labels: &Labels, width: usize, device: &Device) -> Result<Tensor> {
    let values: Vec<f32> = match labels {
        Column::Numbers(numbers) => numbers.as_slice().to_vec(),
        Column::Integers(integers) => integers.as_slice().iter().map(|integer| *integer as f32).collect(),
        Column::Texts(_) => {
            let problem = "they are texts, and a regressor learns numbers; read them as f32".to_owned();
            return Err(Error::Labels { problem });
        }
    };
    if values.len() != labels.len() * width {
        let problem = format!("their shape is {:?}; expected {width} for each example", labels.shape());
        return Err(Error::Labels { problem });
    }
    Ok(Tensor::from_vec(values, (labels.len(), width), device)?)
}

/// Returns labels as classes, one per example.
fn class_ids(labels: &Labels, count: usize, vocabulary: &[String]) -> Result<Vec<u32>> {
    let outside = |given: &dyn std::fmt::Display| Error::Labels {
        problem: format!("a label is {given}; expected a class from 0 to {}, or another n_classes", count - 1),
    };
    let ids: Vec<u32> = match labels {
        _ if labels.shape().iter().product::<usize>() != labels.len() => {
            let problem = format!("their shape is {:?}; expected one class for each example", labels.shape());
            return Err(Error::Labels { problem });
        }
        Column::Integers(integers) => {
            let id = |class: &i64| u32::try_from(*class).ok().filter(|id| (*id as usize) < count);
            integers.as_slice().iter().map(|class| id(class).ok_or_else(|| outside(class))).collect::<Result<_>>()?
        }
        Column::Numbers(numbers) => {
            let whole = |class: &f32| class.fract() == 0.0 && (0.0..count as f32).contains(class);
            let id = |class: &f32| if whole(class) { Ok(*class as u32) } else { Err(outside(class)) };
            numbers.as_slice().iter().map(id).collect::<Result<_>>()?
        }
        Column::Texts(_) if vocabulary.is_empty() => {
            let problem = "they are texts; say with label_vocabulary which class each is".to_owned();
            return Err(Error::Labels { problem });
        }
        Column::Texts(texts) => {
            let id = |text: &String| {
                let id = vocabulary.iter().position(|word| word == text).map(|id| id as u32);
                let problem = || format!("a label is {text:?}; label_vocabulary has {}", vocabulary.join(", "));
                id.ok_or_else(|| Error::Labels { problem: problem() })
            };
            texts.as_slice().iter().map(id).collect::<Result<_>>()?
        }
    };
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regression_of_16_bits_does_not_round_labels() {
        let logits = Tensor::zeros((1, 1), DType::BF16, &Device::Cpu).unwrap();
        let spec = regression(&logits, Some(&Column::from(vec![1001.0f32])), 1, Mode::Eval).unwrap();
        assert_eq!(spec.sums().unwrap().sums[0], 1001.0 * 1001.0);
    }
}

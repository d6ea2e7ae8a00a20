//! The outputs of a model for a batch, and the purposes for which it is called.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use distribute_candle::backend;
use distribute_input::Features;
use distribute_train::metrics::Metric;

use super::Labels;
use crate::{Error, Result};

/// The purpose for which a model is built and called.
///
/// # Source
/// `tf.estimator.ModeKeys`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Training.
    Train,
    /// Evaluation.
    Eval,
    /// Prediction, without labels.
    Predict,
}

/// A candle model that an [`Estimator`](crate::Estimator) can train: it computes an [`EstimatorSpec`] from a batch.
pub trait EstimatorModel {
    /// Computes the outputs for one replica's examples. There is at least one example.
    ///
    /// `labels` is `Some` unless the mode is [`Predict`](Mode::Predict).
    ///
    /// # Errors
    /// [`Error::Feature`] or [`Error::Labels`] if the batch does not fit the model, [`Error::Candle`] if candle fails.
    fn spec(&self, features: &Features, labels: Option<&Labels>, mode: Mode) -> Result<EstimatorSpec>;
}

/// The outputs of a model for a batch: predictions, per-example losses, metrics.
///
/// # Source
/// `tf.estimator.EstimatorSpec`.
#[derive(Default)]
pub struct EstimatorSpec {
    predictions: Vec<(String, Tensor)>,
    loss: Option<Tensor>,
    weights: Option<Tensor>,
    penalty: Option<Tensor>,
    metrics: Vec<Measured>,
}

/// A metric with its inputs.
struct Measured {
    measure: Measure,
    outputs: Tensor,
    targets: Tensor,
}

/// A metric with its name.
#[derive(Clone)]
pub(super) struct Measure {
    name: String,
    metric: Arc<dyn Metric>,
}

/// A replica's sums over examples: of losses, of weights, and of the metrics.
pub(super) struct Sums {
    pub(super) sums: Vec<f64>,
    pub(super) measures: Vec<Measure>,
}

impl EstimatorSpec {
    /// Creates an empty spec.
    pub fn new() -> EstimatorSpec {
        EstimatorSpec::default()
    }

    /// Adds a named prediction; [`predict`](crate::Estimator::predict) returns [`Error::Spec`] if two have one name.
    ///
    /// # Shapes
    /// One row per example.
    pub fn prediction(mut self, name: impl Into<String>, values: &Tensor) -> EstimatorSpec {
        self.predictions.push((name.into(), values.clone()));
        self
    }

    /// Sets the loss of each example, which training and evaluation need. Training minimises the mean over the global
    /// batch, independent of how examples are divided among replicas.
    ///
    /// # Shapes
    /// One number per example.
    pub fn loss(mut self, per_example: &Tensor) -> EstimatorSpec {
        self.loss = Some(per_example.clone());
        self
    }

    /// Sets the weight of each example. Default: 1. Its loss is multiplied by it, and scores are means with these
    /// weights.
    ///
    /// # Shapes
    /// One number per example.
    ///
    /// # Source
    /// The `weight_column` of `tf.estimator`'s heads.
    pub fn weights(mut self, weights: &Tensor) -> EstimatorSpec {
        self.weights = Some(weights.detach());
        self
    }

    /// Sets a loss that does not depend on examples, such as weight decay; it is added to the mean once.
    ///
    /// # Shapes
    /// A scalar.
    pub fn penalty(mut self, penalty: &Tensor) -> EstimatorSpec {
        self.penalty = Some(penalty.clone());
        self
    }

    /// Adds a metric of outputs and targets, under a name of its own that is not `loss` or `global_step`; an evaluation
    /// returns [`Error::Spec`] otherwise. Targets have as many values as outputs, or one class per example.
    ///
    /// # Shapes
    /// One row of outputs per example. Integer targets are classes, other targets are values.
    pub fn metric(
        self,
        name: impl Into<String>,
        metric: impl Metric + 'static,
        outputs: &Tensor,
        targets: &Tensor,
    ) -> EstimatorSpec {
        self.measured(name.into(), Arc::new(metric), outputs, targets)
    }

    /// Adds a metric like [`metric`](EstimatorSpec::metric).
    pub(super) fn measured(
        mut self,
        name: String,
        metric: Arc<dyn Metric>,
        outputs: &Tensor,
        targets: &Tensor,
    ) -> EstimatorSpec {
        let measure = Measure { name, metric };
        self.metrics.push(Measured { measure, outputs: outputs.detach(), targets: targets.detach() });
        self
    }

    /// Returns the loss of each example multiplied by its weight, and the penalty in the same type. Losses of 16 bits
    /// become f32, since a product or a sum of them would soon overflow.
    pub(super) fn losses(&self, mode: Mode) -> Result<(Tensor, Option<Tensor>)> {
        let wrong = |problem: String| Error::Spec { mode, problem };
        let Some(loss) = &self.loss else {
            return Err(wrong("it has no loss; call .loss(…) with a number for each example".to_owned()));
        };
        if loss.dims().len() != 1 {
            let problem =
                format!("its loss has shape {:?}; give one number for each example, not their mean", loss.dims());
            return Err(wrong(problem));
        }
        let loss = match loss.dtype() {
            DType::F16 | DType::BF16 => loss.to_dtype(DType::F32)?,
            _ => loss.clone(),
        };
        let loss = match &self.weights {
            None => loss,
            Some(weights) if weights.dims() == loss.dims() => (&loss * weights.to_dtype(loss.dtype())?)?,
            Some(weights) => {
                let (weights, losses) = (weights.dims(), loss.dims());
                return Err(wrong(format!("its weights have shape {weights:?}, its loss {losses:?}; make them equal")));
            }
        };
        let penalty = self.penalty.as_ref().map(|penalty| penalty.to_dtype(loss.dtype())).transpose()?;
        Ok((loss, penalty))
    }

    pub(super) fn into_predictions(self) -> Result<Vec<(String, Tensor)>> {
        let names: Vec<&str> = self.predictions.iter().map(|(name, _)| name.as_str()).collect();
        if let Some((first, second)) = equal(&names) {
            let (name, first, second) = (names[first], first + 1, second + 1);
            let problem =
                format!("predictions {first} and {second} are both named {name:?}; give each a name of its own");
            return Err(Error::Spec { mode: Mode::Predict, problem });
        }
        let problem = match self.predictions.iter().find(|(_, values)| values.dims().is_empty()) {
            _ if self.predictions.is_empty() => "it has no predictions; call .prediction(…)".to_owned(),
            Some((name, _)) => format!("prediction {name:?} is a scalar; give a row for each example"),
            None => {
                return Ok(self.predictions.into_iter().map(|(name, values)| (name, values.detach())).collect());
            }
        };
        Err(Error::Spec { mode: Mode::Predict, problem })
    }

    /// Computes this replica's sums.
    pub(super) fn sums(self) -> Result<Sums> {
        let names: Vec<&str> = self.metrics.iter().map(|measured| measured.measure.name.as_str()).collect();
        check_names(&names).map_err(|problem| Error::Spec { mode: Mode::Eval, problem })?;
        let (losses, penalty) = self.losses(Mode::Eval)?;
        let examples = losses.elem_count();
        let weights = match &self.weights {
            Some(weights) => Some(weights.to_dtype(DType::F32)?.to_vec1::<f32>()?),
            None => None,
        };
        let weight = match &weights {
            Some(weights) => weights.iter().map(|weight| f64::from(*weight)).sum(),
            None => examples as f64,
        };
        let mut sums = vec![number(&losses.to_dtype(DType::F64)?.sum_all()?)?, weight];
        if let Some(penalty) = penalty {
            // The mean over all examples thus includes it once.
            sums[0] += number(&penalty)? * weight;
        }
        for measured in &self.metrics {
            let from = sums.len();
            sums.resize(from + measured.measure.metric.len(), 0.0);
            if examples > 0 {
                measured.update(&mut sums[from..], weights.as_deref(), examples)?;
            }
        }
        Ok(Sums { sums, measures: self.metrics.into_iter().map(|measured| measured.measure).collect() })
    }
}

impl Measure {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Computes the metrics by name from the sums of all replicas.
    pub(super) fn results(measures: &[Measure], sums: &[f64]) -> Vec<(String, f64)> {
        let mut rest = sums;
        let mut results = Vec::with_capacity(measures.len());
        for measure in measures {
            let (own, others) = rest.split_at(measure.metric.len().min(rest.len()));
            results.push((measure.name.clone(), measure.metric.result(own)));
            rest = others;
        }
        results
    }
}

impl Measured {
    /// Adds the examples in tensors to the metric's sums.
    fn update(&self, sums: &mut [f64], weights: Option<&[f32]>, examples: usize) -> Result<()> {
        Ok(backend::show(&self.outputs, &self.targets, weights, examples, |predictions| {
            predictions.check(&*self.measure.metric)?;
            self.measure.metric.update(sums, predictions);
            Ok(())
        })?)
    }
}

/// Checks that scores can be told apart by the names of the metrics; returns the problem otherwise.
pub(super) fn check_names(names: &[&str]) -> Result<(), String> {
    if let Some((first, second)) = equal(names) {
        let (name, first, second) = (names[first], first + 1, second + 1);
        return Err(format!("metrics {first} and {second} are both named {name:?}; give each a name of its own"));
    }
    match names.iter().find(|name| ["loss", "global_step"].contains(*name)) {
        Some(name) => Err(format!("a metric is named {name:?}, as another score is; give it a name of its own")),
        None => Ok(()),
    }
}

/// Returns the places of the first two equal names, if there are any.
fn equal(names: &[&str]) -> Option<(usize, usize)> {
    let first = |second: usize| names[..second].iter().position(|name| *name == names[second]);
    (0..names.len()).find_map(|second| Some((first(second)?, second)))
}

/// Converts a scalar tensor to a number.
pub(super) fn number(scalar: &Tensor) -> Result<f64> {
    Ok(scalar.detach().to_dtype(DType::F64)?.to_scalar::<f64>()?)
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Train => "TRAIN",
            Mode::Eval => "EVAL",
            Mode::Predict => "PREDICT",
        })
    }
}

impl fmt::Debug for EstimatorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metrics: Vec<&str> = self.metrics.iter().map(|measured| measured.measure.name.as_str()).collect();
        let mut shown = f.debug_struct("EstimatorSpec");
        shown.field("predictions", &self.predictions).field("loss", &self.loss).field("weights", &self.weights);
        shown.field("penalty", &self.penalty);
        shown.field("metrics", &metrics).finish()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn losses_of_16_bits_are_summed_without_an_overflow() {
        let of = |value: f32, dtype: DType| Tensor::full(value, 4, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let sums = EstimatorSpec::new().loss(&of(60_000.0, DType::F16)).sums().unwrap();
        assert_eq!(sums.sums, [240_000.0, 4.0]);
        let weighted = EstimatorSpec::new().loss(&of(60_000.0, DType::F16)).weights(&of(3.0, DType::F32));
        assert_eq!(weighted.sums().unwrap().sums, [720_000.0, 12.0]);
        // In f32 the sum would lose the small ones.
        let mut mixed = vec![1.0f32; 9];
        mixed[0] = 1e8;
        let mixed = EstimatorSpec::new().loss(&Tensor::new(mixed, &Device::Cpu).unwrap());
        assert_eq!(mixed.sums().unwrap().sums, [100_000_008.0, 9.0]);
    }
}

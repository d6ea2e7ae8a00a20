//! Metrics whose value does not depend on the number of replicas: sums over examples, which add up, and functions of
//! these sums.
//!
//! A [`Metric`] reduces predictions to a few sums. Replicas return theirs from a run, `strategy.reduce` adds them up,
//! batch by batch if wanted, and [`Metrics::results`] computes the values. Partial batches and replicas without
//! examples count by their number of examples.
//!
//! # Examples
//! ```
//! use distribute_train::metrics::{Accuracy, Metrics, Predictions, Targets, TopK};
//!
//! let metrics = Metrics::new().with(Accuracy).with(TopK(2));
//! let mut sums = metrics.zeros();
//! let scores = [0.1, 0.7, 0.2, 0.5, 0.3, 0.2];                      // two examples, three classes
//! metrics.update(&mut sums, &Predictions::new(&scores, 3, Targets::Classes(&[1, 1]))?)?;
//! assert_eq!(metrics.results(&sums), [("accuracy".to_owned(), 0.5), ("top_2_accuracy".to_owned(), 1.0)]);
//! # Ok::<(), distribute_train::Error>(())
//! ```
//!
//! # Source
//! `tf.keras.metrics` under `tf.distribute`, whose variables are on-read sums.

mod classes;
mod named;
mod thresholds;
mod values;

pub use classes::{Accuracy, ConfusionMatrix, CrossEntropy, Perplexity, TopK};
pub use named::Named;
pub use thresholds::{Auc, BinaryAccuracy, F1, Precision, Recall};
pub use values::{Mean, MeanAbsoluteError, MeanSquaredError};

use crate::{Error, Result};

/// A model's outputs for some examples, with the targets. They are f32, also those of a model that computes in f64;
/// metrics compute and add in f64.
#[derive(Clone, Copy, Debug)]
pub struct Predictions<'a> {
    outputs: &'a [f32],
    width: usize,
    targets: Targets<'a>,
    weights: Option<&'a [f32]>,
}

/// The targets of a batch.
#[derive(Clone, Copy, Debug)]
pub enum Targets<'a> {
    /// The class of each example.
    Classes(&'a [u32]),
    /// One value per output.
    Values(&'a [f32]),
}

impl<'a> Predictions<'a> {
    /// Creates predictions from `width` outputs for each example, one example after another: scores or logits of
    /// classes, or values.
    ///
    /// # Errors
    /// [`Error::Predictions`] if the number of targets does not fit.
    pub fn new(outputs: &'a [f32], width: usize, targets: Targets<'a>) -> Result<Predictions<'a>> {
        let examples = outputs.len().checked_div(width).unwrap_or(0);
        let (got, expected) = match targets {
            Targets::Classes(classes) => (classes.len(), examples),
            Targets::Values(values) => (values.len(), outputs.len()),
        };
        if examples * width != outputs.len() || got != expected {
            let problem = format!("{} outputs of width {width} do not go with {got} targets", outputs.len());
            return Err(Error::Predictions { problem });
        }
        Ok(Predictions { outputs, width, targets, weights: None })
    }

    /// Sets a weight for each example. Default: 1.
    ///
    /// # Errors
    /// [`Error::Predictions`] if the number of weights is not that of examples.
    pub fn weighted(self, weights: &'a [f32]) -> Result<Predictions<'a>> {
        if weights.len() != self.examples() {
            let problem = format!("{} weights do not go with {} examples", weights.len(), self.examples());
            return Err(Error::Predictions { problem });
        }
        Ok(Predictions { weights: Some(weights), ..self })
    }

    /// Returns the number of examples.
    pub fn examples(&self) -> usize {
        self.outputs.len().checked_div(self.width).unwrap_or(0)
    }

    /// Returns each example's outputs, class and weight, for a [`Metric`]. Values are a class if one of an example's is
    /// 1 and the others 0. Examples without a class, and those with weight 0, are left out; see
    /// [`needs_classes`](Metric::needs_classes).
    pub fn classified(&self) -> impl Iterator<Item = (&'a [f32], usize, f64)> + use<'a> {
        let predictions = *self;
        let outputs = self.outputs.chunks_exact(self.width.max(1)).enumerate();
        let examples = outputs.filter_map(move |(example, outputs)| {
            Some((outputs, predictions.class(example)?, predictions.weight(example)))
        });
        examples.filter(|(.., weight)| *weight != 0.0)
    }

    fn weight(&self, example: usize) -> f64 {
        self.weights.map_or(1.0, |weights| f64::from(weights[example]))
    }

    fn class(&self, example: usize) -> Option<usize> {
        match self.targets {
            Targets::Classes(classes) => Some(classes[example] as usize),
            Targets::Values(values) => {
                let row = &values[example * self.width..][..self.width];
                let class = row.iter().position(|value| *value == 1.0)?;
                let is_alone = row.iter().enumerate().all(|(at, value)| at == class || *value == 0.0);
                is_alone.then_some(class)
            }
        }
    }

    /// Checks that a metric can be computed.
    ///
    /// # Errors
    /// [`Error::Metric`] for a metric that [needs classes](Metric::needs_classes), if there is one output for each
    /// example, or if the targets of an example whose weight is not 0 are values other than one 1 among zeros.
    pub fn check(&self, metric: &dyn Metric) -> Result<()> {
        if !metric.needs_classes() {
            return Ok(());
        }
        let problem = if self.width == 1 {
            Some("scores of classes, and there is one output for each example; use BinaryAccuracy".to_owned())
        } else {
            let counts = |example: &usize| self.weight(*example) != 0.0;
            let example = (0..self.examples()).filter(counts).find(|example| self.class(*example).is_none());
            example.map(|example| {
                format!(
                    "a class for each example, and the targets of example {example} are not one 1 among zeros; give \
                     classes as u32, or leave it out"
                )
            })
        };
        match problem {
            Some(problem) => Err(Error::Metric { metric: metric.name(), problem }),
            None => Ok(()),
        }
    }

    /// Returns each output, its target, and its example's weight, for a [`Metric`], unless that weight is 0. The target
    /// of a class is 1 for the example's class and 0 for others; with one output per example, it is the class itself.
    pub fn paired(&self) -> impl Iterator<Item = (f64, f64, f64)> + use<'a> {
        let predictions = *self;
        let Predictions { outputs, width, targets, .. } = predictions;
        let pairs = outputs.iter().enumerate().map(move |(at, output)| {
            let (example, place) = (at / width.max(1), at % width.max(1));
            let target = match targets {
                Targets::Values(values) => f64::from(values[at]),
                Targets::Classes(classes) if width == 1 => f64::from(classes[example]),
                Targets::Classes(classes) => f64::from(u8::from(classes[example] as usize == place)),
            };
            (f64::from(*output), target, predictions.weight(example))
        });
        pairs.filter(|(.., weight)| *weight != 0.0)
    }
}

/// A metric: sums over examples, and a value computed from them.
///
/// # Examples
/// The share of examples whose class has a score above a half:
/// ```
/// use distribute_train::metrics::{Metric, Metrics, Predictions, Targets};
///
/// struct Sure;
///
/// impl Metric for Sure {
///     fn name(&self) -> String {
///         "sure".to_owned()
///     }
///     fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
///         for (scores, class, weight) in predictions.classified() {
///             sums[0] += if scores.get(class).is_some_and(|score| *score > 0.5) { weight } else { 0.0 };
///             sums[1] += weight;
///         }
///     }
/// }
///
/// let metrics = Metrics::new().with(Sure);
/// let mut sums = metrics.zeros();
/// metrics.update(&mut sums, &Predictions::new(&[0.9, 0.1, 0.4, 0.6], 2, Targets::Classes(&[0, 0]))?)?;
/// assert_eq!(metrics.results(&sums), [("sure".to_owned(), 0.5)]);
/// # Ok::<(), distribute_train::Error>(())
/// ```
pub trait Metric: Send + Sync {
    /// Returns the name in tables and logs, such as `accuracy`.
    fn name(&self) -> String;

    /// Returns whether each example must have a class: then targets that are values other than one 1 among zeros are an
    /// error, as is one output for each example. Default: no.
    fn needs_classes(&self) -> bool {
        false
    }

    /// Returns whether larger values are better, for callbacks that look for the best one; `Some(false)` for errors.
    /// Default: `None`, unknown: such callbacks then go by the name, or must be told.
    fn rises(&self) -> Option<bool> {
        None
    }

    /// Returns the number of sums. Default: 2, the weighted sum of values and the sum of weights.
    fn len(&self) -> usize {
        2
    }

    /// Returns whether there are no sums.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds examples to the sums, of which there are [`len`](Metric::len).
    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>);

    /// Computes the value from the sums; 0 if there were no examples. Default: the first divided by the second.
    fn result(&self, sums: &[f64]) -> f64 {
        ratio(sums[0], sums[1])
    }
}

/// Several metrics, whose sums are kept in one short vector per replica.
#[derive(Default)]
pub struct Metrics {
    metrics: Vec<Box<dyn Metric>>,
}

impl Metrics {
    /// Creates an empty list of metrics.
    pub fn new() -> Metrics {
        Metrics::default()
    }

    /// Adds a metric, whose name must be its own: see [`check_names`](Metrics::check_names). [`Named`] gives it another
    /// one.
    pub fn with(mut self, metric: impl Metric + 'static) -> Metrics {
        self.metrics.push(Box::new(metric));
        self
    }

    /// Checks that each metric has a name of its own, which is not that of the loss or of a value of the validation:
    /// callbacks and tables would show only one of two with equal names. Training and evaluations begin with this.
    ///
    /// # Errors
    /// [`Error::Metric`] for a name that is taken; [`Named`] gives a metric another one.
    pub fn check_names(&self) -> Result<()> {
        let names = self.names();
        for (at, name) in names.iter().enumerate() {
            let of_training = name.strip_prefix("val_").unwrap_or(name);
            let is_of_validation =
                of_training != name && (of_training == "loss" || names.iter().any(|n| n == of_training));
            let taken = if name == "loss" {
                "the loss has it".to_owned()
            } else if is_of_validation {
                format!("the validation's {of_training} has it")
            } else if let Some(first) = names[..at].iter().position(|other| other == name) {
                format!("metrics {} and {} both have it", first + 1, at + 1)
            } else {
                continue;
            };
            let problem = format!("a name of its own, and {taken}; give it another one with metrics::Named");
            return Err(Error::Metric { metric: name.clone(), problem });
        }
        Ok(())
    }

    /// Returns the names of the metrics, in their order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.metrics.iter().map(|metric| metric.name()).collect()
    }

    /// Returns whether the metric of this name [should rise](Metric::rises); `None` if that is unknown, or there is no
    /// such metric.
    pub fn rises(&self, name: &str) -> Option<bool> {
        self.metrics.iter().find(|metric| metric.name() == name)?.rises()
    }

    /// Returns the sums before the first example.
    pub fn zeros(&self) -> Vec<f64> {
        vec![0.0; self.metrics.iter().map(|metric| metric.len()).sum()]
    }

    /// Adds examples to the sums.
    ///
    /// # Errors
    /// [`Error::Metric`] if a metric cannot be computed from the predictions, as [`Predictions::check`] finds.
    pub fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) -> Result<()> {
        let mut rest = sums;
        for metric in &self.metrics {
            predictions.check(&**metric)?;
            let (own, others) = rest.split_at_mut(metric.len().min(rest.len()));
            metric.update(own, predictions);
            rest = others;
        }
        Ok(())
    }

    /// Returns each metric's name and its value for the sums of all replicas.
    pub fn results(&self, sums: &[f64]) -> Vec<(String, f64)> {
        let mut rest = sums;
        let mut results = Vec::with_capacity(self.metrics.len());
        for metric in &self.metrics {
            let (own, others) = rest.split_at(metric.len().min(rest.len()));
            results.push((metric.name(), metric.result(own)));
            rest = others;
        }
        results
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.metrics.iter().map(|metric| metric.name())).finish()
    }
}

/// Divides two sums; 0 if the divisor is 0.
fn ratio(sum: f64, count: f64) -> f64 {
    if count == 0.0 { 0.0 } else { sum / count }
}

#[cfg(test)]
mod tests;

//! Metrics whose value under any number of replicas is that of one: sums over examples, which add up, and what they come to.
//!
//! A [`Metric`] turns predictions into a few sums. Replicas return theirs from a run, `strategy.reduce` adds them up, batch by batch
//! if wanted, and [`Metrics::results`] gives the values. Partial batches and replicas without examples weigh what they have.
//!
//! # Examples
//! ```
//! use distribute_train::metrics::{Accuracy, Metrics, Predictions, Targets, TopK};
//!
//! let metrics = Metrics::new().with(Accuracy).with(TopK(2));
//! let mut sums = metrics.zeros();
//! let scores = [0.1, 0.7, 0.2, 0.5, 0.3, 0.2];                      // two examples, three classes
//! metrics.update(&mut sums, &Predictions::new(&scores, 3, Targets::Classes(&[1, 1]))?);
//! assert_eq!(metrics.results(&sums), [("accuracy".to_owned(), 0.5), ("top_2_accuracy".to_owned(), 1.0)]);
//! # Ok::<(), distribute_train::Error>(())
//! ```
//!
//! # Source
//! `tf.keras.metrics` under `tf.distribute`, whose variables are on-read sums.

mod classes;
mod thresholds;
mod values;

pub use classes::{Accuracy, ConfusionMatrix, CrossEntropy, Perplexity, TopK};
pub use thresholds::{Auc, BinaryAccuracy, F1, Precision, Recall};
pub use values::{Mean, MeanAbsoluteError, MeanSquaredError};

use crate::{Error, Result};

/// What a model said of some examples, and what is right.
#[derive(Clone, Copy, Debug)]
pub struct Predictions<'a> {
    outputs: &'a [f32],
    width: usize,
    targets: Targets<'a>,
    weights: Option<&'a [f32]>,
}

/// What is right.
#[derive(Clone, Copy, Debug)]
pub enum Targets<'a> {
    /// The class of each example.
    Classes(&'a [u32]),
    /// As many values as outputs.
    Values(&'a [f32]),
}

impl<'a> Predictions<'a> {
    /// Outputs of `width` numbers for each example, one after another: scores or logits of classes, or values.
    ///
    /// # Errors
    /// [`Error::Predictions`] where targets are not as many.
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

    /// With a weight for each example; default: 1.
    ///
    /// # Errors
    /// [`Error::Predictions`] where weights are not as many as examples.
    pub fn weighted(self, weights: &'a [f32]) -> Result<Predictions<'a>> {
        if weights.len() != self.examples() {
            let problem = format!("{} weights do not go with {} examples", weights.len(), self.examples());
            return Err(Error::Predictions { problem });
        }
        Ok(Predictions { weights: Some(weights), ..self })
    }

    fn examples(&self) -> usize {
        self.outputs.len().checked_div(self.width).unwrap_or(0)
    }

    /// Each example's outputs, class and weight; nothing where targets are no classes, nor of examples that weigh nothing.
    fn classified(&self) -> impl Iterator<Item = (&'a [f32], usize, f64)> + use<'a> {
        let classes = match self.targets {
            Targets::Classes(classes) => classes,
            Targets::Values(_) => &[],
        };
        let weights = self.weights;
        let weight = move |example: usize| weights.map_or(1.0, |weights| f64::from(weights[example]));
        let outputs = self.outputs.chunks_exact(self.width.max(1)).zip(classes).enumerate();
        let examples = outputs.map(move |(example, (outputs, class))| (outputs, *class as usize, weight(example)));
        examples.filter(|(.., weight)| *weight != 0.0)
    }

    /// Each output, what it should be, and its example's weight, unless that is 0. A class is 1 where it is the example's, else 0; with one output
    /// for each example, the class itself.
    fn paired(&self) -> impl Iterator<Item = (f64, f64, f64)> + use<'a> {
        let Predictions { outputs, width, targets, weights } = *self;
        let pairs = outputs.iter().enumerate().map(move |(at, output)| {
            let (example, place) = (at / width.max(1), at % width.max(1));
            let target = match targets {
                Targets::Values(values) => f64::from(values[at]),
                Targets::Classes(classes) if width == 1 => f64::from(classes[example]),
                Targets::Classes(classes) => f64::from(u8::from(classes[example] as usize == place)),
            };
            (f64::from(*output), target, weights.map_or(1.0, |weights| f64::from(weights[example])))
        });
        pairs.filter(|(.., weight)| *weight != 0.0)
    }
}

/// Sums over examples, and what they come to.
pub trait Metric: Send + Sync {
    /// What tables and logs call it, such as `accuracy`.
    fn name(&self) -> String;

    /// How many sums it keeps. Default: 2, one of what examples weigh times what they come to, and one of weights.
    fn len(&self) -> usize {
        2
    }

    /// Whether it keeps none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds examples to its sums, of which there are [`len`](Metric::len).
    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>);

    /// What the sums come to; 0 where there were no examples. Default: the first divided by the second.
    fn result(&self, sums: &[f64]) -> f64 {
        ratio(sums[0], sums[1])
    }
}

/// Several metrics, whose sums are kept together: one short vector for each replica.
#[derive(Default)]
pub struct Metrics {
    metrics: Vec<Box<dyn Metric>>,
}

impl Metrics {
    /// None yet.
    pub fn new() -> Metrics {
        Metrics::default()
    }

    /// One more.
    pub fn with(mut self, metric: impl Metric + 'static) -> Metrics {
        self.metrics.push(Box::new(metric));
        self
    }

    /// The sums before the first example.
    pub fn zeros(&self) -> Vec<f64> {
        vec![0.0; self.metrics.iter().map(|metric| metric.len()).sum()]
    }

    /// Adds examples to the sums.
    pub fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        let mut rest = sums;
        for metric in &self.metrics {
            let (own, others) = rest.split_at_mut(metric.len().min(rest.len()));
            metric.update(own, predictions);
            rest = others;
        }
    }

    /// Each metric's name, and what the sums of all replicas come to.
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

/// A quotient of two sums; 0 where there is nothing.
fn ratio(sum: f64, count: f64) -> f64 {
    if count == 0.0 { 0.0 } else { sum / count }
}

#[cfg(test)]
mod tests;

//! Metrics of outputs that are scores of classes. Targets are classes, or rows with one 1 among zeros.

use super::{Metric, Predictions, ratio};

/// Accuracy: the proportion of examples whose class has the highest score. Of equally high scores the first counts. An
/// example with a NaN score counts as wrong.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accuracy;

/// Top-k accuracy: the proportion of examples whose class is among the k highest scores. Ties count in favour of the
/// class. An example with a NaN score counts as wrong.
#[derive(Clone, Copy, Debug)]
pub struct TopK(pub usize);

/// The mean cross-entropy of logits, in nats.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropy;

/// The exponential of the mean cross-entropy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Perplexity;

/// Confusion matrix: counts for each actual class how often each class was predicted. Its result is the accuracy;
/// [`matrix`](ConfusionMatrix::matrix) returns the counts.
///
/// An example whose class or prediction has no place in the matrix (a class beyond the last, a NaN score) is in no row,
/// but counts as wrong in the result.
#[derive(Clone, Copy, Debug)]
pub struct ConfusionMatrix {
    /// The number of classes.
    pub classes: usize,
}

impl ConfusionMatrix {
    /// Returns the sums as rows: `matrix[actual][predicted]`.
    pub fn matrix<'a>(&self, sums: &'a [f64]) -> Vec<&'a [f64]> {
        sums.chunks_exact(self.classes.max(1)).take(self.classes).collect()
    }
}

impl Metric for Accuracy {
    fn name(&self) -> String {
        "accuracy".to_owned()
    }

    fn needs_classes(&self) -> bool {
        true
    }

    fn rises(&self) -> Option<bool> {
        Some(true)
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        for (scores, class, weight) in predictions.classified() {
            sums[0] += if highest(scores) == Some(class) { weight } else { 0.0 };
            sums[1] += weight;
        }
    }
}

impl Metric for TopK {
    fn name(&self) -> String {
        format!("top_{}_accuracy", self.0)
    }

    fn needs_classes(&self) -> bool {
        true
    }

    fn rises(&self) -> Option<bool> {
        Some(true)
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        for (scores, class, weight) in predictions.classified() {
            let own = scores.get(class).filter(|_| !scores.iter().any(|score| score.is_nan()));
            let within = own.is_some_and(|own| scores.iter().filter(|score| *score > own).count() < self.0);
            sums[0] += if within { weight } else { 0.0 };
            sums[1] += weight;
        }
    }
}

impl Metric for CrossEntropy {
    fn name(&self) -> String {
        "cross_entropy".to_owned()
    }

    fn needs_classes(&self) -> bool {
        true
    }

    fn rises(&self) -> Option<bool> {
        Some(false)
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        for (logits, class, weight) in predictions.classified() {
            sums[0] += weight * cross_entropy(logits, class);
            sums[1] += weight;
        }
    }
}

impl Metric for Perplexity {
    fn name(&self) -> String {
        "perplexity".to_owned()
    }

    fn needs_classes(&self) -> bool {
        true
    }

    fn rises(&self) -> Option<bool> {
        Some(false)
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        CrossEntropy.update(sums, predictions);
    }

    fn result(&self, sums: &[f64]) -> f64 {
        if sums[1] == 0.0 { 0.0 } else { (sums[0] / sums[1]).exp() }
    }
}

impl Metric for ConfusionMatrix {
    fn name(&self) -> String {
        "accuracy_of_matrix".to_owned()
    }

    fn needs_classes(&self) -> bool {
        true
    }

    fn rises(&self) -> Option<bool> {
        Some(true)
    }

    /// The matrix, and the weight of examples that have no place in it.
    fn len(&self) -> usize {
        self.classes * self.classes + 1
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        for (scores, class, weight) in predictions.classified() {
            let taken = highest(scores).filter(|taken| *taken < self.classes && class < self.classes);
            sums[taken.map_or(self.classes * self.classes, |taken| class * self.classes + taken)] += weight;
        }
    }

    fn result(&self, sums: &[f64]) -> f64 {
        let right: f64 = (0..self.classes).map(|class| sums[class * self.classes + class]).sum();
        ratio(right, sums.iter().sum())
    }
}

/// Returns the first of the highest scores; `None` if one is NaN, since it cannot be compared.
fn highest(scores: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (at, score) in scores.iter().copied().enumerate() {
        if score.is_nan() {
            return None;
        }
        if best.is_none_or(|(_, highest)| score > highest) {
            best = Some((at, score));
        }
    }
    best.map(|(at, _)| at)
}

/// Computes the negative logarithm of the softmax probability of the class; infinite if there is no such class.
fn cross_entropy(logits: &[f32], class: usize) -> f64 {
    let highest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - highest).exp()).sum();
    logits.get(class).map_or(f64::INFINITY, |logit| sum.ln() - (f64::from(*logit) - highest))
}

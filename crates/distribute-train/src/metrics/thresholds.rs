//! Metrics of outputs that are probabilities of a positive: one for each example, or one for each of several labels.
//!
//! A probability of a half is a logit of 0: give this threshold for outputs that are logits. A NaN output makes the
//! result NaN.

use super::{Metric, Predictions, ratio};

/// Binary accuracy: the proportion of outputs on the right side of the threshold.
#[derive(Clone, Copy, Debug)]
pub struct BinaryAccuracy {
    /// Outputs above it are positive.
    pub threshold: f64,
}

/// Precision: true positives over predicted positives.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// Outputs above it are positive.
    pub threshold: f64,
}

/// Recall: true positives over actual positives.
#[derive(Clone, Copy, Debug)]
pub struct Recall {
    /// Outputs above it are positive.
    pub threshold: f64,
}

/// F1 score: the harmonic mean of precision and recall.
#[derive(Clone, Copy, Debug)]
pub struct F1 {
    /// Outputs above it are positive.
    pub threshold: f64,
}

/// Area under the ROC curve, approximated by n thresholds from 0 to 1. Outputs are probabilities: one outside 0 to 1,
/// such as a logit, makes the result NaN.
#[derive(Clone, Copy, Debug)]
pub struct Auc {
    /// The number of thresholds; more give a better approximation.
    pub thresholds: usize,
}

macro_rules! at_half {
    ($($metric:ident),*) => {$(
        impl Default for $metric {
            fn default() -> $metric {
                $metric { threshold: 0.5 }
            }
        }
    )*};
}

at_half!(BinaryAccuracy, Precision, Recall, F1);

impl Default for Auc {
    fn default() -> Auc {
        Auc { thresholds: 200 }
    }
}

/// Counts true positives, false positives, false negatives and true negatives; all are NaN if an output is NaN.
fn count(sums: &mut [f64], threshold: f64, predictions: &Predictions<'_>) {
    for (output, target, weight) in predictions.paired() {
        if output.is_nan() {
            sums.fill(f64::NAN);
            return;
        }
        let place = match (output > threshold, target > 0.5) {
            (true, true) => 0,
            (true, false) => 1,
            (false, true) => 2,
            (false, false) => 3,
        };
        sums[place] += weight;
    }
}

macro_rules! counted {
    ($($metric:ident $name:literal |$sums:ident| $result:expr;)*) => {$(
        impl Metric for $metric {
            fn name(&self) -> String {
                $name.to_owned()
            }

            fn rises(&self) -> Option<bool> {
                Some(true)
            }

            fn len(&self) -> usize {
                4
            }

            fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
                count(sums, self.threshold, predictions);
            }

            fn result(&self, $sums: &[f64]) -> f64 {
                $result
            }
        }
    )*};
}

counted! {
    BinaryAccuracy "binary_accuracy" |sums| ratio(sums[0] + sums[3], sums.iter().sum());
    Precision "precision" |sums| ratio(sums[0], sums[0] + sums[1]);
    Recall "recall" |sums| ratio(sums[0], sums[0] + sums[2]);
    F1 "f1" |sums| ratio(2.0 * sums[0], 2.0 * sums[0] + sums[1] + sums[2]);
}

impl Metric for Auc {
    fn name(&self) -> String {
        "auc".to_owned()
    }

    fn rises(&self) -> Option<bool> {
        Some(true)
    }

    /// Positives and negatives in each interval between thresholds.
    fn len(&self) -> usize {
        2 * (self.thresholds + 1)
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        for (output, target, weight) in predictions.paired() {
            if !(0.0..=1.0).contains(&output) {
                sums.fill(f64::NAN);
                return;
            }
            let place = (output * self.thresholds as f64).round() as usize;
            sums[2 * place + usize::from(target > 0.5)] += weight;
        }
    }

    fn result(&self, sums: &[f64]) -> f64 {
        let (mut below, mut area, mut yes_in_all) = (0.0, 0.0, 0.0);
        for interval in sums.chunks_exact(2) {
            let (no, yes) = (interval[0], interval[1]);
            // Each positive ranks above all negatives below it, and above half of those in its interval.
            area += yes * (below + no / 2.0);
            below += no;
            yes_in_all += yes;
        }
        ratio(area, below * yes_in_all)
    }
}

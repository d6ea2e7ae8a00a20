//! Metrics of outputs that are values.

use super::{Metric, Predictions};

/// The mean of the outputs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mean;

/// Mean squared error: the mean of the squared differences between outputs and targets,
/// both rounded to f32, also those of a model in f64.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanSquaredError;

/// Mean absolute error: the mean of the absolute differences between outputs and targets,
/// both rounded to f32, also those of a model in f64.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanAbsoluteError;

macro_rules! means {
    ($($metric:ident $name:literal $rises:expr, |$output:ident, $target:ident| $value:expr;)*) => {$(
        impl Metric for $metric {
            fn name(&self) -> String {
                $name.to_owned()
            }

            fn rises(&self) -> Option<bool> {
                $rises
            }

            fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
                for ($output, $target, weight) in predictions.paired() {
                    sums[0] += weight * $value;
                    sums[1] += weight;
                }
            }
        }
    )*};
}

means! {
    Mean "mean" None, |output, _target| output;
    MeanSquaredError "mean_squared_error" Some(false), |output, target| (output - target).powi(2);
    MeanAbsoluteError "mean_absolute_error" Some(false), |output, target| (output - target).abs();
}

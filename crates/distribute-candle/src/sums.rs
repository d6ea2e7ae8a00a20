//! Sums over examples, from which losses and metrics are computed, per replica and in total.

use candle_core::{DType, Tensor};
use distribute_train::metrics::{Predictions, Targets};

use crate::Result;

/// Passes a replica's examples to metrics. Integer targets are classes, other targets are values.
pub fn show(
    outputs: &Tensor,
    targets: &Tensor,
    weights: Option<&[f32]>,
    examples: usize,
    look: impl FnOnce(&Predictions<'_>) -> distribute_train::Result<()>,
) -> Result<()> {
    let width = outputs.elem_count() / examples;
    let outputs = floats(outputs)?;
    let (values, classes): (Vec<f32>, Vec<u32>);
    let targets = if targets.dtype().is_float() {
        values = floats(targets)?;
        Targets::Values(&values)
    } else {
        classes = targets.to_dtype(DType::U32)?.flatten_all()?.to_vec1()?;
        Targets::Classes(&classes)
    };
    let mut predictions = Predictions::new(&outputs, width, targets)?;
    if let Some(weights) = weights {
        predictions = predictions.weighted(weights)?;
    }
    Ok(look(&predictions)?)
}

pub(crate) fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

//! Sums over examples, from which losses and metrics are computed, per replica and in total.

use candle_core::{DType, Tensor};
use distribute_train::metrics::{Predictions, Targets};

use crate::{Error, Result};

/// Passes a replica's examples to metrics. Integer targets are classes, other targets are values. Integers that
/// cannot be classes, such as -1, are values where there is one output per example.
///
/// # Errors
/// [`Error::NotClass`] for such an integer where there are several outputs per example.
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
        let integers = integers(targets)?;
        match as_classes(&integers) {
            Ok(found) => {
                classes = found;
                Targets::Classes(&classes)
            }
            Err(_) if width == 1 => {
                values = integers.into_iter().map(|integer| integer as f32).collect();
                Targets::Values(&values)
            }
            Err(error) => return Err(error),
        }
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

/// Returns the class that each integer target is.
///
/// # Errors
/// [`Error::NotClass`] for one that is negative or does not fit into 32 bits.
pub(crate) fn classes(targets: &Tensor) -> Result<Vec<u32>> {
    as_classes(&integers(targets)?)
}

fn integers(targets: &Tensor) -> Result<Vec<i64>> {
    Ok(targets.to_dtype(DType::I64)?.flatten_all()?.to_vec1()?)
}

fn as_classes(integers: &[i64]) -> Result<Vec<u32>> {
    let class = |(at, class): (usize, &i64)| u32::try_from(*class).map_err(|_| Error::NotClass { at, class: *class });
    integers.iter().enumerate().map(class).collect()
}

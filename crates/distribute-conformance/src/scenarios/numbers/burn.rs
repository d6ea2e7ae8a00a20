//! Losses of burn models.

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use distribute::Error;
use distribute::burn::{
    BinaryCrossentropy, Loss, MeanSquaredError, SparseCategoricalCrossentropy, cross_entropy_per_example,
};
use distribute::collectives::schedule::part;
use distribute::prelude::{PerReplica, Strategy};
use distribute::values::{HostTensor, TensorStorage};

use super::references::{binary_cross_entropy, cross_entropy};
use super::{CLASSES, LOGITS, OUTPUTS, TARGETS, close, squared, with_three};
use crate::check::{Fault, Stop, check, check_eq};

/// The types of outputs, and the tolerances of losses and of their gradients.
const TYPES: [(FloatDType, f64, f64); 4] = [
    (FloatDType::F32, 2e-6, 2e-6),
    (FloatDType::F64, 1e-12, 1e-12),
    (FloatDType::F16, 2e-6, 4e-3),
    (FloatDType::BF16, 2e-6, 4e-3),
];

fn tensor(rows: &[[f64; 4]], dtype: FloatDType) -> Tensor<2> {
    let elements = TensorData::new(rows.as_flattened().to_vec(), [rows.len(), 4]);
    Tensor::<2>::from_data(elements, (&Device::flex(), burn::tensor::DType::F64)).cast(dtype)
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f64>, Error> {
    let elements = tensor.cast(FloatDType::F64).into_data().try_into_vec::<f64>();
    elements.map_err(|error| Error::program(Fault(format!("a tensor cannot be read: {error:?}"))))
}

/// Passes each replica's part of the rows through a loss; returns the losses of all rows, and the gradients of the
/// outputs for the sum of losses.
fn losses<Y>(
    strategy: &Strategy,
    outputs: &Tensor<2>,
    loss: &dyn Loss<2, Y>,
    targets: impl Fn(std::ops::Range<usize>) -> Y + Sync,
) -> Result<(Vec<f64>, Vec<f64>), Stop> {
    let results = strategy.run_with((), |context, ()| {
        let rows = part(outputs.dims()[0], context.num_replicas_in_sync(), context.replica_id());
        if rows.is_empty() {
            return Ok::<_, Error>((Vec::new(), Vec::new()));
        }
        let own = Tensor::from_inner(outputs.clone().narrow(0, rows.start, rows.len())).require_grad();
        let per_example = loss.per_example(own.clone(), targets(rows))?;
        let gradients = per_example.clone().sum().backward();
        let gradient = own.grad(&gradients).map_or_else(|| Ok(Vec::new()), numbers)?;
        Ok((numbers(per_example.without_autodiff())?, gradient))
    })?;
    let gathered = |all: Vec<Vec<f64>>| -> Result<Vec<f64>, Stop> {
        let tensors = all.into_iter().map(|own| HostTensor::new(&[own.len()], own)).collect::<Result<Vec<_>, _>>()?;
        let whole: HostTensor = strategy.gather(&PerReplica::new(tensors), 0)?;
        Ok(whole.to_elements::<f64>()?)
    };
    let (losses, gradients) = results.into_values().into_iter().unzip();
    Ok((gathered(losses)?, gathered(gradients)?))
}

pub(crate) fn class_losses(strategy: &Strategy) -> Result<(), Stop> {
    let device = Device::flex().autodiff();
    let classes = |of: &[u32]| -> Tensor<1, Int> { Tensor::from_data(TensorData::from(of), &device) };
    let targets = |rows: std::ops::Range<usize>| classes(&CLASSES[rows]);
    for strategy in with_three(strategy)? {
        for (dtype, tolerance, rounding) in TYPES {
            let what = format!("{dtype:?} on {} replicas", strategy.num_replicas_in_sync());
            let outputs = tensor(&LOGITS, dtype);
            let rounded = numbers(outputs.clone())?;
            let expected: Vec<(f64, Vec<f64>)> =
                rounded.chunks(4).zip(CLASSES).map(|(row, class)| cross_entropy(row, class as usize)).collect();
            let of_losses: Vec<f64> = expected.iter().map(|(loss, _)| *loss).collect();
            let of_logits: Vec<f64> = expected.into_iter().flat_map(|(_, gradient)| gradient).collect();
            let (found, gradients) = losses(&strategy, &outputs, &SparseCategoricalCrossentropy, targets)?;
            close(&found, &of_losses, tolerance, tolerance, &format!("cross-entropy of {what}"))?;
            close(&gradients, &of_logits, rounding, rounding, &format!("the gradient of cross-entropy of {what}"))?;
            let mut not_a_number = LOGITS;
            not_a_number[0][1] = f64::NAN;
            let outputs = tensor(&not_a_number, dtype);
            let (found, _) = losses(&strategy, &outputs, &SparseCategoricalCrossentropy, targets)?;
            check!(found[0].is_nan() && found[1..].iter().all(|loss| !loss.is_nan()), "NaN among logits: {found:?}");
        }
    }
    // The sum of these exponentials exceeds f16.
    let many = Tensor::<2>::zeros([1, 70_000], &Device::flex()).cast(FloatDType::F16);
    let loss = numbers(cross_entropy_per_example(many, classes(&[69_999]))?)?;
    close(&loss, &[70_000f64.ln()], 2e-6, 0.0, "the cross-entropy of 70,000 classes in f16")?;
    let outputs = tensor(&LOGITS[..2], FloatDType::F32);
    let refused = cross_entropy_per_example(outputs, classes(&[0, 4])).err();
    let text = refused.map(|error| error.to_string()).unwrap_or_default();
    check!(
        text.contains("the target of example 1 is 4, but there are 4 classes"),
        "a target that is not a class: {text}"
    );
    Ok(())
}

pub(crate) fn value_losses(strategy: &Strategy) -> Result<(), Stop> {
    type Plain = fn(f64, f64) -> (f64, f64);
    let kinds: [(&str, &dyn Loss<2, Tensor<2>>, Plain); 2] = [
        ("binary cross-entropy", &BinaryCrossentropy, binary_cross_entropy),
        ("mean squared error", &MeanSquaredError, squared),
    ];
    for strategy in with_three(strategy)? {
        for (dtype, tolerance, rounding) in TYPES {
            let (x, t) = (tensor(&OUTPUTS, dtype), tensor(&TARGETS, dtype));
            let targets =
                |rows: std::ops::Range<usize>| Tensor::from_inner(t.clone().narrow(0, rows.start, rows.len()));
            let pairs: Vec<(f64, f64)> = numbers(x.clone())?.into_iter().zip(numbers(t.clone())?).collect();
            for (name, loss, plain) in kinds {
                let what = format!("{name} of {dtype:?} on {} replicas", strategy.num_replicas_in_sync());
                let (found, gradients) = losses(&strategy, &x, loss, targets)?;
                let mean = |row: &[(f64, f64)]| row.iter().map(|(x, t)| plain(*x, *t).0).sum::<f64>() / 4.0;
                let expected: Vec<f64> = pairs.chunks(4).map(mean).collect();
                close(&found, &expected, tolerance, tolerance, &what)?;
                let slopes: Vec<f64> = pairs.iter().map(|(x, t)| plain(*x, *t).1 / 4.0).collect();
                close(&gradients, &slopes, rounding, rounding, &format!("the gradient of {what}"))?;
                let mut not_a_number = OUTPUTS;
                not_a_number[2][1] = f64::NAN;
                let (found, _) = losses(&strategy, &tensor(&not_a_number, dtype), loss, targets)?;
                let shows: Vec<bool> = found.iter().map(|loss| loss.is_nan()).collect();
                check_eq!(shows, [false, false, true, false], format!("NaN among the outputs of {what}"));
            }
        }
    }
    Ok(())
}

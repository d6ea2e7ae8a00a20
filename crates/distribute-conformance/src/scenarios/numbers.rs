//! Numbers: results on any number of replicas, compared with plain references in f64, on hard inputs.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{BatchNormConfig, ModuleT};
use distribute::backend::TensorLibrary;
use distribute::candle::{
    BinaryCrossentropy, CategoricalCrossentropy, Hinge, Huber, Loss, MeanAbsoluteError, MeanSquaredError, ScopeOptions,
    SparseCategoricalCrossentropy, SyncBatchNorm,
};
use distribute::collectives::schedule::part;
use distribute::device::DType as Type;
use distribute::prelude::*;
use distribute::values::{HostTensor, TensorStorage};

use crate::check::{Stop, check, check_eq};
use crate::conditions::{is_compiled, unless_whole};
use crate::library::{Library, elements, variables};

pub(crate) mod burn;
mod references;

use references::{Kind, Reference, binary_cross_entropy, cross_entropy, huber, normalised};

/// Returns the strategy, and, if it has two threads, also one of three: divisions by a number that is not a power of
/// two are inexact.
fn with_three(strategy: &Strategy) -> Result<Vec<Strategy>, Stop> {
    let mut all = vec![strategy.clone()];
    if strategy.name() == "Mirrored" && strategy.num_replicas_in_sync() == 2 {
        all.push(MirroredStrategy::builder().devices(["CPU:0", "CPU:1", "CPU:2"]).build()?);
    }
    Ok(all)
}

/// Checks that all replicas of all processes have the same bits.
fn same_bits(strategy: &Strategy, of_replicas: Vec<Vec<u64>>, what: &str) -> Result<(), Stop> {
    let brought = PerReplica::new(of_replicas);
    let least = strategy.reduce(ReduceOp::Min, &brought, Axis::None)?;
    let greatest = strategy.reduce(ReduceOp::Max, &brought, Axis::None)?;
    check_eq!(least, greatest, format!("{what}: the least and the greatest bits over replicas"));
    Ok(())
}

fn numbers(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Checks that numbers are close to the expected ones, with NaN and infinities in the same places.
fn close(got: &[f64], expected: &[f64], relative: f64, absolute: f64, what: &str) -> Result<(), Stop> {
    check_eq!(got.len(), expected.len(), format!("{what}: the number of results"));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let fits = got == expected
            || got.is_nan() && expected.is_nan()
            || (got - expected).abs() <= relative * expected.abs() + absolute;
        check!(fits, "{what}: number {at} is {got:e}, expected {expected:e}");
    }
    Ok(())
}

/// Returns gradients of magnitudes far below to far above one, by element and step.
fn gradient(step: u64, element: usize) -> f64 {
    let size = [1e-15, 1e-6, 1.0, 3e4, 1e15][element % 5];
    let sign = if (step + element as u64).is_multiple_of(3) { -1.0 } else { 1.0 };
    sign * size * (1.0 + 0.125 * ((step * 7 + element as u64) % 5) as f64)
}

/// Three variables: with a gradient in every step, in every second one, and in every third one on one replica only.
const VARIABLES: [(&str, f64, u64); 3] = [("always", 1.0, 1), ("sometimes", 1000.0, 2), ("seldom", 1e-3, 3)];

pub(crate) fn optimizers<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    for strategy in with_three(strategy)? {
        for (dtype, relative) in [(Type::F32, 3e-6), (Type::F64, 1e-12)] {
            // Programs refuse variables of f64.
            if dtype == Type::F64 && is_compiled(&strategy) {
                continue;
            }
            let mut refused = Vec::new();
            for kind in Kind::ALL {
                if !optimizer::<L>(&strategy, kind, dtype, relative)? {
                    refused.push(kind);
                }
            }
            check!(refused.len() <= 1, "these are refused: {refused:?}");
        }
    }
    Ok(())
}

/// Returns whether the strategy takes the optimizer.
fn optimizer<L: Library>(strategy: &Strategy, kind: Kind, dtype: Type, relative: f64) -> Result<bool, Stop> {
    let model = L::bag(strategy, &VARIABLES.map(|(name, value, _)| (name, value)), 5, dtype)?;
    let Some(optimizer) = unless_whole(strategy, kind.build(&model))? else { return Ok(false) };
    let replicas = strategy.num_replicas_in_sync() as f64;
    let mut references: Vec<Reference> =
        VARIABLES.iter().map(|(_, value, _)| Reference::new(kind, vec![*value; 5])).collect();
    // Replicas must use sharded variables equally, and all variables in one program.
    let is_equal = variables(&model)[0].layout().is_some() || is_compiled(strategy);
    for step in 0..12u64 {
        L::step(strategy, &model, &optimizer, |context, index| {
            let (_, _, every) = VARIABLES[index];
            match index != 2 || context.replica_id() == 0 {
                _ if step % every != 0 => None,
                true => Some((0..5).map(|element| gradient(step, element) / replicas).collect()),
                false => is_equal.then(|| vec![0.0; 5]),
            }
        })?;
        for (index, (reference, (_, _, every))) in references.iter_mut().zip(VARIABLES).enumerate() {
            if step % every == 0 {
                let share = if index == 2 { 1.0 / replicas } else { 1.0 };
                let slopes: Vec<f64> = (0..5).map(|element| gradient(step, element) * share).collect();
                reference.step(&slopes);
            }
        }
    }
    let of_replicas = |tensors: &dyn Fn(usize) -> Result<Vec<f64>, Stop>| -> Result<Vec<Vec<u64>>, Stop> {
        let bits = |replica| Ok(tensors(replica)?.into_iter().map(f64::to_bits).collect());
        (0..strategy.num_local_replicas()).map(bits).collect()
    };
    for ((variable, (name, _, _)), reference) in variables(&model).iter().zip(VARIABLES).zip(&references) {
        let what = format!("{kind:?} of {dtype:?} on {replicas} replicas, {name}");
        close(&elements(strategy, variable, 0)?, &reference.parameter, relative, relative * 1e-3, &what)?;
        same_bits(strategy, of_replicas(&|replica| elements(strategy, variable, replica))?, &what)?;
    }
    for (slot, layout) in optimizer.slots_with_layouts() {
        if layout.is_none() {
            let wide = |replica: usize| Ok(L::Tensors::cast(&slot.components()[replica], Type::F64)?.to_elements()?);
            same_bits(strategy, of_replicas(&wide)?, slot.name())?;
        }
    }
    Ok(true)
}

pub(crate) fn norms(strategy: &Strategy) -> Result<(), Stop> {
    // The mean, the deviation, the type, and the tolerance. Neighbouring f32 near 1e6 are 0.0625 apart, which affects
    // the input only.
    let cases = [
        (0.0, 1.0, DType::F32, 2e-5),
        (1e3, 0.1, DType::F32, 2e-5),
        (-1e5, 0.1, DType::F32, 2e-5),
        (1e6, 0.1, DType::F32, 2e-5),
        (1e6, 1e-3, DType::F64, 1e-9),
        (6e4, 2e3, DType::F16, 2e-3),
        (1.0, 0.01, DType::F16, 2e-3),
        (3e38, 1e37, DType::BF16, 2e-2),
        (-300.0, 8.0, DType::BF16, 2e-2),
    ];
    for strategy in with_three(strategy)? {
        for (mean, deviation, dtype, tolerance) in cases {
            // Squares of 1e37 exceed f32; bf16 has the same range, but a layer of 3e38 is useless.
            let (mean, deviation) = if mean > 1e37 { (1e18, 1e16) } else { (mean, deviation) };
            for remove_mean in [true, false] {
                // Rows for all, rows for all but the last, and fewer rows than replicas.
                for (rows, over) in [(13, 0), (13, 1), (2, 0)] {
                    norm(&strategy, [mean, deviation, tolerance], dtype, remove_mean, rows, over)?;
                }
            }
        }
    }
    Ok(())
}

const CHANNELS: usize = 3;

fn norm(
    strategy: &Strategy,
    [mean, deviation, tolerance]: [f64; 3],
    dtype: DType,
    remove_mean: bool,
    rows: usize,
    idle: usize,
) -> Result<(), Stop> {
    let what = format!(
        "{rows} rows, mean {mean:e}, deviation {deviation:e}, {dtype:?}, remove_mean {remove_mean}, {idle} idle of {} \
         replicas",
        strategy.num_replicas_in_sync()
    );
    let values: Vec<f64> = (0..rows * CHANNELS * 2)
        .map(|at| mean + deviation * (((at * 7919 + 13) % 1009) as f64 / 504.5 - 1.0) * 1.7)
        .collect();
    let whole = Tensor::from_vec(values, (rows, CHANNELS, 2), &Device::Cpu)?.to_dtype(dtype)?;
    let slopes: Vec<f64> = (0..rows * CHANNELS * 2).map(|at| ((at * 31 + 7) % 17) as f64 / 8.0 - 1.0).collect();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let slopes = Tensor::from_vec(slopes, (rows, CHANNELS, 2), &Device::Cpu)?.to_dtype(wide)?;
    let config = BatchNormConfig { remove_mean, ..BatchNormConfig::default() };
    let options = ScopeOptions::default().dtype(dtype);
    let model =
        strategy.scope_with(options, |vb| distribute::candle::sync_batch_norm(CHANNELS, config, vb.pp("norm")))?;
    let results = strategy.run(&model, |context, norm: &SyncBatchNorm| {
        let busy = context.num_replicas_in_sync().saturating_sub(idle).max(1);
        let own = if context.replica_id() < busy { part(rows, busy, context.replica_id()) } else { 0..0 };
        let x = Var::from_tensor(&whole.narrow(0, own.start, own.len())?.contiguous()?)?;
        let y = norm.forward_t(x.as_tensor(), true)?;
        let loss = (y.to_dtype(wide)? * slopes.narrow(0, own.start, own.len())?)?.sum_all()?;
        let gradients = loss.backward()?;
        let gradient = gradients.get(x.as_tensor()).cloned();
        Ok((y, gradient.unwrap_or(x.as_tensor().zeros_like()?)))
    })?;
    let (y, gradient) = strategy.gather(&results, 0)?;
    let epsilon = BatchNormConfig::default().eps;
    let expected = normalised(&numbers(&whole)?, &numbers(&slopes)?, CHANNELS, epsilon, remove_mean);
    let greatest = |of: &[f64]| of.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    close(
        &numbers(&y)?,
        &expected.outputs,
        tolerance,
        tolerance * greatest(&expected.outputs),
        &format!("{what}: outputs"),
    )?;
    let absolute = tolerance * greatest(&expected.gradients);
    // If the inputs hardly differ, gradients exceed f16.
    if greatest(&expected.gradients) < 6e4 || wide == dtype {
        close(&numbers(&gradient)?, &expected.gradients, tolerance, absolute, &format!("{what}: gradients"))?;
    }
    for replica in 0..strategy.num_local_replicas() {
        let Some(norm) = model.replica(replica) else { continue };
        let statistics = [(norm.running_mean(), &expected.means, 0.0), (norm.running_var(), &expected.variances, 0.9)];
        for (running, of_batch, rest) in statistics {
            let blended: Vec<f64> = of_batch.iter().map(|x| rest + 0.1 * x).collect();
            close(&numbers(running)?, &blended, 1e-5, 0.0, &format!("{what}: running statistics"))?;
        }
    }
    let bits = |replica: usize| -> candle_core::Result<Vec<u64>> {
        let both = model.replica(replica).map(|norm| [norm.running_mean().clone(), norm.running_var().clone()]);
        let all: candle_core::Result<Vec<Vec<f64>>> = both.iter().flatten().map(numbers).collect();
        Ok(all?.into_iter().flatten().map(f64::to_bits).collect())
    };
    let bits: candle_core::Result<Vec<Vec<u64>>> = (0..strategy.num_local_replicas()).map(bits).collect();
    same_bits(strategy, bits?, &what)
}

/// Logits on which a naive softmax overflows or loses all digits, and their classes.
const LOGITS: [[f64; 4]; 7] = [
    [0.0, 0.0, 0.0, 0.0],
    [1e4, -1e4, 0.0, 5.0],
    [-3e4, -3e4, -3e4, -3e4],
    [6e4, 5e4, 0.0, -6e4],
    [1e-3, 2e-3, -1e-3, 0.0],
    [88.0, 89.0, 90.0, 91.0],
    [0.0, f64::NEG_INFINITY, 1.0, f64::NEG_INFINITY],
];
const CLASSES: [u32; 7] = [3, 0, 1, 1, 2, 0, 2];

/// Outputs and targets of losses of values.
const OUTPUTS: [[f64; 4]; 4] =
    [[0.0, 1.0, -1.0, 20.0], [-20.0, 100.0, -100.0, 0.5], [6e4, -6e4, 300.0, -300.0], [0.0, -0.0, 1e-4, -1e-4]];
const TARGETS: [[f64; 4]; 4] =
    [[1.0, 0.0, 0.5, 1.0], [0.0, 1.0, 0.25, 1.0], [1.0, 0.0, 0.0, 1.0], [0.5, 1.0, 0.0, 1.0]];

/// Returns the squared error and its derivative.
fn squared(x: f64, target: f64) -> (f64, f64) {
    ((x - target) * (x - target), 2.0 * (x - target))
}

/// The types of outputs; in 16 bits, losses compute in f32.
const TYPES: [(DType, f64); 4] = [(DType::F32, 2e-6), (DType::F64, 1e-12), (DType::F16, 2e-6), (DType::BF16, 2e-6)];

/// Passes each replica's part of the rows through a loss; returns the losses of all rows, and the gradients of the
/// outputs for the sum of losses.
fn losses(
    strategy: &Strategy,
    outputs: &Tensor,
    targets: &Tensor,
    loss: &dyn Loss,
) -> Result<(Vec<f64>, Vec<f64>), Stop> {
    let results = strategy.run((), |context, ()| {
        let rows = part(outputs.dim(0)?, context.num_replicas_in_sync(), context.replica_id());
        let outputs = Var::from_tensor(&outputs.narrow(0, rows.start, rows.len())?.contiguous()?)?;
        let per_example = loss.per_example(outputs.as_tensor(), &targets.narrow(0, rows.start, rows.len())?)?;
        let gradients = per_example.sum_all()?.backward()?;
        let gradient = gradients.get(outputs.as_tensor()).cloned().unwrap_or(outputs.as_tensor().zeros_like()?);
        Ok((per_example.detach(), gradient))
    })?;
    let (losses, gradients) = strategy.gather(&results, 0)?;
    Ok((numbers(&losses)?, numbers(&gradients)?))
}

pub(crate) fn class_losses(strategy: &Strategy) -> Result<(), Stop> {
    for strategy in with_three(strategy)? {
        for (dtype, tolerance) in TYPES {
            let what = format!("{dtype:?} on {} replicas", strategy.num_replicas_in_sync());
            let outputs = Tensor::from_slice(LOGITS.as_flattened(), (7, 4), &Device::Cpu)?.to_dtype(dtype)?;
            let targets = Tensor::new(&CLASSES, &Device::Cpu)?;
            let rounded = numbers(&outputs)?;
            let expected: Vec<(f64, Vec<f64>)> =
                rounded.chunks(4).zip(CLASSES).map(|(row, class)| cross_entropy(row, class as usize)).collect();
            let of_losses: Vec<f64> = expected.iter().map(|(loss, _)| *loss).collect();
            let of_logits: Vec<f64> = expected.iter().flat_map(|(_, gradient)| gradient.clone()).collect();
            let (found, gradients) = losses(&strategy, &outputs, &targets, &SparseCategoricalCrossentropy)?;
            close(&found, &of_losses, tolerance, tolerance, &format!("cross-entropy of {what}"))?;
            let rounding = if matches!(dtype, DType::F16 | DType::BF16) { 4e-3 } else { tolerance };
            close(&gradients, &of_logits, rounding, rounding, &format!("the gradient of cross-entropy of {what}"))?;
            let rows: Vec<f64> =
                CLASSES.iter().flat_map(|class| (0..4).map(|at| f64::from(u8::from(at == *class)))).collect();
            let one_hot = Tensor::from_vec(rows, (7, 4), &Device::Cpu)?.to_dtype(dtype)?;
            let (found, gradients) = losses(&strategy, &outputs, &one_hot, &CategoricalCrossentropy)?;
            close(&found, &of_losses, tolerance, tolerance, &format!("categorical cross-entropy of {what}"))?;
            close(&gradients, &of_logits, rounding, rounding, &format!("its gradient, of {what}"))?;
            let mut not_a_number = LOGITS;
            not_a_number[0][1] = f64::NAN;
            let outputs = Tensor::from_slice(not_a_number.as_flattened(), (7, 4), &Device::Cpu)?.to_dtype(dtype)?;
            let (found, _) = losses(&strategy, &outputs, &targets, &SparseCategoricalCrossentropy)?;
            check!(found[0].is_nan() && found[1..].iter().all(|loss| !loss.is_nan()), "NaN among logits: {found:?}");
        }
        // The sum of these exponentials exceeds f16.
        let many = Tensor::zeros((1, 70_000), DType::F16, &Device::Cpu)?;
        let loss = cross_entropy_per_example(&many, &Tensor::new(&[69_999u32], &Device::Cpu)?)?;
        close(&numbers(&loss)?, &[70_000f64.ln()], 2e-6, 0.0, "the cross-entropy of 70,000 classes in f16")?;
    }
    let outputs = Tensor::zeros((2, 4), DType::F32, &Device::Cpu)?;
    let targets = |of: [i64; 2], dtype| Tensor::new(&of, &Device::Cpu)?.to_dtype(dtype);
    for (wrong, named) in [
        (targets([0, 4], DType::U32)?, "4"),
        (targets([3, i64::from(u32::MAX)], DType::U32)?, "4294967295"),
        (targets([0, -1], DType::I64)?, "-1"),
        (targets([0, i64::MAX], DType::I64)?, "9223372036854775807"),
        (targets([0, 255], DType::U8)?, "255"),
    ] {
        let refused = cross_entropy_per_example(&outputs, &wrong).map(|loss| loss.to_string());
        let text = refused.as_ref().map_or_else(ToString::to_string, |loss| format!("no error but {loss}"));
        let sentence = format!("the target of example 1 is {named}, but there are 4 classes; give indices from 0 to 3");
        check!(text.contains(&sentence), "a target that is not a class: {text}");
    }
    Ok(())
}

pub(crate) fn value_losses(strategy: &Strategy) -> Result<(), Stop> {
    type Plain = fn(f64, f64) -> (f64, f64);
    let kinds: [(&str, &dyn Loss, Plain); 5] = [
        ("binary cross-entropy", &BinaryCrossentropy, binary_cross_entropy),
        ("mean squared error", &MeanSquaredError, squared),
        ("mean absolute error", &MeanAbsoluteError, |x, t| ((x - t).abs(), if x < t { -1.0 } else { 1.0 })),
        ("Huber's loss", &Huber { delta: 1.5 }, |x, t| huber(x, t, 1.5)),
        ("hinge loss", &Hinge, |x, t| if x * t > 1.0 { (0.0, 0.0) } else { (1.0 - x * t, -t) }),
    ];
    for strategy in with_three(strategy)? {
        for (dtype, tolerance) in TYPES {
            let tensor = |of: &[[f64; 4]]| -> candle_core::Result<Tensor> {
                Tensor::from_slice(of.as_flattened(), (of.len(), 4), &Device::Cpu)?.to_dtype(dtype)
            };
            let (x, t) = (tensor(&OUTPUTS)?, tensor(&TARGETS)?);
            let pairs: Vec<(f64, f64)> = numbers(&x)?.into_iter().zip(numbers(&t)?).collect();
            for (name, loss, plain) in kinds {
                let what = format!("{name} of {dtype:?} on {} replicas", strategy.num_replicas_in_sync());
                let (found, gradients) = losses(&strategy, &x, &t, loss)?;
                let mean = |row: &[(f64, f64)]| row.iter().map(|(x, t)| plain(*x, *t).0).sum::<f64>() / 4.0;
                let expected: Vec<f64> = pairs.chunks(4).map(mean).collect();
                close(&found, &expected, tolerance, tolerance, &what)?;
                let slopes: Vec<f64> = pairs.iter().map(|(x, t)| plain(*x, *t).1 / 4.0).collect();
                let rounding = if matches!(dtype, DType::F16 | DType::BF16) { 4e-3 } else { tolerance };
                close(&gradients, &slopes, rounding, rounding, &format!("the gradient of {what}"))?;
                let mut not_a_number = OUTPUTS;
                not_a_number[2][1] = f64::NAN;
                let (found, _) = losses(&strategy, &tensor(&not_a_number)?, &t, loss)?;
                let shows: Vec<bool> = found.iter().map(|loss| loss.is_nan()).collect();
                check_eq!(shows, [false, false, true, false], format!("NaN among the outputs of {what}"));
            }
        }
        // The sum of these exceeds f16, their mean does not.
        let average = strategy.run((), |context, ()| {
            let own = Tensor::new(&[6e4f32, 6e4], &Device::Cpu)?.to_dtype(DType::F16)?;
            let mean = context.average_loss(&own, 2 * context.num_replicas_in_sync())?;
            Ok(f64::from(mean.to_dtype(DType::F32)?.to_scalar::<f32>()?))
        })?;
        close(
            &[strategy.reduce(ReduceOp::Sum, &average, Axis::None)?],
            &[6e4],
            1e-3,
            0.0,
            "the average of losses in f16",
        )?;
    }
    let refused = Huber { delta: 0.0 }
        .per_example(&Tensor::zeros(1, DType::F32, &Device::Cpu)?, &Tensor::zeros(1, DType::F32, &Device::Cpu)?);
    check!(refused.is_err_and(|error| error.to_string().contains("delta of Huber is 0")), "a delta of 0 was accepted");
    Ok(())
}

pub(crate) fn zeros(strategy: &Strategy) -> Result<(), Stop> {
    for strategy in with_three(strategy)? {
        for axis in [Axis::None, Axis::At(0)] {
            for first in [0.0f32, -0.0] {
                let brought = strategy.distribute_values_from_function(|context| {
                    let own = if context.replica_id.is_multiple_of(2) { first } else { -first };
                    Ok::<_, distribute::Error>(Tensor::new(&[own], &Device::Cpu)?)
                })?;
                let mixed = strategy.num_replicas_in_sync() > 1;
                for (op, negative) in [
                    (ReduceOp::Min, mixed || first.is_sign_negative()),
                    (ReduceOp::Max, !mixed && first.is_sign_negative()),
                ] {
                    let whole: Tensor = strategy.reduce(op, &brought, axis.clone())?;
                    let bits: Vec<u64> = numbers(&whole)?.into_iter().map(f64::to_bits).collect();
                    let expected = if negative { -0.0f64 } else { 0.0 };
                    check_eq!(bits, [expected.to_bits()], format!("{op} of zeros over {axis:?}, the first {first:?}"));
                    same_bits(&strategy, vec![bits; strategy.num_local_replicas()], "zeros")?;
                }
            }
        }
    }
    Ok(())
}

/// Returns the values of one replica: as many rows as its id, so that the first has none.
fn rows<T: Copy>(all: &[T], replica: usize) -> Vec<T> {
    (0..replica).map(|row| all[(replica * 3 + row) % all.len()]).collect()
}

/// Returns the values of all replicas.
fn rows_of_all<T: Copy>(all: &[T], replicas: usize) -> Vec<T> {
    (0..replicas).flat_map(|replica| rows(all, replica)).collect()
}

pub(crate) fn reductions(strategy: &Strategy) -> Result<(), Stop> {
    const HARD: [f64; 7] = [1e8, -1.0, 0.25, -0.0, 0.0, 1e-8, 3e4];
    for strategy in with_three(strategy)? {
        let replicas = strategy.num_replicas_in_sync();
        let reduced = |op, values: &dyn Fn(usize) -> Vec<f64>, dtype| -> Result<Vec<f64>, Stop> {
            let brought = strategy.distribute_values_from_function(|context| {
                let own = values(context.replica_id);
                let rows = own.len();
                Ok::<_, distribute::Error>(Tensor::from_vec(own, rows, &Device::Cpu)?.to_dtype(dtype)?)
            })?;
            let whole: Tensor = strategy.reduce(op, &brought, Axis::At(0))?;
            let result = numbers(&whole)?;
            let bits = vec![result.iter().map(|x| x.to_bits()).collect(); strategy.num_local_replicas()];
            same_bits(&strategy, bits, &format!("{op} of {dtype:?}"))?;
            Ok(result)
        };
        for (dtype, tolerance) in [(DType::F32, 1e-7), (DType::F64, 1e-14), (DType::BF16, 4e-3)] {
            let rounded = numbers(&Tensor::new(&HARD, &Device::Cpu)?.to_dtype(dtype)?)?;
            let all = rows_of_all(&rounded, replicas);
            let sum: f64 = all.iter().sum();
            for (op, expected) in [
                (ReduceOp::Sum, sum),
                (ReduceOp::Mean, sum / all.len() as f64),
                (ReduceOp::Product, all.iter().product()),
                (ReduceOp::Min, all.iter().copied().fold(f64::INFINITY, f64::min)),
                (ReduceOp::Max, all.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
            ] {
                let got = reduced(op, &|replica| rows(&HARD, replica), dtype)?;
                close(
                    &got,
                    &[expected],
                    tolerance,
                    1e-30,
                    &format!("{op} of {dtype:?} over {replicas} replicas' rows"),
                )?;
            }
            for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                // On the last replica only.
                let values = |replica| if replica + 1 == replicas { vec![1.0, special] } else { vec![2.0] };
                for (op, finite) in [(ReduceOp::Min, 1.0), (ReduceOp::Max, if replicas > 1 { 2.0 } else { 1.0 })] {
                    let wins = special.is_nan() || (special > 0.0) == (op == ReduceOp::Max);
                    close(&reduced(op, &values, dtype)?, &[if wins { special } else { finite }], 0.0, 0.0, op.name())?;
                }
                close(&reduced(ReduceOp::Sum, &values, dtype)?, &[special], 0.0, 0.0, "a sum with what is not finite")?;
            }
        }
        // The sums of three and of two of these exceed f16; their mean does not.
        let mean = reduced(ReduceOp::Mean, &|_| vec![3e4, 6e4], DType::F16)?;
        close(&mean, &[45_000.0], 1e-3, 0.0, "a mean of f16")?;
        integers(&strategy)?;
    }
    Ok(())
}

fn integers(strategy: &Strategy) -> Result<(), Stop> {
    let replicas = strategy.num_replicas_in_sync();
    let hard = [i64::MAX, i64::MIN, -1, 0, 7, 1 << 53, (1 << 53) + 1];
    let brought = strategy.distribute_values_from_function(|context| {
        let own = rows(&hard, context.replica_id);
        HostTensor::new(&[own.len()], own).map_err(distribute::Error::from)
    })?;
    let all = rows_of_all(&hard, replicas);
    for (op, expected) in [
        (ReduceOp::Sum, all.iter().fold(0, |sum: i64, x| sum.wrapping_add(*x))),
        (ReduceOp::Product, all.iter().fold(1, |product: i64, x| product.wrapping_mul(*x))),
        (ReduceOp::Min, all.iter().copied().min().unwrap_or(i64::MAX)),
        (ReduceOp::Max, all.iter().copied().max().unwrap_or(i64::MIN)),
        (ReduceOp::BitAnd, all.iter().fold(-1, |and, x| and & x)),
        (ReduceOp::BitOr, all.iter().fold(0, |or, x| or | x)),
        (ReduceOp::BitXor, all.iter().fold(0, |xor, x| xor ^ x)),
    ] {
        let whole: HostTensor<i64> = strategy.reduce(op, &brought, Axis::At(0))?;
        check_eq!(whole.to_elements::<i64>()?, [expected], format!("{op} of i64 over {replicas} replicas' rows"));
    }
    // 4 and 5 have the mean 4.5.
    for axis in [Axis::None, Axis::At(0)] {
        let refused = strategy.reduce(ReduceOp::Mean, &brought, axis.clone()).map(|_: HostTensor<i64>| ());
        let text = refused.map_or_else(|error| error.to_string(), |()| "a mean".to_owned());
        check!(text.contains("a mean of integers is not an integer"), "the mean of integers over {axis:?}: {text}");
    }
    Ok(())
}

pub(crate) fn layers(_: &Strategy) -> Result<(), Stop> {
    let build = |dtype| -> Result<_, Stop> {
        let options = ScopeOptions::default().dtype(dtype);
        Ok(Strategy::default_strategy()?.scope_with(options, |vb| {
            Ok((
                distribute::candle::layer_norm(4, 1e-5, vb.pp("a"))?,
                distribute::candle::rms_norm(4, 1e-5, vb.pp("b"))?,
            ))
        })?)
    };
    for (mean, deviation, dtype, tolerance) in
        [(1e6, 0.1, DType::F32, 2e-5), (1e3, 0.1, DType::F32, 2e-5), (6e4, 1e3, DType::F16, 2e-3)]
    {
        let model = build(dtype)?;
        let (layer, root) = model.first();
        let x: Vec<f64> = (0..20).map(|at| mean + deviation * f64::from((at * 7 + 3) % 11)).collect();
        let x = Tensor::from_vec(x, (5, 4), &Device::Cpu)?.to_dtype(dtype)?;
        let x = Var::from_tensor(&x)?;
        let rows: Vec<Vec<f64>> = numbers(x.as_tensor())?.chunks(4).map(<[f64]>::to_vec).collect();
        let expected = |remove_mean| -> Vec<f64> {
            let slopes = [0.0; 4];
            rows.iter().flat_map(|row| normalised(row, &slopes, 1, 1e-5, remove_mean).outputs).collect()
        };
        let what = format!("of {dtype:?} with mean {mean:e}");
        let y = layer.forward(x.as_tensor())?;
        close(&numbers(&y)?, &expected(true), tolerance, tolerance, &format!("layer normalisation {what}"))?;
        let root_mean_square = |row: &[f64]| (row.iter().map(|x| x * x).sum::<f64>() / 4.0 + 1e-5).sqrt();
        let scaled: Vec<f64> =
            rows.iter().flat_map(|row| row.iter().map(|x| x / root_mean_square(row)).collect::<Vec<f64>>()).collect();
        close(&numbers(&root.forward(x.as_tensor())?)?, &scaled, tolerance, 0.0, &format!("rms normalisation {what}"))?;
        // Unlike in candle's own layers, gradients are propagated.
        let loss = (y.narrow(1, 0, 1)?.to_dtype(DType::F32)?.sum_all()? * 1.0)?;
        check!(loss.backward()?.get(x.as_tensor()).is_some(), "no gradient came through layer normalisation");
        let none = x.as_tensor().narrow(0, 0, 0)?;
        check_eq!(layer.forward(&none)?.dims().to_vec(), vec![0, 4], "layer normalisation of no rows");
        check_eq!(root.forward(&none)?.dims().to_vec(), vec![0, 4], "rms normalisation of no rows");
    }
    Ok(())
}

//! Steps of custom loops.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use distribute_burn::{
    Adam, BurnContext, BurnStrategy, Clip, Error, Model, Optimizer, Sgd, cast_module, cross_entropy_per_example,
};
use distribute_collectives::ReduceOp;
use distribute_device::BufferRef;
use distribute_input::Array;
use distribute_strategy::Strategy;
use distribute_values::{Axis, PerReplica, TensorStorage};

use crate::models::{Cnn, Mlp, Transformer};
use crate::training::{Values, assert_close, numbers, rows, seeded, values};
use crate::{mirrored, tpu};

fn seeded_mlp(strategy: &Strategy) -> Model<Mlp> {
    strategy.scope(seeded(11, Mlp::new)).unwrap()
}

/// Trains by a custom loop; returns the losses of steps and the variables.
fn looped(strategy: &Strategy, batch: usize) -> (Vec<f32>, Values) {
    let model = seeded_mlp(strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap().clip(Clip::GlobalNorm(0.5)).unwrap();
    let mut losses = Vec::new();
    for _ in 0..4 {
        for batch_of in strategy.distribute_dataset(&rows(32, 12, batch)).unwrap() {
            let step =
                strategy.run_step((&model, &optimizer, batch_of.unwrap()), |context, (model, optimizer, (x, y))| {
                    let (x, y) = (context.tensor::<2>(&x)?, context.int_tensor::<1>(&y)?);
                    let per_example = cross_entropy_per_example(model.forward(x), y.clone())?;
                    let loss = context.average_loss(per_example, batch);
                    optimizer.minimize(context, &loss)?;
                    Ok::<_, Error>((loss, y))
                });
            let (of_replicas, classes): (Vec<_>, Vec<_>) = step.unwrap().into_values().into_iter().unzip();
            assert!(classes.iter().all(|classes| classes.dims()[0] > 0));
            let total = of_replicas.into_iter().map(|loss: Tensor<1>| loss.into_scalar::<f32>()).sum();
            losses.push(total);
        }
    }
    assert!(optimizer.gradient_norm().is_some());
    (losses, values(&model))
}

#[test]
fn a_custom_loop_trains_alike() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let ((losses, variables), (expected, own)) = (looped(&strategy, 8), looped(&mirrored(2), 8));
    assert_close(&losses, &expected, 4e-5, "losses");
    for ((name, given), (_, expected)) in variables.iter().zip(&own) {
        assert_close(given, expected, 4e-5, name);
    }
}

#[test]
fn a_step_that_differs_between_replicas_is_refused() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let x = Array::new([4, 12], numbers(48)).unwrap();
    let outcome = strategy.run_step((&model, &optimizer), |context, (model, optimizer)| {
        let outputs = model.forward(context.tensor::<2>(&x)?);
        let loss = context.average_loss(outputs.square().mul_scalar(context.replica_id() as f64 + 1.0), 8);
        optimizer.minimize(context, &loss)?;
        Ok::<_, Error>(loss)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("replica 1 computes something else"), "{error}");
    let twice = strategy.run_step((&model, &optimizer), |context, (model, optimizer)| {
        let loss = context.average_loss(model.forward(context.tensor::<2>(&x)?), 8);
        optimizer.minimize(context, &loss)?;
        optimizer.minimize(context, &loss)
    });
    let error = twice.unwrap_err().to_string();
    assert!(error.contains("minimize is called twice"), "{error}");
}

/// A step on one batch that all replicas have.
fn step_on<M: Module + Sync + 'static>(
    strategy: &Strategy,
    (model, optimizer): (&Model<M>, &Optimizer),
    width: usize,
    forward: impl Fn(&M, Tensor<2>, usize) -> Tensor<2> + Sync,
) -> distribute_burn::Result<PerReplica<Tensor<1>>> {
    let x = Array::new([4, width], numbers(4 * width)).unwrap();
    strategy.run_step((model, optimizer), |context, (model, optimizer)| {
        let outputs = forward(model, context.tensor::<2>(&x)?, context.replica_id());
        let loss = context.average_loss(outputs.square(), 8);
        optimizer.minimize(context, &loss)?;
        Ok::<_, Error>(loss)
    })
}

/// Two layers of equal shapes.
#[derive(Module, Debug)]
struct Pair {
    a: Linear,
    b: Linear,
}

impl Pair {
    fn new(device: &Device) -> Pair {
        Pair { a: LinearConfig::new(3, 2).init(device), b: LinearConfig::new(3, 2).init(device) }
    }
}

#[test]
fn replicas_that_train_other_layers_of_equal_shapes_are_refused() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let model = strategy.scope(Pair::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let outcome = step_on(&strategy, (&model, &optimizer), 3, |model, x, replica| match replica {
        0 => model.a.forward(x),
        _ => model.b.forward(x),
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("replica 1 computes something else"), "{error}");
}

#[test]
fn replicas_that_minimize_by_other_optimizers_are_refused() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let model = strategy.scope(Pair::new).unwrap();
    let (first, second) = (Sgd::new(0.1).build(&model).unwrap(), Sgd::new(0.1).build(&model).unwrap());
    let outcome = strategy.run_step((&model, &first, &second), |context, (model, first, second)| {
        let x = context.tensor::<2>(&Array::new([4, 3], numbers(12))?)?;
        let loss = context.average_loss(model.a.forward(x).square(), 8);
        if context.replica_id() == 0 { first.minimize(context, &loss) } else { second.minimize(context, &loss) }
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("another optimizer than replica 0"), "{error}");
}

#[test]
fn an_optimizer_of_another_model_is_refused() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let (model, other) = (strategy.scope(Mlp::new).unwrap(), strategy.scope(Mlp::new).unwrap());
    let small = strategy.scope(|device| LinearConfig::new(3, 1).init(device)).unwrap();
    let before = values(&other);
    for optimizer in [Sgd::new(0.1).build(&other).unwrap(), Sgd::new(0.1).build(&small).unwrap()] {
        let outcome = step_on(&strategy, (&model, &optimizer), 12, |model, x, _| model.forward(x));
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the optimizer is of another model"), "{error}");
    }
    assert_eq!(values(&other), before);
}

#[test]
fn a_loss_that_is_not_weighed_is_refused_on_a_replica_without_examples() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let x = Array::new([2, 12], numbers(24)).unwrap();
    let batch = || PerReplica::new(vec![x.clone(), x.clone()]).with_examples(&[true, false]);
    let step = |is_weighed: bool| {
        strategy.run_step((&model, &optimizer, batch()), |context, (model, optimizer, x)| {
            let loss = model.forward(context.tensor::<2>(&x)?).square().sum();
            let loss = if is_weighed { context.weigh(loss) } else { loss };
            optimizer.minimize(context, &loss)?;
            Ok::<_, Error>(loss)
        })
    };
    let error = step(false).unwrap_err();
    assert!(matches!(error, Error::Strategy(distribute_strategy::Error::Unweighed { .. })), "{error:?}");
    let losses: Vec<f32> = step(true).unwrap().into_values().into_iter().map(Tensor::into_scalar::<f32>).collect();
    assert!(losses[0] > 0.0 && losses[1] == 0.0, "{losses:?}");
}

#[test]
fn what_replicas_without_examples_computed_is_neither_gathered_nor_reduced() {
    let Some((_generator, strategy)) = tpu(4) else { return };
    let computed = |strategy: &Strategy| {
        let model = seeded_mlp(strategy);
        let mut values: Vec<f32> = Vec::new();
        // The last batch has rows for two of four replicas.
        for batch in strategy.distribute_dataset(&rows(10, 12, 4)).unwrap() {
            let batch = batch.unwrap();
            let outputs = strategy.run_step((&model, batch.clone()), |context, (model, (x, _))| {
                Ok::<_, Error>(model.forward(context.tensor::<2>(&x)?))
            });
            let gathered: Tensor<2> = strategy.gather(&outputs.unwrap(), 0).unwrap();
            values.extend(gathered.into_data().try_into_vec::<f32>().unwrap());
            let sums = strategy.run_step((&model, batch), |context, (model, (x, _))| {
                Ok::<_, Error>(model.forward(context.tensor::<2>(&x)?).sum())
            });
            let sums = sums.unwrap();
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                values.push(strategy.reduce(op, &sums, Axis::None).unwrap().into_scalar::<f32>());
            }
        }
        values
    };
    assert_close(&computed(&strategy), &computed(&mirrored(4)), 4e-5, "values");
}

#[test]
fn what_programs_do_not_do_is_refused() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let with_statistics = strategy.scope(Cnn::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&with_statistics).unwrap();
    let outcome = step_on(&strategy, (&with_statistics, &optimizer), 64, |model, x, _| model.forward(x));
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("running statistics") && error.contains("Trainer"), "{error}");
    let of_f64 = strategy.scope(|device| cast_module(Mlp::new(device), FloatDType::F64)).unwrap();
    let optimizer = Sgd::new(0.1).build(&of_f64).unwrap();
    let outcome = step_on(&strategy, (&of_f64, &optimizer), 12, |model, x, _| model.forward(x.cast(FloatDType::F64)));
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("a variable of f64"), "{error}");
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let x = Array::new([4, 12], numbers(48)).unwrap();
    let outcome = strategy.run_step((&model, &optimizer), |context, (model, optimizer)| {
        let loss = context.average_loss(model.forward(context.tensor::<2>(&x)?).square(), 8);
        optimizer.accumulate(context, &loss)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("accumulate") && error.contains("compiled program"), "{error}");
}

#[test]
fn copies_that_differ_are_found_when_an_audit_is_due() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap().audit_every(3);
    let step = || step_on(&strategy, (&model, &optimizer), 12, |model, x, _| model.forward(x));
    step().unwrap();
    let bias = model.variables().iter().find(|variable| variable.name() == "first.bias").unwrap();
    bias.components()[1].overwrite(BufferRef::from(&[7.0f32; 16][..])).unwrap();
    step().unwrap();
    let error = step().unwrap_err().to_string();
    assert!(error.contains("first.bias"), "{error}");
}

#[test]
fn a_model_of_bf16_trains_alike() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let train = |strategy: &Strategy| {
        let new = seeded(11, Mlp::new);
        let model = strategy.scope(|device| cast_module(new(device), FloatDType::BF16)).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let mut losses = Vec::new();
        for _ in 0..20 {
            let loss = step_on(strategy, (&model, &optimizer), 12, |model, x, _| {
                model.forward(x.cast(FloatDType::BF16)).cast(FloatDType::F32)
            });
            losses.push(loss.unwrap().into_values().swap_remove(0).into_scalar::<f32>());
        }
        losses
    };
    let (losses, expected) = (train(&strategy), train(&mirrored(2)));
    // bf16 has 8 bits.
    assert_close(&losses, &expected, 1e-2, "losses");
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn classes_that_are_a_part_of_an_input_are_checked() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let model = strategy.scope(Transformer::new).unwrap();
    let step = |last: i64| {
        // The first of each row is an input only, and no class.
        let windows = Array::new([1, 4], vec![10i64, 3, 2, last]).unwrap();
        strategy.run_step(&model, |context, model| {
            let windows = context.int_tensor::<2>(&windows)?;
            let logits = model.forward(windows.clone().slice([0..1, 0..3]));
            let targets = windows.slice([0..1, 1..4]).flatten::<1>(0, 1);
            cross_entropy_per_example(logits.flatten::<2>(0, 1).slice([0..3, 0..9]), targets)
        })
    };
    assert!(step(8).unwrap().values().iter().all(|losses| losses.dims() == [3]));
    let error = step(9).unwrap_err();
    assert!(matches!(error, Error::Class { at: 2, class: 9, classes: 9 }), "{error}");
}

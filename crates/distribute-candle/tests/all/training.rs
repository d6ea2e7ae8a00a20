//! Replicas train as one: compared with plain candle, with each other, and with missing gradients.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, linear};
use distribute_candle::{
    Adam, Candle, CandleContext, CandleStrategy, Error, Sgd, cross_entropy_per_example, nll_per_example,
};
use distribute_strategy::CentralStorageStrategy;
use distribute_testkit::apart;
use distribute_train::checkpoint::{Checkpointed, Snapshot};
use distribute_values::TensorStorage;

use crate::common::*;

#[test]
fn replicas_train_as_one_on_the_whole_batch() {
    let (one, losses_of_one) = train(&mirrored(1), 20, 12);
    for replicas in [2, 3] {
        let (many, losses) = train(&mirrored(replicas), 20, 12);
        assert!(apart(&losses, &losses_of_one) < 1e-5, "{losses:?} {losses_of_one:?}");
        assert!(losses[19] < losses[0]);
        for replica in 1..replicas {
            assert_eq!(values(&many, 0), values(&many, replica), "copies are equal bit for bit");
        }
        let apart = apart(&values(&many, 0).concat(), &values(&one, 0).concat());
        assert!(apart < 4e-5, "{apart:e}");
    }
}

#[test]
fn runs_repeat_bit_for_bit() {
    let strategy = mirrored(2);
    let (first, losses) = train(&strategy, 8, 10);
    let (second, again) = train(&strategy, 8, 10);
    assert_eq!(losses, again);
    assert_eq!(values(&first, 1), values(&second, 0));
}

/// Makes the same computation by hand: two sets of plain variables, with gradients added in replica order.
#[test]
fn two_replicas_equal_their_sequential_emulation_bit_for_bit() {
    let strategy = mirrored(2);
    let model = strategy.scope(Mlp::new).unwrap();
    let names: Vec<String> = model.variables().iter().map(|v| v.name().to_owned()).collect();
    let vars: Vec<Var> = model
        .variables()
        .iter()
        .map(|v| Var::from_tensor(&v.components()[0].detach().copy().unwrap()).unwrap())
        .collect();
    let tensors = names.iter().cloned().zip(vars.iter().map(|var| var.as_tensor().clone())).collect();
    let emulated = Mlp::new(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let batch = parts(2, 10);
    for _ in 0..5 {
        strategy
            .run_with((&model, &optimizer, batch.clone()), |context, (model, optimizer, (x, y))| {
                let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 10)?;
                optimizer.minimize(context, &loss)
            })
            .unwrap();
        let grads: Vec<_> = batch
            .values()
            .iter()
            .map(|(x, y)| {
                let loss = cross_entropy_per_example(&emulated.forward(x).unwrap(), y).unwrap();
                (loss.sum_all().unwrap() / 10.0).unwrap().backward().unwrap()
            })
            .collect();
        for var in &vars {
            let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let (a, b) = (flat(grads[0].get(var).unwrap()), flat(grads[1].get(var).unwrap()));
            let next: Vec<f32> = flat(var).iter().zip(a.iter().zip(b)).map(|(p, (a, b))| p - 0.1 * (a + b)).collect();
            var.set(&Tensor::from_vec(next, var.shape(), &Device::Cpu).unwrap()).unwrap();
        }
    }
    for (variable, var) in model.variables().iter().zip(&vars) {
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(flat(&variable.components()[1]), flat(var), "{}", variable.name());
    }
}

#[test]
fn a_replica_without_examples_weighs_nothing() {
    let (one, _) = train(&mirrored(1), 5, 3);
    let (four, losses) = train(&mirrored(4), 5, 3);
    assert!(losses.iter().all(|loss| loss.is_finite()));
    let apart = apart(&values(&four, 3).concat(), &values(&one, 0).concat());
    assert!(apart < 4e-5, "{apart:e}");
}

#[test]
fn a_variable_without_gradient_stays_until_it_gets_one() {
    let strategy = mirrored(2);
    let model = strategy.scope(|vb| Ok((linear(8, 3, vb.pp("a"))?, linear(8, 3, vb.pp("b"))?))).unwrap();
    let optimizer = Adam::new(0.1).build(&model).unwrap();
    let values = |index: usize| -> Vec<Vec<f32>> {
        let parts = model.variables()[index].components();
        parts.iter().map(|t| t.flatten_all().unwrap().to_vec1().unwrap()).collect()
    };
    let step = |use_b_on: Option<usize>| {
        strategy
            .run_with((&model, &optimizer, parts(2, 8)), |context, ((a, b), optimizer, (x, y))| {
                let layer = if use_b_on == Some(context.replica_id()) { b } else { a };
                let logits = candle_nn::ops::log_softmax(&layer.forward(&x)?, 1)?;
                optimizer.minimize(context, &context.average_loss(&nll_per_example(&logits, &y)?, 8)?)
            })
            .unwrap();
    };
    let before = values(2);
    step(None);
    step(None);
    assert_eq!(values(2), before);
    step(Some(1));
    assert_ne!(values(2), before);
    assert_eq!(values(2)[0], values(2)[1]);
    let after = values(2);
    step(None);
    assert_eq!(values(2), after);
}

#[test]
fn a_failing_replica_ends_the_run_for_all() {
    let strategy = mirrored(2);
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let started = std::time::Instant::now();
    let error = strategy
        .run_with((&model, &optimizer, parts(2, 4)), |context, (model, optimizer, (x, y))| {
            if context.replica_id() == 1 {
                return Err(Error::Candle(candle_core::Error::Msg("the data are broken".to_owned())));
            }
            let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 4)?;
            optimizer.minimize(context, &loss)
        })
        .unwrap_err();
    assert!(error.to_string().contains("the data are broken"), "{error}");
    assert!(started.elapsed() < std::time::Duration::from_secs(5));
    let panicked = strategy.run_with((), |context, ()| -> Result<(), Error> {
        assert_eq!(context.replica_id(), 0, "replica one gives up");
        Ok(context.barrier()?)
    });
    assert!(panicked.unwrap_err().to_string().contains("replica one gives up"));
    strategy.run_with((), |context, ()| Ok::<_, Error>(context.barrier()?)).unwrap();
}

#[test]
fn replicas_that_share_variables_train_as_mirrored_ones_do() {
    let central = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    let (shared, losses) = train(&central, 20, 12);
    let (copied, losses_of_copies) = train(&mirrored(2), 20, 12);
    // Sums of two numbers have only one order, so the bits are equal.
    assert_eq!(losses, losses_of_copies);
    assert_eq!(values(&shared, 0), values(&copied, 0));
    assert_eq!(values(&shared, 0), values(&shared, 1));
    let [first, second] = [0, 1].map(|replica| shared.variables()[0].components()[replica].id());
    assert_eq!(first, second);
}

#[test]
fn a_copy_that_was_written_behind_the_optimizers_back_is_named() {
    let strategy = mirrored(3);
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.5).build(&model).unwrap();
    step(&strategy, &model, &optimizer);
    model.audit(&strategy).unwrap();
    let variable = model.variables().iter().find(|variable| variable.name() == "second.bias").unwrap();
    let written = TensorStorage::<Candle>::write(&variable.components()[2], &mut |mut buffer| {
        buffer.as_mut_slice::<f32>().unwrap()[1] += 1e-6;
    });
    written.unwrap();
    let text = model.audit(&strategy).unwrap_err().to_string();
    assert!(text.starts_with("variable second.bias of replica 2 differs from replica 0's"), "{text}");
}

#[test]
fn copies_are_compared_in_some_steps_and_before_every_checkpoint() {
    let strategy = mirrored(2);
    let batch = parts(2, 12);
    for (every, failing) in [(3, Some(3)), (0, None)] {
        let model = strategy.scope(Mlp::new).unwrap();
        let optimizer = Sgd::new(0.5).build(&model).unwrap().audit_every(every);
        let step = || {
            let step = strategy.run_with((&model, &optimizer, batch.clone()), |context, (model, optimizer, (x, y))| {
                let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                optimizer.minimize(context, &context.average_loss(&per_example, 12)?)
            });
            step.map(drop).map_err(|error| error.to_string())
        };
        step().unwrap();
        model.variables()[1].components()[1].zero_set().unwrap();
        let expected = format!("variable {} of replica 1 differs from replica 0's", model.variables()[1].name());
        for count in 2..=4 {
            let outcome = step();
            match failing {
                Some(failing) if failing == count => assert!(outcome.unwrap_err().starts_with(&expected)),
                _ => outcome.unwrap(),
            }
        }
        let error = model.save(&strategy, &mut Snapshot::new(4)).unwrap_err().to_string();
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn copies_are_compared_after_the_first_step() {
    let strategy = mirrored(2);
    let model = strategy.scope(Mlp::new).unwrap();
    model.variables()[0].components()[0].zero_set().unwrap();
    let optimizer = Sgd::new(0.5).build(&model).unwrap();
    let outcome = strategy.run_with((&model, &optimizer, parts(2, 12)), |context, (model, optimizer, (x, y))| {
        let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
        optimizer.minimize(context, &context.average_loss(&per_example, 12)?)
    });
    let error = outcome.map(drop).unwrap_err();
    assert!(matches!(&error, Error::Optim(distribute_optim::Error::Diverged { replica: 1, .. })), "{error}");
}

#[test]
fn frozen_variables_stay() {
    for shared in [false, true] {
        let strategy = match shared {
            true => CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap(),
            false => mirrored(2),
        };
        let mut model = strategy.scope(Mlp::new).unwrap();
        let (before, parameters) = (values(&model, 0), model.num_parameters());
        assert_eq!(model.freeze(|name| name.starts_with("first.")).unwrap(), 2);
        assert_eq!(model.num_parameters(), parameters - 8 * 16 - 16);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        step(&strategy, &model, &optimizer);
        for (variable, (before, after)) in model.variables().iter().zip(before.iter().zip(values(&model, 0))) {
            assert_eq!(*before == after, variable.name().starts_with("first."), "{}", variable.name());
        }
        assert!(matches!(model.freeze(|_| true), Err(Error::FrozenLate)));
    }
}

#[test]
fn a_penalty_counts_once_whatever_the_number_of_replicas() {
    for replicas in [1, 4] {
        let strategy = mirrored(replicas);
        let shares = strategy.run_with((), |context, ()| {
            let penalty = Tensor::new(3f32, &Device::Cpu)?;
            Ok::<_, Error>(context.scale_regularization_loss(&penalty)?.to_scalar::<f32>()?)
        });
        assert_eq!(shares.unwrap().iter().sum::<f32>(), 3.0);
    }
}

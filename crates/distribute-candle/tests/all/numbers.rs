//! Step counts of variables that get gradients rarely, and the warning about variables that get none.

use std::process::Command;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Init, linear};
use distribute_candle::{Adam, CandleContext, CandleStrategy, Error, Model, Optimizer, Sgd};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_train::checkpoint::CheckpointManager;

fn mirrored(replicas: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    MirroredStrategy::builder().devices(devices).build().unwrap()
}

type Built = (Model<[Tensor; 2]>, Optimizer);

fn build(strategy: &Strategy, sharded: bool) -> Built {
    let model = strategy
        .scope(|vb| {
            let variable = |name| vb.get_with_hints(7, name, Init::Const(1.0));
            Ok([variable("always")?, variable("seldom")?])
        })
        .unwrap();
    let optimizer = Adam::new(0.1).betas(0.5, 0.75).build(&model).unwrap();
    let optimizer = if sharded { optimizer.zero1().unwrap() } else { optimizer };
    (model, optimizer)
}

/// Trains; the second variable has a gradient in every third step, on the last replica alone.
fn train(strategy: &Strategy, (model, optimizer): &Built, steps: std::ops::Range<usize>) {
    for step in steps {
        strategy
            .run_with((model, optimizer), |context, (model, optimizer)| {
                let [always, seldom] = model;
                let slope = 1.0 + (step % 4) as f64;
                let mut loss = (always.sum_all()? * (slope / context.num_replicas_in_sync() as f64))?;
                if step.is_multiple_of(3) && context.replica_id() + 1 == context.num_replicas_in_sync() {
                    loss = (loss + (seldom.sum_all()? * slope)?)?;
                }
                optimizer.minimize(context, &loss)
            })
            .unwrap();
    }
}

fn values((model, _): &Built, variable: usize) -> Vec<Vec<f32>> {
    model.variables()[variable].components().iter().map(|tensor| tensor.to_vec1().unwrap()).collect()
}

/// Computes the second variable after `steps` steps in f64, numbering steps by its own count or by the optimizer's.
fn expected(steps: usize, own: bool) -> f64 {
    let (mut p, mut m, mut v, mut count) = (1.0f64, 0.0f64, 0.0f64, 0);
    for step in (0..steps).filter(|step| step % 3 == 0) {
        count += 1;
        let n = if own { count } else { step as i32 + 1 };
        let g = 1.0 + (step % 4) as f64;
        m = 0.5 * m + 0.5 * g;
        v = 0.75 * v + 0.25 * g * g;
        p -= 0.1 * (m / (1.0 - 0.5f64.powi(n))) / ((v / (1.0 - 0.75f64.powi(n))).sqrt() + 1e-8);
    }
    p
}

#[test]
fn a_variable_counts_the_steps_that_it_makes() {
    assert!((expected(10, true) - expected(10, false)).abs() > 0.01, "the test cannot tell the two apart");
    for replicas in [1, 2, 3] {
        for sharded in [false, true] {
            let strategy = mirrored(replicas);
            let built = build(&strategy, sharded);
            train(&strategy, &built, 0..10);
            for value in values(&built, 1).concat() {
                let expected = expected(10, true);
                assert!((f64::from(value) - expected).abs() < 1e-6, "{value} for {expected}, {replicas} replicas");
            }
            built.0.audit(&strategy).unwrap();
        }
    }
}

#[test]
fn counts_are_kept_in_checkpoints() {
    for (save, load) in [(false, false), (false, true), (true, false), (true, true)] {
        let folder = tempfile::tempdir().unwrap();
        let strategy = mirrored(2);
        let saved = build(&strategy, save);
        train(&strategy, &saved, 0..6);
        let mut checkpoints = CheckpointManager::new(folder.path());
        checkpoints.save(&strategy, 6, &[&saved.0, &saved.1], &()).unwrap();
        checkpoints.finish().unwrap();
        let loaded = build(&strategy, load);
        let mut checkpoints = CheckpointManager::new(folder.path());
        checkpoints.restore::<()>(&strategy, &[&loaded.0, &loaded.1]).unwrap().unwrap();
        for built in [&saved, &loaded] {
            // Sharded state starts with a step in which all variables have gradients.
            train(&strategy, built, 6..10);
        }
        for variable in [0, 1] {
            assert_eq!(values(&loaded, variable), values(&saved, variable), "sharded: {save}, then {load}");
        }
        assert!((f64::from(values(&loaded, 1)[0][0]) - expected(10, true)).abs() < 1e-6);
    }
}

const ROLE: &str = "DISTRIBUTE_NUMBERS_TEST_UNTRAINED";

/// Runs in a process that the next test starts: a layer whose fused operation in candle has no backward.
#[test]
#[ignore = "a process that other tests start"]
fn trains_behind_a_fused_operation() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let strategy = mirrored(2);
    let model = strategy
        .scope(|vb| {
            let norm = candle_nn::layer_norm(4, 1e-5, vb.pp("norm"))?;
            Ok((linear(3, 4, vb.pp("first"))?, norm, linear(4, 1, vb.pp("second"))?))
        })
        .unwrap();
    for _ in 0..2 {
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        strategy
            .run_with((&model, &optimizer), |context, (model, optimizer)| {
                let (first, norm, second) = model;
                let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
                let y = second.forward(&norm.forward(&first.forward(&x)?)?)?;
                optimizer.minimize(context, &context.average_loss(&y, 4)?)?;
                Ok::<_, Error>(())
            })
            .unwrap();
    }
}

#[test]
fn variables_without_gradients_are_named_on_standard_error_once() {
    let test = ["--exact", "numbers::trains_behind_a_fused_operation", "--ignored", "--nocapture"];
    let output = Command::new(std::env::current_exe().unwrap()).args(test).env(ROLE, "1").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let names = "no gradient came for norm.weight, norm.bias, first.weight, first.bias;";
    assert_eq!(said.matches(names).count(), 1, "{said}");
    assert!(said.contains("use those of distribute_candle") && said.contains("candle_nn::ops::softmax"), "{said}");
}

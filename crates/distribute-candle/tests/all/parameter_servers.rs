//! candle models whose variables are on parameter servers, compared with the same models trained without servers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use candle_core::{DType, Device, Module, ModuleT, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, Linear, VarBuilder, batch_norm, linear};
use distribute_candle::{
    Adagrad, Adam, CandleContext, CandleParameterServer, CandleStrategy, CandleWorker, Clip, Error, ScopeOptions,
    ShardedEmbedding, cross_entropy_per_example, dropout, sharded_embedding,
};
use distribute_parameter_server::{
    ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy, ParameterServerStrategyBuilder, Program,
    Server, Updates, WorkerContext,
};
use distribute_strategy::Strategy;
use distribute_testkit::apart;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed};
use distribute_values::HostTensor;

use crate::common::{Mlp, data, serve};

/// A table of 50 vectors, and a layer.
struct Words {
    table: ShardedEmbedding,
    head: Linear,
}

impl Words {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Words> {
        Ok(Words { table: sharded_embedding(50, 4, vb.pp("table"))?, head: linear(4, 3, vb.pp("head"))? })
    }

    /// Looks some words up twice.
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let mean = self.table.forward(ids)?.mean(1)?;
        let first = self.table.forward(&ids.narrow(1, 0, 1)?)?.squeeze(1)?;
        self.head.forward(&(mean + first)?)
    }
}

struct Normalised {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
}

impl Normalised {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Normalised> {
        let norm = batch_norm(16, BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Normalised { first: linear(8, 16, vb.pp("first"))?, norm, second: linear(16, 3, vb.pp("second"))? })
    }

    fn forward(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.second.forward(&self.norm.forward_t(&self.first.forward(x)?, train)?.relu()?)
    }
}

fn ids(step: u64) -> (Tensor, Tensor) {
    let ids: Vec<u32> = (0..24).map(|at| ((at * 7 + step * 13) % 50) as u32).collect();
    let labels: Vec<u32> = (0..8).map(|at| ((at + step) % 3) as u32).collect();
    (Tensor::from_vec(ids, (8, 3), &Device::Cpu).unwrap(), Tensor::from_vec(labels, 8, &Device::Cpu).unwrap())
}

fn mean_loss(logits: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
    let examples = y.dim(0)?;
    cross_entropy_per_example(logits, y)?.sum_all()? / examples as f64
}

/// Makes a step of one replica on a batch of some rows; returns its loss.
fn normalised(worker: &WorkerContext, rows: usize) -> Result<f32, Error> {
    let model = worker.model("normalised", Normalised::new)?;
    let (x, y) = data(rows);
    let loss = mean_loss(&model.forward(&x, true)?, &y)?;
    model.minimize(&loss)?;
    Ok(loss.to_scalar::<f32>()?)
}

fn program() -> Program {
    Program::new()
        .function("mlp", |worker: &WorkerContext, part: Option<(usize, usize)>| {
            let model = worker.model("mlp", Mlp::new)?;
            let (mut x, mut y) = data(32);
            if let Some((start, len)) = part {
                (x, y) = (x.narrow(0, start, len)?, y.narrow(0, start, len)?);
            }
            let loss = mean_loss(&model.forward(&x)?, &y)?;
            model.minimize(&loss)?;
            Ok::<_, Error>(loss.to_scalar::<f32>()?)
        })
        .function("clipped", |worker: &WorkerContext, (): ()| {
            let model = worker.model("mlp", Mlp::new)?;
            let (x, y) = data(32);
            let loss = mean_loss(&model.forward(&x)?, &y)?;
            model.minimize_clipped(&loss, Clip::GlobalNorm(0.01))?;
            Ok::<_, Error>(loss.to_scalar::<f32>()?)
        })
        .function("words", |worker: &WorkerContext, step: u64| {
            let model = worker.model("words", Words::new)?;
            let (ids, y) = ids(step);
            let loss = mean_loss(&model.forward(&ids)?, &y)?;
            model.minimize(&loss)?;
            Ok::<_, Error>(loss.to_scalar::<f32>()?)
        })
        .function("normalised", |worker: &WorkerContext, (): ()| normalised(worker, 32))
        .function("normalised_rows", |worker: &WorkerContext, rows: usize| normalised(worker, rows))
        .function("normalised_replicas", |worker: &WorkerContext, rows: usize| {
            let strategy = worker.mirrored(["CPU:0", "CPU:1"])?;
            let model = worker.replicated_model("replicas", &strategy, Normalised::new)?;
            strategy.run_with((&model, model.split(&data(rows))?), |context, (model, (x, y))| {
                let losses = cross_entropy_per_example(&model.forward(&x, true)?, &y)?;
                model.backward(context, &context.average_loss(&losses, rows)?)
            })?;
            model.push_gradients()
        })
        .function("fails", |worker: &WorkerContext, (): ()| {
            let model = worker.model("normalised", Normalised::new)?;
            model.forward(&data(32).0, true)?;
            Err::<(), _>(Error::from(candle_core::Error::Msg("before its gradients".to_owned())))
        })
        .function("drops", |worker: &WorkerContext, (): ()| {
            // Both workers call it before one returns.
            std::thread::sleep(Duration::from_millis(50));
            let layers = |vb: VarBuilder<'_>| Ok((linear(8, 16, vb.pp("first"))?, dropout(0.5, vb.pp("dropout"))?));
            let model = worker.model("drops", layers)?;
            let ones = Tensor::ones(64, DType::F32, &Device::Cpu)?;
            Ok::<_, Error>((worker.worker_index(), model.1.forward_t(&ones, true)?.to_vec1::<f32>()?))
        })
        .function("another", |worker: &WorkerContext, (): ()| {
            worker.model("another", |vb| linear(5, 5, vb.pp("first"))).map(drop)
        })
}

/// Starts servers and workers as threads of this process, and creates a strategy of them.
fn cluster(
    servers: usize,
    workers: usize,
    settle: impl FnOnce(ParameterServerStrategyBuilder) -> ParameterServerStrategyBuilder,
) -> (Vec<Server>, ParameterServerStrategy) {
    let (chief, tasks) = serve(servers, workers, &program());
    (tasks, settle(ParameterServerStrategy::builder(&chief)).build().unwrap())
}

/// Runs a function `steps` times, one call after another; returns its results.
fn run(strategy: &ParameterServerStrategy, function: &str, steps: u64) -> Vec<f32> {
    let coordinator = ClusterCoordinator::new(strategy, program()).unwrap();
    (0..steps)
        .map(|step| match function {
            "words" => coordinator.schedule(function, &step).unwrap().fetch().unwrap(),
            "mlp" => coordinator.schedule(function, &None::<(usize, usize)>).unwrap().fetch().unwrap(),
            _ => coordinator.schedule(function, &()).unwrap().fetch().unwrap(),
        })
        .collect()
}

fn on_servers(strategy: &ParameterServerStrategy) -> BTreeMap<String, Vec<f32>> {
    let values = |variable: distribute_parameter_server::ShardedVariable| {
        let values = distribute_values::TensorStorage::to_elements::<f32>(&variable.read::<f32>().unwrap()).unwrap();
        (variable.name().to_owned(), values)
    };
    strategy.variables().into_iter().map(values).collect()
}

fn here<M>(model: &distribute_candle::Model<M>) -> BTreeMap<String, Vec<f32>> {
    let values = |variable: &distribute_candle::Variable| {
        (variable.name().to_owned(), variable.components()[0].flatten_all().unwrap().to_vec1().unwrap())
    };
    model.variables().iter().map(values).collect()
}

/// Makes the same steps without servers.
fn locally<M: Sync>(
    build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    optimizer: impl FnOnce(&distribute_candle::Model<M>) -> distribute_candle::Result<distribute_candle::Optimizer>,
    steps: u64,
    forward: impl Fn(&M, u64) -> candle_core::Result<(Tensor, Tensor)> + Sync,
) -> (BTreeMap<String, Vec<f32>>, Vec<f32>) {
    let strategy = Strategy::default_strategy().unwrap();
    let model = strategy.scope(build).unwrap();
    let optimizer = optimizer(&model).unwrap();
    let losses = (0..steps).map(|step| {
        let loss = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let (logits, y) = forward(model, step)?;
            let loss = context.average_loss(&cross_entropy_per_example(&logits, &y)?, y.dim(0)?)?;
            optimizer.minimize(context, &loss)?;
            Ok::<_, Error>(loss.to_scalar::<f32>()?)
        });
        loss.unwrap().values()[0]
    });
    let losses = losses.collect();
    (here(&model), losses)
}

fn assert_near(got: &BTreeMap<String, Vec<f32>>, expected: &BTreeMap<String, Vec<f32>>, tolerance: f64) {
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, values) in got {
        let apart = apart(values, &expected[name]);
        assert!(apart <= tolerance, "{name} is {apart:e} apart: {values:?} and {:?}", expected[name]);
    }
}

#[test]
fn one_worker_after_another_is_training_without_servers_bit_for_bit() {
    let (_servers, strategy) = cluster(2, 2, |builder| builder.partitioner(FixedShardsPartitioner::new(2)));
    strategy.create_model(Adam::new(0.01), Mlp::new).unwrap();
    let losses = run(&strategy, "mlp", 20);
    let (expected, expected_losses) = locally(
        Mlp::new,
        |model| Adam::new(0.01).build(model),
        20,
        |model, _| Ok((model.forward(&data(32).0)?, data(32).1)),
    );
    assert_eq!(losses, expected_losses);
    assert_eq!(on_servers(&strategy), expected);
    // The model itself, in this process.
    let model = strategy.read_model(Mlp::new).unwrap();
    let loss = mean_loss(&model.forward(&data(32).0).unwrap(), &data(32).1).unwrap().to_scalar::<f32>().unwrap();
    assert!(loss < losses[19]);
}

#[test]
fn rows_of_a_table_are_updated_as_the_whole_would_be() {
    let (_servers, strategy) = cluster(2, 1, |builder| builder.partitioner(FixedShardsPartitioner::new(2)));
    strategy.create_model(Adagrad::new(0.1), Words::new).unwrap();
    assert_eq!(strategy.find("table.weight").unwrap().shards().len(), 2);
    let losses = run(&strategy, "words", 20);
    let forward = |model: &Words, step| Ok((model.forward(&ids(step).0)?, ids(step).1));
    let (expected, expected_losses) = locally(Words::new, |model| Adagrad::new(0.1).build(model), 20, forward);
    assert_near(&on_servers(&strategy), &expected, 2e-6);
    assert!((losses[19] - expected_losses[19]).abs() < 1e-5);
    let model = strategy.read_model(Words::new).unwrap();
    assert_eq!(model.forward(&ids(0).0).unwrap().dims(), [8, 3]);
}

#[test]
fn synchronous_contributions_are_one_batch() {
    let updates = Updates::Synchronous { contributions: 2, backups: 0 };
    let (_servers, strategy) = cluster(1, 2, |builder| builder.updates(updates));
    strategy.create_model(Adam::new(0.01), Mlp::new).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    for _ in 0..20 {
        for part in [(0usize, 16usize), (16, 16)] {
            coordinator.schedule("mlp", &Some(part)).unwrap();
        }
    }
    coordinator.join().unwrap();
    let (expected, _) = locally(
        Mlp::new,
        |model| Adam::new(0.01).build(model),
        20,
        |model, _| Ok((model.forward(&data(32).0)?, data(32).1)),
    );
    assert_near(&on_servers(&strategy), &expected, 4e-5);
}

#[test]
fn sixteen_bits_on_the_wire_train_too() {
    let (_servers, strategy) = cluster(1, 1, |builder| builder.wire(distribute_device::DType::BF16));
    strategy.create_model(Adam::new(0.01), Mlp::new).unwrap();
    let losses = run(&strategy, "mlp", 60);
    assert!(losses[59] < 0.8 * losses[0], "{losses:?}");
    // Values on the servers keep all their bits.
    assert!(on_servers(&strategy)["first.weight"].iter().any(|x| x.to_bits() & 0xffff != 0));
}

#[test]
fn statistics_of_layers_reach_the_servers() {
    let (_servers, strategy) = cluster(1, 1, |builder| builder);
    strategy.create_model(Adam::new(0.01), Normalised::new).unwrap();
    assert_eq!(on_servers(&strategy)["norm.running_mean"], [0.0; 16]);
    run(&strategy, "normalised", 30);
    let forward = |model: &Normalised, _| Ok((model.forward(&data(32).0, true)?, data(32).1));
    let (expected, _) = locally(Normalised::new, |model| Adam::new(0.01).build(model), 30, forward);
    assert_near(&on_servers(&strategy), &expected, 1e-4);
}

#[test]
fn a_batch_of_one_row_leaves_no_statistic_without_a_value() {
    let (_servers, strategy) = cluster(1, 1, |builder| builder);
    strategy.create_model(Adam::new(0.01), Normalised::new).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let variance = |rows: usize| {
        coordinator.schedule("normalised_rows", &rows).unwrap().fetch::<f32>().unwrap();
        let values = on_servers(&strategy);
        assert!(values.values().flatten().all(|value| value.is_finite()), "{rows} rows: {values:?}");
        values["norm.running_var"].clone()
    };
    // candle's batch_norm divides by the number of rows minus one.
    assert_eq!(variance(1), [1.0; 16]);
    let first = variance(32);
    assert_ne!(first, [1.0; 16]);
    assert_eq!(variance(1), first);
    assert_ne!(variance(32), first);
}

#[test]
fn statistics_that_the_wire_cannot_represent_stay_on_the_servers() {
    for function in ["normalised_rows", "normalised_replicas"] {
        let (_servers, strategy) = cluster(1, 1, |builder| builder.wire(distribute_device::DType::F16));
        strategy.create_model(Adam::new(0.01), Normalised::new).unwrap();
        let large = HostTensor::new(&[16], vec![1e5f32; 16]).unwrap();
        strategy.find("norm.running_mean").unwrap().assign(&large).unwrap();
        let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
        for _ in 0..2 {
            coordinator.schedule(function, &8usize).unwrap();
            coordinator.join().unwrap();
        }
        let values = on_servers(&strategy);
        assert_eq!(values["norm.running_mean"], [1e5; 16], "{function}");
        let variance = &values["norm.running_var"];
        assert!(variance.iter().all(|value| value.is_finite() && *value != 1.0), "{function}: {variance:?}");
    }
}

#[test]
fn contributions_move_statistics_as_one_batch_does() {
    let updates = Updates::Synchronous { contributions: 4, backups: 0 };
    let (_servers, strategy) = cluster(1, 4, |builder| builder.updates(updates));
    strategy.create_model(Adam::new(0.001), Normalised::new).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    for _ in 0..40 {
        coordinator.schedule("normalised", &()).unwrap();
    }
    coordinator.join().unwrap();
    let forward = |model: &Normalised, _| Ok((model.forward(&data(32).0, true)?, data(32).1));
    let (expected, _) = locally(Normalised::new, |model| Adam::new(0.001).build(model), 10, forward);
    let got = on_servers(&strategy);
    for name in ["norm.running_mean", "norm.running_var"] {
        assert_eq!(got[name].len(), expected[name].len());
        for (got, expected) in got[name].iter().zip(&expected[name]) {
            // A contribution may begin with the statistics to which another one was added.
            assert!((got - expected).abs() < 0.05 * expected.abs() + 1e-3, "{name}: {got} {expected}");
        }
    }
}

#[test]
fn no_two_workers_or_steps_drop_the_same_elements() {
    let (_servers, strategy) = cluster(1, 2, |builder| builder);
    strategy.create_model(Adam::new(0.01), |vb| linear(8, 16, vb.pp("first"))).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let scheduled: Vec<_> = (0..8).map(|_| coordinator.schedule("drops", &()).unwrap()).collect();
    let dropped: Vec<(usize, Vec<f32>)> = scheduled.into_iter().map(|step| step.fetch().unwrap()).collect();
    let workers: BTreeSet<usize> = dropped.iter().map(|(worker, _)| *worker).collect();
    assert_eq!(workers.len(), 2);
    for (at, (_, one)) in dropped.iter().enumerate() {
        assert!(dropped[at + 1..].iter().all(|(_, other)| other != one), "{dropped:?}");
    }
}

#[test]
fn statistics_of_a_function_that_failed_are_not_kept() {
    let train = |failures| {
        let (_servers, strategy) = cluster(1, 1, |builder| builder);
        strategy.create_model(Adam::new(0.01), Normalised::new).unwrap();
        run(&strategy, "normalised", 2);
        let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
        for _ in 0..failures {
            coordinator.schedule("fails", &()).unwrap();
            assert!(coordinator.join().unwrap_err().to_string().contains("before its gradients"));
        }
        coordinator.schedule("normalised", &()).unwrap().fetch::<f32>().unwrap();
        on_servers(&strategy)
    };
    assert_eq!(train(2), train(0));
}

#[test]
fn gradients_can_be_limited() {
    let (_servers, strategy) = cluster(1, 1, |builder| builder);
    strategy.create_model(distribute_candle::Sgd::new(1.0), Mlp::new).unwrap();
    let before = on_servers(&strategy);
    run(&strategy, "clipped", 1);
    let after = on_servers(&strategy);
    let squares =
        after.iter().flat_map(|(name, values)| values.iter().zip(&before[name]).map(|(a, b)| (a - b).powi(2)));
    assert!((squares.sum::<f32>().sqrt() - 0.01).abs() < 1e-5);
}

#[test]
fn a_checkpoint_of_servers_goes_on_without_them_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let (_servers, strategy) = cluster(2, 1, |builder| builder.partitioner(FixedShardsPartitioner::new(2)));
    strategy.create_model(Adam::new(0.01), Mlp::new).unwrap();
    run(&strategy, "mlp", 5);
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&local, 5, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let model = local.scope_seeded(7, Mlp::new).unwrap();
    checkpoints.restore::<()>(&local, &[&model as &dyn Checkpointed]).unwrap().unwrap();
    assert_eq!(here(&model), on_servers(&strategy));
}

#[test]
fn models_that_the_servers_do_not_have_are_refused_in_words() {
    let (_servers, strategy) = cluster(1, 1, |builder| builder);
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let error = coordinator.schedule("mlp", &None::<(usize, usize)>).unwrap().fetch::<f32>().unwrap_err().to_string();
    assert!(error.contains("first.weight"), "{error}");
    assert!(coordinator.join().is_err());
    strategy.create_model(Adam::new(0.01), Mlp::new).unwrap();
    coordinator.schedule("another", &()).unwrap();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("[16, 8]") && error.contains("[5, 5]"), "{error}");
    let half = ScopeOptions::default().dtype(DType::F16);
    let error = strategy.create_model_with(half, Adam::new(0.01), |vb| linear(2, 2, vb.pp("half"))).unwrap_err();
    assert!(error.to_string().contains("f16"), "{error}");
}

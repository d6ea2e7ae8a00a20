//! Workers with several replicas push the gradients that one replica would push.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Module, ModuleT, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, Linear, VarBuilder, batch_norm, linear};
use distribute_candle::{
    Adagrad, Adam, CandleContext, CandleParameterServer, CandleStrategy, CandleWorker, Clip, Error, ServedFit,
    ServedTrainer, ServedTraining, Sgd, ShardedEmbedding, SparseCategoricalCrossentropy, SyncBatchNorm,
    cross_entropy_per_example, sharded_embedding, sync_batch_norm,
};
use distribute_collectives::ReduceOp;
use distribute_input::{Dataset, InputContext};
use distribute_parameter_server::{
    ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy, Program, Server, WorkerContext,
};
use distribute_strategy::{MirroredStrategy, get_replica_context};
use distribute_testkit::apart;
use distribute_train::metrics::{Accuracy, Metric, Metrics, Predictions};
use distribute_values::{Axis, PerReplica};

use crate::common::{Mlp, data, mirrored, serve};

type Values = BTreeMap<String, Vec<f32>>;

/// A table and a layer; some rows are looked up twice.
struct Words(ShardedEmbedding, Linear);

impl Words {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Words> {
        Ok(Words(sharded_embedding(50, 4, vb.pp("table"))?, linear(4, 3, vb.pp("head"))?))
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let ids = ((x * 20.0)? + 21.0)?.to_dtype(candle_core::DType::U32)?;
        let first = self.0.forward(&ids.narrow(1, 0, 1)?)?.squeeze(1)?;
        self.1.forward(&(self.0.forward(&ids)?.mean(1)? + first)?)
    }
}

struct Normed<N>(Linear, N, Linear);

fn synced(vb: VarBuilder<'_>) -> candle_core::Result<Normed<SyncBatchNorm>> {
    let norm = sync_batch_norm(16, BatchNormConfig::default(), vb.pp("norm"))?;
    Ok(Normed(linear(8, 16, vb.pp("first"))?, norm, linear(16, 3, vb.pp("second"))?))
}

fn normed(vb: VarBuilder<'_>) -> candle_core::Result<Normed<BatchNorm>> {
    let norm = batch_norm(16, BatchNormConfig::default(), vb.pp("norm"))?;
    Ok(Normed(linear(8, 16, vb.pp("first"))?, norm, linear(16, 3, vb.pp("second"))?))
}

impl<N: ModuleT> Normed<N> {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.2.forward(&self.1.forward_t(&self.0.forward(x)?, true)?.relu()?)
    }
}

fn devices(replicas: usize) -> impl Iterator<Item = String> {
    (0..replicas).map(|index| format!("CPU:{index}"))
}

/// The rows of a step.
fn batch(rows: usize, step: u64) -> candle_core::Result<(Tensor, Tensor)> {
    let (x, y) = data(40);
    let first = step as usize % 3;
    Ok((x.narrow(0, first, rows)?, y.narrow(0, first, rows)?))
}

/// Makes one step, and returns the loss of the batch.
fn step<M: Send + Sync + 'static>(
    worker: &WorkerContext,
    (replicas, rows, step): (usize, usize, u64),
    build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    forward: impl Fn(&M, &Tensor) -> candle_core::Result<Tensor> + Sync,
) -> Result<f32, Error> {
    let strategy = worker.mirrored(devices(replicas))?;
    let model = worker.replicated_model("model", &strategy, build)?;
    let losses = strategy.run_with((&model, model.split(&batch(rows, step)?)?), |context, (model, (x, y))| {
        let loss = context.average_loss(&cross_entropy_per_example(&forward(&model, &x)?, &y)?, rows)?;
        model.backward(context, &loss)?;
        Ok::<_, Error>(loss.detach())
    })?;
    assert!(model.push_gradients()?);
    let shares: f32 = losses.values().iter().map(|loss| loss.to_scalar::<f32>().unwrap()).sum();
    // A sum of a run's results leaves out replicas without examples, whose shares are 0.
    let loss: f32 = strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar()?;
    assert!((loss - shares).abs() < 1e-6);
    Ok(loss)
}

type Step = (usize, usize, u64);

fn program() -> Program {
    Program::new()
        .function("mlp", |worker: &WorkerContext, of: Step| step(worker, of, Mlp::new, |model, x| model.forward(x)))
        .function("words", |worker: &WorkerContext, of: Step| step(worker, of, Words::new, Words::forward))
        .function("synced", |worker: &WorkerContext, of: Step| step(worker, of, synced, Normed::forward))
        .function("normed", |worker: &WorkerContext, of: Step| step(worker, of, normed, Normed::forward))
        .function("one", |worker: &WorkerContext, (_, rows, step): Step| {
            let model = worker.model("one", Mlp::new)?;
            let (x, y) = batch(rows, step)?;
            let loss = (cross_entropy_per_example(&model.forward(&x)?, &y)?.sum_all()? / rows as f64)?;
            model.minimize(&loss)?;
            Ok::<_, Error>(loss.to_scalar::<f32>()?)
        })
        .function("clipped", |worker: &WorkerContext, (): ()| {
            let strategy = worker.mirrored(devices(2))?;
            let model = worker.replicated_model("model", &strategy, Mlp::new)?;
            strategy.run_with((&model, model.split(&data(8))?), |context, (model, (x, y))| {
                let losses = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                model.backward(context, &context.average_loss(&losses, 8)?)
            })?;
            model.push_clipped_gradients(Clip::GlobalNorm(0.01))
        })
        .function("fails", |worker: &WorkerContext, how: String| {
            let strategy = worker.mirrored(devices(2))?;
            let model = worker.replicated_model("model", &strategy, normed)?;
            strategy.run_with((&model, model.split(&data(8))?), |context, (model, (x, y))| {
                let losses = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                model.backward(context, &context.average_loss(&losses, 8)?)?;
                match (context.replica_id(), how.as_str()) {
                    (1, "replica") => Err(candle_core::Error::Msg("no such word".to_owned()).into()),
                    (1, "panic") => panic!("out of words"),
                    // The other replica waits for the one that fails.
                    (0, "replica" | "panic") => context.barrier().map_err(Error::from),
                    _ => Ok(()),
                }
            })?;
            Err::<(), _>(Error::from(candle_core::Error::Msg("after the run".to_owned())))
        })
        .function("traffic", |worker: &WorkerContext, (): ()| {
            let traffic = worker.traffic();
            Ok::<_, Error>((traffic.pulled_bytes, traffic.pushed_bytes))
        })
        .function("meet", |worker: &WorkerContext, (): ()| {
            let strategy = worker.mirrored(devices(2))?;
            let met = strategy.run_with((), |context, ()| {
                context.barrier()?;
                Ok::<_, Error>(context.all_reduce(ReduceOp::Sum, &(10.0 + context.replica_id() as f64))?)
            })?;
            Ok::<_, Error>(met.into_values())
        })
        .function("groups", |worker: &WorkerContext, (): ()| {
            let strategy = MirroredStrategy::builder().devices(devices(2)).tensor_parallel(2).build()?;
            worker.replicated_model("groups", &strategy, Mlp::new).map(drop)
        })
}

/// Starts two servers and a worker as threads of this process.
fn cluster() -> (Vec<Server>, ParameterServerStrategy) {
    let (chief, tasks) = serve(2, 1, &program());
    let builder = ParameterServerStrategy::builder(&chief).partitioner(FixedShardsPartitioner::new(2));
    (tasks, builder.build().unwrap())
}

fn on_servers(strategy: &ParameterServerStrategy) -> Values {
    let values = |variable: distribute_parameter_server::ShardedVariable| {
        let values = distribute_values::TensorStorage::to_elements::<f32>(&variable.read::<f32>().unwrap()).unwrap();
        (variable.name().to_owned(), values)
    };
    strategy.variables().into_iter().map(values).collect()
}

fn create(strategy: &ParameterServerStrategy, function: &str) {
    match function {
        "words" => strategy.create_model(Adagrad::new(0.1), Words::new),
        "synced" => strategy.create_model(Sgd::new(0.1), synced),
        "normed" | "fails" => strategy.create_model(Sgd::new(0.1), normed),
        _ => strategy.create_model(Sgd::new(0.1), Mlp::new),
    }
    .unwrap();
}

/// Makes steps one after another on one worker; returns the values, the losses and the bytes pulled and pushed.
fn train(function: &str, replicas: usize, rows: usize) -> (Values, Vec<f32>, (u64, u64)) {
    let (_tasks, strategy) = cluster();
    create(&strategy, function);
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let step = |step: u64| coordinator.schedule(function, &(replicas, rows, step)).unwrap().fetch::<f32>().unwrap();
    let losses = (0..6).map(step).collect();
    (on_servers(&strategy), losses, coordinator.schedule("traffic", &()).unwrap().fetch().unwrap())
}

#[track_caller]
fn assert_near(got: &Values, expected: &Values, tolerance: f64) {
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, values) in got {
        let apart = apart(values, &expected[name]);
        assert!(apart <= tolerance, "{name} is {apart:e} apart: {values:?} and {:?}", expected[name]);
    }
}

#[track_caller]
fn assert_trains_as_one(function: &str, as_one: &str, rows: usize) {
    let (expected, losses, traffic) = train(as_one, 1, rows);
    for replicas in [1, 2, 3] {
        let (values, own, own_traffic) = train(function, replicas, rows);
        assert_near(&values, &expected, 1e-5);
        // Each replica fetches the rows of tables that it looks up; all else is transferred once.
        assert!(function == "words" || own_traffic == traffic, "{replicas}: {own_traffic:?} and {traffic:?}");
        assert!(apart(&own, &losses) < 1e-5, "{replicas}: {own:?} and {losses:?}");
    }
}

#[test]
fn replicas_of_a_worker_train_as_one_would() {
    assert_trains_as_one("mlp", "one", 12);
}

#[test]
fn batches_that_do_not_divide_count_by_rows() {
    assert_trains_as_one("mlp", "one", 7);
    // The third replica has none.
    assert_trains_as_one("mlp", "one", 2);
}

#[test]
fn rows_of_tables_are_summed_over_replicas() {
    assert_trains_as_one("words", "words", 8);
    assert_trains_as_one("words", "words", 2);
}

#[test]
fn statistics_of_the_whole_batch_are_those_of_one_replica() {
    assert_trains_as_one("synced", "synced", 7);
    assert_trains_as_one("synced", "synced", 2);
}

#[test]
fn statistics_of_replicas_are_averaged() {
    let (values, ..) = train("normed", 2, 8);
    let strategy = mirrored(2);
    let model = strategy.scope(normed).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    for step in 0..6 {
        let (x, y) = batch(8, step).unwrap();
        let part = |first| (x.narrow(0, first, 4).unwrap(), y.narrow(0, first, 4).unwrap());
        let batch = PerReplica::new(vec![part(0), part(4)]);
        let run = strategy.run_with((&model, &optimizer, batch), |context, (model, optimizer, (x, y))| {
            let losses = cross_entropy_per_example(&model.forward(&x)?, &y)?;
            optimizer.minimize(context, &context.average_loss(&losses, 8)?)
        });
        run.unwrap();
    }
    let mean = |variable: &distribute_candle::Variable| {
        let [a, b] = [0, 1].map(|replica: usize| variable.components()[replica].flatten_all().unwrap());
        (variable.name().to_owned(), ((a + b).unwrap() / 2.0).unwrap().to_vec1().unwrap())
    };
    assert_near(&values, &model.variables().iter().map(mean).collect(), 1e-5);
}

#[test]
fn a_replica_with_one_row_leaves_no_statistic_without_a_value() {
    // candle's batch_norm divides the second replica's variance by 0.
    let (values, ..) = train("normed", 2, 3);
    assert!(values.values().flatten().all(|value| value.is_finite()), "{values:?}");
    assert_ne!(values["norm.running_var"], [1.0; 16]);
}

#[test]
fn a_failing_replica_fails_the_function_and_the_next_one_starts_clean() {
    let (_tasks, strategy) = cluster();
    create(&strategy, "fails");
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    for (how, words) in [("replica", "no such word"), ("panic", "out of words"), ("after", "after the run")] {
        coordinator.schedule("fails", &how.to_owned()).unwrap();
        let error = coordinator.join().unwrap_err().to_string();
        assert!(error.contains("\"fails\" failed on worker:0") && error.contains(words), "{error}");
    }
    for step in 0..6 {
        coordinator.schedule("normed", &(2usize, 8usize, step as u64)).unwrap().fetch::<f32>().unwrap();
    }
    // Statistics too are as if nothing had failed.
    assert_eq!(on_servers(&strategy), train("normed", 2, 8).0);
}

#[test]
fn replicas_run_at_the_same_time_and_can_communicate() {
    let (_tasks, strategy) = cluster();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let met: Vec<f64> = coordinator.schedule("meet", &()).unwrap().fetch().unwrap();
    assert_eq!(met, [21.0, 21.0]);
}

#[test]
fn sums_of_gradients_can_be_limited() {
    let (_tasks, strategy) = cluster();
    create(&strategy, "clipped");
    let before = on_servers(&strategy);
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    assert!(coordinator.schedule("clipped", &()).unwrap().fetch::<bool>().unwrap());
    let after = on_servers(&strategy);
    let squares =
        after.iter().flat_map(|(name, values)| values.iter().zip(&before[name])).map(|(a, b)| (a - b).powi(2));
    let norm = squares.sum::<f32>().sqrt();
    assert!((norm - 0.1 * 0.01).abs() < 1e-5, "{norm}");
}

#[test]
fn strategies_of_tensor_groups_are_refused_in_words() {
    let (_tasks, strategy) = cluster();
    create(&strategy, "mlp");
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    coordinator.schedule("groups", &()).unwrap();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("use worker.mirrored"), "{error}");
}

/// Sums the weights of examples, as accuracy does.
struct Rows;

impl Metric for Rows {
    fn name(&self) -> String {
        "rows".to_owned()
    }

    fn len(&self) -> usize {
        Accuracy.len()
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        Accuracy.update(sums, predictions);
    }

    fn result(&self, sums: &[f64]) -> f64 {
        sums[1]
    }
}

/// A model whose replicas wait for each other in training.
struct Meeting(Mlp);

/// The most replicas that have met.
static MET: AtomicUsize = AtomicUsize::new(0);

impl ModuleT for Meeting {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        if let (true, Some(context)) = (train, get_replica_context()) {
            context.barrier().map_err(candle_core::Error::wrap)?;
            MET.fetch_max(context.num_replicas_in_sync(), Ordering::Relaxed);
        }
        self.0.forward(x)
    }
}

fn training() -> ServedTraining<Meeting> {
    let rows = |_: &InputContext| Ok::<_, Error>(Dataset::from_tensor_slices(data(25)).batch(8));
    let weighted = |_: &InputContext| {
        let (x, y) = data(25);
        let weights = Tensor::arange(0f32, 25., &candle_core::Device::Cpu)?;
        Ok::<_, Error>(Dataset::from_tensor_slices((x, y, weights)).batch(8))
    };
    let build = |vb| Ok(Meeting(Mlp::new(vb)?));
    let metrics = Metrics::new().with(Accuracy).with(Rows);
    ServedTraining::new(build, Adam::new(0.02), SparseCategoricalCrossentropy, metrics)
        .dataset("rows", rows)
        .dataset("weighted", weighted)
}

#[test]
fn trainings_with_several_replicas_have_the_history_of_one() {
    let fit = |replicas: usize| {
        let training = training().replicas_per_worker(replicas).unwrap();
        let (chief, _tasks) = serve(1, 1, &training.program());
        let strategy = ParameterServerStrategy::builder(&chief).build().unwrap();
        let mut trainer: ServedTrainer<Meeting> = training.on_servers(&strategy).unwrap();
        // The last batch of a pass has one row.
        let fit = ServedFit::epochs(3).steps_per_epoch(4).validation(&trainer.data("weighted").unwrap());
        let history = trainer.fit("rows", fit).unwrap();
        let weighted = ServedFit::epochs(2).steps_per_epoch(4).class_weights([0.2, 3.0]);
        let weighted = trainer.fit("weighted", weighted).unwrap();
        [history.epochs, weighted.epochs].concat()
    };
    let expected = fit(1);
    assert_eq!(MET.load(Ordering::Relaxed), 0, "one replica needs no strategy");
    for replicas in [2, 3] {
        let epochs = fit(replicas);
        assert_eq!(MET.load(Ordering::Relaxed), replicas);
        assert_eq!(epochs.len(), expected.len());
        for ((_, epoch), (_, expected)) in epochs.iter().zip(&expected) {
            // Each example once: 25 of weight 1, or of the weights 0 to 24.
            let rows = epoch.iter().find(|(name, _)| name == "rows").unwrap().1;
            assert!(rows == 25.0 || rows == 300.0, "{epoch:?}");
            assert_eq!(epoch.len(), expected.len());
            for ((name, a), (other, b)) in epoch.iter().zip(expected) {
                assert!(name == other && (a - b).abs() <= 1e-5, "{replicas} replicas, {name}: {a} and {b}");
            }
        }
    }
}

#[test]
fn no_replica_per_worker_is_refused_in_words() {
    let error = training().replicas_per_worker(0).err().unwrap().to_string();
    assert_eq!(error, "0 replicas per worker were given, and none would train; give at least 1");
}

//! fit, evaluate and predict on parameter servers give the results that they give without, also when a worker dies.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, ModuleT, Tensor};
use candle_nn::{Init, VarBuilder};
use distribute_candle::{
    Adam, CandleParameterServer, CandleStrategy, Error, MeanSquaredError, ServedFit, ServedTrainer, ServedTraining,
    Sgd, SparseCategoricalCrossentropy,
};
use distribute_cluster::{SimpleResolver, TaskType};
use distribute_input::{Dataset, InputContext};
use distribute_parameter_server::{
    FixedShardsPartitioner, ParameterServerOptions, ParameterServerStrategy, Program, Server, Updates,
};
use distribute_strategy::Strategy;
use distribute_testkit::apart;
use distribute_train::callbacks::{
    BackupAndRestore, Callback, EarlyStopping, LearningRateSchedule, ModelCheckpoint, Training,
};
use distribute_train::checkpoint::{CheckpointManager, Checkpointed};
use distribute_train::history::History;
use distribute_train::metrics::{Accuracy, Metric, Metrics, Predictions};
use distribute_train::preemption::TerminationConfig;
use distribute_train::trainer::Trainee;
use distribute_types::FailureKind;

use crate::common::{Mlp, data, mirrored, serve};

const BATCH: usize = 16;
const EXAMPLES: usize = 3 * BATCH;
const STEPS: u64 = 3;

/// Counts the batches.
struct Batches;

impl Metric for Batches {
    fn name(&self) -> String {
        "batches".to_owned()
    }

    fn len(&self) -> usize {
        1
    }

    fn update(&self, sums: &mut [f64], _: &Predictions<'_>) {
        sums[0] += 1.0;
    }

    fn result(&self, sums: &[f64]) -> f64 {
        sums[0]
    }
}

/// Returns the rows of an input pipeline, unbatched.
fn rows(context: &InputContext) -> Dataset<(Tensor, Tensor)> {
    let all = Dataset::from_tensor_slices(data(EXAMPLES));
    all.shard(context.num_input_pipelines, context.input_pipeline_id)
}

fn training() -> ServedTraining<Mlp> {
    let metrics = Metrics::new().with(Accuracy).with(Batches);
    let weighted = |context: &InputContext| {
        let (x, y) = data(EXAMPLES);
        let weights = Tensor::arange(0f32, EXAMPLES as f32, &Device::Cpu)?;
        let all = Dataset::from_tensor_slices((x, y, weights));
        Ok::<_, Error>(all.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH))
    };
    let narrow = |_: &InputContext| {
        let (x, y) = data(EXAMPLES);
        Ok::<_, Error>(Dataset::from_tensor_slices((x.narrow(1, 0, 5)?, y)).batch(BATCH))
    };
    ServedTraining::new(Mlp::new, Adam::new(0.02), SparseCategoricalCrossentropy, metrics)
        .dataset("train", |context: &InputContext| Ok::<_, Error>(rows(context).shuffle(EXAMPLES, 7).batch(BATCH)))
        .dataset("in order", |context: &InputContext| Ok::<_, Error>(rows(context).batch(BATCH)))
        .dataset("test", |context: &InputContext| Ok::<_, Error>(rows(context).batch(7)))
        .dataset("weighted", weighted)
        .dataset("narrow", narrow)
        .dataset("empty", |context: &InputContext| Ok::<_, Error>(rows(context).take(0).batch(BATCH)))
        .dataset("endless", |context: &InputContext| Ok::<_, Error>(rows(context).batch(BATCH).repeat_forever()))
        .dataset("missing", |_: &InputContext| Err::<Dataset<(Tensor, Tensor)>, _>("no such file"))
}

/// A trainer on servers and workers that are threads of this process.
fn on_servers(workers: usize, updates: Updates) -> (Vec<Server>, ParameterServerStrategy, ServedTrainer<Mlp>) {
    let training = training();
    let (chief, tasks) = serve(2, workers, &training.program());
    let builder = ParameterServerStrategy::builder(&chief).partitioner(FixedShardsPartitioner::new(2));
    let strategy = builder.updates(updates).build().unwrap();
    let trainer = training.on_servers(&strategy).unwrap();
    (tasks, strategy, trainer)
}

fn alone() -> ServedTrainer<Mlp> {
    training().under(&Strategy::default_strategy().unwrap()).unwrap()
}

fn predictions(trainer: &ServedTrainer<Mlp>) -> Vec<Vec<f32>> {
    trainer.predict(&Dataset::from_tensor_slices(data(EXAMPLES).0).batch(10)).unwrap().to_vec2().unwrap()
}

#[track_caller]
fn assert_same(got: &History, expected: &History, tolerance: f64) {
    assert_eq!(got.epochs.len(), expected.epochs.len());
    for ((_, got), (_, expected)) in got.epochs.iter().zip(&expected.epochs) {
        assert_eq!(got.len(), expected.len());
        for ((name, a), (other, b)) in got.iter().zip(expected).filter(|((name, _), _)| name != "val_batches") {
            assert!(name == other && (a - b).abs() <= tolerance, "{name}: {a} and {b}");
        }
    }
}

#[test]
fn one_worker_trains_as_any_strategy_does() {
    let run = |mut trainer: ServedTrainer<Mlp>| {
        let test = trainer.data("test").unwrap();
        let rate = LearningRateSchedule::new(|epoch, rate| if epoch > 2 { 0.5 * rate } else { rate });
        let fit = ServedFit::epochs(4).steps_per_epoch(STEPS).validation(&test).callback(rate);
        let history = trainer.fit("train", fit).unwrap();
        let by_step = LearningRateSchedule::by_step(|step| 0.01 / (1.0 + step as f64));
        let fit = ServedFit::epochs(2).steps_per_epoch(4).callback(by_step).class_weights([0.2, 3.0]);
        let weighted = trainer.fit("weighted", fit).unwrap();
        (history, weighted, trainer.evaluate("test").unwrap(), predictions(&trainer))
    };
    let (expected, expected_weighted, scores, outputs) = run(alone());
    assert!(expected.last("loss").unwrap() < 0.9 * expected.of("loss")[0], "{expected}");
    let (_tasks, _, trainer) = on_servers(1, Updates::Asynchronous);
    let (history, weighted, own_scores, own_outputs) = run(trainer);
    assert_same(&history, &expected, 1e-6);
    assert_same(&weighted, &expected_weighted, 1e-5);
    assert_eq!((own_scores[0].0.as_str(), own_scores[1].0.as_str()), ("loss", "accuracy"));
    for ((name, a), (_, b)) in own_scores.iter().zip(&scores).take(2) {
        assert!((a - b).abs() < 1e-6, "{name}: {a} and {b}");
    }
    // The rows of a batch were in the same order, so the outputs are the same bit for bit.
    assert_eq!(own_outputs, outputs);
}

#[test]
fn all_kinds_of_updates_count_every_batch_once_and_learn() {
    for updates in [
        Updates::Asynchronous,
        Updates::BoundedStaleness { rounds: 1 },
        Updates::Synchronous { contributions: 2, backups: 0 },
    ] {
        let (_tasks, _, mut trainer) = on_servers(2, updates);
        let test = trainer.data("test").unwrap();
        let fit = ServedFit::epochs(3).steps_per_epoch(40).validation(&test).steps_per_execution(3);
        let history = trainer.fit("train", fit).unwrap();
        assert_eq!(history.of("batches"), [40.0; 3], "{updates:?}");
        assert!(history.last("val_loss").unwrap() < 0.95 * history.of("loss")[0], "{updates:?}: {history}");
        let scores = trainer.evaluate("test").unwrap();
        assert_eq!(scores[0].1, history.last("val_loss").unwrap(), "{updates:?}");
    }
}

/// A number whose gradient is 1 in each step.
struct Counter(Tensor);

static DELAY: AtomicU64 = AtomicU64::new(0);

impl Counter {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Counter> {
        Ok(Counter(vb.get_with_hints(1, "count", Init::Const(0.0))?))
    }
}

impl ModuleT for Counter {
    fn forward_t(&self, x: &Tensor, _: bool) -> candle_core::Result<Tensor> {
        std::thread::sleep(Duration::from_millis(DELAY.load(Ordering::Relaxed)));
        x.broadcast_mul(&self.0)
    }
}

/// Ends a worker while steps are under way.
struct Kill {
    at: u64,
    worker: Option<Server>,
}

impl Callback for Kill {
    fn step_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.step == self.at {
            self.worker = None;
        }
        Ok(())
    }
}

fn counting() -> ServedTraining<Counter> {
    let loss = |outputs: &Tensor, _: &Tensor| outputs.flatten_all();
    let ones = |_: &InputContext| {
        let ones = Tensor::ones((8, 1), DType::F32, &Device::Cpu)?;
        Ok::<_, Error>(Dataset::from_tensor_slices((ones.clone(), ones)).batch(4))
    };
    ServedTraining::new(Counter::new, Sgd::new(1.0), loss, Metrics::new().with(Batches)).dataset("ones", ones)
}

#[test]
fn an_evaluation_takes_no_part_in_synchronous_updates() {
    let training = counting();
    // Fifteen parts for three workers would leave half a round.
    let (chief, _tasks) = serve(1, 3, &training.program());
    let updates = Updates::Synchronous { contributions: 2, backups: 0 };
    let strategy = ParameterServerStrategy::builder(&chief).updates(updates).build().unwrap();
    let mut trainer = training.on_servers(&strategy).unwrap();
    let ones = trainer.data("ones").unwrap();
    let history = trainer.fit("ones", ServedFit::epochs(3).steps_per_epoch(4).validation(&ones)).unwrap();
    assert_eq!((history.of("batches"), history.of("val_batches")), (vec![4.0; 3], vec![32.0; 3]));
    // The mean of two gradients of 1, twice in an epoch.
    let count = strategy.read_model(Counter::new).unwrap().0.to_vec1::<f32>().unwrap();
    assert_eq!((count, history.of("val_loss")), (vec![-6.0], vec![-2.0, -4.0, -6.0]));
}

/// Ends a worker while steps are under way, and starts it again.
struct Restart {
    at: u64,
    worker: Option<Server>,
    task: SimpleResolver,
    program: Program,
}

impl Callback for Restart {
    fn step_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.step == self.at {
            self.worker = None;
            let end = Instant::now() + Duration::from_secs(20);
            while self.worker.is_none() {
                // Its port may still be in use.
                let started = Server::start(&self.task, self.program.clone());
                assert!(started.is_ok() || Instant::now() < end, "{started:?}");
                self.worker = started.ok();
            }
        }
        Ok(())
    }
}

/// The batches that one iterator over a dataset has returned.
type Seen = Arc<Mutex<Vec<Vec<f32>>>>;

#[test]
fn a_worker_that_was_started_again_reads_its_data_in_another_order() {
    let opened = Arc::new(Mutex::new(Vec::<Seen>::new()));
    let all = opened.clone();
    let numbers = move |_: &InputContext| {
        let seen = Seen::default();
        all.lock().unwrap().push(seen.clone());
        let numbers = Tensor::arange(0f32, 24., &Device::Cpu)?.reshape((24, 1))?;
        let batches = Dataset::from_tensor_slices((numbers.clone(), numbers)).shuffle(24, 7).batch(4);
        Ok::<_, Error>(batches.map(move |batch: (Tensor, Tensor)| {
            seen.lock().unwrap().push(batch.0.flatten_all()?.to_vec1()?);
            Ok(batch)
        }))
    };
    let training = counting().dataset("numbers", numbers);
    let program = training.program();
    let (chief, mut tasks) = serve(1, 1, &program);
    let strategy = ParameterServerStrategy::builder(&chief).build().unwrap();
    let mut trainer = training.on_servers(&strategy).unwrap();
    let task = SimpleResolver { task_type: Some(TaskType::Worker), ..chief };
    let restart = Restart { at: 6, worker: tasks.pop(), task, program };
    trainer.fit("numbers", ServedFit::epochs(1).steps_per_epoch(12).callback(restart)).unwrap();
    // Without the iterator by which the dataset was described.
    let seen: Vec<Vec<Vec<f32>>> = opened.lock().unwrap().iter().map(|seen| seen.lock().unwrap().clone()).collect();
    let seen: Vec<&Vec<Vec<f32>>> = seen.iter().filter(|seen| !seen.is_empty()).collect();
    let [before, after] = seen[..] else { panic!("{seen:?}") };
    let count = before.len().min(after.len());
    assert!(count >= 3 && before[..count] != after[..count], "{seen:?}");
}

#[test]
fn a_worker_that_dies_loses_no_step_and_none_counts_twice() {
    DELAY.store(5, Ordering::Relaxed);
    let training = counting();
    let (chief, mut tasks) = serve(1, 2, &training.program());
    let strategy = ParameterServerStrategy::builder(&chief).build().unwrap();
    let mut trainer = training.on_servers(&strategy).unwrap();
    let kill = Kill { at: 21, worker: tasks.pop() };
    let history = trainer.fit("ones", ServedFit::epochs(3).steps_per_epoch(15).callback(kill)).unwrap();
    assert_eq!(history.of("batches"), [15.0; 3]);
    let count = strategy.read_model(Counter::new).unwrap().0.to_vec1::<f32>().unwrap();
    assert_eq!(count, [-45.0]);
}

/// Fails at the end of an epoch, like a process that ends.
struct Dies(u32);

impl Callback for Dies {
    fn epoch_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.epoch == self.0 { Err(distribute_train::Error::Chief("it died".to_owned())) } else { Ok(()) }
    }
}

fn backed_up(trainer: &mut ServedTrainer<Mlp>, folder: &Path, every: u64, dies: Option<u32>) -> Option<History> {
    let backup = BackupAndRestore::new(folder).keep_at_end().every_steps(every);
    let fit = ServedFit::epochs(4).steps_per_epoch(STEPS).callback(backup).callback(dies.map(Dies));
    trainer.fit("in order", fit).ok()
}

#[test]
fn a_training_that_died_resumes_on_new_servers() {
    let calm = tempfile::tempdir().unwrap();
    let (_tasks, _, mut trainer) = on_servers(1, Updates::Asynchronous);
    let expected = backed_up(&mut trainer, calm.path(), 2, None).unwrap();
    let outputs = predictions(&trainer);
    let folder = tempfile::tempdir().unwrap();
    for dies in [Some(2), Some(3), None, None] {
        let (_tasks, _, mut trainer) = on_servers(1, Updates::Asynchronous);
        // Steps 3, 6 and 9 end an epoch, which is saved after the callback that dies.
        match (backed_up(&mut trainer, folder.path(), STEPS, dies), dies) {
            (None, Some(_)) => {}
            (Some(history), None) => {
                assert_same(&history, &expected, 1e-9);
                assert_eq!(predictions(&trainer), outputs);
            }
            (history, _) => panic!("{history:?}"),
        }
    }
}

#[test]
fn checkpoints_of_servers_continue_under_other_strategies_and_back() {
    let expected = backed_up(&mut alone(), tempfile::tempdir().unwrap().path(), STEPS, None).unwrap();
    let [to, from] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_tasks, strategy, mut trainer) = on_servers(1, Updates::Asynchronous);
    // The second epoch is not saved.
    assert!(backed_up(&mut trainer, to.path(), 100, Some(2)).is_none());
    let mut other = training().under(&Strategy::default_strategy().unwrap()).unwrap();
    let history = backed_up(&mut other, to.path(), 100, None).unwrap();
    assert_same(&history, &expected, 1e-5);
    // The coordinator holds some pieces of the model.
    assert!(trainer.model().streams() && !other.model().streams());
    drop((trainer, strategy));

    assert!(backed_up(&mut alone(), from.path(), 100, Some(2)).is_none());
    let (_tasks, _, mut trainer) = on_servers(1, Updates::Asynchronous);
    let history = backed_up(&mut trainer, from.path(), 100, None).unwrap();
    assert_same(&history, &expected, 1e-5);
    assert!(apart(&predictions(&trainer).concat(), &predictions(&other).concat()) < 1e-5);
}

#[test]
fn the_best_model_on_servers_is_loaded_under_mirrored_replicas() {
    let folder = tempfile::tempdir().unwrap();
    let (_tasks, strategy, mut trainer) = on_servers(2, Updates::Asynchronous);
    let test = trainer.data("test").unwrap();
    // After the third epoch the loss only rises.
    let rate = LearningRateSchedule::new(|epoch, rate| if epoch == 4 { 5.0 } else { rate });
    let fit = ServedFit::epochs(9)
        .steps_per_epoch(20)
        .validation(&test)
        .callback(rate)
        .callback(EarlyStopping::new("val_loss").patience(2).restore_best())
        .callback(ModelCheckpoint::new(folder.path()).best("val_loss"));
    let history = trainer.fit("train", fit).unwrap();
    assert!((4..9).contains(&history.epochs.len()), "{history}");
    let best = history.of("val_loss").into_iter().fold(f64::INFINITY, f64::min);
    assert!((trainer.evaluate("test").unwrap()[0].1 - best).abs() < 1e-9, "{history}");

    let mirrored = mirrored(2);
    let model = mirrored.scope_seeded(7, Mlp::new).unwrap();
    let optimizer = Adam::new(1.0).build(&model).unwrap();
    let parts: [&dyn Checkpointed; 2] = [&model, &optimizer];
    CheckpointManager::new(folder.path()).restore::<serde_json::Value>(&mirrored, &parts).unwrap().unwrap();
    let x = data(EXAMPLES).0;
    let served = strategy.read_model(Mlp::new).unwrap().forward(&x).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(model.first().forward(&x).unwrap().to_vec2::<f32>().unwrap(), served);
    assert_eq!(predictions(&trainer).len(), EXAMPLES);
    assert!(optimizer.learning_rate() < 1.0, "the learning rate is restored too");
}

#[test]
fn workers_wait_for_the_next_coordinator_after_preemption() {
    let folder = tempfile::tempdir().unwrap();
    let (chief, tasks) = serve(1, 2, &training().program());
    let tasks: Vec<_> = tasks.into_iter().map(|task| std::thread::spawn(|| task.join())).collect();
    let fit = |steps: u64, config: TerminationConfig| {
        let options = ParameterServerOptions::default().connect_timeout(Duration::from_secs(20));
        let strategy = ParameterServerStrategy::builder(&chief).options(options).build().unwrap();
        let backup = BackupAndRestore::new(folder.path());
        let fit = ServedFit::epochs(1).steps_per_epoch(steps).callback(backup).stop_on(config.signals(Vec::new()));
        training().on_servers(&strategy).unwrap().fit("train", fit)
    };
    // Not in the first step, so that others are under way.
    let calls = AtomicU64::new(0);
    let told = move || calls.fetch_add(1, Ordering::Relaxed) >= 3;
    let told = TerminationConfig::default().watch_every(Duration::from_millis(50)).watch(told);
    let error = fit(20_000, told).unwrap_err();
    assert!(error.to_string().starts_with("stopped after step"), "{error}");
    let (step, _) = CheckpointManager::new(folder.path()).list().unwrap()[0];
    // The steps that were under way are in the checkpoint, and in the epoch's values.
    let history = fit(step + 10, TerminationConfig::default()).unwrap();
    assert_eq!(history.of("batches"), [(step + 10) as f64]);
    for task in tasks {
        task.join().unwrap().unwrap();
    }
}

#[test]
fn settings_and_data_that_do_not_go_on_servers_are_refused_in_words() {
    let (_tasks, _, mut trainer) = on_servers(2, Updates::Synchronous { contributions: 2, backups: 0 });
    let test = trainer.data("test").unwrap();
    let two = || ServedFit::epochs(1).steps_per_epoch(2);
    let mut says = |dataset: &str, fit: ServedFit, words: &str| {
        let error = trainer.fit(dataset, fit).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        error
    };
    says("tarin", two(), "no dataset \"tarin\"; it has empty, endless, in order, missing");
    says("train", ServedFit::epochs(1), "set steps_per_epoch");
    says("train", ServedFit::epochs(1).steps_per_epoch(3), "multiple of 2");
    says("train", two().batch_size(64), "batch them in their functions");
    says("train", two().validation(&test).validation_steps(2), "validation_steps has no effect");
    says("train", two().validation(&alone().data("test").unwrap()), "of another trainer");
    says("missing", two(), "no such file");
    let error = says("empty", two(), "has no elements");
    assert!(matches!(error, Error::Train(distribute_train::Error::NoExamples { .. })), "{error}");
    // The function's own error, once; then the trainer can be used again.
    let error = says("narrow", ServedFit::epochs(1).steps_per_epoch(20), "\"served.step\" failed on worker:");
    assert!(error.to_string().contains("shape mismatch"), "{error}");
    assert!(matches!(error, Error::ParameterServer(_)), "{error}");
    assert!(trainer.evaluate("endless").unwrap_err().to_string().contains("repeats forever"));
    assert!(trainer.data("tarin").is_err());
    let history = trainer.fit("train", two()).unwrap();
    assert_eq!(history.of("batches"), [2.0]);
    assert_eq!(trainer.fit("endless", two()).unwrap().of("batches"), [2.0]);
}

#[test]
fn two_trainings_do_not_share_a_strategy() {
    let (_tasks, strategy, _trainer) = on_servers(1, Updates::Asynchronous);
    let build = |vb: VarBuilder<'static>| candle_nn::linear(8, 3, vb.pp("other"));
    let other = ServedTraining::new(build, Sgd::new(0.1), MeanSquaredError, Metrics::new())
        .dataset("train", |context: &InputContext| Ok::<_, Error>(rows(context).batch(BATCH)));
    let mut other = other.on_servers(&strategy).unwrap();
    let error = other.fit("train", ServedFit::epochs(1).steps_per_epoch(1)).unwrap_err();
    assert!(error.to_string().contains("another training of this strategy"), "{error}");
}

/// Ends like a process that is lost: servers and workers wait for the next coordinator.
struct Lost(u64);

impl Callback for Lost {
    fn step_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.step >= self.0 { Err(distribute_train::Error::Chief("it was lost".to_owned())) } else { Ok(()) }
    }
}

/// Makes a call of `fit` as one run of a coordinator that can be restarted in place; returns the count and the outcome.
fn run_in_place(chief: &SimpleResolver, fit: ServedFit, lost: bool) -> (f32, distribute_candle::Result<History>) {
    let strategy = ParameterServerStrategy::builder(chief).restart_in_place().build().unwrap();
    let mut trainer = counting().on_servers(&strategy).unwrap();
    let outcome = trainer.fit("ones", fit);
    let count = strategy.read_model(Counter::new).unwrap().0.to_vec1::<f32>().unwrap()[0];
    if lost {
        strategy.report_failure("it was lost", FailureKind::Retryable);
    }
    (count, outcome)
}

#[test]
fn fit_continues_in_place_after_the_step_that_the_servers_have_made() {
    let folder = tempfile::tempdir().unwrap();
    let (chief, _tasks) = serve(2, 2, &counting().program());
    let fit = |lost: Option<u64>| {
        let backup = BackupAndRestore::new(folder.path());
        ServedFit::epochs(3).steps_per_epoch(10).callback(backup).callback(lost.map(Lost))
    };
    let (count, outcome) = run_in_place(&chief, fit(Some(16)), true);
    assert!(outcome.is_err() && (-20.0..=-16.0).contains(&count), "{count}: {outcome:?}");
    let (count, outcome) = run_in_place(&chief, fit(None), false);
    let batches = outcome.unwrap().of("batches");
    // The second epoch lacks what the first coordinator knew of it.
    assert!(batches[0] == 10.0 && batches[1] < 10.0 && batches[2] == 10.0, "{batches:?}");
    assert_eq!(count, -30.0);
}

/// Copies a folder with its folders.
fn copied(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        match path.is_dir() {
            true => copied(&path, &to),
            false => assert!(std::fs::copy(&path, &to).is_ok()),
        }
    }
}

#[test]
fn fit_goes_back_to_its_backup_if_an_epoch_has_ended_since_and_says_so_without_one() {
    let folder = tempfile::tempdir().unwrap();
    let (newest, older) = (folder.path().join("newest"), folder.path().join("older"));
    let (chief, _tasks) = serve(1, 1, &counting().program());
    let backup = |folder: &Path| BackupAndRestore::new(folder).keep_at_end();
    let steps = |epochs: u32| ServedFit::epochs(epochs).steps_per_epoch(3);
    let (count, outcome) = run_in_place(&chief, steps(1).callback(backup(&newest)), true);
    assert_eq!((count, outcome.unwrap().epochs.len()), (-3.0, 1));
    copied(&newest, &older);
    // It knows more than the servers, which learn of the last step's end from a further one.
    let (count, outcome) = run_in_place(&chief, steps(4).callback(backup(&newest)).callback(Lost(8)), true);
    assert!(outcome.is_err() && count <= -8.0, "{count}: {outcome:?}");
    let (count, outcome) = run_in_place(&chief, steps(4).callback(backup(&older)), true);
    let history = outcome.unwrap();
    assert_eq!((count, history.of("batches")), (-12.0, vec![3.0; 4]));
    // Without any backup nothing is known of the epochs that have ended.
    let (count, outcome) = run_in_place(&chief, steps(5), false);
    let error = outcome.unwrap_err();
    let unknown = matches!(&error, Error::Train(distribute_train::Error::StepsUnknown { .. }));
    assert!(unknown && error.to_string().contains("BackupAndRestore"), "{error}");
    assert_eq!(count, -12.0);
}

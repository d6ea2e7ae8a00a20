//! fit, evaluate and predict give the same results under every strategy, and after a restart.

use std::path::Path;
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor};
use distribute_burn::{
    Adam, BinaryCrossentropy, BurnContext, BurnStrategy, Error, Examples, Fit, Items, MeanSquaredError, Sgd,
    SparseCategoricalCrossentropy, ToArray, Trainer, cross_entropy_per_example,
};
use distribute_input::{Array, Dataset};
use distribute_strategy::{MultiWorkerMirroredStrategy, Strategy};
use distribute_testkit::Job;
use distribute_train::callbacks::{BackupAndRestore, Callback, EarlyStopping, ModelCheckpoint, Training};
use distribute_train::history::History;
use distribute_train::metrics::{Accuracy, BinaryAccuracy, MeanAbsoluteError, Metrics, TopK};

use crate::common::*;

const EXAMPLES: usize = 50;

/// A classifier of rows.
type ClassTrainer<M> = Trainer<M, Tensor<2>, Tensor<1, Int>, 2>;

fn arrays() -> (Array<f32>, Array<i32>) {
    let (x, y) = batch(3, EXAMPLES);
    (Array::new([EXAMPLES, INPUTS], x).unwrap(), Array::from(y))
}

fn tensors() -> (Tensor<2>, Tensor<1, Int>) {
    let device = Device::flex();
    cut(&batch(3, EXAMPLES), 1, &device).remove(0)
}

/// Batches of 16; the last one has two examples.
fn data() -> Dataset<(Array<f32>, Array<i32>)> {
    Dataset::from_tensor_slices(arrays()).shuffle(EXAMPLES, 7).batch(16)
}

fn trainer<M: Classifier>(strategy: &Strategy) -> ClassTrainer<M> {
    let metrics = Metrics::new().with(Accuracy).with(TopK(2));
    let adam = |model: &_| Adam::new(0.01).build(model);
    Trainer::new(strategy, M::new, M::forward, adam, SparseCategoricalCrossentropy, metrics).unwrap()
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.to_array().unwrap().as_slice().to_vec()
}

fn predictions<M: Classifier>(trainer: &ClassTrainer<M>) -> Vec<f32> {
    floats(trainer.predict(&Dataset::from_tensor_slices(arrays().0).batch(16)).unwrap())
}

#[test]
fn histories_and_predictions_are_the_same_under_every_strategy() {
    let fit = |strategy: &Strategy| {
        let mut trainer = trainer::<Mlp>(strategy);
        let validation = Dataset::from_tensor_slices(arrays()).batch(20);
        let history = trainer.fit(&data(), Fit::epochs(6).validation(&validation)).unwrap();
        (history, predictions(&trainer))
    };
    let (expected, outputs) = fit(&one());
    assert!(expected.last("loss").unwrap() < 0.9 * expected.of("loss")[0], "{expected}");
    for strategy in [mirrored(2), mirrored(3), mirrored(5)] {
        let (history, own) = fit(&strategy);
        for name in ["loss", "accuracy", "top_2_accuracy", "val_loss", "val_accuracy"] {
            assert_eq!(history.of(name).len(), 6);
            let (own, expected): (Vec<f32>, Vec<f32>) =
                history.of(name).iter().zip(expected.of(name)).map(|(a, b)| (*a as f32, b as f32)).unzip();
            assert_close(&own, &expected, 1e-4, name);
        }
        assert_close(&own, &outputs, 1e-3, "predictions");
    }
}

#[test]
fn losses_and_metrics_are_those_of_the_examples_whatever_the_batches() {
    let trainer = trainer::<Normalised>(&mirrored(2));
    let whole = trainer.evaluate(&Dataset::from_tensor_slices(arrays()).batch(EXAMPLES)).unwrap();
    for batch in [1, 7, 16] {
        let parts = trainer.evaluate(&Dataset::from_tensor_slices(arrays()).batch(batch)).unwrap();
        for ((name, a), (_, b)) in parts.iter().zip(&whole) {
            assert!((a - b).abs() < 1e-6, "{name}: {a} and {b}");
        }
    }
    let (x, y) = tensors();
    let logits = trainer.model().first().valid().forward(x.clone());
    let losses = floats(cross_entropy_per_example(logits.clone(), y.clone()).unwrap());
    let mean = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / EXAMPLES as f64;
    assert!((whole[0].1 - mean).abs() < 1e-6, "{whole:?} {mean}");
    let right = logits.argmax(1).reshape([EXAMPLES]).equal(y.clone()).int().sum().into_scalar::<i64>();
    assert!((whole[1].1 - right as f64 / EXAMPLES as f64).abs() < 1e-9, "{whole:?} {right}");
    // Tensors in memory are data too.
    assert_eq!(trainer.evaluate(&(x.clone(), y)).unwrap()[1], whole[1]);
    assert_close(&floats(trainer.predict(&x).unwrap()), &predictions(&trainer), 1e-6, "predictions");
}

/// A batch of a program's own type, as burn's users have.
#[derive(Clone)]
struct Digits {
    rows: Tensor<2>,
    classes: Tensor<1, Int>,
}

impl From<Digits> for Examples<Tensor<2>, Tensor<1, Int>> {
    fn from(batch: Digits) -> Self {
        (batch.rows, batch.classes).into()
    }
}

struct DigitBatcher;

impl Batcher<(Vec<f32>, i32), Digits> for DigitBatcher {
    fn batch(&self, items: Vec<(Vec<f32>, i32)>, device: &Device) -> Digits {
        let rows = items.iter().map(|(row, _)| Tensor::<1>::from_floats(&row[..], device)).collect();
        let classes: Vec<i32> = items.iter().map(|(_, class)| *class).collect();
        Digits { rows: Tensor::stack(rows, 0), classes: Tensor::from_ints(&classes[..], device) }
    }
}

impl Batcher<(Vec<f32>, i32), Tensor<2>> for DigitBatcher {
    fn batch(&self, items: Vec<(Vec<f32>, i32)>, device: &Device) -> Tensor<2> {
        let batch: Digits = self.batch(items, device);
        batch.rows
    }
}

fn in_memory() -> InMemDataset<(Vec<f32>, i32)> {
    let (x, y) = batch(3, EXAMPLES);
    InMemDataset::new(x.chunks(INPUTS).map(<[f32]>::to_vec).zip(y).collect())
}

#[test]
fn burns_own_datasets_and_tensors_in_memory_train_as_arrays_do() {
    let strategy = mirrored(2);
    let mut arrays = trainer::<Mlp>(&strategy);
    let expected = arrays.fit(&data(), Fit::epochs(3)).unwrap();
    let mut items = trainer::<Mlp>(&strategy);
    let data: Items<_, Digits> =
        Items::new(in_memory(), DigitBatcher, |indices| indices.shuffle(EXAMPLES, 7).batch(16));
    let history = items.fit(&data, Fit::epochs(3).validation(&data)).unwrap();
    assert_eq!(history.of("loss"), expected.of("loss"));
    assert_eq!(predictions(&items), predictions(&arrays));
    let rows: Items<_, Tensor<2>> = Items::new(in_memory(), DigitBatcher, |indices| indices.batch(16));
    assert_eq!(floats(items.predict(&rows).unwrap()), predictions(&arrays));

    let mut tensors_in_memory = trainer::<Mlp>(&strategy);
    let history = tensors_in_memory.fit(&tensors(), Fit::epochs(3).batch_size(16)).unwrap();
    assert!(history.last("loss") < history.of("loss").first().copied());
}

/// Fails at the end of an epoch, like a process that ends.
struct Dies(u32);

impl Callback for Dies {
    fn epoch_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.epoch == self.0 { Err(distribute_train::Error::Chief("it died".to_owned())) } else { Ok(()) }
    }
}

/// With an optimizer of this project, and with one of burn's.
#[test]
fn a_training_that_died_resumes_as_if_it_had_not() {
    for burns in [false, true] {
        let build = || -> ClassTrainer<Normalised> {
            let strategy = mirrored(2);
            if !burns {
                return trainer(&strategy);
            }
            let model = strategy.scope(Normalised::new).unwrap();
            let adam = |model: &distribute_burn::Model<_>| model.optimizer(AdamConfig::new().init(), 0.01, "Adam");
            let forward = Normalised::forward;
            Trainer::of_model(&strategy, model, forward, adam, SparseCategoricalCrossentropy, Metrics::new()).unwrap()
        };
        let fit = |folder: &Path, every: u64, dies: Option<u32>| -> Option<(History, Vec<f32>)> {
            let mut trainer = build();
            let backup = BackupAndRestore::new(folder).keep_at_end();
            let backup = if every > 0 { backup.every_steps(every) } else { backup };
            let fit = Fit::epochs(4).callback(backup);
            let fit = if let Some(epoch) = dies { fit.callback(Dies(epoch)) } else { fit };
            let history = trainer.fit(&data(), fit).ok()?;
            // Statistics are saved as their mean over replicas, so they differ a little afterwards.
            let parameters = values(trainer.model(), 0).into_iter().filter(|(name, _)| !name.contains("running"));
            Some((history, parameters.flat_map(|(_, values)| values).collect()))
        };
        let calm = tempfile::tempdir().unwrap();
        let (expected, parameters) = fit(calm.path(), 0, None).unwrap();
        // Every 3 steps: in the middle of an epoch of 4. 0: only at its end.
        for every in [0, 3] {
            let folder = tempfile::tempdir().unwrap();
            assert_eq!(fit(folder.path(), every, Some(1)), None);
            assert_eq!(fit(folder.path(), every, Some(3)), None);
            let (history, resumed) = fit(folder.path(), every, None).unwrap();
            assert_eq!(history.epochs.len(), 4);
            assert_eq!(resumed, parameters);
            // The parts of an epoch were summed in another order.
            for (a, b) in history.of("loss").iter().zip(expected.of("loss")) {
                assert!((a - b).abs() < 1e-12, "{history} {expected}");
            }
        }
    }
}

#[test]
fn weights_of_examples_and_classes_count_as_often_as_they_say() {
    let strategy = mirrored(2);
    let (x, y) = arrays();
    let by_class = [2.0, 1.0, 0.5];
    let weight = |class: &i32| by_class.get(*class as usize).copied().unwrap_or(1.0f32);
    let weights = Array::from(y.as_slice().iter().map(weight).collect::<Vec<f32>>());
    let fit = |data: &dyn Fn(&mut ClassTrainer<Mlp>) -> History| {
        let mut trainer = trainer::<Mlp>(&strategy);
        let history = data(&mut trainer);
        (history, values(trainer.model(), 1))
    };
    let by_examples =
        Dataset::from_tensor_slices((x.clone(), y.clone(), weights.clone())).shuffle(EXAMPLES, 7).batch(16);
    let (weighted, parameters) = fit(&|trainer| trainer.fit(&by_examples, Fit::epochs(2)).unwrap());
    let (plain, of_classes) = fit(&|trainer| trainer.fit(&data(), Fit::epochs(2).class_weights(by_class)).unwrap());
    assert_eq!(parameters, of_classes);
    // The losses that are shown have the examples' weights, but not those of classes.
    assert_ne!(weighted.of("loss"), plain.of("loss"));
    let (unweighted, _) = fit(&|trainer| trainer.fit(&data(), Fit::epochs(2)).unwrap());
    assert_ne!(plain.of("loss")[1], unweighted.of("loss")[1]);
    assert_eq!(plain.of("loss").len(), 2);

    // An example of weight 0 does not exist for metrics.
    let trainer = trainer::<Mlp>(&strategy);
    let first: Vec<f32> = (0..EXAMPLES).map(|at| if at < 10 { 1.0 } else { 0.0 }).collect();
    let some = Dataset::from_tensor_slices((x.clone(), y.clone(), Array::from(first))).batch(16);
    let ten = Dataset::from_tensor_slices((x, y)).take(10).batch(16);
    assert_eq!(trainer.evaluate(&some).unwrap()[1], trainer.evaluate(&ten).unwrap()[1]);
}

/// Half of the hidden outputs are dropped in training.
#[derive(Module, Debug)]
struct Dropping {
    dropout: Dropout,
    inner: Mlp,
}

#[test]
fn layers_know_whether_they_are_trained() {
    let build = |device: &Device| Dropping { dropout: DropoutConfig::new(0.5).init(), inner: Mlp::new(device) };
    let forward = |model: &Dropping, x: Tensor<2>| {
        let x = drawing(|| model.dropout.forward(x));
        model.inner.forward(x)
    };
    let sgd = |model: &_| Sgd::new(0.0).build(model);
    let mut trainer: Trainer<_, _, Tensor<1, Int>, 2> =
        Trainer::new(&mirrored(2), build, forward, sgd, SparseCategoricalCrossentropy, Metrics::new()).unwrap();
    let history = trainer.fit(&data(), Fit::epochs(6).validation(&data())).unwrap();
    let evaluated = trainer.evaluate(&data()).unwrap()[0].1;
    // With a learning rate of 0 only dropout changes losses.
    assert_eq!(history.of("val_loss"), [evaluated; 6]);
    assert!(history.of("loss").iter().any(|loss| (loss - evaluated).abs() > 1e-5), "{history}");
}

#[test]
fn the_best_model_is_kept_and_training_stops_early() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer::<Mlp>(&mirrored(2));
    let keep = ModelCheckpoint::new(folder.path()).best("loss");
    let fit = Fit::epochs(30).callback(keep).callback(EarlyStopping::new("loss").min_delta(10.0).patience(2));
    let history = trainer.fit(&data(), fit).unwrap();
    assert_eq!(history.epochs.len(), 3, "{history}");
    assert!(std::fs::read_dir(folder.path()).unwrap().count() > 0);
}

#[test]
fn values_are_fitted_as_classes_are() {
    let (x, _) = arrays();
    let sums: Vec<f32> = x.as_slice().chunks(INPUTS).flat_map(|row| [row[0] + row[1], row[2] - row[3]]).collect();
    let data = |targets: &[f32]| {
        let targets = Array::new([EXAMPLES, 2], targets.to_vec()).unwrap();
        Dataset::from_tensor_slices((x.clone(), targets)).shuffle(EXAMPLES, 3).batch(16)
    };
    let forward = |model: &Mlp, x: Tensor<2>| {
        let rows = x.dims()[0];
        model.forward(x).slice([0..rows, 0..2])
    };
    let adam = |model: &_| Adam::new(0.01).build(model);
    let metrics = Metrics::new().with(MeanAbsoluteError);
    let strategy = mirrored(2);
    let mut trainer = Trainer::new(&strategy, Mlp::new, forward, adam, MeanSquaredError, metrics).unwrap();
    let history = trainer.fit(&data(&sums), Fit::epochs(20)).unwrap();
    assert!(history.last("loss").unwrap() < 0.5 * history.of("loss")[0], "{history}");
    assert!(history.last("mean_absolute_error").unwrap() < history.of("mean_absolute_error")[0], "{history}");

    let signs: Vec<f32> = sums.iter().map(|sum| f32::from(u8::from(*sum > 0.0))).collect();
    let metrics = Metrics::new().with(BinaryAccuracy { threshold: 0.0 });
    let mut trainer = Trainer::new(&strategy, Mlp::new, forward, adam, BinaryCrossentropy, metrics).unwrap();
    let history = trainer.fit(&data(&signs), Fit::epochs(20)).unwrap();
    assert!(history.last("loss").unwrap() < 0.9 * history.of("loss")[0], "{history}");
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let strategy = mirrored(2);
    let adam = |model: &_| Adam::new(0.01).build(model);
    let one_for_all = |outputs: Tensor<2>, _: Tensor<1, Int>| outputs.mean();
    let mut trainer = Trainer::new(&strategy, Mlp::new, Mlp::forward, adam, one_for_all, Metrics::new()).unwrap();
    let error = trainer.fit(&data(), Fit::epochs(1)).unwrap_err();
    assert!(matches!(error, Error::Losses { given: 1, examples: 8 }), "{error}");

    let trainer = self::trainer::<Mlp>(&mirrored(2));
    let none = trainer.predict(&Dataset::from_tensor_slices(arrays().0).take(0).batch(4)).unwrap_err();
    assert!(matches!(none, Error::NoExamples { what: "predict" }), "{none}");
    let (x, _) = arrays();
    let outside = Array::from(vec![CLASSES as i32; EXAMPLES]);
    let error = trainer.evaluate(&Dataset::from_tensor_slices((x, outside)).batch(EXAMPLES)).unwrap_err().to_string();
    assert!(error.contains("there are 4 classes"), "{error}");
}

#[test]
fn metrics_refuse_classes_that_do_not_belong_to_rows_of_outputs() {
    let device = Device::flex();
    let scores = [[0.0, 1.0, 2.0, 0.5], [0.0, 1.0, 0.5, 0.2], [0.0, 1.0, 2.0, 0.5], [0.0, 1.0, 2.0, 0.5]];
    let x = Tensor::<2>::from_floats(scores, &device);
    let forward = |_: &Mlp, x: Tensor<2>| x;
    let sgd = |model: &_| Sgd::new(0.0).build(model);
    let loss = |outputs: Tensor<2>, _: Tensor<2, Int>| outputs.mean_dim(1).squeeze_dim(1);
    let metrics = Metrics::new().with(Accuracy);
    let trainer = Trainer::new(&one(), Mlp::new, forward, sgd, loss, metrics).unwrap();
    let column = Tensor::<2, Int>::from_ints([[2], [1], [2], [0]], &device);
    assert_eq!(trainer.evaluate(&(x.clone(), column)).unwrap()[1].1, 0.75);
    let two = Tensor::<2, Int>::from_ints([[1, 0], [1, 0], [1, 0], [1, 0]], &device);
    let told = trainer.evaluate(&(x, two)).unwrap_err().to_string();
    assert!(told.contains("[4, 4]") && told.contains("[4, 2]"), "{told}");

    // One class for each output, in both shapes.
    let x = Tensor::<2>::from_floats([[2.0], [-1.0], [1.0], [3.0]], &device);
    let forward = |_: &Mlp, x: Tensor<2>| x;
    let metrics = || Metrics::new().with(BinaryAccuracy { threshold: 0.0 });
    let trainer = Trainer::new(&one(), Mlp::new, forward, sgd, loss, metrics()).unwrap();
    let column = Tensor::<2, Int>::from_ints([[1], [0], [1], [0]], &device);
    assert_eq!(trainer.evaluate(&(x.clone(), column.clone())).unwrap()[1].1, 0.75);
    let loss = |outputs: Tensor<2>, _: Tensor<1, Int>| outputs.mean_dim(1).squeeze_dim(1);
    let trainer = Trainer::new(&one(), Mlp::new, forward, sgd, loss, metrics()).unwrap();
    assert_eq!(trainer.evaluate(&(x, column.squeeze_dim::<1>(1))).unwrap()[1].1, 0.75);
}

/// A loss of the program's own ignores positions that are marked so, and metrics do not.
#[test]
fn targets_that_are_no_classes_are_an_error_of_metrics() {
    let ignoring = |logits: Tensor<2>, targets: Tensor<1, Int>| {
        let is_kept = targets.clone().greater_equal_elem(0).float();
        losses(logits, targets.clamp_min(0)) * is_kept
    };
    let (x, _) = tensors();
    let targets = Array::from(vec![0, -1]);
    let data = Dataset::from_tensor_slices((x.narrow(0, 0, 2).to_array().unwrap(), targets)).batch(2);
    let trainer = |metrics| {
        let sgd = |model: &_| Sgd::new(0.1).build(model);
        Trainer::new(&one(), Mlp::new, Mlp::forward, sgd, ignoring, metrics).unwrap()
    };
    trainer(Metrics::new()).fit(&data, Fit::epochs(1)).unwrap();
    let mut with_metric = trainer(Metrics::new().with(Accuracy));
    let error = with_metric.fit(&data, Fit::epochs(1)).unwrap_err();
    assert!(matches!(error, Error::NotClass { at: 1, class: -1 }), "{error}");
    let error = with_metric.evaluate(&data).unwrap_err();
    assert!(error.to_string().contains("target 1 of a batch is -1"), "{error}");
}

/// The variable that makes a process of this test a worker.
const WORKER: &str = "DISTRIBUTE_TEST_DROPOUT_WORKER";

/// Prints initial values, and what dropout leaves of ones.
#[test]
#[ignore = "a process that other tests start"]
fn dropout_worker() {
    if std::env::var_os(WORKER).is_none() {
        return;
    }
    let strategy = MultiWorkerMirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    let build = |device: &Device| {
        device.seed(7);
        Dropping { dropout: DropoutConfig::new(0.5).init(), inner: Mlp::new(device) }
    };
    let model = strategy.scope(build).unwrap();
    println!("values {:?}", model.to_module(&strategy).unwrap().inner.head.weight.val().to_array().unwrap().as_slice());
    let kept = strategy.run_with(&model, |context, model| {
        let ones = Tensor::<1>::ones([64], &context.burn_device()?);
        Ok::<_, Error>(model.dropout.forward(ones).without_autodiff().to_array()?.as_slice().to_vec())
    });
    println!("kept {:?}", kept.unwrap().values());
}

#[test]
fn workers_of_one_seed_drop_different_elements() {
    let place = |rank: u32| {
        // Nothing listens at the leader's address: they meet in a folder.
        let place = [("RANK", rank.to_string()), ("WORLD_SIZE", "3".to_owned())];
        let leader = [("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", "1".to_owned())];
        place.into_iter().chain(leader).map(|(name, value)| (name.to_owned(), value)).collect()
    };
    let lines = || {
        let folder = tempfile::tempdir().unwrap();
        let job = Job::of_test("trainer::dropout_worker").unwrap().env(WORKER, "1");
        let job = job.env("DISTRIBUTE_STORE", format!("file:{}", folder.path().display()));
        let job = job.env("DISTRIBUTE_JOB_ID", "dropout-1");
        let outcomes = job.tasks(3).task_env(place).start().unwrap().wait_all(Duration::from_secs(60)).unwrap();
        let of = |begin: &str| {
            let find = |printed: &str| printed.lines().find(|line| line.starts_with(begin)).map(str::to_owned);
            outcomes.iter().map(|outcome| find(&outcome.stdout).unwrap()).collect::<Vec<String>>()
        };
        (of("values "), of("kept "))
    };
    let (values, kept) = lines();
    assert_eq!([&values[1], &values[2]], [&values[0]; 2]);
    assert!(kept[0] != kept[1] && kept[0] != kept[2] && kept[1] != kept[2], "{kept:?}");
    assert_eq!(lines(), (values, kept), "the seed repeats them");
}

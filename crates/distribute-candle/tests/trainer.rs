//! fit, evaluate and predict: the same under every strategy, and after a restart.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::Path;

use candle_core::{Device, Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use distribute_candle::{Adam, Fit, MeanSquared, SparseCategoricalCrossentropy, Trainer};
use distribute_input::Dataset;
use distribute_strategy::{CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy, Strategy};
use distribute_train::callbacks::{Callback, EarlyStopping, EpochEnd, LearningRateSchedule};
use distribute_train::checkpoint::CheckpointManager;
use distribute_train::history::History;
use distribute_train::metrics::{Accuracy, MeanAbsoluteError, Metrics, TopK};
use distribute_train::preemption::TerminationConfig;

struct Mlp(Linear, Linear);

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Mlp> {
        Ok(Mlp(linear(8, 16, vb.pp("first"))?, linear(16, 3, vb.pp("second"))?))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}

const EXAMPLES: usize = 50;

fn examples() -> (Tensor, Tensor) {
    let x: Vec<f32> = (0..EXAMPLES * 8).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let y: Vec<u32> = x.chunks_exact(8).map(|row| if row[0] > 0.3 { 2 } else { u32::from(row[1] > 0.0) }).collect();
    (Tensor::from_vec(x, (EXAMPLES, 8), &Device::Cpu).unwrap(), Tensor::from_vec(y, EXAMPLES, &Device::Cpu).unwrap())
}

/// Batches of 16, so the last one has two examples.
fn data() -> Dataset<(Tensor, Tensor)> {
    Dataset::from_tensor_slices(examples()).shuffle(EXAMPLES, 7).batch(16)
}

fn mirrored(replicas: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    MirroredStrategy::builder().devices(devices).build().unwrap()
}

fn trainer(strategy: &Strategy) -> Trainer<Mlp> {
    let metrics = Metrics::new().with(Accuracy).with(TopK(2));
    let adam = |model: &_| Adam::new(0.02).build(model);
    Trainer::new(strategy, Mlp::new, adam, SparseCategoricalCrossentropy, metrics).unwrap()
}

fn predictions(trainer: &Trainer<Mlp>) -> Vec<Vec<f32>> {
    let x = Dataset::from_tensor_slices(examples().0).batch(16);
    trainer.predict(&x).unwrap().to_vec2().unwrap()
}

#[test]
fn histories_and_predictions_are_the_same_under_every_strategy() {
    let central = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    let fit = |strategy: &Strategy| {
        let mut trainer = trainer(strategy);
        let validation = Dataset::from_tensor_slices(examples()).batch(20);
        let history = trainer.fit(&data(), Fit::epochs(6).validation(&validation)).unwrap();
        (history, predictions(&trainer))
    };
    let (expected, outputs) = fit(&Strategy::default_strategy().unwrap());
    assert!(expected.last("loss").unwrap() < 0.8 * expected.of("loss")[0], "{expected}");
    assert!(expected.last("val_accuracy").unwrap() > 0.6, "{expected}");
    for strategy in [OneDeviceStrategy::new("CPU:0").unwrap(), mirrored(2), mirrored(3), central] {
        let (history, own) = fit(&strategy);
        for name in ["loss", "accuracy", "top_2_accuracy", "val_loss", "val_accuracy"] {
            assert_eq!(history.of(name).len(), 6);
            for (a, b) in history.of(name).iter().zip(expected.of(name)) {
                assert!((a - b).abs() < 1e-4, "{}: {name} {a} and {b}", strategy.describe());
            }
        }
        let apart = own.iter().flatten().zip(outputs.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-4, "{}: predictions are {apart} apart", strategy.describe());
    }
}

#[test]
fn losses_and_metrics_are_those_of_the_examples_whatever_the_batches() {
    let trainer = trainer(&mirrored(2));
    let (x, y) = examples();
    let whole = trainer.evaluate(&Dataset::from_tensor_slices((x.clone(), y.clone())).batch(EXAMPLES)).unwrap();
    for batch in [1, 7, 16] {
        let parts = trainer.evaluate(&Dataset::from_tensor_slices((x.clone(), y.clone())).batch(batch)).unwrap();
        for ((name, a), (_, b)) in parts.iter().zip(&whole) {
            assert!((a - b).abs() < 1e-6, "{name}: {a} and {b}");
        }
    }
    let logits = trainer.model().first().forward(&x).unwrap();
    let loss = candle_nn::loss::cross_entropy(&logits, &y).unwrap().to_scalar::<f32>().unwrap();
    assert!((whole[0].1 - f64::from(loss)).abs() < 1e-6);
}

/// Fails at the end of an epoch, as a process that dies.
struct Dies(u32);

impl Callback for Dies {
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> distribute_train::Result<()> {
        if end.epoch == self.0 { Err(distribute_train::Error::Chief("it died".to_owned())) } else { Ok(()) }
    }
}

#[test]
fn a_training_that_died_goes_on_as_if_it_had_not() {
    let fit = |folder: &Path, every: u64, dies: Option<u32>| -> Option<(History, Vec<Vec<f32>>)> {
        let mut trainer = trainer(&mirrored(2));
        let fit = Fit::epochs(4).checkpoints(CheckpointManager::new(folder), every);
        let fit = if let Some(epoch) = dies { fit.callback(Dies(epoch)) } else { fit };
        let history = trainer.fit(&data(), fit).ok()?;
        Some((history, predictions(&trainer)))
    };
    let calm = tempfile::tempdir().unwrap();
    let expected = fit(calm.path(), 0, None).unwrap();
    // Every 3 steps: the middle of an epoch of 4. 0: only its end.
    for every in [0, 3] {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(fit(folder.path(), every, Some(1)), None);
        assert_eq!(fit(folder.path(), every, Some(3)), None);
        // Twice: the second time there is nothing left to do.
        for _ in 0..2 {
            let (history, outputs) = fit(folder.path(), every, None).unwrap();
            assert_eq!(outputs, expected.1);
            // The parts of an epoch were summed in another order.
            for (a, b) in history.of("loss").iter().zip(expected.0.of("loss")) {
                assert!((a - b).abs() < 1e-12, "{history} {}", expected.0);
            }
            assert_eq!(history.epochs.len(), 4);
        }
    }
}

/// Asks to stop at the end of an epoch, as a signal would.
struct Asks(std::sync::Arc<std::sync::atomic::AtomicBool>);

impl Callback for Asks {
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> distribute_train::Result<()> {
        self.0.store(end.epoch == 1, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn a_training_that_is_told_to_stop_saves_after_the_step_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = || CheckpointManager::new(folder.path());
    let strategy = mirrored(2);
    let asks = Asks(strategy.stop_flag());
    let fit = Fit::epochs(3).checkpoints(checkpoints(), 0).stop_on(TerminationConfig::default()).callback(asks);
    let error = trainer(&strategy).fit(&data(), fit).unwrap_err();
    // Four steps of the first epoch, and one of the second.
    assert!(error.to_string().starts_with("stopped after step 5, which is saved"), "{error}");
    let mut resumed = trainer(&mirrored(2));
    resumed.fit(&data(), Fit::epochs(3).checkpoints(checkpoints(), 0)).unwrap();
    let mut calm = trainer(&mirrored(2));
    calm.fit(&data(), Fit::epochs(3)).unwrap();
    assert_eq!(predictions(&resumed), predictions(&calm));
}

#[test]
fn callbacks_stop_and_set_the_learning_rate() {
    let mut trainer = trainer(&mirrored(2));
    let frozen = LearningRateSchedule::new(|epoch, rate| if epoch < 3 { rate } else { 0.0 });
    let stopping = EarlyStopping::new("loss").patience(1);
    let history = trainer.fit(&data(), Fit::epochs(50).callback(frozen).callback(stopping)).unwrap();
    // From the third epoch on nothing changes: the fourth is the first without progress, up to rounding.
    assert!((4..8).contains(&history.epochs.len()), "{history}");
    assert_eq!(trainer.optimizer().learning_rate(), 0.0);
    let text = trainer.fit(&data(), Fit::epochs(1).callback(EarlyStopping::new("val_loss"))).unwrap_err().to_string();
    assert!(text.contains("val_loss"), "{text}");
}

#[test]
fn values_are_fitted_as_classes_are() {
    let strategy = mirrored(2);
    let (x, _) = examples();
    let y = (x.narrow(1, 0, 1).unwrap() * 2.0).unwrap();
    let data = Dataset::from_tensor_slices((x, y)).shuffle(EXAMPLES, 1).batch(10);
    let build = |vb: VarBuilder<'static>| linear(8, 1, vb.pp("fc"));
    let metrics = Metrics::new().with(MeanAbsoluteError);
    let mut trainer =
        Trainer::new(&strategy, build, |model| Adam::new(0.05).build(model), MeanSquared, metrics).unwrap();
    let history = trainer.fit(&data, Fit::epochs(40)).unwrap();
    assert!(history.last("mean_absolute_error").unwrap() < 0.05, "{history}");
    let none = Dataset::from_tensor_slices(examples().0).take(0).batch(4);
    assert!(trainer.predict(&none).unwrap_err().to_string().contains("no elements"));
}

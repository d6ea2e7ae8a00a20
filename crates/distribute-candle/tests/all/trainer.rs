//! fit, evaluate and predict give the same results under every strategy, and after a restart.

use std::path::Path;

use candle_core::{DType, Device, Module, ModuleT, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use distribute_candle::{Adam, Error, Fit, Loss, MeanSquaredError, Sgd, SparseCategoricalCrossentropy, Trainer};
use distribute_input::Dataset;
use distribute_strategy::{CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy, Request, Strategy};
use distribute_testkit::apart;
use distribute_train::callbacks::{
    BackupAndRestore, Callback, EarlyStopping, LearningRateSchedule, ModelCheckpoint, Occasion, ReduceLrOnPlateau,
    TerminateOnNan, Training,
};
use distribute_train::checkpoint::{CheckpointManager, Snapshot};
use distribute_train::history::History;
use distribute_train::metrics::{Accuracy, MeanAbsoluteError, Metrics, TopK};
use distribute_train::preemption::TerminationConfig;
use distribute_types::ErrorClass;

mod measures;

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

/// Batches of 16; the last one has two examples.
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
    for strategy in [OneDeviceStrategy::builder("CPU:0").build().unwrap(), mirrored(2), mirrored(3), central] {
        let (history, own) = fit(&strategy);
        for name in ["loss", "accuracy", "top_2_accuracy", "val_loss", "val_accuracy"] {
            assert_eq!(history.of(name).len(), 6);
            let (got, expected) = (history.of(name), expected.of(name));
            assert!(apart(&got, &expected) < 1e-4, "{}: {name} {got:?} and {expected:?}", strategy.describe());
        }
        let apart = apart(&own.concat(), &outputs.concat());
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
        assert_eq!(parts.len(), whole.len());
        for ((name, a), (_, b)) in parts.iter().zip(&whole) {
            assert!((a - b).abs() < 1e-6, "{name}: {a} and {b}");
        }
    }
    let logits = trainer.model().first().forward(&x).unwrap();
    let loss = candle_nn::loss::cross_entropy(&logits, &y).unwrap().to_scalar::<f32>().unwrap();
    assert!((whole[0].1 - f64::from(loss)).abs() < 1e-6);
}

/// Fails at the end of an epoch, like a process that ends.
struct Dies(u32);

impl Callback for Dies {
    fn epoch_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.epoch == self.0 { Err(distribute_train::Error::Chief("it died".to_owned())) } else { Ok(()) }
    }
}

#[test]
fn a_training_that_died_goes_on_as_if_it_had_not() {
    let fit = |folder: &Path, every: u64, dies: Option<u32>| -> Option<(History, Vec<Vec<f32>>)> {
        let mut trainer = trainer(&mirrored(2));
        let backup = BackupAndRestore::new(folder).keep_at_end();
        let backup = if every > 0 { backup.every_steps(every) } else { backup };
        let fit = Fit::epochs(4).callback(backup);
        let fit = if let Some(epoch) = dies { fit.callback(Dies(epoch)) } else { fit };
        let history = trainer.fit(&data(), fit).ok()?;
        Some((history, predictions(&trainer)))
    };
    let calm = tempfile::tempdir().unwrap();
    let expected = fit(calm.path(), 0, None).unwrap();
    // Every 3 steps: in the middle of an epoch of 4. 0: only at its end.
    for every in [0, 3] {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(fit(folder.path(), every, Some(1)), None);
        assert_eq!(fit(folder.path(), every, Some(3)), None);
        // The second time all epochs are done already.
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

/// Makes a request at the end of the first epoch, like a signal.
struct Asks(Request);

impl Callback for Asks {
    fn epoch_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.epoch == 1 {
            training.strategy.request(self.0);
        }
        Ok(())
    }
}

#[test]
fn a_training_that_is_told_to_stop_saves_after_the_step_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let backup = || BackupAndRestore::new(folder.path());
    let strategy = mirrored(2);
    let fit = Fit::epochs(3).callback(backup()).stop_on(TerminationConfig::default()).callback(Asks(Request::Leave));
    let error = trainer(&strategy).fit(&data(), fit).unwrap_err();
    // Four steps of the first epoch, and one of the second.
    assert!(error.to_string().starts_with("stopped after step 5, which is saved"), "{error}");
    let mut resumed = trainer(&strategy);
    resumed.fit(&data(), Fit::epochs(3).callback(backup())).unwrap();
    assert!(!folder.path().exists(), "what was saved is removed at the end");
    let mut calm = trainer(&mirrored(2));
    calm.fit(&data(), Fit::epochs(3)).unwrap();
    assert_eq!(predictions(&resumed), predictions(&calm));
}

#[test]
fn a_function_that_announces_preemption_and_one_that_panics_end_a_training_that_is_saved() {
    let told = TerminationConfig::default().watch(|| true);
    let broken = TerminationConfig::default().watch(|| panic!("no such machine"));
    for (config, begin, code) in [(told, "stopped after step", 143), (broken, "the function of Termination", 1)] {
        let folder = tempfile::tempdir().unwrap();
        let fit = Fit::epochs(1_000_000).callback(BackupAndRestore::new(folder.path()));
        let error = trainer(&mirrored(2)).fit(&data(), fit.stop_on(config.signals(Vec::new()))).unwrap_err();
        assert_eq!((error.to_string().starts_with(begin), error.class().exit_code()), (true, code), "{error}");
        let (step, _) = CheckpointManager::new(folder.path()).list().unwrap()[0];
        assert!(error.to_string().contains(&format!("after step {step}")), "{error}");
    }
}

/// Ends the training between the callbacks that save before it and those that save after it.
struct DiesSaving;

impl Callback for DiesSaving {
    fn save(&mut self, _: &mut Training<'_>, occasion: Occasion) -> distribute_train::Result<bool> {
        match occasion {
            Occasion::Epoch => Err(distribute_train::Error::Chief("it died".to_owned())),
            _ => Ok(false),
        }
    }
}

#[test]
fn all_folders_of_a_training_belong_to_its_run_over_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let (best, backup) = (folder.path().join("best"), folder.path().join("backup"));
    // The callback that saves precedes the one that restores.
    let fit = || {
        let best = ModelCheckpoint::new(&best).keep(2);
        Fit::epochs(3).callback(best).callback(BackupAndRestore::new(&backup))
    };
    // Killed between the first checkpoint and the first backup, so that training restarts from the beginning, and after
    // a backup.
    let first = Fit::epochs(3).callback(ModelCheckpoint::new(&best).keep(2)).callback(DiesSaving);
    assert!(trainer(&mirrored(2)).fit(&data(), first.callback(BackupAndRestore::new(&backup))).is_err());
    assert!(!backup.join("latest").exists() && best.join("latest").exists());
    assert!(trainer(&mirrored(2)).fit(&data(), fit().callback(Dies(2))).is_err());
    trainer(&mirrored(2)).fit(&data(), fit()).unwrap();
    let runs = |folder: &Path| -> Vec<_> {
        let list = CheckpointManager::new(folder).list().unwrap();
        list.into_iter().map(|(step, path)| (step, Snapshot::read(path).unwrap().run().unwrap())).collect()
    };
    let found = runs(&best);
    assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [12, 8]);
    assert_eq!(found[0].1, found[1].1);
    // The next training is another run, which gets the request before its first step.
    let error = trainer(&mirrored(2)).fit(&data(), fit()).unwrap_err();
    assert!(error.to_string().contains("steps 8, 12") && error.to_string().contains("set_aside_other_runs"), "{error}");
    assert_eq!(runs(&best), found);
    // To continue from these checkpoints, restore from them.
    let more = Fit::epochs(4).callback(BackupAndRestore::new(&best)).callback(ModelCheckpoint::new(&best).keep(2));
    trainer(&mirrored(2)).fit(&data(), more).unwrap();
    assert_eq!(runs(&best), [(16, found[0].1), (12, found[0].1)]);
}

/// Records when callbacks may save.
struct Notes(std::sync::Arc<parking_lot::Mutex<Vec<(u64, Occasion)>>>);

impl Callback for Notes {
    fn save(&mut self, training: &mut Training<'_>, occasion: Occasion) -> distribute_train::Result<bool> {
        if occasion != Occasion::Step {
            self.0.lock().push((training.step, occasion));
        }
        Ok(true)
    }
}

#[test]
fn with_a_grace_period_it_saves_goes_on_and_saves_again() {
    let notes = std::sync::Arc::default();
    let config = TerminationConfig::default().grace_period(std::time::Duration::from_secs(600));
    let asks = Asks(Request::Save);
    let fit = Fit::epochs(2).callback(Notes(std::sync::Arc::clone(&notes))).callback(asks).stop_on(config);
    trainer(&mirrored(2)).fit(&data(), fit).unwrap();
    // Ten minutes have not passed when training ends.
    let expected = [(4, Occasion::Epoch), (5, Occasion::Notice), (8, Occasion::Epoch)];
    assert_eq!(*notes.lock(), expected);
}

#[test]
fn callbacks_go_on_as_if_the_program_had_not_been_stopped() {
    // The rate is reduced in the second epoch without improvement; there is one on each side of the stop.
    let plateau = || ReduceLrOnPlateau::new("accuracy").patience(2).factor(0.5);
    let still = || LearningRateSchedule::new(|epoch, rate| if epoch == 1 { 1e-30 } else { rate });
    let folder = tempfile::tempdir().unwrap();
    let mut first = trainer(&mirrored(2));
    let fit = Fit::epochs(4).callback(BackupAndRestore::new(folder.path())).callback(still()).callback(plateau());
    assert!(first.fit(&data(), fit.callback(Dies(3))).is_err());
    let mut second = trainer(&mirrored(2));
    let fit = Fit::epochs(3).callback(BackupAndRestore::new(folder.path())).callback(still()).callback(plateau());
    second.fit(&data(), fit.callback(Dies(9))).unwrap();
    assert_eq!(second.optimizer().learning_rate(), 0.5e-30);
}

#[test]
fn a_training_that_was_ended_early_stays_ended() {
    let folder = tempfile::tempdir().unwrap();
    let fit = || {
        let stopping = EarlyStopping::new("loss").baseline(0.0);
        Fit::epochs(5).callback(BackupAndRestore::new(folder.path()).keep_at_end()).callback(stopping)
    };
    let first = trainer(&mirrored(2)).fit(&data(), fit()).unwrap();
    assert_eq!(first.epochs.len(), 2);
    assert_eq!(trainer(&mirrored(2)).fit(&data(), fit()).unwrap(), first);
}

#[test]
fn a_loss_that_is_no_number_ends_it_within_the_epoch() {
    let mut trainer = trainer(&mirrored(2));
    let rate = LearningRateSchedule::new(|epoch, rate| if epoch == 2 { 1e300 } else { rate });
    let history = trainer.fit(&data(), Fit::epochs(9).callback(rate).callback(TerminateOnNan::default())).unwrap();
    assert_eq!(history.epochs.len(), 2, "{history}");
    assert!(history.last("loss").unwrap().is_nan());
}

#[test]
fn weights_of_examples_and_classes_count_as_often_as_they_say() {
    let (x, y) = examples();
    let counts: Vec<u32> = (0..EXAMPLES as u32).map(|i| i % 3).collect();
    let weights = Tensor::from_iter(counts.iter().map(|count| *count as f32), &Device::Cpu).unwrap();
    let repeated: Vec<u32> = (0..EXAMPLES as u32).flat_map(|i| vec![i; counts[i as usize] as usize]).collect();
    let rows = Tensor::new(repeated.as_slice(), &Device::Cpu).unwrap();
    let build = |strategy: &Strategy| {
        let metrics = Metrics::new().with(Accuracy);
        Trainer::new(strategy, Mlp::new, |m| Sgd::new(0.5).build(m), SparseCategoricalCrossentropy, metrics).unwrap()
    };
    let strategy = mirrored(2);
    // A single batch, so that both divide by the same number once the learning rate compensates.
    let mut weighted = build(&strategy);
    weighted.fit(&(x.clone(), y.clone(), weights.clone()), Fit::epochs(1).batch_size(EXAMPLES)).unwrap();
    let mut plain = build(&strategy);
    plain.optimizer().set_learning_rate(0.5 * repeated.len() as f64 / EXAMPLES as f64);
    let often = (x.index_select(&rows, 0).unwrap(), y.index_select(&rows, 0).unwrap());
    plain.fit(&often, Fit::epochs(1).batch_size(repeated.len())).unwrap();
    let close = |a: &Trainer<Mlp>, b: &Trainer<Mlp>| {
        let (a, b) = (predictions(a).concat(), predictions(b).concat());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{a:?} {b:?}");
    };
    close(&weighted, &plain);
    let (of_weights, of_rows) =
        (weighted.evaluate(&(x.clone(), y.clone(), weights)).unwrap(), weighted.evaluate(&often).unwrap());
    // The loss is divided by the number of examples, the accuracy by the sum of weights.
    let ratio = repeated.len() as f64 / EXAMPLES as f64;
    assert!((of_weights[0].1 - of_rows[0].1 * ratio).abs() < 1e-6, "{of_weights:?} {of_rows:?}");
    assert!((of_weights[1].1 - of_rows[1].1).abs() < 1e-12);

    let of_class = |class: &u32| [1.0f32, 0.25, 1.0][*class as usize];
    let of_classes = Tensor::from_iter(y.to_vec1::<u32>().unwrap().iter().map(of_class), &Device::Cpu).unwrap();
    let (mut by_class, mut by_example) = (build(&strategy), build(&strategy));
    by_class.fit(&(x.clone(), y.clone()), Fit::epochs(2).class_weights([1.0, 0.25])).unwrap();
    by_example.fit(&(x.clone(), y.clone(), of_classes), Fit::epochs(2)).unwrap();
    close(&by_class, &by_example);
    let few = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    let text = by_class.evaluate(&Dataset::from_tensor_slices((x, y, few)).batch(5)).unwrap_err().to_string();
    assert!(text.contains("50") && text.contains('3'), "{text}");
}

/// A classifier of each of several positions.
struct Positions(Linear);

impl Module for Positions {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.forward(x)
    }
}

#[test]
fn the_loss_of_sequences_is_trained_as_it_is_reported() {
    let (x, y) = examples();
    let fit = |x: Tensor, y: Tensor, batch: usize| {
        let build = |vb: VarBuilder<'_>| Ok(Positions(linear(8, 3, vb.pp("out"))?));
        let sgd = |model: &_| Sgd::new(0.5).build(model);
        let mut trainer =
            Trainer::new(&mirrored(2), build, sgd, SparseCategoricalCrossentropy, Metrics::new()).unwrap();
        let history = trainer.fit(&(x, y), Fit::epochs(3).batch_size(batch)).unwrap();
        let weights = trainer.model().variables()[0].components()[0].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        (history.of("loss").to_vec(), weights)
    };
    // Ten examples of five positions are trained as fifty of one.
    let sequences = fit(x.reshape((10, 5, 8)).unwrap(), y.reshape((10, 5)).unwrap(), 10);
    let rows = fit(x, y, EXAMPLES);
    assert!(sequences.0.iter().zip(&rows.0).all(|(a, b)| (a - b).abs() < 1e-6), "{sequences:?} {rows:?}");
    assert!(sequences.1.iter().zip(&rows.1).all(|(a, b)| (a - b).abs() < 1e-5), "{sequences:?} {rows:?}");
}

#[test]
fn epochs_of_so_many_steps_and_several_steps_at_once_change_nothing() {
    // Four steps per pass: six steps are a pass and a half.
    let fit = |steps: Option<u64>, epochs: u32, at_once: usize, dies: bool, folder: &Path| {
        let mut trainer = trainer(&mirrored(2));
        let fit =
            Fit::epochs(epochs).steps_per_execution(at_once).callback(BackupAndRestore::new(folder).keep_at_end());
        let fit = if let Some(steps) = steps { fit.steps_per_epoch(steps) } else { fit };
        let fit = if dies { fit.callback(Dies(1)) } else { fit };
        trainer.fit(&data(), fit).map(|history| (history, predictions(&trainer)))
    };
    let new = || tempfile::tempdir().unwrap();
    let (_, expected) = fit(None, 3, 1, false, new().path()).unwrap();
    for at_once in [1, 4, 5] {
        let (history, outputs) = fit(Some(6), 2, at_once, false, new().path()).unwrap();
        assert_eq!((history.epochs.len(), outputs), (2, expected.clone()), "{at_once} at once");
        let (history, outputs) = fit(None, 3, at_once, false, new().path()).unwrap();
        assert_eq!((history.epochs.len(), outputs), (3, expected.clone()), "{at_once} at once");
    }
    let folder = new();
    let forever = trainer(&mirrored(2)).fit(&data().repeat_forever(), Fit::epochs(2).steps_per_epoch(3)).unwrap();
    assert_eq!(forever.epochs.len(), 2);
    assert!(fit(Some(6), 2, 1, true, folder.path()).is_err());
    assert_eq!(fit(Some(6), 2, 1, false, folder.path()).unwrap().1, expected);
}

#[test]
fn without_a_batch_there_is_no_loss() {
    #[track_caller]
    fn assert_none<T: std::fmt::Debug>(result: Result<T, Error>) {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Train(distribute_train::Error::NoExamples { .. })), "{error}");
    }
    let rows = || Dataset::from_tensor_slices(examples());
    for none in [data().take(0), data().filter(|_| Ok(false)), rows().batch_exact(EXAMPLES + 1)] {
        let strategy = mirrored(2);
        let mut trainer = trainer(&strategy);
        assert_none(trainer.fit(&none, Fit::epochs(1)));
        assert_none(trainer.fit(&none, Fit::epochs(1).steps_per_epoch(3)));
        assert_none(trainer.fit(&data(), Fit::epochs(1).validation(&none)));
        assert_none(trainer.evaluate(&none));
    }
}

#[test]
fn a_later_call_of_fit_continues_with_the_next_pass() {
    let strategy = mirrored(2);
    let (mut once, mut twice) = (trainer(&strategy), trainer(&strategy));
    once.fit(&data(), Fit::epochs(3)).unwrap();
    twice.fit(&data(), Fit::epochs(2)).unwrap();
    twice.fit(&data(), Fit::epochs(1)).unwrap();
    assert_eq!(predictions(&once), predictions(&twice));
}

/// Records the mode that it was called in.
struct Modes(Linear);

impl ModuleT for Modes {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.0.forward(x)? * if train { 1.0 } else { 0.0 }
    }
}

#[test]
fn a_term_of_the_weights_counts_once_over_all_replicas() {
    let x = Tensor::zeros((6, 2), DType::F32, &Device::Cpu).unwrap();
    let data = Dataset::from_tensor_slices((x, Tensor::zeros((6, 1), DType::F32, &Device::Cpu).unwrap())).batch(4);
    for replicas in [1, 3] {
        let build = |vb: VarBuilder<'_>| {
            let weight = vb.get_with_hints((1, 2), "weight", candle_nn::Init::Const(2.0))?;
            Ok(Linear::new(weight, None))
        };
        let sgd = |model: &_| Sgd::new(0.1).build(model);
        let trainer = Trainer::new(&mirrored(replicas), build, sgd, MeanSquaredError, Metrics::new()).unwrap();
        let mut trainer = trainer.regularize(|layer| layer.weight().sqr()?.sum_all()? * 0.25);
        let history = trainer.fit(&data, Fit::epochs(1)).unwrap();
        // Of the examples there is no gradient, and of the term half the weight: two steps, whatever their examples.
        let weights = trainer.model().first().weight().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(weights.iter().all(|weight| (weight - 2.0 * 0.95 * 0.95).abs() < 1e-6), "{replicas}: {weights:?}");
        assert_eq!(history.of("loss"), [0.0], "the term is not reported");
    }
}

#[test]
fn layers_know_whether_they_are_trained() {
    let build = |vb: VarBuilder<'static>| Ok(Modes(linear(8, 3, vb.pp("fc"))?));
    let (adam, metrics) = (|m: &_| Adam::new(0.1).build(m), Metrics::new());
    let mut trainer = Trainer::new(&mirrored(2), build, adam, SparseCategoricalCrossentropy, metrics).unwrap();
    let history = trainer.fit(&examples(), Fit::epochs(3)).unwrap();
    assert!(history.last("loss").unwrap() < 3f64.ln() - 1e-3, "{history}");
    assert!((trainer.evaluate(&examples()).unwrap()[0].1 - 3f64.ln()).abs() < 1e-6);
    assert_eq!(trainer.predict(&examples().0).unwrap().dims(), [EXAMPLES, 3]);
}

#[test]
fn the_best_model_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer(&mirrored(2));
    // After the third epoch the metric only worsens.
    let rate = LearningRateSchedule::new(|epoch, rate| if epoch == 4 { 5.0 } else { rate });
    let best = ModelCheckpoint::new(folder.path()).best("val_loss");
    let fit = Fit::epochs(5).validation(&examples()).callback(rate).callback(best);
    let history = trainer.fit(&data(), fit).unwrap();
    assert!(history.of("val_loss")[2] < history.of("val_loss")[4], "{history}");
    let latest = std::fs::read_to_string(folder.path().join("latest")).unwrap();
    assert_eq!(latest.trim(), "step-00000012");
}

#[test]
fn callbacks_stop_and_set_the_learning_rate() {
    let mut trainer = trainer(&mirrored(2));
    let frozen = LearningRateSchedule::new(|epoch, rate| if epoch < 3 { rate } else { 0.0 });
    let stopping = EarlyStopping::new("loss").patience(1);
    let history = trainer.fit(&data(), Fit::epochs(50).callback(frozen).callback(stopping)).unwrap();
    // From the third epoch on nothing changes: the fourth is the first without improvement, up to rounding.
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
        Trainer::new(&strategy, build, |model| Adam::new(0.05).build(model), MeanSquaredError, metrics).unwrap();
    let history = trainer.fit(&data, Fit::epochs(40)).unwrap();
    assert!(history.last("mean_absolute_error").unwrap() < 0.05, "{history}");
    let none = Dataset::from_tensor_slices(examples().0).take(0).batch(4);
    assert!(trainer.predict(&none).unwrap_err().to_string().contains("no elements"));
}

#[test]
fn the_memory_of_a_replica_is_that_of_its_tensors() {
    let mut trainer = trainer(&mirrored(2));
    let bytes = 4 * ((8 * 16 + 16) + (16 * 3 + 3));
    let memory = trainer.optimizer().memory();
    assert_eq!((memory.parameter_bytes, memory.gradient_bytes), (bytes, None));
    trainer.fit(&data(), Fit::epochs(1)).unwrap();
    let memory = trainer.optimizer().memory();
    assert_eq!((memory.gradient_bytes, memory.state_bytes), (Some(bytes), Some(2 * bytes)));
    assert_eq!(memory.bucket_bytes.iter().sum::<usize>(), bytes);
}

#[test]
fn a_validation_after_every_second_epoch_trains_as_one_after_each() {
    let strategy = mirrored(2);
    let of = |every: u32| {
        let fit = Fit::epochs(5).validation(&data()).validation_every(every).callback(EarlyStopping::new("val_loss"));
        trainer(&strategy).fit(&data(), fit).unwrap()
    };
    let (each, second) = (of(1), of(2));
    assert_eq!(second.of("loss"), each.of("loss"));
    assert_eq!(second.of("val_loss"), [each.of("val_loss")[1], each.of("val_loss")[3]]);
}

#[test]
fn a_batch_size_for_data_that_are_batched_already_and_steps_of_no_validation_are_refused() {
    let strategy = mirrored(1);
    // The default size too, if it is set.
    for size in [8, 32] {
        let error = trainer(&strategy).fit(&data(), Fit::epochs(1).batch_size(size)).unwrap_err().to_string();
        assert!(error.contains(&format!("batch_size({size}) has no effect: a dataset has")), "{error}");
    }
    let error = trainer(&strategy).fit(&data(), Fit::epochs(1).validation_steps(2)).unwrap_err().to_string();
    assert!(error.contains("validation_steps(2) has no effect"), "{error}");
    let error = trainer(&strategy).fit(&data(), Fit::epochs(4).validation_every(2)).unwrap_err().to_string();
    assert!(error.contains("validation_every(2) has no effect"), "{error}");
    // It is for the training data; those of the validation have a size of their own.
    let fit = Fit::epochs(1).batch_size(8).validation(&data());
    trainer(&strategy).fit(&examples(), fit).unwrap();
}

#[test]
fn class_weights_are_for_targets_that_are_classes() {
    let strategy = mirrored(2);
    let (x, y) = examples();
    let fit = |targets: Tensor| {
        let loss = |outputs: &Tensor, targets: &Tensor| {
            SparseCategoricalCrossentropy.per_example(outputs, &targets.to_dtype(DType::U32)?)
        };
        let adam = |model: &_| Adam::new(0.02).build(model);
        let mut trainer = Trainer::new(&strategy, Mlp::new, adam, loss, Metrics::new())?;
        trainer.fit(&(x.clone(), targets), Fit::epochs(2).batch_size(16).class_weights([0.5, 2.0]))?;
        Ok::<_, Error>(predictions(&trainer))
    };
    // Classes that are floating-point numbers, as for a binary loss, are classes too.
    assert_eq!(fit(y.to_dtype(DType::F32).unwrap()).unwrap(), fit(y.clone()).unwrap());
    let half = (y.to_dtype(DType::F32).unwrap() + 0.5).unwrap();
    let negative = (y.to_dtype(DType::F32).unwrap() - 3.0).unwrap();
    for targets in [half, negative] {
        let error = fit(targets).unwrap_err().to_string();
        assert!(error.contains("class_weights are by class"), "{error}");
    }
}

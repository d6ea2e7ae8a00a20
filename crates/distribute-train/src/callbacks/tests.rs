use distribute_values::{Assignment, DistributedVariable, Host, HostTensor, TensorStorage, VariableOptions};

use super::*;
use crate::BoxError;

mod checkpoints;
mod learning_rate;
#[cfg(any(feature = "kubeflow", feature = "status"))]
pub(super) mod roles;
mod tables;

/// A training run of one variable that callbacks save and restore.
pub(super) struct Toy {
    pub(super) strategy: Strategy,
    weight: Weight,
    learning_rate: f64,
    stop: Option<String>,
    pub(super) epoch: u32,
    pub(super) epochs: u32,
    pub(super) steps_per_epoch: Option<u64>,
    pub(super) step: u64,
}

struct Weight(DistributedVariable<HostTensor>);

impl Weight {
    fn set(&self, strategy: &Strategy, value: f64) {
        let set = |context: distribute_values::CallContext<'_>| {
            self.0.assign(context, Assignment::Set, &HostTensor::new(&[2], vec![value, 1.0]).unwrap())
        };
        strategy.with_call_context(set).unwrap();
    }

    fn get(&self) -> f64 {
        self.0.components()[0].to_elements::<f64>().unwrap()[0]
    }
}

impl Checkpointed for Weight {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        snapshot.put::<Host, _>("model", self.0.name(), &self.0.save(&strategy.groups())?)?;
        Ok(())
    }

    fn load(&self, strategy: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        let saved = snapshot.get::<Host, _>("model", self.0.name(), &self.0.components()[0])?;
        self.0.restore(&strategy.groups(), &saved)?;
        Ok(())
    }
}

struct Saves<'a>(&'a Strategy, &'a Weight, u64);

impl Run for Saves<'_> {
    fn model(&self) -> &dyn Checkpointed {
        self.1
    }

    fn claim(&mut self, checkpoints: &mut CheckpointManager) -> Result<()> {
        checkpoints.claim(self.0).map(drop)
    }

    fn save(&mut self, checkpoints: &mut CheckpointManager) -> Result<()> {
        checkpoints.save(self.0, self.2, &[self.1], &())
    }

    fn restore(&mut self, checkpoints: &mut CheckpointManager) -> Result<Option<u64>> {
        Ok(checkpoints.restore::<()>(self.0, &[self.1])?.map(|(step, ())| step))
    }
}

impl Toy {
    pub(super) fn new() -> Toy {
        Toy::under(Strategy::default_strategy().unwrap())
    }

    pub(super) fn under(strategy: Strategy) -> Toy {
        let initial = HostTensor::new(&[2], vec![0.0, 1.0]).unwrap();
        let weight = Weight(strategy.variable("fc.weight", &initial, VariableOptions::default()).unwrap());
        Toy { strategy, weight, learning_rate: 1.0, stop: None, epoch: 0, epochs: 0, steps_per_epoch: Some(3), step: 0 }
    }

    /// Calls `look` with a state of the training.
    pub(super) fn show<R>(
        &mut self,
        values: &[(&str, f64)],
        look: impl FnOnce(&mut Training<'_>) -> Result<R>,
    ) -> Result<R> {
        let values: Vec<(String, f64)> = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let Toy { strategy, weight, learning_rate, stop, epoch, epochs, steps_per_epoch, step } = self;
        look(&mut Training {
            epoch: *epoch,
            epochs: *epochs,
            steps_per_epoch: *steps_per_epoch,
            step: *step,
            examples: *step * 10,
            values: &values,
            without_validation: false,
            without_training: false,
            learning_rate,
            stop,
            strategy,
            run: &mut Saves(strategy, weight, *step),
        })
    }

    /// Runs a callback through epochs of three steps with these losses until it ends the training; returns the number
    /// of epochs.
    pub(super) fn train(&mut self, callback: &mut dyn Callback, name: &str, values: &[f64]) -> u32 {
        self.epochs = self.epoch + values.len() as u32;
        self.show(&[], |training| callback.train_begin(training)).unwrap();
        for value in values {
            self.epoch += 1;
            self.show(&[], |training| callback.epoch_begin(training)).unwrap();
            for _ in 0..3 {
                self.step += 1;
                self.weight.set(&self.strategy, *value);
                self.show(&[("loss", *value)], |training| callback.step_end(training)).unwrap();
                self.show(&[("loss", *value)], |training| callback.save(training, Occasion::Step)).unwrap();
            }
            let values = [("loss", *value), (name, *value)];
            self.show(&values, |training| callback.epoch_end(training)).unwrap();
            self.show(&values, |training| callback.save(training, Occasion::Epoch)).unwrap();
            if self.stop.is_some() {
                break;
            }
        }
        self.show(&[], |training| callback.train_end(training)).unwrap();
        self.epoch
    }
}

#[test]
fn stopping_waits_as_long_as_its_patience() {
    let seen = |mut stopping: EarlyStopping, name: &str, values: &[f64]| {
        let mut toy = Toy::new();
        let epochs = toy.train(&mut stopping, name, values);
        toy.stop.map(|_| epochs)
    };
    // The epochs after which tf.keras stops, counted from 1.
    let stays = [1.0, 1.1, 1.1, 1.1, 1.1];
    for (patience, expected) in [(0, Some(2)), (1, Some(2)), (2, Some(3)), (3, Some(4)), (5, None)] {
        assert_eq!(seen(EarlyStopping::new("val_loss").patience(patience), "val_loss", &stays), expected, "{patience}");
    }
    let falling = EarlyStopping::new("val_loss").patience(2);
    assert_eq!(seen(falling.clone(), "val_loss", &[3.0, 2.0, 2.5, 1.0, 1.0, 1.0]), Some(6));
    assert_eq!(seen(falling, "val_loss", &[3.0, 2.0, 1.0, 0.5]), None);
    assert_eq!(seen(EarlyStopping::new("val_accuracy"), "val_accuracy", &[0.5, 0.6, 0.6]), Some(3));
    assert_eq!(seen(EarlyStopping::new("score").rises(false), "score", &[0.5, 0.6]), Some(2));
    assert_eq!(seen(EarlyStopping::new("val_loss").min_delta(0.5), "val_loss", &[3.0, 2.0, 1.9]), Some(3));
    assert_eq!(seen(EarlyStopping::new("val_loss"), "val_loss", &[f64::NAN, 1.0]), None);
    assert_eq!(seen(EarlyStopping::new("val_loss"), "val_loss", &[f64::NAN, f64::NAN]), Some(2));
    assert_eq!(seen(EarlyStopping::new("val_loss").start_from_epoch(2), "val_loss", &[1.0, 2.0, 2.0]), Some(3));
    assert_eq!(seen(EarlyStopping::new("val_loss").baseline(0.5), "val_loss", &[1.0, 0.9]), Some(2));
    let mut toy = Toy::new();
    toy.train(&mut EarlyStopping::new("val_loss"), "val_loss", &[1.0, 2.0]);
    assert_eq!(toy.stop.unwrap(), "val_loss has not got better than 1 for 1 epochs");
}

#[test]
fn stopping_goes_on_counting_after_a_restart_and_restores_the_best() {
    let mut toy = Toy::new();
    let mut before = EarlyStopping::new("val_loss").patience(3);
    toy.train(&mut before, "val_loss", &[1.0, 2.0, 2.0]);
    assert_eq!(toy.stop, None);
    let mut after = EarlyStopping::new("val_loss").patience(3);
    after.set_state(&Callback::state(&before));
    toy.train(&mut after, "val_loss", &[2.0, 2.0, 2.0]);
    assert_eq!((toy.stop.is_some(), toy.epoch), (true, 4));

    let mut toy = Toy::new();
    toy.train(&mut EarlyStopping::new("loss").patience(1).restore_best(), "loss", &[3.0, 2.0, 4.0, 5.0]);
    assert_eq!(toy.weight.get(), 2.0);

    // After a restart, the best since then is restored, though a better one was before.
    let mut toy = Toy::new();
    let new = || EarlyStopping::new("val_loss").patience(3).restore_best();
    let mut before = new();
    before.set_state(&serde_json::json!({ "monitor": "val_loss", "best": 0.3, "waited": 0 }));
    assert_eq!(toy.train(&mut before, "val_loss", &[0.4, 0.45, 0.6]), 3);
    assert_eq!((toy.stop.is_some(), toy.weight.get()), (true, 0.4));
}

#[test]
fn a_best_model_that_is_gone_with_a_restart_is_known_at_the_end() {
    let lost = |mut stopping: EarlyStopping, (best, waited): (f64, u32), values: &[f64]| {
        stopping.set_state(&serde_json::json!({ "monitor": "val_loss", "best": best, "waited": waited }));
        let mut toy = Toy::new();
        for value in values {
            toy.epoch += 1;
            toy.show(&[("val_loss", *value)], |training| stopping.epoch_end(training)).unwrap();
        }
        stopping.lost()
    };
    let new = || EarlyStopping::new("val_loss").patience(3).restore_best();
    assert_eq!(lost(new(), (0.3, 0), &[0.4, 0.35]), Some(0.3));
    // The epochs were over, and the last one was not the best, or was.
    assert_eq!(lost(new(), (0.3, 1), &[]), Some(0.3));
    assert_eq!(lost(new(), (0.3, 0), &[]), None);
    assert_eq!(lost(new(), (0.3, 0), &[0.4, 0.2]), None);
    assert_eq!(lost(EarlyStopping::new("val_loss").patience(3), (0.3, 0), &[0.4]), None);
    // No epoch has passed the baseline.
    assert_eq!(lost(new().baseline(0.1), (0.1, 1), &[0.4]), None);
}

#[test]
fn numbers_that_a_callback_cannot_use_are_refused_before_the_first_step() {
    let plateau = || ReduceLrOnPlateau::new("loss");
    let stopping = || EarlyStopping::new("loss");
    let wrong: [(&mut dyn Callback, &str); 8] = [
        (&mut plateau().factor(1.0), "ReduceLrOnPlateau: factor is 1; give a number from 0 to less than 1"),
        (&mut plateau().factor(10.0), "factor is 10;"),
        (&mut plateau().factor(-0.1), "factor is -0.1;"),
        (&mut plateau().factor(f64::NAN), "factor is NaN;"),
        (&mut plateau().min_learning_rate(f64::NAN), "min_learning_rate is NaN; give 0 or more"),
        (&mut plateau().min_learning_rate(-1.0), "min_learning_rate is -1;"),
        (&mut plateau().min_delta(f64::NAN), "ReduceLrOnPlateau: min_delta is NaN;"),
        (&mut stopping().baseline(f64::NAN), "EarlyStopping: baseline is NaN;"),
    ];
    for (callback, words) in wrong {
        let error = Toy::new().show(&[], |training| callback.train_begin(training)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    Toy::new().show(&[], |training| plateau().factor(0.0).train_begin(training)).unwrap();
}

#[test]
fn a_name_that_does_not_tell_whether_it_should_rise_is_refused_until_the_program_does() {
    let folder = tempfile::tempdir().unwrap();
    let best = |name: &str| ModelCheckpoint::new(folder.path()).best(name);
    let unknown: [&mut dyn Callback; 3] =
        [&mut best("val_score"), &mut EarlyStopping::new("score"), &mut ReduceLrOnPlateau::new("val_score")];
    for callback in unknown {
        let error = Toy::new().show(&[], |training| callback.train_begin(training)).unwrap_err();
        assert!(matches!(error, Error::Direction { .. }) && error.to_string().contains("rises(true)"), "{error}");
    }
    for name in ["val_loss", "loss", "val_mean_squared_error", "val_accuracy", "top_3_accuracy", "auc", "val_f1"] {
        Toy::new().show(&[], |training| best(name).train_begin(training)).unwrap();
    }
    let values = [0.9, 0.5, 0.7, 1.2];
    for (rises, expected) in [(false, "step-00000006"), (true, "step-00000012")] {
        let set = || ModelCheckpoint::new(folder.path()).set_aside_other_runs();
        for mut checkpoint in [set().best("val_score").rises(rises), set().rises(rises).best("val_score")] {
            Toy::new().train(&mut checkpoint, "val_score", &values);
            let names: Vec<String> = kept(folder.path()).into_iter().filter(|name| name.starts_with("step-")).collect();
            assert_eq!(names, [expected], "{rises}");
        }
    }
    for (rises, expected) in [(false, 0.5), (true, 1.0)] {
        let mut toy = Toy::new();
        let mut plateau = ReduceLrOnPlateau::new("val_score").rises(rises).patience(2).factor(0.5);
        toy.train(&mut plateau, "val_score", &[1.0, 1.1, 1.2]);
        assert_eq!(toy.learning_rate, expected, "{rises}");
    }
    let error = Toy::new().show(&[], |training| ModelCheckpoint::new("never").rises(true).train_begin(training));
    assert!(matches!(error, Err(Error::WithoutEffect { setting: "rises", .. })), "{error:?}");
}

#[test]
fn an_epoch_whose_values_of_training_are_lost_does_not_count() {
    let mut toy = Toy::new();
    toy.epoch = 2;
    let callbacks: [&mut dyn Callback; 4] = [
        &mut EarlyStopping::new("loss").baseline(0.5),
        &mut ReduceLrOnPlateau::new("accuracy").patience(0),
        &mut ModelCheckpoint::new("never").best("loss"),
        &mut TerminateOnNan::default(),
    ];
    for callback in callbacks {
        let saved = toy.show(&[("val_loss", 1.0)], |training| {
            training.without_training = true;
            callback.epoch_end(training)?;
            callback.save(training, Occasion::Epoch)
        });
        assert!(!saved.unwrap());
    }
    assert!(toy.stop.is_none() && toy.learning_rate == 1.0);
}

#[test]
fn numbers_survive_json_to_the_last_bit() {
    // Without `float_roundtrip`, serde_json is off by one in the last place for some.
    let rates = [0.05 * 0.9f64.powi(7), 1e-3 / 3.0, 5e-324, f64::MAX, 2.2250738585072014e-308];
    let many = (1..2000u64).map(|n| f64::from_bits(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 2)).chain(rates);
    for rate in many.filter(|rate| rate.is_finite()) {
        let read: f64 = serde_json::from_str(&serde_json::to_string(&rate).unwrap()).unwrap();
        assert_eq!(read.to_bits(), rate.to_bits(), "{rate:e}");
    }
}

#[test]
fn the_state_of_another_callback_is_ignored() {
    // The rate that was kept is not the number of an epoch.
    let (mut toy, mut scale) = (Toy::new(), ScaleByReplicas::new().warm_up(4));
    let mut schedule = LearningRateSchedule::new(|_, rate| rate / 2.0);
    toy.train(&mut schedule, "x", &[1.0, 1.0, 1.0]);
    scale.set_state(&schedule.state());
    toy.show(&[], |training| scale.epoch_begin(training)).unwrap();
    assert_eq!(toy.learning_rate, 0.125);
    // The best accuracy is not the best loss.
    let mut accuracy = EarlyStopping::new("val_accuracy");
    toy.train(&mut accuracy, "val_accuracy", &[0.9]);
    let others: [&mut dyn Callback; 3] = [
        &mut EarlyStopping::new("val_loss"),
        &mut ReduceLrOnPlateau::new("val_accuracy"),
        &mut ModelCheckpoint::new("never").best("val_accuracy"),
    ];
    for other in others {
        let before = other.state();
        other.set_state(&accuracy.state());
        assert_eq!(other.state(), before);
    }
    let mut same = EarlyStopping::new("val_accuracy");
    same.set_state(&accuracy.state());
    assert_eq!(same.state(), accuracy.state());
}

#[test]
fn states_of_earlier_versions_are_read() {
    let (mut toy, mut schedule) = (Toy::new(), LearningRateSchedule::new(|_, rate| rate / 2.0));
    schedule.set_state(&serde_json::json!(3));
    toy.epoch = 3;
    toy.show(&[], |training| schedule.epoch_begin(training)).unwrap();
    assert_eq!(toy.learning_rate, 1.0);
    let seen = serde_json::json!({ "best": 0.5, "waited": 2 });
    let mut stopping = EarlyStopping::new("val_loss").patience(2);
    stopping.set_state(&seen);
    toy.show(&[("val_loss", 0.75)], |training| stopping.epoch_end(training)).unwrap();
    assert!(toy.stop.is_some());
    let folder = tempfile::tempdir().unwrap();
    let mut best = ModelCheckpoint::new(folder.path()).best("val_loss");
    best.set_state(&serde_json::json!({ "watch": seen, "is_best": false }));
    for (value, saves) in [(0.75, false), (0.25, true)] {
        let saved = toy.show(&[("val_loss", value)], |training| {
            best.epoch_begin(training)?;
            best.epoch_end(training)?;
            best.save(training, Occasion::Epoch)
        });
        assert_eq!(saved.unwrap(), saves);
    }
    // One whose warm-up was over leaves the rate as it is, and one within it continues.
    for (step, rate) in [(20, 0.5), (2, 1.0)] {
        let mut scale = ScaleByReplicas::new().warm_up(10);
        scale.set_state(&serde_json::json!(1.0));
        (toy.step, toy.learning_rate) = (step, 0.5);
        toy.show(&[], |training| scale.epoch_begin(training)).unwrap();
        assert_eq!(toy.learning_rate, rate);
    }
}

#[test]
fn a_loss_that_is_no_number_ends_the_training_and_names_the_variables() {
    let mut toy = Toy::new();
    assert_eq!(toy.train(&mut TerminateOnNan::default(), "x", &[1.0, f64::NAN, 1.0]), 2);
    assert_eq!(toy.stop.unwrap(), "the loss is NaN after step 4; not finite are fc.weight (1 of 2)");
}

#[test]
fn a_name_that_is_not_there_is_a_sentence() {
    let mut toy = Toy::new();
    let values = [("loss", 1.0), ("accuracy", 0.5)];
    let mut stopping = EarlyStopping::new("val_loss");
    let text = toy.show(&values, |training| stopping.epoch_end(training)).unwrap_err().to_string();
    assert!(text.contains("\"val_loss\"") && text.contains("loss, accuracy"), "{text}");
}

/// Returns the steps of the checkpoints in a folder.
fn kept(folder: &std::path::Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.sort();
    names
}

#[test]
fn an_epoch_without_validation_does_not_count() {
    let mut toy = Toy::new();
    let (mut stopping, mut plateau) = (EarlyStopping::new("val_loss"), ReduceLrOnPlateau::new("val_loss").patience(0));
    for (epoch, value) in [(1, None), (2, Some(1.0)), (3, None), (4, Some(1.0))] {
        toy.epoch = epoch;
        let values: Vec<(&str, f64)> = value.map(|value| ("val_loss", value)).into_iter().collect();
        for callback in [&mut stopping as &mut dyn Callback, &mut plateau] {
            let end = |training: &mut Training<'_>| {
                training.without_validation = value.is_none();
                callback.epoch_end(training)
            };
            toy.show(&values, end).unwrap();
        }
        assert_eq!((toy.stop.is_some(), toy.learning_rate < 1.0), (epoch == 4, epoch == 4), "epoch {epoch}");
    }
    let unknown = toy.show(&[("loss", 1.0)], |training| {
        training.without_validation = true;
        EarlyStopping::new("accuracy").epoch_end(training)
    });
    assert!(unknown.unwrap_err().to_string().contains("accuracy"));
}

#[cfg(all(feature = "tensorboard", feature = "object-store"))]
#[test]
fn event_files_in_a_store_are_whole_when_the_training_ends() {
    let folder = distribute_storage::Location::open("memory://boards/run").unwrap();
    let mut board = TensorBoard::new(folder.url());
    Toy::new().train(&mut board, "val_loss", &[1.0, 0.5]);
    // The callback still exists: the end of the training has closed them.
    let files = folder.list_below().unwrap();
    assert_eq!(files.len(), 2);
    let bytes = folder.join(&files[0].name).read(1 << 20).unwrap();
    assert_eq!(bytes.windows(10).filter(|window| *window == b"epoch_loss").count(), 2);
    drop(board);
}

#[cfg(feature = "tensorboard")]
#[test]
fn event_files_have_epochs_steps_and_histograms() {
    let folder = tempfile::tempdir().unwrap();
    let mut board = TensorBoard::new(folder.path()).histograms(1).every_steps(2);
    Toy::new().train(&mut board, "val_loss", &[1.0, 0.5]);
    let bytes = |run: &str| -> Vec<u8> {
        let files = std::fs::read_dir(folder.path().join(run)).unwrap();
        files.flat_map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
    };
    let has = |run: &str, tag: &str| bytes(run).windows(tag.len()).any(|window| window == tag.as_bytes());
    for tag in ["epoch_loss", "batch_loss", "batch_examples_per_second", "epoch_learning_rate", "fc.weight"] {
        assert!(has("train", tag), "{tag}");
    }
    assert!(has("validation", "epoch_loss") && !has("validation", "fc.weight"));
}

#[cfg(feature = "tensorboard")]
#[test]
fn the_rate_of_an_epoch_is_that_of_its_steps() {
    let folder = tempfile::tempdir().unwrap();
    let (mut toy, mut board) = (Toy::new(), TensorBoard::new(folder.path()));
    toy.epoch = 1;
    toy.show(&[], |training| board.epoch_begin(training)).unwrap();
    toy.step = 100;
    toy.show(&[("loss", 1.0)], |training| board.step_end(training)).unwrap();
    // The validation.
    std::thread::sleep(std::time::Duration::from_millis(500));
    toy.show(&[("loss", 1.0)], |training| board.epoch_end(training)).unwrap();
    let files = std::fs::read_dir(folder.path().join("train")).unwrap();
    let bytes: Vec<u8> = files.flat_map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    let tag = b"epoch_examples_per_second";
    let at = bytes.windows(tag.len()).position(|window| window == tag).unwrap() + tag.len();
    // The value follows as a fixed32 of field 2.
    assert_eq!(bytes[at], 0x15);
    let rate = f32::from_le_bytes(bytes[at + 1..at + 5].try_into().unwrap());
    assert!(rate > 4000.0, "{rate}");
}

#[cfg(feature = "tensorboard")]
#[test]
fn event_files_have_steps_when_several_are_run_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (mut toy, mut board) = (Toy::new(), TensorBoard::new(folder.path()).every_steps(50));
    for step in (8..=104).step_by(8) {
        toy.step = step;
        toy.show(&[("loss", 1.0)], |training| board.step_end(training)).unwrap();
    }
    toy.show(&[], |training| board.train_end(training)).unwrap();
    let files = std::fs::read_dir(folder.path().join("train")).unwrap();
    let bytes: Vec<u8> = files.flat_map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    // After steps 56 and 104.
    assert_eq!(bytes.windows(10).filter(|window| *window == b"batch_loss").count(), 2);
}

#[cfg(feature = "prometheus")]
#[test]
fn prometheus_fetches_the_numbers() {
    use std::io::{Read, Write};
    let mut endpoint = Prometheus::serve("127.0.0.1:0").unwrap();
    let address = endpoint.address();
    let mut toy = Toy::new();
    toy.train(&mut endpoint, "val_loss", &[0.5]);
    let fetch = |path: &str| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let text = fetch("/metrics");
    assert!(text.starts_with("HTTP/1.1 200 OK"), "{text}");
    for line in [
        "distribute_training_epoch 1",
        "distribute_training_steps_total 3",
        "distribute_training_examples_total 30",
        "distribute_training_value{name=\"val_loss\"} 0.5",
    ] {
        assert!(text.lines().any(|known| known == line), "{line}: {text}");
    }
    assert!(fetch("/").starts_with("HTTP/1.1 404"));
    drop(endpoint);
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[cfg(feature = "status")]
#[test]
fn a_status_page_shows_the_training() {
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};
    let mut page = StatusPage::serve("127.0.0.1:0").unwrap();
    let address = page.address();
    let mut toy = Toy::new();
    toy.train(&mut page, "val_loss", &[0.5]);
    let fetch = || {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        write!(stream, "GET /status.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        serde_json::from_str::<serde_json::Value>(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    let view = loop {
        // The steps are reported within a second.
        let view = fetch();
        if view["job"]["step"].as_u64() == Some(3) {
            break view;
        }
        assert!(Instant::now() < deadline, "{view:#}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!((&view["tasks"][0]["task"], &view["job"]["epoch"]), (&"worker:0".into(), &1.into()), "{view:#}");
    let metrics = serde_json::json!([{"name": "loss", "value": 0.5}, {"name": "val_loss", "value": 0.5}]);
    assert_eq!(view["job"]["metrics"], metrics);
    drop(page);
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn an_optional_callback_does_what_it_holds_and_keeps_its_place() {
    let mut toy = Toy::new();
    let mut none: Option<EarlyStopping> = None;
    assert_eq!(toy.train(&mut none, "val_loss", &[1.0, 2.0, 2.0]), 3);
    assert!(toy.stop.is_none() && none.state().is_null());
    let mut some = Some(EarlyStopping::new("val_loss").patience(5));
    toy.train(&mut some, "val_loss", &[1.0, 2.0, 2.0]);
    let state = some.as_ref().unwrap().state();
    assert_eq!((some.state(), state.is_null()), (state.clone(), false));
    none.set_state(&state);
    let mut resumed = Some(EarlyStopping::new("val_loss"));
    resumed.set_state(&state);
    assert_eq!(resumed.state(), state);
    let folder = tempfile::tempdir().unwrap();
    let mut saves = Some(ModelCheckpoint::new(folder.path()));
    let saved = toy.show(&[("loss", 1.0)], |training| {
        saves.train_begin(training)?;
        saves.save(training, Occasion::Epoch)
    });
    assert!(saved.unwrap() && std::fs::read_dir(folder.path()).unwrap().count() > 0);
    assert!(!toy.show(&[], |training| none.save(training, Occasion::Epoch)).unwrap());
}

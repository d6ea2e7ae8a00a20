//! Promises of trainers.

use distribute::backend::Trainee;
use distribute::device::DType;
use distribute::optim::{Adam, Sgd};
use distribute::prelude::Strategy;
use distribute::strategy::Request;
use distribute::train;
use distribute::train::callbacks::{BackupAndRestore, Callback, Occasion, Training};
use distribute::train::history::History;
use distribute::train::metrics::{Accuracy, CrossEntropy, Metrics};
use distribute::train::preemption::TerminationConfig;
use distribute::train::trainer::Fit;
use distribute_testkit::apart;

use super::models::{TOLERANCE, audit, parameters};
use crate::check::{Stop, check, check_eq};
use crate::library::{Batch, Build, Kind, Library};

fn trainer<L: Library>(strategy: &Strategy) -> Result<L::Trainer, Stop> {
    trainer_of::<L>(strategy, Kind::Dense, |model| Adam::new(0.01).build(model))
}

fn trainer_of<L: Library>(strategy: &Strategy, kind: Kind, build: Build<L>) -> Result<L::Trainer, Stop> {
    let metrics = Metrics::new().with(Accuracy).with(CrossEntropy);
    Ok(L::trainer(strategy, L::model(strategy, kind, 5, DType::F32)?, build, metrics)?)
}

/// Returns 23 examples in batches of 8: three steps per pass, the last with 7 examples.
fn data<L: Library>() -> Result<L::Data, Stop> {
    Ok(L::data(&Batch::new(0, 23), 8, true)?)
}

fn compare(history: &History, expected: &History) -> Result<(), Stop> {
    check_eq!(history.epochs.len(), expected.epochs.len(), "epochs");
    for ((_, got), (_, expected)) in history.epochs.iter().zip(&expected.epochs) {
        compare_scores(got, expected)?;
    }
    Ok(())
}

fn compare_scores(got: &[(String, f64)], expected: &[(String, f64)]) -> Result<(), Stop> {
    check_eq!(got.len(), expected.len(), "the number of scores");
    for ((name, a), (_, b)) in got.iter().zip(expected) {
        check!((a - b).abs() < 1e-4, "{name} is {a}, and {b} with one replica");
    }
    Ok(())
}

/// The results of a training run, of its evaluation and of predictions.
struct Outcome {
    history: History,
    scores: Vec<(String, f64)>,
    outputs: Vec<f32>,
    parameters: Vec<f32>,
}

impl Outcome {
    fn of<L: Library>(
        strategy: &Strategy,
        mut trainer: L::Trainer,
        (data, epochs): (&L::Data, u32),
        (examples, batch): (&Batch, usize),
    ) -> Result<Outcome, Stop> {
        let history = L::fit(&mut trainer, data, Fit::epochs(epochs).validation(data))?;
        let outputs = L::predict(&trainer, examples, batch)?;
        let parameters = parameters::<L>(strategy, L::trained(&trainer), 0)?;
        Ok(Outcome { history, outputs, parameters, scores: L::evaluate(&trainer, data)? })
    }

    fn compare(&self, expected: &Outcome) -> Result<(), Stop> {
        compare(&self.history, &expected.history)?;
        check_eq!(self.outputs.len(), expected.outputs.len(), "predictions");
        let of_outputs = apart(&self.outputs, &expected.outputs);
        check!(of_outputs < 1e-4, "predictions are {of_outputs:e} apart");
        compare_scores(&self.scores, &expected.scores)
    }
}

pub(crate) fn fitted<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let data = data::<L>()?;
    let fit =
        |strategy: &Strategy| Outcome::of::<L>(strategy, trainer::<L>(strategy)?, (&data, 4), (&Batch::new(0, 23), 6));
    fit(strategy)?.compare(&fit(&Strategy::default_strategy()?)?)
}

pub(crate) fn reshaped<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    // Batches of eight, eight and one: in the last one, all replicas but one have no examples.
    let examples = Batch::new(0, 17);
    let data = L::data(&examples, 8, false)?;
    let fit = |strategy: &Strategy| {
        let trainer = trainer_of::<L>(strategy, Kind::Reshaped, |model| Sgd::new(0.1).build(model))?;
        Outcome::of::<L>(strategy, trainer, (&data, 3), (&examples, 8))
    };
    let (got, expected) = (fit(strategy)?, fit(&Strategy::default_strategy()?)?);
    got.compare(&expected)?;
    let apart = apart(&got.parameters, &expected.parameters);
    check!(apart < TOLERANCE, "parameters are {apart:e} apart");
    Ok(())
}

pub(crate) fn weighted<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let examples = Batch::new(0, 23);
    let weights: Vec<f32> = (0..23).map(|example| (example % 4) as f32).collect();
    let fit = |strategy: &Strategy| -> Result<History, Stop> {
        let fit = Fit::epochs(4).batch_size(8).steps_per_epoch(4).steps_per_execution(2).class_weights([0.5, 2.0]);
        Ok(L::fit_weighted(&mut trainer::<L>(strategy)?, &examples, &weights, fit)?)
    };
    compare(&fit(strategy)?, &fit(&Strategy::default_strategy()?)?)
}

/// Returns whether this is the last worker, whose action the others learn of.
fn is_last(strategy: &Strategy) -> bool {
    strategy.topology().worker() + 1 == strategy.topology().workers()
}

/// Calls a function on the last worker after a step.
struct AtStep(u64, fn(&mut Training<'_>) -> train::Result<()>);

impl Callback for AtStep {
    fn step_end(&mut self, training: &mut Training<'_>) -> train::Result<()> {
        if training.step == self.0 && is_last(training.strategy) { (self.1)(training) } else { Ok(()) }
    }
}

pub(crate) fn stopped<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let ends = |training: &mut Training<'_>| {
        *training.stop = Some("it has seen enough".to_owned());
        Ok(())
    };
    // After a step in the second epoch; and after an epoch's last step, whose request the next step would carry.
    for step in [4, 6] {
        let mut trainer = trainer::<L>(strategy)?;
        let history = L::fit(&mut trainer, &data::<L>()?, Fit::epochs(9).callback(AtStep(step, ends)))?;
        check_eq!(history.epochs.len(), 2, "epochs");
        audit::<L>(strategy, L::trained(&trainer))?;
        // A request to one training does not affect another.
        check_eq!(L::fit(&mut trainer, &data::<L>()?, Fit::epochs(2))?.epochs.len(), 2, "epochs of the next training");
    }
    Ok(())
}

/// Decides by information of this worker only.
struct Decides;

impl Callback for Decides {
    fn epoch_end(&mut self, training: &mut Training<'_>) -> train::Result<()> {
        *training.learning_rate = if training.is_chief() { 0.02 } else { 0.5 };
        if training.epoch == 3 && is_last(training.strategy) {
            *training.stop = Some("its time is over".to_owned());
        }
        Ok(())
    }
}

pub(crate) fn decided<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let mut trainer = trainer::<L>(strategy)?;
    let history = L::fit(&mut trainer, &data::<L>()?, Fit::epochs(9).callback(Decides))?;
    check_eq!(history.epochs.len(), 3, "epochs");
    check_eq!(trainer.learning_rate(), 0.02, "the learning rate");
    Ok(audit::<L>(strategy, L::trained(&trainer))?)
}

pub(crate) fn backed_up<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    // Each worker has a folder of its own; only the chief's is used.
    let folder = tempfile::tempdir()?;
    let mut first = trainer::<L>(strategy)?;
    let backup = || BackupAndRestore::new(folder.path().join("backup")).every_steps(2);
    L::fit(&mut first, &data::<L>()?, Fit::epochs(2).callback(backup().keep_at_end()))?;
    check_eq!(folder.path().join("backup").exists(), strategy.is_chief(), "files of this worker");
    let mut second = trainer::<L>(strategy)?;
    let history = L::fit(&mut second, &data::<L>()?, Fit::epochs(4).callback(backup()))?;
    check_eq!(history.epochs.len(), 4, "epochs");
    check!(!folder.path().join("backup").exists(), "the backup stays after the end");
    let mut calm = trainer::<L>(strategy)?;
    compare(&history, &L::fit(&mut calm, &data::<L>()?, Fit::epochs(4))?)?;
    check_eq!(
        parameters::<L>(strategy, L::trained(&second), 0)?,
        parameters::<L>(strategy, L::trained(&calm), 0)?,
        "parameters"
    );
    Ok(())
}

/// Records when it may save.
struct Notes(std::sync::Arc<parking_lot::Mutex<Vec<(u64, Occasion)>>>);

impl Callback for Notes {
    fn save(&mut self, training: &mut Training<'_>, occasion: Occasion) -> train::Result<bool> {
        if matches!(occasion, Occasion::Notice | Occasion::Leaving) {
            self.0.lock().push((training.step, occasion));
        }
        Ok(true)
    }
}

pub(crate) fn asked<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let save = |training: &mut Training<'_>| {
        training.strategy.request(Request::Save);
        Ok(())
    };
    let leave = |training: &mut Training<'_>| {
        training.strategy.request(Request::Leave);
        Ok(())
    };
    let notes = std::sync::Arc::default();
    let fit = Fit::epochs(9)
        .callback(AtStep(1, save))
        .callback(AtStep(4, leave))
        .callback(Notes(std::sync::Arc::clone(&notes)))
        .stop_on(TerminationConfig::default());
    let error = L::fit(&mut trainer::<L>(strategy)?, &data::<L>()?, fit).err();
    let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
    check!(text.starts_with("stopped after step 5"), "fit ends with {text:?}");
    check_eq!(error.map(|error| error.exit_code()), Some(143), "exit code");
    let notes = notes.lock().clone();
    check_eq!(notes, [(2, Occasion::Notice), (5, Occasion::Leaving)], "when it may save");
    Ok(())
}

pub(crate) fn failed<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let fails = |_: &mut Training<'_>| Err(train::Error::Chief("the roof is leaking".to_owned()));
    let error = L::fit(&mut trainer::<L>(strategy)?, &data::<L>()?, Fit::epochs(9).callback(AtStep(4, fails))).err();
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    check!(text.contains("the roof is leaking"), "fit ends with {text:?}");
    let last = strategy.topology().workers() - 1;
    check!(is_last(strategy) || text.contains(&format!("worker {last} failed")), "fit ends with {text:?}");
    Ok(())
}

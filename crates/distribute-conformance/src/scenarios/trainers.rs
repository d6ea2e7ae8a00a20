//! Promises of trainers.

use candle_core::{Device, Tensor};
use candle_nn::ModuleT;
use distribute::Error;
use distribute::candle::{Fit, SparseCategoricalCrossentropy};
use distribute::prelude::*;
use distribute::strategy::Request;
use distribute::train;
use distribute::train::callbacks::{BackupAndRestore, Callback, Occasion, Training};
use distribute::train::history::History;
use distribute::train::metrics::{Accuracy, CrossEntropy, Metrics};
use distribute::train::preemption::TerminationConfig;

use super::models::{Kind, Net, batch, parameters};
use super::optimizers::apart;
use crate::check::{Stop, check, check_eq};

fn trainer(strategy: &Strategy) -> Result<Trainer<Net>, Stop> {
    let metrics = Metrics::new().with(Accuracy).with(CrossEntropy);
    let model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
    let adam = |model: &_| Adam::new(0.01).build(model);
    Ok(Trainer::of_model(strategy, model, adam, SparseCategoricalCrossentropy, metrics)?)
}

/// Returns 23 examples in batches of 8: three steps per pass, the last with 7 examples.
fn data() -> Result<Dataset<(Tensor, Tensor)>, Stop> {
    Ok(Dataset::from_tensor_slices(batch(0, 23)?).shuffle(23, 3).batch(8))
}

fn compare(history: &History, expected: &History) -> Result<(), Stop> {
    check_eq!(history.epochs.len(), expected.epochs.len(), "epochs");
    for ((_, got), (_, expected)) in history.epochs.iter().zip(&expected.epochs) {
        for ((name, a), (_, b)) in got.iter().zip(expected) {
            check!((a - b).abs() < 1e-4, "{name} is {a}, and {b} with one replica");
        }
    }
    Ok(())
}

pub(crate) fn fitted(strategy: &Strategy) -> Result<(), Stop> {
    let (x, data) = (batch(0, 23)?.0, data()?);
    type Outcome = (History, Vec<f32>, Vec<(String, f64)>);
    let fit = |strategy: &Strategy| -> Result<Outcome, Stop> {
        let mut trainer = trainer(strategy)?;
        let history = trainer.fit(&data, Fit::epochs(4).validation(&data))?;
        let outputs = trainer.predict(&Dataset::from_tensor_slices(x.clone()).batch(6))?;
        Ok((history, outputs.flatten_all()?.to_vec1()?, trainer.evaluate(&data)?))
    };
    let (history, outputs, scores) = fit(strategy)?;
    let (expected, expected_outputs, expected_scores) = fit(&Strategy::default_strategy()?)?;
    compare(&history, &expected)?;
    check_eq!(outputs.len(), expected_outputs.len(), "predictions");
    let apart = apart(&outputs, &expected_outputs);
    check!(apart < 1e-4, "predictions are {apart:e} apart");
    for ((name, a), (_, b)) in scores.iter().zip(&expected_scores) {
        check!((a - b).abs() < 1e-4, "{name} is {a}, and {b} with one replica");
    }
    Ok(())
}

/// A layer that fails for batches without rows: the size of the last dimension cannot be inferred from a tensor without
/// elements.
struct Reshaped(Net);

impl ModuleT for Reshaped {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let rows = x.dim(0)?;
        self.0.forward_t(&x.reshape((rows, 1, ()))?.max(1)?, train)
    }
}

pub(crate) fn reshaped(strategy: &Strategy) -> Result<(), Stop> {
    // Batches of eight, eight and one: in the last one, all replicas but one have no examples.
    let (x, y) = batch(0, 17)?;
    let data = Dataset::from_tensor_slices((x.clone(), y)).batch(8);
    type Outcome = (History, Vec<f32>, Vec<f32>, Vec<(String, f64)>);
    let fit = |strategy: &Strategy| -> Result<Outcome, Stop> {
        let model = strategy.scope_seeded(5, |vb| Ok(Reshaped(Net::new(Kind::Dense, &vb)?)))?;
        let sgd = |model: &_| Sgd::new(0.1).build(model);
        let metrics = Metrics::new().with(Accuracy);
        let mut trainer = Trainer::of_model(strategy, model, sgd, SparseCategoricalCrossentropy, metrics)?;
        let history = trainer.fit(&data, Fit::epochs(3).validation(&data))?;
        let outputs = trainer.predict(&Dataset::from_tensor_slices(x.clone()).batch(8))?.flatten_all()?.to_vec1()?;
        Ok((history, outputs, parameters(trainer.model(), 0)?, trainer.evaluate(&data)?))
    };
    let (history, outputs, got, scores) = fit(strategy)?;
    let (expected, expected_outputs, expected_parameters, expected_scores) = fit(&Strategy::default_strategy()?)?;
    compare(&history, &expected)?;
    check_eq!(outputs.len(), expected_outputs.len(), "predictions");
    let (of_outputs, of_parameters) = (apart(&outputs, &expected_outputs), apart(&got, &expected_parameters));
    check!(of_outputs < 1e-4, "predictions are {of_outputs:e} apart");
    check!(of_parameters < 4e-5, "parameters are {of_parameters:e} apart");
    for ((name, a), (_, b)) in scores.iter().zip(&expected_scores) {
        check!((a - b).abs() < 1e-4, "{name} is {a}, and {b} with one replica");
    }
    Ok(())
}

pub(crate) fn weighted(strategy: &Strategy) -> Result<(), Stop> {
    let (x, y) = batch(0, 23)?;
    let weights = Tensor::from_iter((0..23).map(|example| (example % 4) as f32), &Device::Cpu)?;
    let fit = |strategy: &Strategy| -> Result<History, Stop> {
        let fit = Fit::epochs(4).batch_size(8).steps_per_epoch(4).steps_per_execution(2).class_weights([0.5, 2.0]);
        Ok(trainer(strategy)?.fit(&(x.clone(), y.clone(), weights.clone()), fit)?)
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

pub(crate) fn stopped(strategy: &Strategy) -> Result<(), Stop> {
    let ends = |training: &mut Training<'_>| {
        *training.stop = Some("it has seen enough".to_owned());
        Ok(())
    };
    // After a step in the second epoch; and after an epoch's last step, whose request the next step would carry.
    for step in [4, 6] {
        let mut trainer = trainer(strategy)?;
        let history = trainer.fit(&data()?, Fit::epochs(9).callback(AtStep(step, ends)))?;
        check_eq!(history.epochs.len(), 2, "epochs");
        trainer.model().audit(strategy)?;
        // A request to one training does not affect another.
        check_eq!(trainer.fit(&data()?, Fit::epochs(2))?.epochs.len(), 2, "epochs of the next training");
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

pub(crate) fn decided(strategy: &Strategy) -> Result<(), Stop> {
    let mut trainer = trainer(strategy)?;
    let history = trainer.fit(&data()?, Fit::epochs(9).callback(Decides))?;
    check_eq!(history.epochs.len(), 3, "epochs");
    check_eq!(trainer.optimizer().learning_rate(), 0.02, "the learning rate");
    Ok(trainer.model().audit(strategy)?)
}

pub(crate) fn backed_up(strategy: &Strategy) -> Result<(), Stop> {
    // Each worker has a folder of its own; only the chief's is used.
    let folder = tempfile::tempdir()?;
    let mut first = trainer(strategy)?;
    let backup = || BackupAndRestore::new(folder.path().join("backup")).every_steps(2);
    first.fit(&data()?, Fit::epochs(2).callback(backup().keep_at_end()))?;
    check_eq!(folder.path().join("backup").exists(), strategy.is_chief(), "files of this worker");
    let mut second = trainer(strategy)?;
    let history = second.fit(&data()?, Fit::epochs(4).callback(backup()))?;
    check_eq!(history.epochs.len(), 4, "epochs");
    check!(!folder.path().join("backup").exists(), "the backup stays after the end");
    let mut calm = trainer(strategy)?;
    compare(&history, &calm.fit(&data()?, Fit::epochs(4))?)?;
    check_eq!(parameters(second.model(), 0)?, parameters(calm.model(), 0)?, "parameters");
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

pub(crate) fn asked(strategy: &Strategy) -> Result<(), Stop> {
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
    let error = trainer(strategy)?.fit(&data()?, fit).err();
    let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
    check!(text.starts_with("stopped after step 5"), "fit ends with {text:?}");
    check_eq!(error.map(|error| Error::from(error).exit_code()), Some(143), "exit code");
    let notes = notes.lock().clone();
    check_eq!(notes, [(2, Occasion::Notice), (5, Occasion::Leaving)], "when it may save");
    Ok(())
}

pub(crate) fn failed(strategy: &Strategy) -> Result<(), Stop> {
    let fails = |_: &mut Training<'_>| Err(train::Error::Chief("the roof is leaking".to_owned()));
    let error = trainer(strategy)?.fit(&data()?, Fit::epochs(9).callback(AtStep(4, fails))).err();
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    check!(text.contains("the roof is leaking"), "fit ends with {text:?}");
    let last = strategy.topology().workers() - 1;
    check!(is_last(strategy) || text.contains(&format!("worker {last} failed")), "fit ends with {text:?}");
    Ok(())
}

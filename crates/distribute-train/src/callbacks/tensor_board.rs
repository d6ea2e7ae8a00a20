//! Event files of a training.

use std::path::PathBuf;
use std::time::Instant;

use super::{Callback, Training};
use crate::Result;
use crate::tensorboard::EventWriter;

/// Writes every epoch's values to event files: those of the training to the run `train`, those of the validation to
/// `validation`, under the tags that Keras uses; histograms of variables and values of steps if wanted.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::TensorBoard;
/// let board = TensorBoard::new("runs/1").histograms(1).every_steps(100);
/// ```
///
/// # Source
/// `tf.keras.callbacks.TensorBoard`.
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    histograms: u32,
    every_steps: u64,
    writers: Option<[EventWriter; 2]>,
    /// When the epoch began, or values of a step were last written, and the examples seen by then.
    since: Option<(Instant, u64)>,
}

impl TensorBoard {
    /// To this folder.
    pub fn new(folder: impl Into<PathBuf>) -> TensorBoard {
        TensorBoard { folder: folder.into(), histograms: 0, every_steps: 0, writers: None, since: None }
    }

    /// Histograms of all variables after every so manieth epoch. Default: 0, none.
    pub fn histograms(mut self, every_epochs: u32) -> TensorBoard {
        self.histograms = every_epochs;
        self
    }

    /// The loss of the chief's replicas, and examples per second, after every so manieth step. Default: 0, never.
    pub fn every_steps(mut self, steps: u64) -> TensorBoard {
        self.every_steps = steps;
        self
    }

    fn writers(&mut self) -> Result<&mut [EventWriter; 2]> {
        match &mut self.writers {
            Some(writers) => Ok(writers),
            none => {
                let create = |run| EventWriter::create(self.folder.join(run));
                Ok(none.insert([create("train")?, create("validation")?]))
            }
        }
    }

    fn examples_per_second(&mut self, examples: u64) -> Option<f64> {
        let now = Instant::now();
        let (then, before) = self.since.replace((now, examples))?;
        Some((examples - before) as f64 / (now - then).as_secs_f64().max(1e-9))
    }
}

impl Callback for TensorBoard {
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.since = Some((Instant::now(), training.examples));
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if self.every_steps == 0 || !training.step.is_multiple_of(self.every_steps) || !training.is_chief() {
            return Ok(());
        }
        let rate = self.examples_per_second(training.examples);
        let [train, _] = self.writers()?;
        for (name, value) in training.values {
            train.scalar(&format!("batch_{name}"), training.step, *value)?;
        }
        if let Some(rate) = rate {
            train.scalar("batch_examples_per_second", training.step, rate)?;
        }
        train.flush()
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        // All workers take part in a snapshot.
        let due = self.histograms > 0 && training.epoch.is_multiple_of(self.histograms);
        let snapshot = if due { Some(training.snapshot()?) } else { None };
        if !training.is_chief() {
            return Ok(());
        }
        let rate = if self.every_steps == 0 { self.examples_per_second(training.examples) } else { None };
        let [train, validation] = self.writers()?;
        let step = u64::from(training.epoch);
        for (name, value) in training.values {
            match name.strip_prefix("val_") {
                Some(name) => validation.scalar(&format!("epoch_{name}"), step, *value)?,
                None => train.scalar(&format!("epoch_{name}"), step, *value)?,
            }
        }
        train.scalar("epoch_learning_rate", step, *training.learning_rate)?;
        if let Some(rate) = rate {
            train.scalar("epoch_examples_per_second", step, rate)?;
        }
        for name in snapshot.iter().flat_map(|snapshot| snapshot.names("model")) {
            let numbers = snapshot.as_ref().and_then(|snapshot| snapshot.numbers("model", name));
            train.histogram(name, step, numbers.unwrap_or_default())?;
        }
        train.flush()?;
        validation.flush()
    }
}

//! Event files of a training run.

use std::path::PathBuf;
use std::time::Instant;

use super::steps::Steps;
use super::{Callback, Training, settings};
use crate::Result;
use crate::checkpoint::bounded;
use crate::tensorboard::EventWriter;

/// Writes every epoch's values to event files: those of the training to the run `train`, those of the validation to
/// `validation`, under Keras's tags; optionally also histograms of variables and values of steps.
///
/// Examples per second are steps times the global batch, over the time from the begin of the epoch to its last step;
/// with [`every_steps`](TensorBoard::every_steps) those between two of these steps.
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
    steps: Option<Steps>,
    writers: Option<[EventWriter; 2]>,
    /// The start of the epoch or the last time that values of a step were written, and the examples seen by then.
    since: Option<(Instant, u64)>,
    /// The time of the last step, and the examples seen by then.
    last: Option<(Instant, u64)>,
}

impl TensorBoard {
    /// Writes to this folder, which may be a URL of a store (feature `object-store`): see [`EventWriter`] for how often
    /// it is uploaded.
    pub fn new(folder: impl Into<PathBuf>) -> TensorBoard {
        TensorBoard { folder: folder.into(), histograms: 0, steps: None, writers: None, since: None, last: None }
    }

    /// Writes histograms of all variables after every `every_epochs` epochs. Default: 0, none.
    pub fn histograms(mut self, every_epochs: u32) -> TensorBoard {
        self.histograms = every_epochs;
        self
    }

    /// Writes the loss of the chief's replicas, and examples per second, after every `steps` steps; if several are run
    /// at once, after those in which a multiple is. Default: 0, never.
    pub fn every_steps(mut self, steps: u64) -> TensorBoard {
        self.steps = (steps > 0).then(|| Steps::new(steps));
        self
    }

    /// Writes to the runs `train` and `validation` on a separate thread, and waits as long as the disk makes progress.
    fn write(&mut self, lines: Vec<Line>) -> Result<()> {
        let (folder, writers) = (self.folder.clone(), self.writers.take());
        let write = move || {
            let mut writers = match writers {
                Some(writers) => writers,
                None => [EventWriter::create(folder.join("train"))?, EventWriter::create(folder.join("validation"))?],
            };
            for Line { run, tag, step, shown } in lines {
                let writer = &mut writers[usize::from(run == Run::Validation)];
                match shown {
                    Shown::Number(value) => writer.scalar(&tag, step, value)?,
                    Shown::Histogram(values) => writer.histogram(&tag, step, values)?,
                }
            }
            for writer in &mut writers {
                writer.flush()?;
            }
            Ok(writers)
        };
        self.writers = Some(bounded("writing event files to", &self.folder, write)?);
        Ok(())
    }

    /// Returns the rate since it was last asked for, or since the epoch began, up to the last step.
    fn examples_per_second(&mut self) -> Option<f64> {
        let (now, examples) = self.last?;
        let (then, before) = self.since.replace((now, examples))?;
        Some(examples.saturating_sub(before) as f64 / (now - then).as_secs_f64().max(1e-9))
    }
}

impl Callback for TensorBoard {
    fn name(&self) -> &'static str {
        "TensorBoard"
    }

    fn is_collective(&self) -> bool {
        self.histograms > 0
    }

    fn settings(&self) -> String {
        let histograms = (self.histograms > 0).then(|| format!("histograms {}", self.histograms));
        settings::of(self.name(), histograms)
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        (self.since, self.last) = (Some((Instant::now(), training.examples)), None);
        if let Some(steps) = &mut self.steps {
            steps.continue_after(training.step);
        }
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.last = Some((Instant::now(), training.examples));
        let is_due = self.steps.as_mut().is_some_and(|steps| steps.is_due(training.step));
        if !is_due || !training.is_chief() {
            return Ok(());
        }
        let rate = self.examples_per_second();
        let values = training.values.iter().map(|(name, value)| (format!("batch_{name}"), *value));
        let rate = rate.map(|rate| ("batch_examples_per_second".to_owned(), rate));
        self.write(values.chain(rate).map(|(tag, value)| Line::number(Run::Train, tag, training.step, value)).collect())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        // All workers must take part in a snapshot.
        let due = self.histograms > 0 && training.epoch.is_multiple_of(self.histograms);
        let snapshot = if due { Some(training.snapshot()?) } else { None };
        if !training.is_chief() {
            return Ok(());
        }
        let rate = if self.steps.is_none() { self.examples_per_second() } else { None };
        let step = u64::from(training.epoch);
        let mut lines = Vec::new();
        for (name, value) in training.values {
            let (run, name) =
                name.strip_prefix("val_").map_or((Run::Train, name.as_str()), |name| (Run::Validation, name));
            lines.push(Line::number(run, format!("epoch_{name}"), step, *value));
        }
        lines.push(Line::number(Run::Train, "epoch_learning_rate".to_owned(), step, *training.learning_rate));
        lines.extend(rate.map(|rate| Line::number(Run::Train, "epoch_examples_per_second".to_owned(), step, rate)));
        for name in snapshot.iter().flat_map(|snapshot| snapshot.names("model")) {
            let numbers = snapshot.as_ref().and_then(|snapshot| snapshot.numbers("model", name)).unwrap_or_default();
            lines.push(Line { run: Run::Train, tag: name.to_owned(), step, shown: Shown::Histogram(numbers) });
        }
        self.write(lines)
    }

    fn train_end(&mut self, _: &mut Training<'_>) -> Result<()> {
        let Some(writers) = self.writers.take() else { return Ok(()) };
        bounded("closing event files in", &self.folder, move || writers.into_iter().try_for_each(EventWriter::close))
    }
}

/// A value to write to an event file.
struct Line {
    run: Run,
    tag: String,
    step: u64,
    shown: Shown,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Run {
    Train,
    Validation,
}

enum Shown {
    Number(f64),
    Histogram(Vec<f64>),
}

impl Line {
    fn number(run: Run, tag: String, step: u64, value: f64) -> Line {
        Line { run, tag, step, shown: Shown::Number(value) }
    }
}

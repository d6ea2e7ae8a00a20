//! What happens between epochs besides training.
//!
//! Callbacks run on every worker with the same values, which are those of all replicas together, so what they decide is agreed.
//! Those that write files do so on the chief alone.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use crate::{Error, Result};

mod stopping;

pub use stopping::{EarlyStopping, ReduceLrOnPlateau, TerminateOnNan};

/// What a callback sees at the end of an epoch, and may change.
#[derive(Debug)]
pub struct EpochEnd<'a> {
    /// The epoch, from 1.
    pub epoch: u32,
    /// Losses and metrics; those of the validation begin with `val_`.
    pub values: &'a [(String, f64)],
    /// Whether this process writes what must be written once.
    pub is_chief: bool,
    /// The learning rate of the next epoch.
    pub learning_rate: &'a mut f64,
    /// Set it to end the training, with the reason.
    pub stop: &'a mut Option<String>,
}

impl EpochEnd<'_> {
    /// A value by its name.
    ///
    /// # Errors
    /// [`Error::Monitor`] where there is none of this name.
    pub fn value(&self, name: &str) -> Result<f64> {
        let found = self.values.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        found.ok_or_else(|| Error::Monitor {
            name: name.to_owned(),
            known: self.values.iter().map(|(known, _)| known.as_str()).collect::<Vec<_>>().join(", "),
        })
    }
}

/// Something that happens between epochs.
///
/// # Source
/// `tf.keras.callbacks.Callback`.
pub trait Callback: Send {
    /// Before an epoch, from 1: the learning rate may be changed.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn epoch_begin(&mut self, epoch: u32, learning_rate: &mut f64) -> Result<()> {
        let _ = (epoch, learning_rate);
        Ok(())
    }

    /// After an epoch and its validation.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> Result<()> {
        let _ = end;
        Ok(())
    }
}

/// Sets each epoch's learning rate, from the epoch's number and the present rate.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::{Callback, LearningRateSchedule};
/// // Five epochs of warm-up to 0.4, then a tenth every 30.
/// let mut schedule = LearningRateSchedule::new(|epoch, _| match epoch {
///     ..=5 => 0.4 * f64::from(epoch) / 5.0,
///     _ => 0.4 * 0.1f64.powi((epoch as i32 - 1) / 30),
/// });
/// let mut learning_rate = 0.0;
/// schedule.epoch_begin(5, &mut learning_rate)?;
/// assert_eq!(learning_rate, 0.4);
/// # Ok::<(), distribute_train::Error>(())
/// ```
pub struct LearningRateSchedule {
    schedule: Box<dyn FnMut(u32, f64) -> f64 + Send>,
}

impl LearningRateSchedule {
    /// A schedule of the caller's.
    pub fn new(schedule: impl FnMut(u32, f64) -> f64 + Send + 'static) -> LearningRateSchedule {
        LearningRateSchedule { schedule: Box::new(schedule) }
    }
}

impl Callback for LearningRateSchedule {
    fn epoch_begin(&mut self, epoch: u32, learning_rate: &mut f64) -> Result<()> {
        *learning_rate = (self.schedule)(epoch, *learning_rate);
        Ok(())
    }
}

/// Appends a line for each epoch to a CSV file, which begins with the names.
///
/// # Source
/// `tf.keras.callbacks.CSVLogger`.
#[derive(Debug)]
pub struct CsvLogger {
    path: PathBuf,
}

impl CsvLogger {
    /// To this file; a run that goes on appends to it.
    pub fn new(path: impl Into<PathBuf>) -> CsvLogger {
        CsvLogger { path: path.into() }
    }
}

impl Callback for CsvLogger {
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> Result<()> {
        if !end.is_chief {
            return Ok(());
        }
        let append = || {
            let begins = fs::metadata(&self.path).map_or(true, |metadata| metadata.len() == 0);
            let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            if begins {
                let names: Vec<&str> = end.values.iter().map(|(name, _)| name.as_str()).collect();
                writeln!(file, "epoch,{}", names.join(","))?;
            }
            let values: Vec<String> = end.values.iter().map(|(_, value)| value.to_string()).collect();
            writeln!(file, "{},{}", end.epoch, values.join(","))
        };
        append().map_err(|source| Error::File { path: self.path.clone(), source })
    }
}

/// Writes every epoch's values to event files: those of the training to the run `train`, those of the validation to
/// `validation`, under the tags that Keras uses.
///
/// # Source
/// `tf.keras.callbacks.TensorBoard`.
#[cfg(feature = "tensorboard")]
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    writers: Option<[crate::tensorboard::EventWriter; 2]>,
}

#[cfg(feature = "tensorboard")]
impl TensorBoard {
    /// To this folder.
    pub fn new(folder: impl Into<PathBuf>) -> TensorBoard {
        TensorBoard { folder: folder.into(), writers: None }
    }
}

#[cfg(feature = "tensorboard")]
impl Callback for TensorBoard {
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> Result<()> {
        use crate::tensorboard::EventWriter;
        if !end.is_chief {
            return Ok(());
        }
        let writers = match &mut self.writers {
            Some(writers) => writers,
            none => {
                let create = |run| EventWriter::create(self.folder.join(run));
                none.insert([create("train")?, create("validation")?])
            }
        };
        let step = u64::from(end.epoch);
        for (name, value) in end.values {
            let (run, name) = name.strip_prefix("val_").map_or((0, name.as_str()), |name| (1, name));
            writers[run].scalar(&format!("epoch_{name}"), step, *value)?;
        }
        writers[0].scalar("epoch_learning_rate", step, *end.learning_rate)?;
        writers.iter_mut().try_for_each(EventWriter::flush)
    }
}

#[cfg(test)]
mod tests;

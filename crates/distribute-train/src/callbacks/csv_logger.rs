//! A table of epochs in a file.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use super::{Callback, Training};
use crate::{Error, Result};

/// Appends a line for each epoch to a CSV file, which begins with the names. A training that goes on takes out the lines of epochs
/// that it does again.
///
/// # Source
/// `tf.keras.callbacks.CSVLogger`.
#[derive(Debug)]
pub struct CsvLogger {
    path: PathBuf,
}

impl CsvLogger {
    /// To this file; what other trainings have written there stays.
    pub fn new(path: impl Into<PathBuf>) -> CsvLogger {
        CsvLogger { path: path.into() }
    }

    fn append(&self, training: &Training<'_>) -> io::Result<()> {
        let begins = fs::metadata(&self.path).map_or(true, |metadata| metadata.len() == 0);
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        if begins {
            let names: Vec<&str> = training.values.iter().map(|(name, _)| name.as_str()).collect();
            writeln!(file, "epoch,{}", names.join(","))?;
        }
        let values: Vec<String> = training.values.iter().map(|(_, value)| value.to_string()).collect();
        writeln!(file, "{},{}", training.epoch, values.join(","))
    }

    /// Takes out the last lines from those of an epoch on.
    fn cut(&self, from: u32) -> io::Result<()> {
        let text = match fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let epoch = |line: &str| line.split(',').next().and_then(|epoch| epoch.parse::<u32>().ok());
        let mut lines: Vec<&str> = text.lines().collect();
        while lines.last().and_then(|line| epoch(line)).is_some_and(|epoch| epoch >= from) {
            lines.pop();
        }
        let mut left = lines.join("\n");
        left.push('\n');
        if left.len() < text.len() { fs::write(&self.path, left) } else { Ok(()) }
    }

    fn failed(&self) -> impl FnOnce(io::Error) -> Error {
        let path = self.path.clone();
        move |source| Error::File { path, source }
    }
}

impl Callback for CsvLogger {
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        // In an epoch that begins anew, a line of it can only be one of before.
        match training.is_chief() && training.epoch > 1 {
            true => self.cut(training.epoch).map_err(self.failed()),
            false => Ok(()),
        }
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if training.is_chief() { self.append(training).map_err(self.failed()) } else { Ok(()) }
    }
}

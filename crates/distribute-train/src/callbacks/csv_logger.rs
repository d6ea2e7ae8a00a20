//! A CSV file with a row per epoch.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{Callback, Training};
use crate::checkpoint::bounded;
use crate::{Error, Result};

/// Appends a row for each epoch to a CSV file, after a header with the names. When training resumes, rows of epochs
/// that it repeats are removed.
///
/// # Source
/// `tf.keras.callbacks.CSVLogger`.
#[derive(Debug)]
pub struct CsvLogger {
    path: PathBuf,
}

impl CsvLogger {
    /// Logs to this file; rows of other training runs in it are kept.
    pub fn new(path: impl Into<PathBuf>) -> CsvLogger {
        CsvLogger { path: path.into() }
    }

    /// Works on the file on a separate thread, and waits as long as the disk makes progress.
    fn with(&self, work: impl FnOnce(&Path) -> io::Result<()> + Send + 'static) -> Result<()> {
        let path = self.path.clone();
        bounded("writing", &self.path, move || work(&path).map_err(|source| Error::File { path, source }))
    }
}

impl Callback for CsvLogger {
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        // A row of an epoch that begins now was written before a restart.
        match training.is_chief() && training.epoch > 1 {
            true => {
                let epoch = training.epoch;
                self.with(move |path| cut(path, epoch))
            }
            false => Ok(()),
        }
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if !training.is_chief() {
            return Ok(());
        }
        let (epoch, values) = (training.epoch, training.values.to_vec());
        self.with(move |path| append(path, epoch, &values))
    }
}

fn append(path: &Path, epoch: u32, values: &[(String, f64)]) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    let length = file.metadata()?.len();
    let mut lines = String::new();
    if length == 0 {
        let names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
        lines = format!("epoch,{}\n", names.join(","));
    } else {
        // A killed process may have left an incomplete row, which must not run into the next one.
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            lines.push('\n');
        }
    }
    let values: Vec<String> = values.iter().map(|(_, value)| value.to_string()).collect();
    lines += &format!("{},{}\n", epoch, values.join(","));
    file.write_all(lines.as_bytes())
}

/// Removes the last rows, from the epoch `from` on.
fn cut(path: &Path, from: u32) -> io::Result<()> {
    let text = match fs::read_to_string(path) {
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
    if left.len() >= text.len() {
        return Ok(());
    }
    // Written to a temporary file first, so that a crash cannot lose the whole table.
    let mut beside = path.as_os_str().to_owned();
    beside.push(".tmp");
    let mut file = File::create(&beside)?;
    file.write_all(left.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

//! A CSV file with a row per epoch.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{Callback, Training};
use crate::checkpoint::bounded;
use crate::objects;
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
    /// Logs to this file; rows of other training runs in it are kept. With the feature `object-store`, it may be an
    /// object such as `s3://bucket/run/history.csv`, which is written anew after each epoch.
    pub fn new(path: impl Into<PathBuf>) -> CsvLogger {
        CsvLogger { path: objects::resolved(path.into()) }
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
    if let Some(object) = objects::of(path)? {
        let mut text = object.read(MOST_BYTES)?.unwrap_or_default();
        let lines = rows(text.last().copied(), epoch, values);
        text.extend_from_slice(lines.as_bytes());
        return object.write(&text);
    }
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    let mut last = None;
    if file.metadata()?.len() > 0 {
        let mut byte = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut byte)?;
        last = Some(byte[0]);
    }
    file.write_all(rows(last, epoch, values).as_bytes())
}

/// Returns the row of an epoch, and before it the header of an empty table, which has no last byte.
fn rows(last: Option<u8>, epoch: u32, values: &[(String, f64)]) -> String {
    let mut lines = match last {
        None => {
            let names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
            format!("epoch,{}\n", names.join(","))
        }
        // A killed process may have left an incomplete row, which must not run into the next one.
        Some(last) if last != b'\n' => "\n".to_owned(),
        Some(_) => String::new(),
    };
    let values: Vec<String> = values.iter().map(|(_, value)| value.to_string()).collect();
    lines += &format!("{},{}\n", epoch, values.join(","));
    lines
}

/// Removes the last rows, from the epoch `from` on.
fn cut(path: &Path, from: u32) -> io::Result<()> {
    if let Some(object) = objects::of(path)? {
        let text = object.read(MOST_BYTES)?.map(String::from_utf8).transpose();
        let text = text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        return match text.and_then(|text| without(&text, from)) {
            Some(left) => object.write(left.as_bytes()),
            None => Ok(()),
        };
    }
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let Some(left) = without(&text, from) else { return Ok(()) };
    // Written to a temporary file first, so that a crash cannot lose the whole table.
    let mut beside = path.as_os_str().to_owned();
    beside.push(".tmp");
    let mut file = File::create(&beside)?;
    file.write_all(left.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

/// Returns a table without its last rows, from the epoch `from` on; `None` if it has no such rows.
fn without(text: &str, from: u32) -> Option<String> {
    let epoch = |line: &str| line.split(',').next().and_then(|epoch| epoch.parse::<u32>().ok());
    let mut lines: Vec<&str> = text.lines().collect();
    while lines.last().and_then(|line| epoch(line)).is_some_and(|epoch| epoch >= from) {
        lines.pop();
    }
    let mut left = lines.join("\n");
    left.push('\n');
    (left.len() < text.len()).then_some(left)
}

/// The largest table that is kept in a store: it is held in memory to be written anew.
const MOST_BYTES: u64 = 64 << 20;

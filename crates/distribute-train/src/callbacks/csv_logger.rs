//! A CSV file with a row per epoch.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Callback, Training};
use crate::checkpoint::bounded;
use crate::objects;
use crate::{Error, Result};

/// Appends a row for each epoch to a CSV file, after a header with the names. When training resumes, rows of epochs
/// that it repeats are removed. Values of a name that the header lacks get a column at its end; cells without a value
/// are empty.
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
        let text = object.read(MOST_BYTES)?.map(String::from_utf8).transpose();
        let text = text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?.unwrap_or_default();
        let whole = match change(&text, epoch, values)? {
            Change::Added(lines) => text + &lines,
            Change::Whole(table) => table,
        };
        return object.write(whole.as_bytes());
    }
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read?,
    };
    match change(&text, epoch, values)? {
        Change::Added(lines) => OpenOptions::new().create(true).append(true).open(path)?.write_all(lines.as_bytes()),
        Change::Whole(table) => replace(path, &table),
    }
}

/// How a table gets another row.
enum Change {
    /// These lines are added to it.
    Added(String),
    /// It is replaced by this table, which has more columns.
    Whole(String),
}

/// Adds the row of an epoch to a table. Values are in the columns of their names, and those of new names in new columns
/// at the end; cells without a value are empty.
fn change(text: &str, epoch: u32, values: &[(String, f64)]) -> io::Result<Change> {
    let mut rows = Vec::new();
    for row in csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_bytes()).records() {
        rows.push(row.map_err(io::Error::other)?.iter().map(str::to_owned).collect::<Vec<_>>());
    }
    let is_new = rows.is_empty();
    if is_new {
        rows.push(vec!["epoch".to_owned()]);
    }
    let header = &mut rows[0];
    let columns = header.len();
    for (name, _) in values {
        if !header[1..].contains(name) {
            header.push(name.clone());
        }
    }
    let cell = |name: &String| values.iter().find(|(known, _)| known == name).map(|(_, value)| value.to_string());
    let row = header[1..].iter().map(|name| cell(name).unwrap_or_default());
    let row: Vec<String> = std::iter::once(epoch.to_string()).chain(row).collect();
    if !is_new && header.len() == columns {
        // A killed process may have left an incomplete row, which must not run into the next one.
        let end = if text.ends_with('\n') { "" } else { "\n" };
        return Ok(Change::Added(format!("{end}{}", lines(&[row])?)));
    }
    rows.push(row);
    let width = rows[0].len();
    rows.iter_mut().for_each(|row| row.resize(width.max(row.len()), String::new()));
    let table = lines(&rows)?;
    Ok(if is_new { Change::Added(table) } else { Change::Whole(table) })
}

/// Formats rows, one line each.
fn lines(rows: &[Vec<String>]) -> io::Result<String> {
    let mut writer = csv::WriterBuilder::new().flexible(true).from_writer(Vec::new());
    rows.iter().try_for_each(|row| writer.write_record(row)).map_err(io::Error::other)?;
    let bytes = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    String::from_utf8(bytes).map_err(io::Error::other)
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
    without(&text, from).map_or(Ok(()), |left| replace(path, &left))
}

/// Writes a temporary file first, so that a crash cannot lose the whole table.
fn replace(path: &Path, table: &str) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(table.as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)
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

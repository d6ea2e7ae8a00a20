//! A CSV file with a row per epoch.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Callback, Training, state};
use crate::checkpoint::bounded;
use crate::objects;
use crate::{Error, Result};

/// Appends a row for each epoch to a CSV file, after a header with the names. When training resumes, the rows that it
/// wrote of epochs that it repeats are removed. Values of a name that the header lacks get a column at its end; cells
/// without a value are empty.
///
/// Several training runs may append to one file. Which rows are those of this one is known from its last row before the
/// checkpoint: those that follow it without a gap.
///
/// # Source
/// `tf.keras.callbacks.CSVLogger`.
#[derive(Debug)]
pub struct CsvLogger {
    path: PathBuf,
    /// The end of this run's rows.
    end: Option<End>,
    /// Whether this run may have written rows after that, of epochs that it repeats.
    repeats: bool,
}

/// The end of a run's rows in a table.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct End {
    /// The lines up to the last row, including the header.
    lines: usize,
    /// The epoch of that row; that before the first one if there is none yet.
    epoch: u32,
}

impl CsvLogger {
    /// Logs to this file; rows of other training runs in it are kept. With the feature `object-store`, it may be an
    /// object such as `s3://bucket/run/history.csv`, which is written anew after each epoch.
    pub fn new(path: impl Into<PathBuf>) -> CsvLogger {
        CsvLogger { path: objects::resolved(path.into()), end: None, repeats: false }
    }

    /// Works on the file on a separate thread, and waits as long as the disk makes progress.
    fn with<R: Send + 'static>(&self, work: impl FnOnce(&Path) -> io::Result<R> + Send + 'static) -> Result<R> {
        let path = self.path.clone();
        bounded("writing", &self.path, move || work(&path).map_err(|source| Error::File { path, source }))
    }
}

impl Callback for CsvLogger {
    fn resumed(&mut self, _: &mut Training<'_>) -> Result<()> {
        self.repeats = true;
        Ok(())
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        if training.is_chief() && (self.repeats || self.end.is_none()) {
            let (epoch, end) = (training.epoch, self.end);
            self.end = Some(self.with(move |path| cut(path, epoch, end))?);
            self.repeats = false;
        }
        Ok(())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if training.is_chief() {
            let (epoch, values) = (training.epoch, training.values.to_vec());
            let lines = self.with(move |path| append(path, epoch, &values))?;
            self.end = Some(End { lines, epoch });
        }
        Ok(())
    }

    fn state(&self) -> Value {
        self.end.map_or(Value::Null, |end| state::of(NAME, end))
    }

    fn set_state(&mut self, state: &Value) {
        if let Some(end) = state::read(NAME, state, |_| None) {
            self.end = Some(end);
        }
        // The end of an epoch may have failed after its row was written.
        self.repeats = true;
    }
}

/// Appends the row of an epoch. Returns the lines of the table.
fn append(path: &Path, epoch: u32, values: &[(String, f64)]) -> io::Result<usize> {
    let text = read(path)?.unwrap_or_default();
    let change = change(&text, epoch, values)?;
    let lines = match &change {
        Change::Added(lines) => text.lines().count() + lines.trim_start_matches('\n').lines().count(),
        Change::Whole(table) => table.lines().count(),
    };
    match (objects::of(path)?, change) {
        (Some(object), Change::Added(lines)) => object.write((text + &lines).as_bytes())?,
        (None, Change::Added(lines)) => {
            OpenOptions::new().create(true).append(true).open(path)?.write_all(lines.as_bytes())?;
        }
        (_, Change::Whole(table)) => replace(path, &table)?,
    }
    Ok(lines)
}

/// Reads the table; `None` if it does not exist.
fn read(path: &Path) -> io::Result<Option<String>> {
    if let Some(object) = objects::of(path)? {
        let text = object.read(MOST_BYTES)?.map(String::from_utf8).transpose();
        return text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
    }
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
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

/// Removes the rows of this run from the epoch `from` on, which begins. Returns the end of its rows.
fn cut(path: &Path, from: u32, end: Option<End>) -> io::Result<End> {
    let text = read(path)?.unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let end = end.unwrap_or_else(|| end_in(&lines, from));
    let own = lines.iter().skip(end.lines).zip(u64::from(end.epoch) + 1..);
    let own = own.take_while(|(line, epoch)| epoch_of(line).map(u64::from) == Some(*epoch));
    let own: Vec<u64> = own.map(|(_, epoch)| epoch).collect();
    let kept = own.iter().filter(|epoch| **epoch < u64::from(from)).count();
    let (first, last) = (end.lines + kept, end.lines + own.len());
    if first < last {
        let left = [&lines[..first], &lines[last..]].concat().join("\n") + "\n";
        replace(path, &left)?;
    }
    Ok(End { lines: first, epoch: end.epoch.saturating_add(kept as u32) })
}

/// Returns the end of the rows of a run whose state is unknown, before an epoch. The last row is taken for its own if
/// it is of this epoch, other than the first: earlier versions have saved no state, and a process that has become the
/// chief of an elastic job may not have it.
fn end_in(lines: &[&str], epoch: u32) -> End {
    let is_own = epoch > 1 && lines.last().and_then(|line| epoch_of(line)) == Some(epoch);
    // A table that does not exist will have a header.
    End { lines: lines.len().saturating_sub(usize::from(is_own)).max(1), epoch: epoch.saturating_sub(1) }
}

/// Returns the epoch of a row; `None` for the header.
fn epoch_of(line: &str) -> Option<u32> {
    line.split(',').next()?.parse().ok()
}

/// Replaces the table as a whole. A file is written next to it first, so that a crash cannot lose the table.
fn replace(path: &Path, table: &str) -> io::Result<()> {
    if let Some(object) = objects::of(path)? {
        return object.write(table.as_bytes());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(table.as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)
}

/// The name in the state.
const NAME: &str = "CsvLogger";

/// The largest table that is kept in a store: it is held in memory to be written anew.
const MOST_BYTES: u64 = 64 << 20;

//! Readers of files, which turn a list of files into records.
//!
//! - [`Lines`]: lines of text.
//! - [`TfRecords`], with the feature `tfrecord`: TensorFlow's record files, with their checksums; [`Example`] decodes
//!   their usual content.
//! - [`Csv`], with the feature `csv`: rows as any type that serde can deserialize.
//! - [`Parquet`] and [`Arrow`], with the feature `parquet`: batches of columns.
//! - [`WebDataset`], with the feature `webdataset`: samples in tar files.
//! - [`Images`], with the feature `images`: images in folders named after their classes.
//! - [`read_idx`], with the feature `idx`, and [`SafetensorsFile`], with the feature `safetensors`: whole arrays, for
//!   [`Dataset::from_tensor_slices`].
//!
//! Formats that are read from the beginning (lines, CSV, TFRecord, tar, IDX) may be compressed as a whole with gzip or
//! zstd, with the features `gzip`, which most formats enable, and `zstd`.
//!
//! # Examples
//! ```
//! use distribute_input::read::{BadRecords, Lines, ReadOptions};
//! use distribute_input::{Array, Dataset};
//!
//! # let folder = tempfile::tempdir()?;
//! # std::fs::write(folder.path().join("a.txt"), "1\n2\n")?;
//! # std::fs::write(folder.path().join("b.txt"), "3\n4\n")?;
//! let numbers = Dataset::list_files(folder.path(), ".txt")
//!     .read(Lines, ReadOptions::default().cycle(2))
//!     .map(|line| Ok(Array::scalar(line.parse::<i64>()?)))
//!     .batch(2);
//! let first = numbers.iter().next().expect("there are four lines")?;
//! assert_eq!(first.as_slice(), [1, 3]);                      // two files at a time
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::dataset::{Items, Opener};
use crate::{Dataset, Error, FileShard, Result, store};

#[cfg(feature = "csv")]
mod csv;
mod file;
#[cfg(feature = "idx")]
mod idx;
#[cfg(feature = "images")]
mod images;
mod lines;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
#[cfg(feature = "safetensors")]
mod safetensors;
mod stream;
#[cfg(feature = "webdataset")]
mod tar;
#[cfg(feature = "tfrecord")]
mod tfrecord;

#[cfg(feature = "csv")]
pub use csv::Csv;
#[cfg(feature = "object-store")]
pub use distribute_storage::Cache;
pub use file::InputFile;
#[cfg(feature = "idx")]
pub use idx::read_idx;
#[cfg(feature = "images")]
pub use images::{ImageFolder, Images};
pub use lines::Lines;
#[cfg(feature = "parquet")]
pub use parquet::{Arrow, Parquet, arrow, column, column_or, columns, columns_or, ragged_column, without_nulls};
#[cfg(feature = "safetensors")]
pub use safetensors::SafetensorsFile;
pub use stream::InputStream;
#[cfg(feature = "webdataset")]
pub use tar::{Sample, WebDataset};
#[cfg(feature = "tfrecord")]
pub use tfrecord::{Compression, Example, Feature, TfRecordWriter, TfRecords};

/// A reader of the records of a file.
///
/// # Examples
/// ```
/// use distribute_input::read::{BadRecord, ReadOptions, RecordReader};
/// use distribute_input::{Dataset, FileShard};
///
/// /// Files of two-byte numbers.
/// struct Pairs;
///
/// impl RecordReader for Pairs {
///     type Record = u16;
///     type Records = std::vec::IntoIter<Result<u16, BadRecord>>;
///
///     fn open(&self, file: &FileShard) -> std::io::Result<Self::Records> {
///         let bytes = std::fs::read(file.content())?;
///         let pairs = (0..).zip(bytes.chunks(2)).filter(|(record, _)| file.has(*record));
///         let number = |(record, pair): (u64, &[u8])| match pair {
///             [low, high] => Ok(u16::from_le_bytes([*low, *high])),
///             _ => Err(BadRecord::new(record, 2 * record, "one byte is left over")),
///         };
///         Ok(pairs.map(number).collect::<Vec<_>>().into_iter())
///     }
/// }
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("pairs");
/// std::fs::write(&path, [1, 0, 2, 0, 3])?;
/// let mut numbers = Dataset::from_files([&path]).read(Pairs, ReadOptions::default()).iter();
/// assert_eq!([numbers.next().unwrap()?, numbers.next().unwrap()?], [1, 2]);
/// let error = numbers.next().unwrap().unwrap_err().to_string();
/// assert!(error.ends_with("pairs, record 2 at byte 4: one byte is left over"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait RecordReader: Send + Sync + 'static {
    /// The type of a record.
    type Record: Send + 'static;
    /// An iterator over the records of one file, in order.
    type Records: Iterator<Item = Result<Self::Record, BadRecord>> + Send + 'static;

    /// Opens a file and returns those of its records that [`FileShard::has`] selects, numbered from 0.
    ///
    /// # Errors
    /// The operating system's error if the file cannot be opened.
    fn open(&self, file: &FileShard) -> io::Result<Self::Records>;

    /// Names the options that determine which records a file has: a pass is not resumed with other ones, and workers
    /// compare them. Options with their default values need no name, and a reader without options has none.
    fn settings(&self) -> Option<String> {
        None
    }

    /// Returns the most rows of a record, if records are batches of rows and an option sets their size: a pass in which
    /// such records were chosen or ordered is not resumed with another size.
    fn rows_per_record(&self) -> Option<usize> {
        None
    }
}

/// A record that cannot be read. A reader continues after it if it can, and ends otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRecord {
    record: u64,
    offset: u64,
    problem: String,
    /// The error of the store or the operating system that has ended the reading of the file, if the record itself is
    /// not bad.
    cause: Option<Cause>,
}

#[derive(Clone, Debug)]
struct Cause(Arc<io::Error>);

impl PartialEq for Cause {
    fn eq(&self, other: &Cause) -> bool {
        self.0.to_string() == other.0.to_string()
    }
}

impl Eq for Cause {}

impl BadRecord {
    /// Creates the error of record `record`, which begins at byte `offset` of its file.
    pub fn new(record: u64, offset: u64, problem: impl Into<String>) -> BadRecord {
        BadRecord { record, offset, problem: problem.into(), cause: None }
    }
}

/// Options for reading files.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReadOptions {
    /// The number of files that are open at a time. Default: 1.
    pub cycle: usize,
    /// The number of consecutive records taken from each open file in turn. Default: 1.
    pub block: usize,
    /// The treatment of records and files that cannot be read.
    pub bad_records: BadRecords,
    /// Local copies of objects of a store, from which files are then read. Default: none; objects are streamed, as are
    /// those that do not fit into the cache.
    #[cfg(feature = "object-store")]
    pub cache: Option<Cache>,
    /// Without stores there is no cache.
    #[cfg(not(feature = "object-store"))]
    cache: Option<store::Cache>,
}

impl Default for ReadOptions {
    fn default() -> ReadOptions {
        ReadOptions { cycle: 1, block: 1, bad_records: BadRecords::Fail, cache: None }
    }
}

#[cfg(feature = "object-store")]
distribute_types::setters! {
    ReadOptions {} into { cache: Option<Cache> }
}

distribute_types::setters! {
    ReadOptions {
        cycle: usize,
        block: usize,
        bad_records: BadRecords,
    }
}

/// The treatment of records and files that cannot be read.
#[derive(Clone, Debug, Default)]
pub enum BadRecords {
    /// The pass ends with an error that names file, record and byte.
    #[default]
    Fail,
    /// They are skipped and counted, and the first ones are logged. Files of a store that cannot be asked, or of a disk
    /// that fails, are not: the pass ends with its error.
    Skip(Skipped),
}

/// A counter of skipped records and files. Clones share their count.
///
/// # Examples
/// ```
/// use distribute_input::read::{BadRecords, Lines, ReadOptions, Skipped};
/// use distribute_input::Dataset;
///
/// let skipped = Skipped::default();
/// let options = ReadOptions::default().bad_records(BadRecords::Skip(skipped.clone()));
/// let lines = Dataset::from_files(["/nowhere/at/all"]).read(Lines, options);
/// assert_eq!(lines.iter().count(), 0);
/// assert_eq!(skipped.count(), 1);
/// assert!(skipped.first()[0].contains("/nowhere/at/all"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Skipped {
    state: Arc<Mutex<(u64, Vec<String>)>>,
}

impl Skipped {
    /// Returns the number of records and files that were skipped in all passes.
    pub fn count(&self) -> u64 {
        self.lock().0
    }

    /// Returns the error messages of the first 16 of them.
    pub fn first(&self) -> Vec<String> {
        self.lock().1.clone()
    }

    fn note(&self, error: &Error) {
        let mut state = self.lock();
        state.0 += 1;
        if state.1.len() < NOTED {
            tracing::warn!("left out: {error}");
            state.1.push(error.to_string());
        }
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, (u64, Vec<String>)> {
        self.state.lock()
    }
}

const NOTED: usize = 16;

impl BadRecords {
    /// Converts a failure to an item, or to nothing if it is skipped.
    fn of<T>(&self, error: Error) -> Option<Result<T>> {
        match self {
            // Not the file is bad, but the way to it.
            _ if matches!(&error, Error::File { source, .. } if store::is_unanswered(source)) => Some(Err(error)),
            BadRecords::Fail => Some(Err(error)),
            BadRecords::Skip(skipped) => {
                skipped.note(&error);
                None
            }
        }
    }
}

impl Dataset<FileShard> {
    /// Reads the records of the files.
    ///
    /// # Errors
    /// The pass reports [`Error::Zero`] if `cycle` or `block` is zero, and, unless they are skipped, [`Error::File`]
    /// and [`Error::Record`] for files and records that cannot be read.
    ///
    /// # Source
    /// `interleave` of `TFRecordDataset`, `TextLineDataset` and the like in TensorFlow.
    pub fn read<R: RecordReader>(self, reader: R, options: ReadOptions) -> Dataset<R::Record> {
        let reader = Arc::new(reader);
        let ReadOptions { cycle, block, bad_records, cache } = options;
        let (settings, record_rows) = (reader.settings(), reader.rows_per_record());
        // Files read one after the other have their rows in one order, unless bad batches of them are left out.
        let is_in_order = cycle == 1 && matches!(bad_records, BadRecords::Fail);
        let mut dataset = self.interleaved(cycle, block, move |file| {
            let (reader, bad_records, cache) = (Arc::clone(&reader), bad_records.clone(), cache.clone());
            let open: Opener<R::Record> =
                Arc::new(move |_| records(&*reader, &file, bad_records.clone(), cache.as_ref()));
            Ok(Dataset::of_opener(open))
        });
        let facts = &mut dataset.facts;
        facts.stages.extend(settings);
        facts.record_rows = record_rows;
        if record_rows.is_some() && !is_in_order {
            facts.stage("records");
        }
        dataset
    }
}

fn records<R: RecordReader>(
    reader: &R,
    file: &FileShard,
    bad_records: BadRecords,
    cache: Option<&store::Cache>,
) -> Items<R::Record> {
    let path = file.path.clone();
    match open(reader, file, cache) {
        Ok((records, copy)) => {
            let mut is_lost = false;
            let item = move |record: Result<R::Record, BadRecord>| {
                // The copy stays as long as it is read.
                let _ = &copy;
                if is_lost {
                    return None;
                }
                match record {
                    Ok(record) => Some(Ok(record)),
                    Err(bad) => {
                        is_lost = bad.cause.is_some();
                        bad_records.of(bad.of(&path))
                    }
                }
            };
            Box::new(records.filter_map(item))
        }
        Err(source) => Box::new(bad_records.of(Error::File { path, source: Arc::new(source) }).into_iter()),
    }
}

/// Opens a file, or its copy in the cache.
fn open<R: RecordReader>(
    reader: &R,
    file: &FileShard,
    cache: Option<&store::Cache>,
) -> io::Result<(R::Records, Option<store::Cached>)> {
    let Some(cache) = cache else { return Ok((reader.open(file)?, None)) };
    for _ in 0..LOOKS {
        let Some(copy) = store::copy(cache, &file.path)? else { break };
        match reader.open(&file.with_copy(copy.path())) {
            // Another process that shares the cache has removed it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            outcome => return Ok((outcome?, Some(copy))),
        }
    }
    Ok((reader.open(file)?, None))
}

/// How often a copy is fetched that another process removes at once.
const LOOKS: usize = 3;

impl BadRecord {
    pub(crate) fn of(self, path: &std::path::Path) -> Error {
        let BadRecord { record, offset, problem, cause } = self;
        if let Some(Cause(source)) = cause {
            return Error::File { path: path.to_owned(), source };
        }
        Error::Record { path: PathBuf::from(path), record, offset, problem }
    }
}

#[cfg(test)]
mod tests;

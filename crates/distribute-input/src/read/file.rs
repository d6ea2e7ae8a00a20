//! Files of datasets, on a disk or in a store of objects.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::BadRecord;
use crate::FileShard;
use crate::store::{self, Object};

/// An open file, or, with the feature `object-store`, an object such as `s3://bucket/train/0.tfrecord`, of which blocks
/// of 8 MiB are read ahead.
///
/// # Examples
/// ```
/// use distribute_input::FileShard;
/// use std::io::Read;
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("a.txt");
/// std::fs::write(&path, "some")?;
/// let mut text = String::new();
/// FileShard::whole(&path).open()?.read_to_string(&mut text)?;
/// assert_eq!(text, "some");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct InputFile {
    source: Source,
    failure: Failure,
}

#[derive(Debug)]
enum Source {
    File(File),
    Object(Object),
}

/// The error of a store or the operating system that has interrupted the reading of a file, for a reader whose format's
/// library passes on its text alone. A record after it is not damaged, and not to be skipped.
#[derive(Clone, Debug, Default)]
pub(super) struct Failure(Arc<Mutex<Option<Arc<io::Error>>>>);

impl Failure {
    /// Creates the error of a record, with this error if that is its cause.
    pub(super) fn bad(&self, record: u64, offset: u64, problem: impl Into<String>) -> BadRecord {
        BadRecord { cause: self.0.lock().clone().map(super::Cause), ..BadRecord::new(record, offset, problem) }
    }

    /// Returns this error if there is one, in place of the error of a library that has passed it on as a text.
    pub(super) fn cause(&self, error: io::Error) -> io::Error {
        match self.0.lock().take().map(Arc::try_unwrap) {
            Some(Ok(cause)) => cause,
            _ => error,
        }
    }

    /// Returns whether the reading was interrupted.
    pub(super) fn is_noted(&self) -> bool {
        self.0.lock().is_some()
    }

    fn note<T>(&self, outcome: io::Result<T>) -> io::Result<T> {
        outcome.map_err(|error| {
            let (kind, text) = (error.kind(), error.to_string());
            *self.0.lock() = Some(Arc::new(error));
            io::Error::new(kind, text)
        })
    }
}

impl FileShard {
    /// Opens the file, of which this may be a part.
    ///
    /// # Errors
    /// The error of the operating system or the store if the file cannot be opened.
    pub fn open(&self) -> io::Result<InputFile> {
        InputFile::open(self.content())
    }
}

impl InputFile {
    /// Opens a file by its path or URL.
    pub(super) fn open(path: &Path) -> io::Result<InputFile> {
        let source = match store::open(path)? {
            store::Opened::Local(path) => Source::File(File::open(path)?),
            store::Opened::Object(object) => Source::Object(object),
        };
        Ok(InputFile { source, failure: Failure::default() })
    }

    /// Returns the length in bytes.
    ///
    /// # Errors
    /// The operating system's error if the length cannot be read.
    pub fn byte_len(&self) -> io::Result<u64> {
        match &self.source {
            Source::File(file) => Ok(file.metadata()?.len()),
            Source::Object(object) => Ok(object.byte_len()),
        }
    }

    /// Reads everything that is left.
    #[cfg(any(feature = "images", feature = "safetensors"))]
    pub(super) fn read_all(mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        match &mut self.source {
            Source::File(file) => file.read_to_end(&mut bytes)?,
            Source::Object(object) => object.read_to_end(&mut bytes)?,
        };
        Ok(bytes)
    }

    pub(super) fn failure(&self) -> Failure {
        self.failure.clone()
    }
}

impl Read for InputFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.source {
            // The caller tries again.
            Source::File(file) => match file.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
                outcome => self.failure.note(outcome),
            },
            Source::Object(object) => self.failure.note(object.read(buffer)),
        }
    }
}

impl Seek for InputFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match &mut self.source {
            Source::File(file) => file.seek(to),
            Source::Object(object) => object.seek(to),
        }
    }
}

/// Parquet's reader asks for ranges.
#[cfg(feature = "parquet")]
mod ranges {
    use parquet::errors::{ParquetError, Result};
    use parquet::file::reader::{ChunkReader, Length};

    use super::*;

    impl Length for InputFile {
        fn len(&self) -> u64 {
            self.byte_len().unwrap_or(0)
        }
    }

    impl ChunkReader for InputFile {
        type T = io::BufReader<InputFile>;

        fn get_read(&self, start: u64) -> Result<Self::T> {
            let source = match &self.source {
                Source::File(file) => Source::File(file.try_clone()?),
                Source::Object(object) => object.again().map(Source::Object)?,
            };
            let mut file = InputFile { source, failure: self.failure.clone() };
            file.seek(SeekFrom::Start(start))?;
            Ok(io::BufReader::new(file))
        }

        fn get_bytes(&self, start: u64, length: usize) -> Result<bytes::Bytes> {
            match &self.source {
                Source::File(_) => {
                    let mut bytes = Vec::new();
                    self.get_read(start)?.take(length as u64).read_to_end(&mut bytes)?;
                    if bytes.len() < length {
                        return Err(ParquetError::EOF(format!("{length} bytes at {start} are {}", bytes.len())));
                    }
                    Ok(bytes.into())
                }
                Source::Object(object) => {
                    let range = start..start.saturating_add(length as u64);
                    let read = self.failure.note(object.read_range(range));
                    read.map_err(|error| ParquetError::External(error.into()))
                }
            }
        }
    }
}

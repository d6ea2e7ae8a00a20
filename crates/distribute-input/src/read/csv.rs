//! Rows of comma-separated values.

use std::io;
use std::marker::PhantomData;

use serde::de::DeserializeOwned;

use super::file::Failure;
use super::{BadRecord, InputStream, RecordReader};
use crate::{FileShard, Result};

mod quotes;

use quotes::Quoted;

/// A reader of rows as `T`: a struct with fields named like the header's, a tuple, or a vector, as in the csv crate.
/// Files may be compressed with gzip or zstd.
///
/// A quote that is not closed makes a bad record of the rest of the file, in every part of it.
///
/// # Examples
/// ```
/// use distribute_input::Dataset;
/// use distribute_input::read::{Csv, ReadOptions};
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("flowers.csv");
/// std::fs::write(&path, "width,length,kind\n0.2,1.4,setosa\n")?;
/// let flowers = Dataset::from_files([&path]).read(Csv::<(f32, f32, String)>::new(), ReadOptions::default());
/// assert_eq!(flowers.iter().next().expect("there is a row")?, (0.2, 1.4, "setosa".to_owned()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// RFC 4180; `tf.data.experimental.CsvDataset`.
#[derive(Clone, Debug)]
pub struct Csv<T> {
    has_headers: bool,
    delimiter: u8,
    quoting: bool,
    of: PhantomData<fn() -> T>,
}

impl<T> Csv<T> {
    /// Creates a reader of comma-separated files with a header row.
    pub fn new() -> Csv<T> {
        Csv { has_headers: true, delimiter: b',', quoting: true, of: PhantomData }
    }

    /// Sets whether files begin with a header row.
    pub fn has_headers(self, has_headers: bool) -> Csv<T> {
        Csv { has_headers, ..self }
    }

    /// Sets the field delimiter.
    pub fn delimiter(self, delimiter: u8) -> Csv<T> {
        Csv { delimiter, ..self }
    }

    /// Sets whether `"` quotes fields, which may then contain delimiters and line ends. Default: true. Otherwise it is
    /// data.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::Dataset;
    /// use distribute_input::read::{Csv, ReadOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("screws.tsv");
    /// std::fs::write(&path, "\"5/8\tinches\n")?;
    /// let reader = Csv::<(String, String)>::new().has_headers(false).delimiter(b'\t').quoting(false);
    /// let screws = Dataset::from_files([&path]).read(reader, ReadOptions::default());
    /// assert_eq!(screws.iter().next().expect("there is a row")?, ("\"5/8".to_owned(), "inches".to_owned()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Source
    /// `csv::ReaderBuilder::quoting`; `use_quote_delim` of `tf.data.experimental.CsvDataset`.
    pub fn quoting(self, quoting: bool) -> Csv<T> {
        Csv { quoting, ..self }
    }
}

impl<T> Default for Csv<T> {
    fn default() -> Csv<T> {
        Csv::new()
    }
}

/// The rows of one file.
pub struct CsvRecords<T> {
    file: FileShard,
    reader: csv::Reader<Quoted<InputStream>>,
    failure: Failure,
    headers: Option<csv::ByteRecord>,
    row: csv::ByteRecord,
    record: u64,
    ended: bool,
    of: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + Send + 'static> RecordReader for Csv<T> {
    type Record = T;
    type Records = CsvRecords<T>;

    fn open(&self, file: &FileShard) -> io::Result<CsvRecords<T>> {
        let opened = file.open_stream()?;
        let failure = opened.failure();
        let mut reader = csv::ReaderBuilder::new()
            .has_headers(self.has_headers)
            .delimiter(self.delimiter)
            .quoting(self.quoting)
            .from_reader(Quoted::new(opened, self.delimiter, self.quoting));
        let headers = match self.has_headers {
            true => Some(reader.byte_headers().map_err(|error| failure.cause(io::Error::other(error)))?.clone()),
            false => None,
        };
        if let Some(quote) = reader.get_ref().unclosed() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, not_closed(quote)));
        }
        let (row, of) = (csv::ByteRecord::new(), PhantomData);
        Ok(CsvRecords { file: file.clone(), reader, failure, headers, row, record: 0, ended: false, of })
    }

    fn settings(&self) -> Option<String> {
        let Csv { has_headers, delimiter, quoting, of: _ } = self;
        let mut settings = Vec::new();
        if !has_headers {
            settings.push("without headers".to_owned());
        }
        if *delimiter != b',' {
            settings.push(format!("delimiter {:?}", char::from(*delimiter)));
        }
        if !quoting {
            settings.push("without quoting".to_owned());
        }
        (!settings.is_empty()).then(|| format!("csv {}", settings.join(" ")))
    }
}

impl<T: DeserializeOwned> Iterator for CsvRecords<T> {
    type Item = Result<T, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let record = self.record;
            let offset = self.reader.position().byte();
            let read = self.reader.read_byte_record(&mut self.row);
            self.record += 1;
            // The csv crate takes the rest of the file for a field.
            if let Some(quote) = self.reader.get_ref().unclosed() {
                self.ended = true;
                return Some(Err(BadRecord::new(record, offset, not_closed(quote))));
            }
            match read {
                Ok(false) => self.ended = true,
                Ok(true) if !self.file.has(record) => {}
                // Other parts of the file report what is wrong with their records, but the way to it is everyone's.
                Err(error) if !self.file.has(record) && !error.is_io_error() => {}
                Ok(true) => {
                    let row = self.row.deserialize(self.headers.as_ref());
                    return Some(row.map_err(|error| BadRecord::new(record, offset, error.to_string())));
                }
                Err(error) => {
                    self.ended = error.is_io_error();
                    return Some(Err(self.failure.bad(record, offset, error.to_string())));
                }
            }
        }
        None
    }
}

fn not_closed(quote: u64) -> String {
    format!(
        "the quote at byte {quote} is not closed, so that the rest of the file is lost; close it, or set \
         Csv::quoting(false) if quotes are data"
    )
}

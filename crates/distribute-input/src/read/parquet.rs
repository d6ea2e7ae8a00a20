//! Columns of Parquet and Arrow files.

use std::io::{self, Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow_array::RecordBatch;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::file::metadata::ParquetMetaData;
use parquet::schema::types::SchemaDescriptor;

use super::file::{Failure, InputFile};
use super::packing::refused;
use super::{BadRecord, RecordReader};
use crate::{FileShard, Result};

mod columns;
mod values;

pub use columns::{column, column_or, columns, columns_or, ragged_column, without_nulls};

/// Arrow's array types, for programs that inspect record batches or write files.
pub mod arrow {
    pub use arrow_array::{ArrayRef, Float32Array, Float64Array, Int64Array, ListArray, RecordBatch, StringArray};
    pub use parquet::arrow::ArrowWriter;
}

/// A reader of record batches; [`columns`] and [`column()`] convert one to an [`Array`](crate::Array). A part of a file
/// is a contiguous range of its rows. The columns may be compressed with snappy, zstd, gzip, lz4 or brotli.
///
/// # Examples
/// ```no_run
/// use distribute_input::Dataset;
/// use distribute_input::read::{Parquet, ReadOptions, columns};
/// let rows = Dataset::list_files("flowers", ".parquet")
///     .read(Parquet::new().columns(["width", "length"]), ReadOptions::default())
///     .map(|batch| Ok(columns(&batch, &["width", "length"])?))
///     .unbatch()
///     .shuffle(10_000, 42)
///     .batch(64);
/// ```
#[derive(Clone, Debug)]
pub struct Parquet {
    batch_size: usize,
    columns: Option<Vec<String>>,
}

impl Parquet {
    /// Creates a reader of all columns, in batches of up to 1024 rows.
    pub fn new() -> Parquet {
        Parquet { batch_size: 1024, columns: None }
    }

    /// Sets the largest number of rows of a batch.
    pub fn batch_size(self, rows: usize) -> Parquet {
        Parquet { batch_size: rows.max(1), ..self }
    }

    /// Restricts the reader to these columns. The name `a.b` selects the field `b` of the struct `a` alone.
    pub fn columns<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Parquet {
        Parquet { columns: Some(names.into_iter().map(Into::into).collect()), ..self }
    }
}

impl Default for Parquet {
    fn default() -> Parquet {
        Parquet::new()
    }
}

/// The batches of one file.
pub struct ParquetRecords {
    reader: ParquetRecordBatchReader,
    failure: Failure,
    row: u64,
    ended: bool,
}

impl RecordReader for Parquet {
    type Record = RecordBatch;
    type Records = ParquetRecords;

    fn open(&self, file: &FileShard) -> io::Result<ParquetRecords> {
        let opened = file.open()?;
        let (file_bytes, failure) = (opened.byte_len()?, opened.failure());
        let built = guarded(|| ParquetRecordBatchReaderBuilder::try_new(opened)).map_err(io::Error::other)?;
        let mut builder = built.map_err(|error| {
            let error = failure.cause(io::Error::other(error));
            refused(file, "since Parquet files are read by ranges, and let its columns be compressed instead", error)
        })?;
        check_chunks(builder.metadata(), file_bytes)?;
        if let Some(columns) = &self.columns {
            let mask = projection(builder.parquet_schema(), columns)?;
            builder = builder.with_projection(mask);
        }
        let rows = usize::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        // 128 bits hold the product for any number of rows that a file may claim; the result is at most `rows`.
        let before = |part: usize| (rows as u128 * part as u128 / file.parts.max(1) as u128).min(rows as u128) as usize;
        let (start, end) = (before(file.part), before(file.part.saturating_add(1)));
        let reader = builder.with_batch_size(self.batch_size).with_offset(start).with_limit(end - start).build();
        Ok(ParquetRecords { reader: reader.map_err(io::Error::other)?, failure, row: start as u64, ended: false })
    }

    fn rows_per_record(&self) -> Option<usize> {
        Some(self.batch_size)
    }
}

/// Returns which parts of the schema the columns consist of.
fn projection(schema: &SchemaDescriptor, columns: &[String]) -> io::Result<ProjectionMask> {
    let paths: Vec<String> = schema.columns().iter().map(|leaf| leaf.path().string()).collect();
    let is_in =
        |path: &str, name: &str| path.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    if let Some(missing) = columns.iter().find(|name| !paths.iter().any(|path| is_in(path, name))) {
        return Err(io::Error::other(format!("it has no column {missing:?}")));
    }
    let leaves = (0..paths.len()).filter(|leaf| columns.iter().any(|name| is_in(&paths[*leaf], name)));
    Ok(ProjectionMask::leaves(schema, leaves))
}

/// Checks that all columns lie within the file, because the reader allocates the sizes in the metadata.
fn check_chunks(metadata: &ParquetMetaData, file_bytes: u64) -> io::Result<()> {
    for column in metadata.row_groups().iter().flat_map(|group| group.columns()) {
        let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
        inside("a column", start, column.compressed_size(), file_bytes)?;
    }
    Ok(())
}

/// Checks that a part of a file lies within it.
fn inside(what: &str, start: i64, bytes: i64, file_bytes: u64) -> io::Result<()> {
    let end = u64::try_from(start).ok().zip(u64::try_from(bytes).ok()).and_then(|(start, len)| start.checked_add(len));
    match end {
        Some(end) if end <= file_bytes => Ok(()),
        _ => Err(io::Error::other(format!(
            "it says that {what} has {bytes} bytes at byte {start}, but the file has {file_bytes} bytes"
        ))),
    }
}

impl Iterator for ParquetRecords {
    type Item = Result<RecordBatch, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let (row, batch) = (self.row, guarded(|| self.reader.next()).transpose()?);
        Some(match batch.and_then(|batch| batch.map_err(|error| error.to_string())) {
            Ok(batch) => {
                self.row += batch.num_rows() as u64;
                Ok(batch)
            }
            Err(error) => {
                self.ended = true;
                // The reader does not report the position of a column's page in the file.
                Err(self.failure.bad(row, 0, error))
            }
        })
    }
}

/// Calls a format's library, which panics on some files whose parts contradict each other.
fn guarded<T>(read: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(read)).map_err(|_| "its lengths or offsets contradict each other".to_owned())
}

/// A reader of Arrow's IPC files, in the batches in which they were written. With `n` parts, a part of a file is every
/// `n`-th of its batches.
///
/// # Source
/// The file format of Apache Arrow's columnar format, version 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrow;

/// The batches of one file.
pub struct ArrowRecords {
    file: FileShard,
    reader: arrow_ipc::reader::FileReader<InputFile>,
    failure: Failure,
    batch: u64,
    ended: bool,
}

impl RecordReader for Arrow {
    type Record = RecordBatch;
    type Records = ArrowRecords;

    fn open(&self, file: &FileShard) -> io::Result<ArrowRecords> {
        let mut opened = file.open()?;
        let failure = opened.failure();
        let reader = check_blocks(&mut opened)
            .and_then(|()| {
                let opened = guarded(|| arrow_ipc::reader::FileReader::try_new(opened, None));
                opened.map_err(io::Error::other)?.map_err(io::Error::other)
            })
            .map_err(|error| refused(file, "since Arrow files are read by ranges", failure.cause(error)))?;
        Ok(ArrowRecords { file: file.clone(), reader, failure, batch: 0, ended: false })
    }
}

/// Checks that all batches and dictionaries lie within the file, because the reader trusts the lengths in the footer.
fn check_blocks(file: &mut InputFile) -> io::Result<()> {
    let file_bytes = file.byte_len()?;
    let mut tail = [0; TAIL];
    if file_bytes < tail.len() as u64 {
        return Err(io::Error::other("it is too short for an Arrow file"));
    }
    file.seek(SeekFrom::End(-(TAIL as i64)))?;
    file.read_exact(&mut tail)?;
    let footer_bytes = arrow_ipc::reader::read_footer_length(tail).map_err(io::Error::other)?;
    let start = file_bytes.checked_sub(footer_bytes as u64 + TAIL as u64).ok_or_else(|| {
        io::Error::other(format!(
            "it says that its footer has {footer_bytes} bytes, but the file has {file_bytes} bytes"
        ))
    })?;
    let mut footer = vec![0; footer_bytes];
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(&mut footer)?;
    let footer = arrow_ipc::root_as_footer(&footer).map_err(|error| io::Error::other(error.to_string()))?;
    for (what, blocks) in [("a batch", footer.recordBatches()), ("a dictionary", footer.dictionaries())] {
        for block in blocks.into_iter().flatten() {
            let header = i64::from(block.metaDataLength());
            inside(&format!("the header of {what}"), block.offset(), header, file_bytes)?;
            if header < LEAST_HEADER {
                return Err(io::Error::other(format!(
                    "it says that the header of {what} has {header} bytes, but the shortest has {LEAST_HEADER}"
                )));
            }
            inside(what, block.offset().saturating_add(header), block.bodyLength(), file_bytes)?;
        }
    }
    Ok(())
}

/// The marker that each header begins with, and its length.
const LEAST_HEADER: i64 = 8;

/// The length in bytes of what follows the footer: its size, and the magic that the file begins with.
const TAIL: usize = 10;

impl Iterator for ArrowRecords {
    type Item = Result<RecordBatch, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let batch = self.batch;
            self.batch += 1;
            if self.file.has(batch) {
                // The reader does not report the position of a batch in the file.
                let read = match guarded(|| self.reader.next()) {
                    Ok(read) => read?.map_err(|error| error.to_string()),
                    Err(problem) => {
                        self.ended = true;
                        Err(problem)
                    }
                };
                return Some(read.map_err(|problem| self.failure.bad(batch, 0, problem)));
            }
            if batch as usize >= self.reader.num_batches() || self.reader.set_index(batch as usize + 1).is_err() {
                return None;
            }
        }
        None
    }
}

//! Columns of Parquet and Arrow files.

use std::fs::File;
use std::io;

use arrow_array::{Array as _, PrimitiveArray, RecordBatch, cast::AsArray, types};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use super::{BadRecord, RecordReader};
use crate::{Array, Error, FileShard, Result};

/// What batches of rows are made of, for programs that look into them or write files.
pub mod arrow {
    pub use arrow_array::{ArrayRef, Float32Array, Float64Array, Int64Array, RecordBatch, StringArray};
    pub use parquet::arrow::ArrowWriter;
}

/// Reads batches of rows; [`columns`] makes an [`Array`] of one. A part of a file is a run of its rows.
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
    /// All columns, in batches of up to 1024 rows.
    pub fn new() -> Parquet {
        Parquet { batch_size: 1024, columns: None }
    }

    /// Rows of a batch at most.
    pub fn batch_size(self, rows: usize) -> Parquet {
        Parquet { batch_size: rows.max(1), ..self }
    }

    /// Reads these columns only.
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
    row: u64,
    ended: bool,
}

impl RecordReader for Parquet {
    type Record = RecordBatch;
    type Records = ParquetRecords;

    fn open(&self, file: &FileShard) -> io::Result<ParquetRecords> {
        let mut builder =
            ParquetRecordBatchReaderBuilder::try_new(File::open(&file.path)?).map_err(io::Error::other)?;
        if let Some(columns) = &self.columns {
            let schema = builder.parquet_schema();
            let known =
                |name: &&String| schema.columns().iter().any(|column| column.path().parts().first() == Some(name));
            if let Some(missing) = columns.iter().find(|name| !known(name)) {
                return Err(io::Error::other(format!("it has no column {missing:?}")));
            }
            let mask = ProjectionMask::columns(schema, columns.iter().map(String::as_str));
            builder = builder.with_projection(mask);
        }
        let rows = usize::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let (start, end) = (rows * file.part / file.parts.max(1), rows * (file.part + 1) / file.parts.max(1));
        let reader = builder.with_batch_size(self.batch_size).with_offset(start).with_limit(end - start).build();
        Ok(ParquetRecords { reader: reader.map_err(io::Error::other)?, row: start as u64, ended: false })
    }
}

impl Iterator for ParquetRecords {
    type Item = Result<RecordBatch, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let (row, batch) = (self.row, self.reader.next()?);
        Some(match batch {
            Ok(batch) => {
                self.row += batch.num_rows() as u64;
                Ok(batch)
            }
            Err(error) => {
                self.ended = true;
                // Where in the file a column's page lies, the reader does not say.
                Err(BadRecord::new(row, 0, error.to_string()))
            }
        })
    }
}

/// Reads Arrow's IPC files, batch by batch as they were written. A part of a file is every so manieth of its batches.
///
/// # Source
/// The file format of Apache Arrow's columnar format, version 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrow;

/// The batches of one file.
pub struct ArrowRecords {
    file: FileShard,
    reader: arrow_ipc::reader::FileReader<File>,
    batch: u64,
}

impl RecordReader for Arrow {
    type Record = RecordBatch;
    type Records = ArrowRecords;

    fn open(&self, file: &FileShard) -> io::Result<ArrowRecords> {
        let reader = arrow_ipc::reader::FileReader::try_new(File::open(&file.path)?, None).map_err(io::Error::other)?;
        Ok(ArrowRecords { file: file.clone(), reader, batch: 0 })
    }
}

impl Iterator for ArrowRecords {
    type Item = Result<RecordBatch, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let batch = self.batch;
            self.batch += 1;
            if self.file.has(batch) {
                // Where in the file a batch lies, the reader does not say.
                return Some(self.reader.next()?.map_err(|error| BadRecord::new(batch, 0, error.to_string())));
            }
            if batch as usize >= self.reader.num_batches() || self.reader.set_index(batch as usize + 1).is_err() {
                return None;
            }
        }
    }
}

/// Some numeric columns of a batch as floats.
///
/// # Shapes
/// `[rows, names.len()]`.
///
/// # Errors
/// [`Error::Column`] for a column that is not there, holds no numbers, or has missing values.
pub fn columns(batch: &RecordBatch, names: &[&str]) -> Result<Array<f32>> {
    let mut elements = vec![0.0; batch.num_rows() * names.len()];
    for (place, name) in names.iter().enumerate() {
        let wrong = |problem: &str| Error::Column { name: (*name).to_owned(), problem: problem.to_owned() };
        let column = batch.column_by_name(name).ok_or_else(|| wrong("it is not there; name one that is"))?;
        if column.null_count() > 0 {
            return Err(wrong("it has missing values; fill them before"));
        }
        macro_rules! fill {
            ($($data_type:ident $arrow:ident $to:expr),*) => {
                match column.data_type() {
                    $(DataType::$data_type => {
                        let values: &PrimitiveArray<types::$arrow> = column.as_primitive();
                        for (row, value) in values.values().iter().enumerate() {
                            elements[row * names.len() + place] = $to(*value);
                        }
                    })*
                    other => return Err(wrong(&format!("it holds {other}, and numbers are wanted"))),
                }
            };
        }
        fill!(Float32 Float32Type std::convert::identity, Float64 Float64Type (|x| x as f32), Int64 Int64Type (|x| x as f32),
            Int32 Int32Type (|x| x as f32), UInt8 UInt8Type f32::from, Int8 Int8Type f32::from, UInt32 UInt32Type (|x| x as f32));
    }
    Array::new([batch.num_rows(), names.len()], elements)
}

//! Writers of record files.

use std::fmt;
use std::io::{self, BufWriter, IntoInnerError, Write};

use flate2::write::{GzEncoder, ZlibEncoder};

use super::masked;

/// A writer of TFRecord files.
///
/// # Examples
/// ```
/// use distribute_input::Dataset;
/// use distribute_input::read::{Compression, ReadOptions, TfRecordWriter, TfRecords};
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("greetings.tfrecord");
/// let mut writer = TfRecordWriter::compressed(std::fs::File::create(&path)?, Compression::Gzip);
/// writer.write(b"hello")?;
/// writer.write(b"world")?;
/// writer.finish()?;
/// let records = Dataset::from_files([&path]).read(TfRecords, ReadOptions::default());
/// assert_eq!(records.iter().last().expect("there are two")?, b"world");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `tf.io.TFRecordWriter`.
pub struct TfRecordWriter<W: Write> {
    sink: Sink<W>,
}

/// The compression of a TFRecord file as a whole.
///
/// # Source
/// `compression_type` of `tf.io.TFRecordOptions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// None, which lets a reader of one part of a file skip the records of others without reading them.
    #[default]
    None,
    /// The gzip format, TensorFlow's `GZIP`.
    Gzip,
    /// The zlib format, TensorFlow's `ZLIB`.
    Zlib,
}

enum Sink<W: Write> {
    Plain(BufWriter<W>),
    // The encoders buffer their output, but not the small pieces of which a record consists.
    Gzip(BufWriter<GzEncoder<W>>),
    Zlib(BufWriter<ZlibEncoder<W>>),
}

impl<W: Write> TfRecordWriter<W> {
    /// Creates a writer to a file or another sink of bytes, without compression.
    pub fn new(file: W) -> TfRecordWriter<W> {
        TfRecordWriter::compressed(file, Compression::None)
    }

    /// Creates a writer that compresses at zlib's default level.
    pub fn compressed(file: W, compression: Compression) -> TfRecordWriter<W> {
        let level = flate2::Compression::default();
        let sink = match compression {
            Compression::None => Sink::Plain(BufWriter::with_capacity(BUFFER_BYTES, file)),
            Compression::Gzip => Sink::Gzip(BufWriter::with_capacity(BUFFER_BYTES, GzEncoder::new(file, level))),
            Compression::Zlib => Sink::Zlib(BufWriter::with_capacity(BUFFER_BYTES, ZlibEncoder::new(file, level))),
        };
        TfRecordWriter { sink }
    }

    /// Writes one record.
    ///
    /// # Errors
    /// The I/O error of the file.
    pub fn write(&mut self, record: &[u8]) -> io::Result<()> {
        let length = (record.len() as u64).to_le_bytes();
        let sink = self.sink();
        sink.write_all(&length)?;
        sink.write_all(&masked(crc32c::crc32c(&length)).to_le_bytes())?;
        sink.write_all(record)?;
        sink.write_all(&masked(crc32c::crc32c(record)).to_le_bytes())
    }

    /// Writes the buffered bytes to the file. A compressed file can then be read up to here, but is complete only after
    /// [`finish`](TfRecordWriter::finish).
    ///
    /// # Errors
    /// The I/O error of the file.
    pub fn flush(&mut self) -> io::Result<()> {
        self.sink().flush()
    }

    /// Writes the buffered bytes and the end of a compressed file, and returns the file.
    ///
    /// # Errors
    /// The I/O error of the file.
    pub fn finish(self) -> io::Result<W> {
        match self.sink {
            Sink::Plain(file) => file.into_inner().map_err(IntoInnerError::into_error),
            Sink::Gzip(encoder) => encoder.into_inner().map_err(IntoInnerError::into_error)?.finish(),
            Sink::Zlib(encoder) => encoder.into_inner().map_err(IntoInnerError::into_error)?.finish(),
        }
    }

    fn sink(&mut self) -> &mut dyn Write {
        match &mut self.sink {
            Sink::Plain(file) => file,
            Sink::Gzip(encoder) => encoder,
            Sink::Zlib(encoder) => encoder,
        }
    }
}

impl<W: Write> fmt::Debug for TfRecordWriter<W> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compression = match self.sink {
            Sink::Plain(_) => Compression::None,
            Sink::Gzip(_) => Compression::Gzip,
            Sink::Zlib(_) => Compression::Zlib,
        };
        formatter.debug_struct("TfRecordWriter").field("compression", &compression).finish_non_exhaustive()
    }
}

const BUFFER_BYTES: usize = 1 << 18;

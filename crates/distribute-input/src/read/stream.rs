//! Files that are read from their beginning, decompressed where they are compressed.

use std::fmt;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use super::file::{Failure, InputFile};
use super::packing::{Packing, Recognize, START};
use crate::FileShard;

/// The content of an open file or object from its beginning. A file compressed with gzip or zstd is decompressed, with
/// the feature of that name.
///
/// # Examples
/// ```
/// # #[cfg(feature = "gzip")] {
/// use distribute_input::FileShard;
/// use std::io::{BufRead, Write};
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("a.txt.gz");
/// let mut packed = flate2::write::GzEncoder::new(std::fs::File::create(&path)?, flate2::Compression::fast());
/// packed.write_all(b"one\ntwo\n")?;
/// packed.finish()?;
/// let lines: std::io::Result<Vec<String>> = FileShard::whole(&path).open_stream()?.lines().collect();
/// assert_eq!(lines?, ["one", "two"]);
/// # }
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct InputStream {
    source: Source,
    failure: Failure,
}

enum Source {
    /// A file as it is.
    Plain(BufReader<InputFile>),
    /// Content that can only be read in order.
    Ordered(Box<dyn BufRead + Send>),
}

impl FileShard {
    /// Opens the file, of which this may be a part, to be read from its beginning; the compression of a file is
    /// recognized by its first bytes, whatever its name.
    ///
    /// # Errors
    /// The error of the operating system or the store if the file cannot be opened or its first bytes cannot be read;
    /// an error of the kind [`Unsupported`](io::ErrorKind::Unsupported) if it is compressed in another format (bzip2,
    /// lz4 and xz are recognized), or if the program was built without the feature.
    pub fn open_stream(&self) -> io::Result<InputStream> {
        InputStream::open(self.content(), Packing::of)
    }
}

impl InputStream {
    /// Opens a file by its path or URL, of which `recognize` tells the compression.
    pub(super) fn open(path: &Path, recognize: Recognize) -> io::Result<InputStream> {
        let file = InputFile::open(path)?;
        let failure = file.failure();
        let source = Source::of(file, recognize).map_err(|error| failure.cause(error))?;
        Ok(InputStream { source, failure })
    }

    pub(super) fn failure(&self) -> Failure {
        self.failure.clone()
    }

    /// Skips bytes; also more than there are, so that nothing follows.
    #[cfg(feature = "tfrecord")]
    pub(super) fn skip_bytes(&mut self, bytes: i64) -> io::Result<()> {
        match &mut self.source {
            Source::Plain(reader) => reader.seek_relative(bytes),
            Source::Ordered(reader) => {
                io::copy(&mut reader.take(bytes.unsigned_abs()), &mut io::sink())?;
                Ok(())
            }
        }
    }
}

impl Source {
    fn of(file: InputFile, recognize: Recognize) -> io::Result<Source> {
        let failure = file.failure();
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, file);
        let seen = loop {
            match reader.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                seen => break seen?,
            }
        };
        if let Some(start) = seen.get(..START) {
            return match recognize(start) {
                None => Ok(Source::Plain(reader)),
                Some(packing) => Ok(Source::Ordered(decoded(packing, reader, failure)?)),
            };
        }
        // A short file, or a pipe that has not been written so far.
        let mut start = Vec::with_capacity(START);
        reader.by_ref().take(START as u64).read_to_end(&mut start)?;
        let packing = recognize(&start);
        let whole = Cursor::new(start).chain(reader);
        Ok(Source::Ordered(match packing {
            None => Box::new(whole),
            Some(packing) => decoded(packing, whole, failure)?,
        }))
    }
}

fn decoded(
    packing: Packing,
    packed: impl BufRead + Send + 'static,
    failure: Failure,
) -> io::Result<Box<dyn BufRead + Send>> {
    Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, packing.decoder(packed, failure)?)))
}

const BUFFER_BYTES: usize = 1 << 18;

impl Read for InputStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.source {
            Source::Plain(reader) => reader.read(buffer),
            Source::Ordered(reader) => reader.read(buffer),
        }
    }
}

impl BufRead for InputStream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match &mut self.source {
            Source::Plain(reader) => reader.fill_buf(),
            Source::Ordered(reader) => reader.fill_buf(),
        }
    }

    fn consume(&mut self, bytes: usize) {
        match &mut self.source {
            Source::Plain(reader) => reader.consume(bytes),
            Source::Ordered(reader) => reader.consume(bytes),
        }
    }
}

impl fmt::Debug for InputStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("InputStream").field("failure", &self.failure).finish_non_exhaustive()
    }
}

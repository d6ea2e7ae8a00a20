//! Decoders of gzip and zlib.

use std::io::{self, BufRead, Read};

use flate2::bufread::{MultiGzDecoder, ZlibDecoder};

/// Decodes all members of a gzip file.
pub(super) fn gzip(packed: impl BufRead + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(MultiGzDecoder::new(packed)))
}

/// Decodes all streams of a zlib file.
pub(super) fn zlib(packed: impl BufRead + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(ZlibStreams { stream: Some(ZlibDecoder::new(packed)) }))
}

/// Decodes zlib streams one after the other, as [`MultiGzDecoder`] does gzip's members.
struct ZlibStreams<R> {
    /// The stream that is being read.
    stream: Option<ZlibDecoder<R>>,
}

impl<R: BufRead> Read for ZlibStreams<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(stream) = &mut self.stream {
            let got = stream.read(buffer)?;
            if got > 0 || buffer.is_empty() || stream.get_mut().fill_buf()?.is_empty() {
                return Ok(got);
            }
            self.stream = self.stream.take().map(|ended| ZlibDecoder::new(ended.into_inner()));
        }
        Ok(0)
    }
}

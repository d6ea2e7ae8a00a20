//! Decoders of gzip and zlib.

use std::io::{self, BufRead, Read};

use flate2::bufread::{MultiGzDecoder, ZlibDecoder};

/// Decodes all members of a gzip file.
pub(super) fn gzip(packed: impl BufRead + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(MultiGzDecoder::new(packed)))
}

pub(super) fn zlib(packed: impl BufRead + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(ZlibDecoder::new(packed)))
}

//! The decoder of zstd.

use std::io::{self, BufRead, Read};

/// Decodes all frames of a file. A frame that asks for a window of more than 128 MiB is refused by the library.
pub(super) fn zstd(packed: impl BufRead + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(zstd::Decoder::with_buffer(packed)?))
}

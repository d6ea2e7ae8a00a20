//! Compression of whole files: how it is recognized, and the decoders of what is read.

use std::io::{self, BufRead, Read};

use super::file::Failure;

#[cfg_attr(not(feature = "gzip"), path = "packing/no_gzip.rs")]
mod gzip;
#[cfg_attr(not(feature = "zstd"), path = "packing/no_zstd.rs")]
mod zstd;

/// The format that a whole file is compressed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    Gzip,
    #[cfg_attr(not(feature = "tfrecord"), expect(dead_code, reason = "recognized in record files only"))]
    Zlib,
    Zstd,
    Bzip2,
    Lz4,
    Xz,
}

/// The number of bytes at the beginning of a file by which its compression is recognized.
pub(super) const START: usize = 12;

/// Recognizes the compression of a file by its first [`START`] bytes, or by all if there are fewer.
pub(super) type Recognize = fn(&[u8]) -> Option<Packing>;

impl Packing {
    /// Recognizes the formats whose files begin with bytes that no text and no other format of this crate begins with.
    pub(super) fn of(start: &[u8]) -> Option<Packing> {
        match start {
            [0x1f, 0x8b, 8, ..] => Some(Packing::Gzip),
            // A frame, or a frame to skip, which parallel compressors write first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Packing::Zstd),
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, 0x53, 0x59, ..] => Some(Packing::Bzip2),
            [4, 0x22, 0x4d, 0x18, ..] => Some(Packing::Lz4),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Packing::Xz),
            _ => None,
        }
    }

    /// Recognizes zlib's two bytes, which texts may begin with too.
    #[cfg(feature = "tfrecord")]
    pub(super) fn zlib(start: &[u8]) -> Option<Packing> {
        let [method, flags, ..] = *start else { return None };
        let is_zlib = method & 0xf == 8 && method >> 4 <= 7 && u16::from_be_bytes([method, flags]).is_multiple_of(31);
        is_zlib.then_some(Packing::Zlib)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Packing::Gzip => "gzip",
            Packing::Zlib => "zlib",
            Packing::Zstd => "zstd",
            Packing::Bzip2 => "bzip2",
            Packing::Lz4 => "lz4",
            Packing::Xz => "xz",
        }
    }

    /// Returns the content of a compressed stream.
    pub(super) fn decoder(
        self,
        packed: impl BufRead + Send + 'static,
        failure: Failure,
    ) -> io::Result<Box<dyn Read + Send>> {
        let decoder = match self {
            Packing::Gzip => gzip::gzip(packed)?,
            Packing::Zlib => gzip::zlib(packed)?,
            Packing::Zstd => zstd::zstd(packed)?,
            Packing::Bzip2 | Packing::Lz4 | Packing::Xz => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!(
                        "it is compressed with {}, which is not read; decompress it, or compress it with gzip or zstd",
                        self.name()
                    ),
                ));
            }
        };
        Ok(Box::new(Decoded { decoder, packing: self, failure }))
    }

    /// Returns the message for a compressed file of a format that is not read as a stream.
    #[cfg(any(feature = "images", feature = "parquet", feature = "safetensors"))]
    pub(super) fn refusal(self, format: &str) -> String {
        format!("it is compressed with {}; decompress it, {format}", self.name())
    }
}

/// Replaces the error of a format's library about a file that is compressed as a whole.
#[cfg(feature = "parquet")]
pub(super) fn refused(file: &crate::FileShard, format: &str, error: io::Error) -> io::Error {
    let start = || -> io::Result<Vec<u8>> {
        let mut start = Vec::with_capacity(START);
        file.open()?.take(START as u64).read_to_end(&mut start)?;
        Ok(start)
    };
    match start().ok().and_then(|start| Packing::of(&start)) {
        Some(packing) => io::Error::new(io::ErrorKind::InvalidData, packing.refusal(format)),
        None => error,
    }
}

/// The error of a build without a feature.
#[cfg(not(all(feature = "gzip", feature = "zstd")))]
fn not_built<T>(name: &str, feature: &str) -> io::Result<T> {
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        format!("it is compressed with {name}; build the program with the feature {feature}, or decompress the file"),
    ))
}

/// A decoder whose errors name the compression.
struct Decoded {
    decoder: Box<dyn Read + Send>,
    packing: Packing,
    failure: Failure,
}

impl Read for Decoded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (name, failure) = (self.packing.name(), &self.failure);
        self.decoder.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::Interrupted => error,
            // The store's error, and not the data.
            _ if failure.is_noted() => error,
            kind @ io::ErrorKind::UnexpectedEof => {
                io::Error::new(kind, format!("the file is truncated: its {name} data do not end"))
            }
            kind => io::Error::new(kind, format!("its {name} data are damaged: {error}")),
        })
    }
}

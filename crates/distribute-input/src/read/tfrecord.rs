//! TensorFlow's record files.

use std::collections::HashMap;
use std::io::{self, Read};

use prost::Message;

use super::file::Failure;
use super::packing::Packing;
use super::{BadRecord, InputStream, RecordReader};
use crate::{FileShard, Result};

mod writer;

pub use writer::{Compression, TfRecordWriter};

/// A reader of TFRecord files that yields records as bytes and verifies their checksums. Records of other parts of a
/// file are skipped without being read.
///
/// Files compressed with gzip or zlib, which TensorFlow writes by `TFRecordOptions(compression_type)`, or with zstd are
/// recognized by their first bytes and decompressed. Of such a file each part decompresses everything; byte offsets in
/// errors are those of the decompressed content.
///
/// # Source
/// The format of `tensorflow/core/lib/io/record_writer.h`: length, checksum of the length, data, checksum of the data;
/// checksums are CRC-32C, rotated and offset.
#[derive(Clone, Copy, Debug, Default)]
pub struct TfRecords;

/// The records of one file.
#[derive(Debug)]
pub struct TfRecordRecords {
    file: FileShard,
    reader: InputStream,
    failure: Failure,
    record: u64,
    offset: u64,
    ended: bool,
}

impl RecordReader for TfRecords {
    type Record = Vec<u8>;
    type Records = TfRecordRecords;

    fn open(&self, file: &FileShard) -> io::Result<TfRecordRecords> {
        let reader = InputStream::open(file.content(), packing)?;
        let failure = reader.failure();
        Ok(TfRecordRecords { file: file.clone(), reader, failure, record: 0, offset: 0, ended: false })
    }
}

impl TfRecordRecords {
    /// Returns the next record; `None` at the end of the file, or if the record belongs to another part and was
    /// skipped.
    fn read(&mut self) -> Option<Result<Vec<u8>, String>> {
        let mut header = [0; HEADER];
        match read_full(&mut self.reader, &mut header) {
            Ok(0) => {
                self.ended = true;
                return None;
            }
            Ok(HEADER) => {}
            Ok(got) => {
                return self
                    .broken(format!("the file is truncated: {got} of the {HEADER} bytes of a header are there"));
            }
            Err(error) => return self.broken(error.to_string()),
        }
        let (length, checksum) = header.split_at(8);
        if masked(crc32c::crc32c(length)) != word(checksum) {
            return self.broken("the checksum of the length is wrong; what follows in the file is lost".to_owned());
        }
        let length = u64::from_le_bytes(length.try_into().unwrap_or_default());
        // The largest possible file size, so that no sum of offsets overflows.
        let ends = self.offset.checked_add(length).and_then(|at| at.checked_add((HEADER + FOOTER) as u64));
        let Some(ends) = ends.filter(|at| i64::try_from(*at).is_ok()) else {
            return self.broken(format!("a record of {length} bytes was promised, more than a file can have"));
        };
        let rest = length + FOOTER as u64;
        if !self.file.has(self.record) {
            return match self.reader.skip_bytes(rest as i64) {
                Ok(()) => {
                    self.offset = ends;
                    None
                }
                Err(error) => self.broken(error.to_string()),
            };
        }
        // A wrong length must not allocate more than the file contains.
        let mut data = Vec::with_capacity(rest.min(1 << 24) as usize);
        match self.reader.by_ref().take(rest).read_to_end(&mut data) {
            Ok(got) if got as u64 == rest => {}
            Ok(got) => {
                let problem = format!("the file is truncated: {got} of the {rest} bytes of the record are there");
                return self.broken(problem);
            }
            Err(error) => return self.broken(error.to_string()),
        }
        self.offset = ends;
        let checksum = word(&data[data.len() - FOOTER..]);
        data.truncate(data.len() - FOOTER);
        Some(if masked(crc32c::crc32c(&data)) == checksum {
            Ok(data)
        } else {
            Err("the checksum of the data is wrong".to_owned())
        })
    }

    fn broken(&mut self, problem: String) -> Option<Result<Vec<u8>, String>> {
        self.ended = true;
        Some(Err(problem))
    }
}

impl Iterator for TfRecordRecords {
    type Item = Result<Vec<u8>, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let (record, offset) = (self.record, self.offset);
            let read = self.read();
            self.record += 1;
            if let Some(read) = read {
                return Some(read.map_err(|problem| self.failure.bad(record, offset, problem)));
            }
        }
        None
    }
}

const HEADER: usize = 12;
const FOOTER: usize = 4;

fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().unwrap_or_default())
}

/// Recognizes the compression of a file. The first length of a plain file may have the bytes that a compressed file
/// begins with, but only with their checksum after it.
fn packing(start: &[u8]) -> Option<Packing> {
    match start.split_at_checked(8) {
        Some((length, checksum)) if masked(crc32c::crc32c(length)) == word(checksum) => None,
        _ => Packing::of(start).or_else(|| Packing::zlib(start)),
    }
}

/// Reads until the buffer is full or the file ends.
fn read_full(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// The usual content of TFRecord files: named lists of byte strings, floats or integers.
///
/// # Examples
/// ```
/// use distribute_input::read::{Example, Feature};
/// let example = Example::from([("label", Feature::Int64(vec![3])), ("image", Feature::Float(vec![0.5, 0.25]))]);
/// let read = Example::decode(&example.encode())?;
/// assert_eq!(read.floats("image")?, [0.5, 0.25]);
/// assert_eq!(read.int64s("label")?, [3]);
/// assert!(read.bytes("label").unwrap_err().to_string().contains("label"));
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.train.Example`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Example {
    features: HashMap<String, Feature>,
}

/// A list of values of one type.
#[derive(Clone, Debug, PartialEq)]
pub enum Feature {
    /// Byte strings.
    Bytes(Vec<Vec<u8>>),
    /// Floats.
    Float(Vec<f32>),
    /// Integers.
    Int64(Vec<i64>),
}

impl<'a, const N: usize> From<[(&'a str, Feature); N]> for Example {
    fn from(features: [(&'a str, Feature); N]) -> Example {
        Example { features: features.into_iter().map(|(name, feature)| (name.to_owned(), feature)).collect() }
    }
}

impl Example {
    /// Decodes a record.
    ///
    /// # Errors
    /// [`Error::Example`](crate::Error::Example) if the record is not a valid example.
    pub fn decode(record: &[u8]) -> Result<Example> {
        let wire = wire::Example::decode(record).map_err(|error| wrong(format!("it cannot be decoded: {error}")))?;
        let features = wire.features.unwrap_or_default().feature;
        let features = features.into_iter().filter_map(|(name, feature)| {
            let feature = match feature.kind? {
                wire::Kind::Bytes(list) => Feature::Bytes(list.value),
                wire::Kind::Float(list) => Feature::Float(list.value),
                wire::Kind::Int64(list) => Feature::Int64(list.value),
            };
            Some((name, feature))
        });
        Ok(Example { features: features.collect() })
    }

    /// Encodes the example as a record.
    pub fn encode(&self) -> Vec<u8> {
        let kind = |feature: &Feature| match feature.clone() {
            Feature::Bytes(value) => wire::Kind::Bytes(wire::BytesList { value }),
            Feature::Float(value) => wire::Kind::Float(wire::FloatList { value }),
            Feature::Int64(value) => wire::Kind::Int64(wire::Int64List { value }),
        };
        let features = self.features.iter();
        let feature =
            features.map(|(name, feature)| (name.clone(), wire::Feature { kind: Some(kind(feature)) })).collect();
        wire::Example { features: Some(wire::Features { feature }) }.encode_to_vec()
    }

    /// Returns a feature by its name.
    pub fn get(&self, name: &str) -> Option<&Feature> {
        self.features.get(name)
    }

    /// Returns a feature of floats.
    ///
    /// # Errors
    /// [`Error::Example`](crate::Error::Example) if there is no feature of this name and type.
    pub fn floats(&self, name: &str) -> Result<&[f32]> {
        match self.get(name) {
            Some(Feature::Float(values)) => Ok(values),
            other => Err(self.other(name, "floats", other)),
        }
    }

    /// Returns a feature of integers.
    ///
    /// # Errors
    /// [`Error::Example`](crate::Error::Example) if there is no feature of this name and type.
    pub fn int64s(&self, name: &str) -> Result<&[i64]> {
        match self.get(name) {
            Some(Feature::Int64(values)) => Ok(values),
            other => Err(self.other(name, "integers", other)),
        }
    }

    /// Returns a feature of byte strings.
    ///
    /// # Errors
    /// [`Error::Example`](crate::Error::Example) if there is no feature of this name and type.
    pub fn bytes(&self, name: &str) -> Result<&[Vec<u8>]> {
        match self.get(name) {
            Some(Feature::Bytes(values)) => Ok(values),
            other => Err(self.other(name, "bytes", other)),
        }
    }

    fn other(&self, name: &str, wanted: &str, found: Option<&Feature>) -> crate::Error {
        let kind = match found {
            Some(Feature::Bytes(_)) => "holds bytes",
            Some(Feature::Float(_)) => "holds floats",
            Some(Feature::Int64(_)) => "holds integers",
            None => {
                let mut names: Vec<&str> = self.features.keys().map(String::as_str).collect();
                names.sort_unstable();
                return wrong(format!("{wanted} {name:?} were asked for, it has {}", names.join(", ")));
            }
        };
        wrong(format!("{wanted} were asked for, but {name:?} {kind}"))
    }
}

fn wrong(problem: String) -> crate::Error {
    crate::Error::Example { problem }
}

/// The messages of `tensorflow/core/example/{example,feature}.proto`.
mod wire {
    use std::collections::HashMap;

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Example {
        #[prost(message, optional, tag = "1")]
        pub(super) features: Option<Features>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Features {
        #[prost(map = "string, message", tag = "1")]
        pub(super) feature: HashMap<String, Feature>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Feature {
        #[prost(oneof = "Kind", tags = "1, 2, 3")]
        pub(super) kind: Option<Kind>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum Kind {
        #[prost(message, tag = "1")]
        Bytes(BytesList),
        #[prost(message, tag = "2")]
        Float(FloatList),
        #[prost(message, tag = "3")]
        Int64(Int64List),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct BytesList {
        #[prost(bytes = "vec", repeated, tag = "1")]
        pub(super) value: Vec<Vec<u8>>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct FloatList {
        #[prost(float, repeated, tag = "1")]
        pub(super) value: Vec<f32>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Int64List {
        #[prost(int64, repeated, tag = "1")]
        pub(super) value: Vec<i64>,
    }
}

//! Lines of text.

use std::io::{self, BufRead};

use super::file::Failure;
use super::{BadRecord, InputStream, RecordReader};
use crate::{FileShard, Result};

/// A reader of UTF-8 lines, without their line endings. Files may be compressed with gzip or zstd.
///
/// # Source
/// `tf.data.TextLineDataset`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lines;

/// The lines of one file.
#[derive(Debug)]
pub struct LineRecords {
    file: FileShard,
    reader: InputStream,
    failure: Failure,
    record: u64,
    offset: u64,
    ended: bool,
}

impl RecordReader for Lines {
    type Record = String;
    type Records = LineRecords;

    fn open(&self, file: &FileShard) -> io::Result<LineRecords> {
        let reader = file.open_stream()?;
        let failure = reader.failure();
        Ok(LineRecords { file: file.clone(), reader, failure, record: 0, offset: 0, ended: false })
    }
}

impl Iterator for LineRecords {
    type Item = Result<String, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let mut line = Vec::new();
            let (record, offset) = (self.record, self.offset);
            match self.reader.read_until(b'\n', &mut line) {
                Ok(0) => self.ended = true,
                Ok(read) => {
                    self.record += 1;
                    self.offset += read as u64;
                    if !self.file.has(record) {
                        continue;
                    }
                    while line.last().is_some_and(|last| matches!(last, b'\n' | b'\r')) {
                        line.pop();
                    }
                    return Some(
                        String::from_utf8(line).map_err(|error| BadRecord::new(record, offset, error.to_string())),
                    );
                }
                Err(error) => {
                    self.ended = true;
                    return Some(Err(self.failure.bad(record, offset, error.to_string())));
                }
            }
        }
        None
    }
}

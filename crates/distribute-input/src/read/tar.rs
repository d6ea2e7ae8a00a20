//! Samples in tar files.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::file::Failure;
use super::{BadRecord, RecordReader};
use crate::{FileShard, Result};

/// A reader of samples in tar files: consecutive entries whose names are equal up to the first dot of the file name.
///
/// # Source
/// The WebDataset convention: `0001.jpg`, `0001.cls`, `0002.jpg`, …
#[derive(Clone, Copy, Debug, Default)]
pub struct WebDataset;

/// The files of one sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The common part of the names, with the folder.
    pub key: String,
    /// The contents of the files, by the part of their names after the first dot.
    pub files: BTreeMap<String, Vec<u8>>,
}

/// The samples of one file. A thread reads them ahead, since the entries of an archive can only be read in order.
#[derive(Debug)]
pub struct SampleRecords {
    samples: Receiver<Result<Sample, BadRecord>>,
}

impl RecordReader for WebDataset {
    type Record = Sample;
    type Records = SampleRecords;

    fn open(&self, file: &FileShard) -> io::Result<SampleRecords> {
        let (opened, file) = (file.open()?, file.clone());
        let (failure, reader) = (opened.failure(), BufReader::with_capacity(1 << 18, opened));
        let (sender, samples) = bounded(8);
        std::thread::Builder::new()
            .name("input-tar".to_owned())
            .spawn(move || read(reader, &failure, &file, &sender))?;
        Ok(SampleRecords { samples })
    }
}

impl Iterator for SampleRecords {
    type Item = Result<Sample, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        // The thread ends with the file, or after it has sent an error.
        self.samples.recv().ok()
    }
}

/// Reads samples until the end of the archive, or until the receiver is gone.
fn read(reader: impl Read, failure: &Failure, file: &FileShard, sender: &Sender<Result<Sample, BadRecord>>) {
    let mut archive = tar::Archive::new(reader);
    let (mut record, mut offset) = (0, 0);
    let mut sample: Option<Sample> = None;
    let outcome = (|| -> io::Result<()> {
        for entry in archive.entries()? {
            let mut entry = entry?;
            offset = entry.raw_header_position();
            if !entry.header().entry_type().is_file() {
                continue;
            }
            let name = entry.path()?.to_string_lossy().into_owned();
            let base = name.rfind('/').map_or(0, |slash| slash + 1);
            let dot = name[base..].find('.').map_or(name.len(), |dot| base + dot);
            let (key, extension) = (&name[..dot], name.get(dot + 1..).unwrap_or_default());
            let begins = sample.as_ref().is_none_or(|sample| sample.key != key);
            let next = begins.then(|| Sample { key: key.to_owned(), ..Sample::default() });
            if let Some(done) = next.and_then(|next| sample.replace(next)) {
                if file.has(record) && sender.send(Ok(done)).is_err() {
                    return Ok(());
                }
                record += 1;
            }
            if let Some(sample) = sample.as_mut().filter(|_| file.has(record)) {
                let mut bytes = Vec::new();
                let promised = entry.size();
                let got = entry.read_to_end(&mut bytes)?;
                if got as u64 != promised {
                    return Err(io::Error::other(format!(
                        "the file is truncated: {got} of {promised} bytes of {name} are there"
                    )));
                }
                sample.files.insert(extension.to_owned(), bytes);
            }
        }
        Ok(())
    })();
    let last = match outcome {
        Ok(()) => sample.filter(|_| file.has(record)).map(Ok),
        Err(error) => Some(Err(failure.bad(record, offset, error.to_string()))),
    };
    if let Some(last) = last {
        // Fails if the receiver is gone.
        drop(sender.send(last));
    }
}

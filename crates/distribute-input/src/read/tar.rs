//! Samples in tar files.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::file::Failure;
use super::{BadRecord, RecordReader};
use crate::{FileShard, Result};

/// A reader of samples in tar files: consecutive files whose paths are equal up to the first dot of the file name.
/// Archives may be compressed with gzip or zstd.
///
/// The path `train/0001.seg.png` belongs to the sample `train/0001`, as its file `seg.png`. Folders, links and other
/// entries other than regular files are passed over, and so are files whose name has no dot or begins with one, and
/// the metadata in paths such as `__index__/0`. Two files of one name in a sample, and sparse files, make a bad record,
/// and so does an archive that ends without a block of zeros, since it may have been cut; its last sample is not
/// yielded.
///
/// # Source
/// The WebDataset convention: `0001.jpg`, `0001.cls`, `0002.jpg`, …; `base_plus_ext` and `group_by_keys` of
/// webdataset.
#[derive(Clone, Copy, Debug, Default)]
pub struct WebDataset;

/// The files of one sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The common part of the paths, with the folder.
    pub key: String,
    /// The contents of the files, by the part of their names after the first dot, in lower case.
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
        let (reader, file) = (file.open_stream()?, file.clone());
        let failure = reader.failure();
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
    let mut archive = tar::Archive::new(ToEnd { reader, is_at_end: false });
    let mut samples = Samples { file, sender, begun: None, record: 0 };
    let mut offset = 0;
    let entries = || -> io::Result<bool> {
        for entry in archive.entries()? {
            let mut entry = entry?;
            offset = entry.raw_header_position();
            if !samples.add(&mut entry)? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    // A thread that is gone looks like the end of the archive.
    let outcome = catch_unwind(AssertUnwindSafe(entries)).unwrap_or_else(|_| {
        Err(io::Error::other("reading it panicked, which was printed where it happened; write the archive again"))
    });
    let outcome = outcome.and_then(|is_wanted| match archive.into_inner().is_at_end && is_wanted {
        false => Ok(is_wanted),
        // An archive is read up to the first block of its end mark, and no further.
        true => Err(io::Error::other(
            "the file is truncated, or was not finished: it ends without the blocks of zeros that mark the end of a \
             tar file; copy or write it again",
        )),
    });
    match outcome {
        // Fails if the receiver is gone.
        Ok(is_wanted) => drop(is_wanted && samples.finish()),
        Err(error) => {
            let begun = samples.begun.as_ref().map_or(offset, |begun| begun.offset);
            drop(sender.send(Err(failure.bad(samples.record, begun, error.to_string()))));
        }
    }
}

/// A reader that remembers whether it was asked for more than there is.
struct ToEnd<R> {
    reader: R,
    is_at_end: bool,
}

impl<R: Read> Read for ToEnd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.reader.read(buffer)?;
        self.is_at_end |= got == 0 && !buffer.is_empty();
        Ok(got)
    }
}

/// Groups the entries of an archive.
struct Samples<'a> {
    file: &'a FileShard,
    sender: &'a Sender<Result<Sample, BadRecord>>,
    begun: Option<Begun>,
    record: u64,
}

/// A sample of which more files may follow.
struct Begun {
    sample: Sample,
    offset: u64,
    problem: Option<String>,
}

impl Samples<'_> {
    /// Adds an entry to its sample, and returns whether more are wanted.
    fn add<R: Read>(&mut self, entry: &mut tar::Entry<'_, R>) -> io::Result<bool> {
        let kind = entry.header().entry_type();
        if !kind.is_file() && !kind.is_contiguous() && !kind.is_gnu_sparse() {
            return Ok(true);
        }
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let Some((key, extension)) = key_and_extension(&path) else { return Ok(true) };
        if self.begun.as_ref().is_none_or(|begun| begun.sample.key != key) {
            if !self.finish() {
                return Ok(false);
            }
            let sample = Sample { key: key.to_owned(), ..Sample::default() };
            self.begun = Some(Begun { sample, offset: entry.raw_header_position(), problem: None });
        }
        let Some(begun) = self.begun.as_mut().filter(|_| self.file.has(self.record)) else { return Ok(true) };
        let extension = extension.to_lowercase();
        let problem = if kind.is_gnu_sparse() {
            // A few bytes of it may stand for any number of zeros.
            Some(format!("{path} is stored as a sparse file, which is not read; pack it without --sparse"))
        } else if begun.sample.files.contains_key(&extension) {
            Some(format!("the sample {key} has two files named {extension}; give each a name of its own"))
        } else {
            None
        };
        if problem.is_some() {
            begun.problem = begun.problem.take().or(problem);
            return Ok(true);
        }
        let promised = entry.size();
        let mut bytes = Vec::new();
        let got = entry.read_to_end(&mut bytes)?;
        if got as u64 != promised {
            let problem = format!("the file is truncated: {got} of {promised} bytes of {path} are there");
            return Err(io::Error::other(problem));
        }
        begun.sample.files.insert(extension, bytes);
        Ok(true)
    }

    /// Sends the sample that has begun, if it belongs to this part, and returns whether more are wanted.
    fn finish(&mut self) -> bool {
        let Some(Begun { sample, offset, problem }) = self.begun.take() else { return true };
        let record = self.record;
        self.record += 1;
        let sample = match problem {
            None => Ok(sample),
            Some(problem) => Err(BadRecord::new(record, offset, problem)),
        };
        !self.file.has(record) || self.sender.send(sample).is_ok()
    }
}

/// Returns the key of a sample and the name of its file; `None` for paths that name neither.
fn key_and_extension(path: &str) -> Option<(&str, &str)> {
    let first = path.split('/').next().unwrap_or_default();
    if first.len() >= 4 && first.starts_with("__") && first.ends_with("__") {
        return None;
    }
    let base = path.rfind('/').map_or(0, |slash| slash + 1);
    let dot = path[base..].find('.').filter(|dot| *dot > 0)?;
    Some((&path[..base + dot], &path[base + dot + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Panics;

    impl Read for Panics {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            panic!("a test")
        }
    }

    #[test]
    fn a_panic_is_not_the_end_of_the_archive() {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(600);
        builder.append_data(&mut header, "a.cls", &[1; 600][..]).unwrap();
        let begun = builder.into_inner().unwrap();
        let (sender, samples) = bounded(8);
        read(begun[..1024].chain(Panics), &Failure::default(), &FileShard::whole("a.tar"), &sender);
        let bad = samples.recv().unwrap().unwrap_err().of("a.tar".as_ref()).to_string();
        assert!(bad.starts_with("a.tar, record 0 at byte 0: reading it panicked"), "{bad}");
    }
}

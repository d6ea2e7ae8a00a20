//! A checkpoint whose files are checked, and whose tensors are read one by one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use distribute_device::DType;
use serde_json::Value;

use super::disk::{Disk, Entry, Folder};
use super::folder::read_manifest;
use super::manifest::Manifest;
use super::names::{STATE, group_of};
use super::open::{damaged, of_another_length, retried, state_of, unreadable};
use super::origin::Origin;
use super::run::RunId;
use super::stored::zeros;
use super::tensor_file::{self, LENGTH_BYTES, Located};
use crate::{Error, Result};

/// The contents of a checkpoint, without its tensors' bytes.
#[derive(Debug)]
pub(super) struct Survey {
    path: PathBuf,
    folder: Folder,
    pub(super) found: Found,
}

#[derive(Debug)]
pub(super) struct Found {
    pub(super) step: u64,
    pub(super) run: RunId,
    pub(super) origin: Origin,
    pub(super) state: BTreeMap<String, Value>,
    /// By group and by name.
    pub(super) tensors: BTreeMap<String, BTreeMap<String, Place>>,
}

/// The place of a tensor.
#[derive(Debug)]
pub(super) struct Place {
    file: String,
    start: u64,
    bytes: usize,
    /// The checksums of its blocks, which have [`BLOCK_BYTES`] each, the last one the rest.
    blocks: Vec<u32>,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

impl Survey {
    /// Reads all files of a checkpoint, and compares them with the manifest. Takes the memory of one buffer.
    ///
    /// # Errors
    /// [`Error::Damaged`] if it is not whole, [`Error::Format`] for another version, [`Error::File`] if it cannot be
    /// read for other reasons.
    pub(super) fn of(disk: &Disk, path: &Path) -> Result<Survey> {
        let (found, folder) = retried(disk, path, |folder| surveyed(disk, folder, path))?;
        Ok(Survey { path: path.to_owned(), folder, found })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a range of a tensor's bytes, and compares the blocks that contain it with their checksums.
    ///
    /// # Errors
    /// [`Error::Damaged`] if they are no longer what they were when the files were checked, [`Error::File`] if they
    /// cannot be read, [`Error::Restore`] for another tensor or range.
    pub(super) fn read(&self, disk: &Disk, group: &str, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let wrong = |problem| Error::Restore { name: name.to_owned(), problem };
        let place = self.found.tensors.get(group).and_then(|tensors| tensors.get(name));
        let place = place.ok_or_else(|| wrong(format!("the checkpoint's {group} has none of this name")))?;
        if range.start > range.end || range.end > place.bytes {
            return Err(wrong(format!("it has {} bytes, and {range:?} are asked for", place.bytes)));
        }
        let Place { file, start, blocks, .. } = place;
        let first = range.start / BLOCK_BYTES;
        let from = first * BLOCK_BYTES;
        let to = range.end.next_multiple_of(BLOCK_BYTES).min(place.bytes);
        let mut bytes = zeros(to - from).map_err(|source| Error::File { path: self.path.join(file), source })?;
        let read = disk.read_at(&self.folder, &self.path, file, start + from as u64, &mut bytes);
        read.map_err(|error| unreadable(&self.path, file, error))?;
        let found = bytes.chunks(BLOCK_BYTES).map(crc32c::crc32c);
        if !found.eq(blocks.iter().copied().skip(first).take(bytes.len().div_ceil(BLOCK_BYTES))) {
            return Err(damaged(&self.path, file, format!("{name} has changed since the file was checked")));
        }
        bytes.truncate(range.end - from);
        bytes.drain(..range.start - from);
        Ok(bytes)
    }
}

/// Checks the files of a checkpoint, and finds its tensors.
fn surveyed(disk: &Disk, folder: &Folder, path: &Path) -> Result<Found> {
    let manifest: Manifest = read_manifest(disk, folder, path)?;
    let (mut tensors, mut state) = (BTreeMap::<String, BTreeMap<String, Place>>::new(), BTreeMap::new());
    // Before anything is read.
    for (name, entry) in &manifest.files {
        let length = disk.length(folder, path, name).map_err(|error| unreadable(path, name, error))?;
        if length != entry.bytes {
            return Err(of_another_length(path, name, length, entry));
        }
    }
    for (name, entry) in &manifest.files {
        let mut reader = Reader { disk, folder, path, name, entry, at: 0, crc32c: 0 };
        if name == STATE {
            let text = reader.take(usize::try_from(entry.bytes).unwrap_or(usize::MAX))?;
            reader.end()?;
            state = state_of(&text).map_err(|problem| damaged(path, name, problem))?;
        } else if let Some(group) = group_of(name) {
            tensors.entry(group.to_owned()).or_default().extend(reader.tensors()?);
        } else {
            reader.skip(entry.bytes)?;
            reader.end()?;
        }
    }
    let origin = Origin::of(path, &manifest);
    Ok(Found { step: manifest.step, run: manifest.run, origin, state, tensors })
}

/// Reads a file from its beginning to its end, with a checksum.
struct Reader<'a> {
    disk: &'a Disk,
    folder: &'a Folder,
    path: &'a Path,
    name: &'a str,
    entry: &'a Entry,
    at: u64,
    crc32c: u32,
}

impl Reader<'_> {
    fn tensors(mut self) -> Result<Vec<(String, Place)>> {
        let mut first = [0; LENGTH_BYTES];
        self.fill(&mut first)?;
        let (path, name, bytes) = (self.path, self.name, self.entry.bytes);
        let wrong = |problem| damaged(path, name, problem);
        let header = tensor_file::header_bytes(first, bytes).map_err(wrong)?;
        let header = self.take(header)?;
        let located = tensor_file::tensors_of(&header, bytes).map_err(wrong)?;
        let mut places = Vec::with_capacity(located.len());
        // They follow one another without gaps.
        for Located { name, dtype, shape, start, bytes } in located {
            let blocks = self.skip(bytes as u64)?;
            places.push((name, Place { file: self.name.to_owned(), start, bytes, blocks, dtype, shape }));
        }
        self.end()?;
        Ok(places)
    }

    /// Reads bytes to memory.
    fn take(&mut self, bytes: usize) -> Result<Vec<u8>> {
        let mut all = zeros(bytes).map_err(|source| Error::File { path: self.path.join(self.name), source })?;
        self.fill(&mut all)?;
        Ok(all)
    }

    /// Reads bytes, and returns the checksums of their blocks.
    fn skip(&mut self, bytes: u64) -> Result<Vec<u32>> {
        let (mut left, mut blocks) = (bytes, Vec::new());
        let mut buffer = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX).min(BLOCK_BYTES)];
        while left > 0 {
            let now = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            self.fill(&mut buffer[..now])?;
            blocks.push(crc32c::crc32c(&buffer[..now]));
            left -= now as u64;
        }
        Ok(blocks)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let read = if bytes.len() as u64 > self.entry.bytes - self.at {
            Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "it is shorter than its header says"))
        } else {
            self.disk.read_at(self.folder, self.path, self.name, self.at, bytes)
        };
        read.map_err(|error| unreadable(self.path, self.name, error))?;
        self.at += bytes.len() as u64;
        self.crc32c = crc32c::crc32c_append(self.crc32c, bytes);
        Ok(())
    }

    fn end(self) -> Result<()> {
        if self.crc32c == self.entry.crc32c {
            return Ok(());
        }
        Err(damaged(self.path, self.name, "its checksum is not the one that was written".to_owned()))
    }
}

/// Bytes of a tensor that have a checksum of their own while a checkpoint is restored: the unit in which a part of a
/// tensor is read, and the memory in which a file is checked.
pub(super) const BLOCK_BYTES: usize = 4 << 20;

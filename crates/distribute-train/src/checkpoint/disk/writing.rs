//! Files that are written piece by piece, with their checksums.

use std::path::{Path, PathBuf};

use super::files::NewFile;
use super::{Disk, Entry, PART_BYTES};
use crate::Result;
use crate::objects::{self, Object, Upload};

/// A new file that is being written. It is synced, or becomes visible in a store, when it is finished.
#[derive(Debug)]
pub(in super::super) struct Writing<'a> {
    disk: &'a Disk,
    path: PathBuf,
    target: Target,
    written: Entry,
}

#[derive(Debug)]
enum Target {
    File {
        file: Box<dyn NewFile>,
        unsynced: usize,
    },
    Object {
        object: Object,
        /// Begun when there is more than one part.
        upload: Option<Upload>,
        part: Vec<u8>,
    },
}

impl Disk {
    /// Writes a new file and syncs it. In a store, it replaces an object of the same name when it is complete.
    pub(in super::super) fn write(&self, path: &Path, bytes: &[u8]) -> Result<Entry> {
        self.write_pieces(path, &[bytes])
    }

    /// Writes a new file like [`Disk::write`], of pieces that lie one after another in it.
    pub(in super::super) fn write_pieces(&self, path: &Path, pieces: &[&[u8]]) -> Result<Entry> {
        let mut writing = self.begin_file(path)?;
        pieces.iter().try_for_each(|piece| writing.push(piece))?;
        writing.finish()
    }

    /// Begins a new file, whose bytes come in pieces.
    pub(in super::super) fn begin_file(&self, path: &Path) -> Result<Writing<'_>> {
        let target = match self.object(path)? {
            Some(object) => Target::Object { object, upload: None, part: Vec::new() },
            None => {
                let create = || self.files.create_file(path);
                Target::File { file: self.named("making", path, create)?, unsynced: 0 }
            }
        };
        Ok(Writing { disk: self, path: path.to_owned(), target, written: Entry { bytes: 0, crc32c: 0 } })
    }
}

impl Writing<'_> {
    /// Adds bytes to the file.
    pub(in super::super) fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let Writing { disk, path, target, written } = self;
        written.bytes += bytes.len() as u64;
        written.crc32c = crc32c::crc32c_append(written.crc32c, bytes);
        match target {
            Target::File { file, unsynced } => {
                // Written in parts, so that a slow disk can be told from one that hangs.
                for part in bytes.chunks(PART_BYTES) {
                    if let Some(torn) = disk.faults.torn(part) {
                        drop(file.write_all(torn));
                    }
                    disk.named("writing", path, || file.write_all(part))?;
                    *unsynced += part.len();
                    if *unsynced >= PART_BYTES {
                        disk.named("syncing", path, || file.sync_data())?;
                        *unsynced = 0;
                    }
                }
            }
            Target::Object { object, upload, part } => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    if part.len() == objects::PART_BYTES {
                        let upload = match upload {
                            Some(upload) => upload,
                            None => upload.insert(disk.named("making", path, || object.upload())?),
                        };
                        disk.named("writing", path, || upload.push(part))?;
                        part.clear();
                    }
                    let (now, later) = rest.split_at(rest.len().min(objects::PART_BYTES - part.len()));
                    part.extend_from_slice(now);
                    rest = later;
                }
            }
        }
        Ok(())
    }

    /// Completes the file, and returns its length and checksum.
    pub(in super::super) fn finish(self) -> Result<Entry> {
        let Writing { disk, path, target, written } = self;
        match target {
            Target::File { file, .. } => disk.named("syncing", &path, || file.sync_all())?,
            Target::Object { object, upload: None, part } => disk.named("writing", &path, || object.write(&part))?,
            Target::Object { upload: Some(mut upload), part, .. } => {
                disk.named("writing", &path, || upload.push(&part))?;
                disk.named("completing", &path, || upload.finish())?;
            }
        }
        Ok(written)
    }
}

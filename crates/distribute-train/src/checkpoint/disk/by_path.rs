//! Folders and their names on systems that open files by whole paths only, such as Windows.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A folder. If another takes its place, later reads are from that one; the manifest's checksums tell.
#[derive(Debug)]
pub(in super::super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn open(path: &Path) -> io::Result<Folder> {
        match fs::metadata(path)?.is_dir() {
            true => Ok(Folder(path.to_owned())),
            false => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// Opens a file that is not a link, so that it is in the folder.
    pub(super) fn open_file(&self, name: &str) -> io::Result<File> {
        let path = self.0.join(name);
        match fs::symlink_metadata(&path)?.is_symlink() {
            true => Err(io::Error::new(io::ErrorKind::InvalidData, "it is a link")),
            false => File::open(path),
        }
    }

    /// Returns the length of a file; `None` if it is not a regular one.
    pub(super) fn length_of(&self, name: &str) -> io::Result<Option<u64>> {
        let about = fs::symlink_metadata(self.0.join(name))?;
        Ok(about.is_file().then_some(about.len()))
    }

    /// Returns nothing: a folder that has taken the place of this one is not told from it, so that a damaged checkpoint
    /// is read again.
    pub(super) fn identity_of(&self) -> Option<(u64, u64)> {
        None
    }
}

/// Names in folders cannot be synced here: the file system's journal keeps them.
pub(super) fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// No names are exchanged atomically here.
pub(super) fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns whether the error means that the exchange is not supported.
pub(super) fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
}

/// Returns whether the error means that the file is damaged or gone, not that it cannot be reached.
pub(in super::super) fn is_damage(error: &io::Error) -> bool {
    let known = [
        io::ErrorKind::InvalidData,
        io::ErrorKind::NotFound,
        io::ErrorKind::NotADirectory,
        io::ErrorKind::IsADirectory,
        io::ErrorKind::StaleNetworkFileHandle,
    ];
    known.contains(&error.kind())
}

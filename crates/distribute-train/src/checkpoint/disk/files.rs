//! The calls to a file system. Tests replace them by those of a simulated one.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::Path;

use super::system;

/// A file system.
pub(in super::super) trait FileSystem: fmt::Debug + Send + Sync {
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Creates a folder; it is an error if it exists.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Creates a file; it is an error if it exists.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn NewFile>>;

    /// Syncs the names in a folder.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Renames a file or folder atomically.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Exchanges two names atomically.
    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()>;

    /// Removes a file, or a folder and its contents.
    fn remove(&self, path: &Path) -> io::Result<()>;

    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;

    /// Returns the names in a folder; none if it does not exist.
    fn names(&self, path: &Path) -> io::Result<Vec<OsString>>;

    /// Opens a folder, whose files are then read by name from this very folder even if another takes its place.
    fn open_folder(&self, path: &Path) -> io::Result<Box<dyn OpenFolder>>;
}

/// A file that is being written.
pub(in super::super) trait NewFile: fmt::Debug + Send {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Syncs the bytes.
    fn sync_data(&self) -> io::Result<()>;

    /// Syncs the bytes, and what is known of the file.
    fn sync_all(&self) -> io::Result<()>;
}

/// An open folder.
pub(in super::super) trait OpenFolder: fmt::Debug + Send + Sync {
    /// Opens a file that is not a link, so that it is in the folder; returns its length too, `None` if it is not a
    /// regular one.
    fn file(&self, name: &str) -> io::Result<(Box<dyn OpenFile>, Option<u64>)>;

    /// Returns the length of a file; `None` if it is not a regular one.
    fn length(&self, name: &str) -> io::Result<Option<u64>>;

    /// Returns what tells the folder from others of the same path; `None` if it is not known.
    fn identity(&self) -> Option<(u64, u64)>;
}

/// A file that is read.
pub(in super::super) trait OpenFile: Read + Seek + Send {}

impl<F: Read + Seek + Send> OpenFile for F {}

/// The file systems of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct System;

impl FileSystem for System {
    fn exists(&self, path: &Path) -> io::Result<bool> {
        fs::exists(path)
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        Ok(Box::new(OpenOptions::new().write(true).create_new(true).open(path)?))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        system::sync_folder(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        system::exchange(one, other)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        match fs::symlink_metadata(path)?.is_dir() {
            true => fs::remove_dir_all(path),
            false => fs::remove_file(path),
        }
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn names(&self, path: &Path) -> io::Result<Vec<OsString>> {
        match fs::read_dir(path) {
            Ok(entries) => entries.map(|entry| entry.map(|entry| entry.file_name())).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn open_folder(&self, path: &Path) -> io::Result<Box<dyn OpenFolder>> {
        Ok(Box::new(system::Folder::open(path)?))
    }
}

impl NewFile for File {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        Write::write_all(self, bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn sync_all(&self) -> io::Result<()> {
        File::sync_all(self)
    }
}

impl OpenFolder for system::Folder {
    fn file(&self, name: &str) -> io::Result<(Box<dyn OpenFile>, Option<u64>)> {
        let file = self.open_file(name)?;
        let about = file.metadata()?;
        let length = about.is_file().then_some(about.len());
        Ok((Box::new(file), length))
    }

    fn length(&self, name: &str) -> io::Result<Option<u64>> {
        self.length_of(name)
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.identity_of()
    }
}

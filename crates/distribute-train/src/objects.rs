//! Files and folders of checkpoints that are objects of a store, with the errors of files.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use distribute_storage::{Location, Meta, Place};
use distribute_types::{Class, ErrorClass};

pub(crate) use distribute_storage::PART_BYTES;

/// Returns the object that a path names; `None` for a path of the file system.
pub(crate) fn of(path: &Path) -> io::Result<Option<Object>> {
    match Place::of(path)? {
        Place::Local(_) => Ok(None),
        Place::Store(location) => Ok(Some(Object(location))),
    }
}

/// Returns the path itself, or the one that a URL `file://` names.
pub(crate) fn resolved(path: PathBuf) -> PathBuf {
    match Place::of(&path) {
        Ok(Place::Local(path)) => path,
        // A URL that cannot be used is an error when it is.
        _ => path,
    }
}

/// Returns the message of a store's error, which names the URL.
pub(crate) fn message(error: &io::Error) -> Option<String> {
    distribute_storage::Error::of(error).map(ToString::to_string)
}

/// Returns the class of a store's error.
pub(crate) fn class(error: &io::Error) -> Option<Class> {
    distribute_storage::Error::of(error).map(ErrorClass::class)
}

/// Returns whether the error is that an object does not exist.
#[cfg(feature = "checkpoint")]
pub(crate) fn is_missing(error: &io::Error) -> bool {
    matches!(distribute_storage::Error::of(error), Some(distribute_storage::Error::NotFound { .. }))
}

/// An object, or a folder of objects.
#[derive(Clone, Debug)]
pub(crate) struct Object(Location);

/// A folder's objects, as they were listed.
#[derive(Debug)]
pub(crate) struct Folder {
    folder: Location,
    objects: BTreeMap<String, Meta>,
}

/// An object that is written in parts.
#[derive(Debug)]
pub(crate) struct Upload(distribute_storage::Upload);

impl Object {
    pub(crate) fn join(&self, name: &str) -> Object {
        Object(self.0.join(name))
    }

    pub(crate) fn exists(&self) -> io::Result<bool> {
        Ok(self.0.exists()?)
    }

    /// Returns the names of the objects and folders in a folder.
    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        Ok(self.0.list()?.into_iter().map(|entry| entry.name.into()).collect())
    }

    /// Lists a folder.
    ///
    /// # Errors
    /// That it is not found, if it holds no object.
    pub(crate) fn open_folder(&self) -> io::Result<Folder> {
        let listed = self.0.list()?;
        if listed.is_empty() {
            return Err(io::Error::from(distribute_storage::Error::NotFound { url: self.0.url() }));
        }
        let objects = listed.into_iter().filter_map(|entry| Some((entry.name, entry.meta?))).collect();
        Ok(Folder { folder: self.0.clone(), objects })
    }

    /// Reads the whole object; `None` if it does not exist.
    pub(crate) fn read(&self, most: u64) -> io::Result<Option<Vec<u8>>> {
        match self.0.read(most) {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(distribute_storage::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the object, replacing an earlier one as a whole.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        Ok(self.0.write(bytes.to_vec())?)
    }

    /// Writes an object that does not exist.
    pub(crate) fn create(&self, bytes: &[u8]) -> io::Result<()> {
        Ok(self.0.create(bytes.to_vec())?)
    }

    pub(crate) fn upload(&self) -> io::Result<Upload> {
        Ok(Upload(self.0.upload()?))
    }

    /// Copies the object; `progress` is called after each part of a large one.
    pub(crate) fn copy(&self, to: &Object, progress: impl FnMut()) -> io::Result<()> {
        Ok(self.0.copy_with_progress(&to.0, progress)?)
    }

    pub(crate) fn delete(&self) -> io::Result<()> {
        Ok(self.0.delete()?)
    }
}

impl Upload {
    pub(crate) fn push(&mut self, part: &[u8]) -> io::Result<()> {
        Ok(self.0.push(part.to_vec())?)
    }

    pub(crate) fn finish(self) -> io::Result<()> {
        Ok(self.0.finish()?)
    }
}

impl Folder {
    pub(crate) fn length(&self, name: &str) -> io::Result<u64> {
        self.meta(name).map(|meta| meta.bytes)
    }

    /// Reads a range of the version that was listed.
    pub(crate) fn read(&self, name: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        Ok(self.folder.join(name).read_range(range, self.meta(name)?)?.to_vec())
    }

    fn meta(&self, name: &str) -> io::Result<&Meta> {
        let missing = || distribute_storage::Error::NotFound { url: self.folder.join(name).url() };
        Ok(self.objects.get(name).ok_or_else(missing)?)
    }
}

//! Files of datasets in stores of objects.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use distribute_storage::{Error as StoreError, Location, ObjectReader, Place};
use distribute_types::{Class, ErrorClass};

#[cfg(any(feature = "images", feature = "tfrecord"))]
pub(crate) use distribute_storage::is_url;
pub(crate) use distribute_storage::{Cache, Cached};

/// A place that a path or URL names.
pub(crate) enum Opened {
    Local(PathBuf),
    Object(Object),
}

/// An object that is read.
#[derive(Debug)]
pub(crate) struct Object(Box<ObjectReader>);

/// Opens the object that a URL names.
pub(crate) fn open(path: &Path) -> io::Result<Opened> {
    match Place::of(path)? {
        Place::Local(path) => Ok(Opened::Local(path)),
        Place::Store(location) => Ok(Opened::Object(Object(Box::new(ObjectReader::open(&location)?)))),
    }
}

/// Returns the path that a path or URL names in the file system, or the objects and folders in a folder of a store,
/// each with whether it is a folder.
pub(crate) fn list(folder: &Path) -> io::Result<Result<PathBuf, Vec<(PathBuf, bool)>>> {
    let location = match Place::of(folder)? {
        Place::Local(path) => return Ok(Ok(path)),
        Place::Store(location) => location,
    };
    let listed = location.list()?;
    if listed.is_empty() {
        return Err(StoreError::NotFound { url: location.url() }.into());
    }
    let path = |name: &str| PathBuf::from(location.join(name).url());
    Ok(Err(listed.iter().map(|entry| (path(&entry.name), entry.meta.is_none())).collect()))
}

/// Returns a local copy of an object; `None` for a path of the file system, and for an object that does not fit.
pub(crate) fn copy(cache: &Cache, path: &Path) -> io::Result<Option<Cached>> {
    match Place::of(path)? {
        Place::Local(_) => Ok(None),
        Place::Store(location) => copy_of(cache, &location),
    }
}

fn copy_of(cache: &Cache, location: &Location) -> io::Result<Option<Cached>> {
    Ok(cache.fetch(location)?)
}

/// Returns the message of a store's error, which names the URL.
pub(crate) fn message(error: &io::Error) -> Option<String> {
    StoreError::of(error).map(ToString::to_string)
}

/// Returns the class of a store's error.
pub(crate) fn class(error: &io::Error) -> Option<Class> {
    StoreError::of(error).map(ErrorClass::class)
}

/// Returns whether the error is of a store or a disk that could not be asked, and says nothing of the file.
pub(crate) fn is_unanswered(error: &Arc<io::Error>) -> bool {
    use io::ErrorKind::{InvalidFilename, IsADirectory, NotADirectory, NotFound, PermissionDenied};
    let is_of_file =
        || matches!(error.kind(), NotFound | PermissionDenied | IsADirectory | NotADirectory | InvalidFilename);
    match StoreError::of(error) {
        Some(error) => !matches!(error, StoreError::NotFound { .. }),
        // An error of the operating system, such as too many open files or a broken disk.
        None => error.raw_os_error().is_some() && !is_of_file(),
    }
}

impl Object {
    pub(crate) fn byte_len(&self) -> u64 {
        self.0.byte_len()
    }

    #[cfg(feature = "parquet")]
    pub(crate) fn again(&self) -> io::Result<Object> {
        Ok(Object(Box::new(self.0.again())))
    }

    #[cfg(feature = "parquet")]
    pub(crate) fn read_range(&self, range: std::ops::Range<u64>) -> io::Result<bytes::Bytes> {
        Ok(self.0.read_range(range)?)
    }
}

impl io::Read for Object {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl io::Seek for Object {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

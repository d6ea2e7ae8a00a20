//! Stands for `store.rs` in a build without the feature `object-store`: a URL is an error that names the feature.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use distribute_types::Class;

pub(crate) enum Opened {
    Local(PathBuf),
    #[expect(dead_code, reason = "there are no objects")]
    Object(Object),
}

/// There are none.
#[derive(Debug)]
pub(crate) enum Object {}

/// There are none.
#[derive(Clone, Debug)]
pub(crate) enum Cache {}

/// There are none.
#[derive(Debug)]
pub(crate) enum Cached {}

impl Cached {
    pub(crate) fn path(&self) -> &Path {
        match *self {}
    }
}

/// Returns whether a path is a URL, as `distribute_storage::is_url` does.
pub(crate) fn is_url(path: &Path) -> bool {
    let scheme = path.to_str().and_then(|text| text.split_once("://")).map_or("", |(scheme, _)| scheme);
    scheme.len() > 1 && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+')
}

fn local(path: &Path) -> io::Result<PathBuf> {
    if is_url(path) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "it is a URL, and this program is built for paths only; build it with the feature object-store",
        ));
    }
    Ok(path.to_owned())
}

pub(crate) fn open(path: &Path) -> io::Result<Opened> {
    local(path).map(Opened::Local)
}

pub(crate) fn list(folder: &Path) -> io::Result<Result<PathBuf, Vec<(PathBuf, bool)>>> {
    local(folder).map(Ok)
}

pub(crate) fn copy(cache: &Cache, _: &Path) -> io::Result<Option<Cached>> {
    match *cache {}
}

pub(crate) fn message(_: &io::Error) -> Option<String> {
    None
}

pub(crate) fn class(_: &io::Error) -> Option<Class> {
    None
}

pub(crate) fn is_unanswered(_: &Arc<io::Error>) -> bool {
    false
}

impl Object {
    pub(crate) fn byte_len(&self) -> u64 {
        match *self {}
    }

    #[cfg(feature = "parquet")]
    pub(crate) fn again(&self) -> io::Result<Object> {
        match *self {}
    }

    #[cfg(feature = "parquet")]
    pub(crate) fn read_range(&self, _: std::ops::Range<u64>) -> io::Result<bytes::Bytes> {
        match *self {}
    }
}

impl io::Read for Object {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }
}

impl io::Seek for Object {
    fn seek(&mut self, _: io::SeekFrom) -> io::Result<u64> {
        match *self {}
    }
}

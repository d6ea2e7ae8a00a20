//! Paths and URLs, as programs give them.

use std::path::{Path, PathBuf};

use crate::{Error, Location, Result};

/// A path or a URL: a place in the file system, or in a store.
///
/// # Examples
/// ```
/// use distribute_storage::Place;
/// assert!(matches!(Place::of("runs/1")?, Place::Local(_)));
/// assert!(matches!(Place::of("file:///runs/1")?, Place::Local(path) if path.ends_with("runs/1")));
/// assert!(matches!(Place::of("memory://example/runs/1")?, Place::Store(_)));
/// assert!(Place::of("ftp://host/runs/1").is_err());
/// # Ok::<(), distribute_storage::Error>(())
/// ```
#[derive(Clone, Debug)]
pub enum Place {
    /// A path of the file system.
    Local(PathBuf),
    /// An object, or a folder of objects.
    Store(Location),
}

impl Place {
    /// Opens the place that a path or URL names. A URL `file:///…` names a path of the file system.
    ///
    /// # Errors
    /// [`Error::Url`] for a `file://` URL of another host, and the errors of [`Location::open`] for other URLs.
    pub fn of(path: impl AsRef<Path>) -> Result<Place> {
        let path = path.as_ref();
        match path.to_str() {
            Some(text) if is_url(path) && text.starts_with("file:") => local(text).map(Place::Local),
            Some(text) if is_url(path) => Location::open(text).map(Place::Store),
            _ => Ok(Place::Local(path.to_owned())),
        }
    }
}

/// Returns whether a path is a URL, such as `s3://bucket/folder`: a scheme of at least two letters, so that it is not a
/// drive of Windows, and `://`.
pub fn is_url(path: impl AsRef<Path>) -> bool {
    let scheme = path.as_ref().to_str().and_then(|text| text.split_once("://")).map_or("", |(scheme, _)| scheme);
    scheme.len() > 1 && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+')
}

fn local(text: &str) -> Result<PathBuf> {
    let path = url::Url::parse(text).ok().and_then(|url| url.to_file_path().ok());
    path.ok_or_else(|| Error::Url {
        url: text.to_owned(),
        problem: "it names no path of this machine; write file:///folder, or the path itself",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_paths() {
        for path in ["a/b", "/a/b", "c:/a", "c://a", "a:b", "", "://", "s3:/a/b", "a b://c"] {
            assert!(!is_url(path), "{path}");
            assert!(matches!(Place::of(path).unwrap(), Place::Local(same) if same == Path::new(path)));
        }
        assert!(is_url("s3://bucket") && is_url("file:///a"));
    }

    #[cfg(unix)]
    #[test]
    fn file_urls_are_paths() {
        let Place::Local(path) = Place::of("file:///a%20b/c").unwrap() else { panic!("a store") };
        assert_eq!(path, Path::new("/a b/c"));
        let text = Place::of("file://host/a").unwrap_err().to_string();
        assert!(text.contains("file://host/a") && text.contains("file:///"), "{text}");
    }
}

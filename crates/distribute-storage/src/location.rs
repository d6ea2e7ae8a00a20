//! Objects and folders of objects.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backon::{ExponentialBuilder, Retryable};
use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::path::{Path, PathPart};
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions};

use crate::connect::{FIRST_PAUSE, LONGEST_PAUSE, Store};
use crate::runtime::{self, Pending};
use crate::upload::PART_BYTES;
use crate::{Error, Result};

/// An object of a store, or a folder: all objects whose names begin with its own and a slash. Cheap to clone.
///
/// # Ordering
/// Calls block the calling thread: for at most the time for which requests are repeated (`DISTRIBUTE_STORAGE_RETRY`, 3
/// minutes by default) and 140 s more.
///
/// # Errors
/// All calls return [`Error::Credential`], [`Error::Denied`], [`Error::NoBucket`], [`Error::Connection`],
/// [`Error::Slow`] and [`Error::Answer`]; further ones are named where they occur.
#[derive(Clone)]
pub struct Location {
    pub(crate) store: Arc<Store>,
    pub(crate) path: Path,
}

/// An object's length and version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The length in bytes.
    pub bytes: u64,
    /// The version: its entity tag, or the time of its last change if the store has no tags.
    pub tag: String,
    /// The entity tag, by which a read can insist on this version.
    pub(crate) e_tag: Option<String>,
}

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The name in the folder, without slashes; in [`Location::list_below`], with those below the folder.
    pub name: String,
    /// The object's length and version; `None` for a folder.
    pub meta: Option<Meta>,
}

impl Location {
    /// Opens the place that a URL names: `s3://bucket/path`, `gs://bucket/path`, `az://container/path`, or
    /// `memory://name/path` in the memory of this process. Nothing is asked of the store.
    ///
    /// # Errors
    /// [`Error::Url`] if the URL cannot be used, [`Error::Settings`] or [`Error::Retry`] if the environment's settings
    /// cannot.
    ///
    /// # Source
    /// Variables `AWS_*`, `GOOGLE_*` and `AZURE_*` are those of the crate `object_store`.
    pub fn open(url: &str) -> Result<Location> {
        let (scheme, bucket, path) = parts(url)?;
        Ok(Location { store: Store::of(scheme, bucket)?, path })
    }

    /// Opens a place with settings given as environment variables.
    #[cfg(test)]
    pub(crate) fn with(url: &str, variables: &[(String, String)]) -> Result<Location> {
        let (scheme, bucket, path) = parts(url)?;
        Ok(Location { store: Arc::new(Store::with(scheme, bucket, variables)?), path })
    }

    /// Returns a place below this one; `name` may hold slashes.
    pub fn join(&self, name: &str) -> Location {
        let parts = name.split('/').filter(|part| !part.is_empty());
        // Names of stores are taken as they are; what no store allows is encoded.
        let part = |part: &str| PathPart::parse(part).unwrap_or_else(|_| PathPart::from(part)).as_ref().to_owned();
        let own = Some(self.path.as_ref().to_owned()).filter(|own| !own.is_empty());
        let whole = own.into_iter().chain(parts.map(part)).collect::<Vec<_>>().join("/");
        let path = Path::parse(&whole).unwrap_or_else(|_| Path::from(whole));
        Location { store: Arc::clone(&self.store), path }
    }

    /// Returns the URL.
    pub fn url(&self) -> String {
        match self.path.as_ref() {
            "" => self.store.url.clone(),
            path => format!("{}/{path}", self.store.url),
        }
    }

    /// Returns the last part of the name; empty for a whole bucket.
    pub fn name(&self) -> &str {
        self.path.filename().unwrap_or_default()
    }

    /// Returns the object's length and version; `None` if it does not exist.
    pub fn meta(&self) -> Result<Option<Meta>> {
        match self.request("looking at", async |objects, path| objects.head(&path).await)?.wait() {
            Ok(found) => Ok(Some(Meta::of(&found))),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the whole object, if it has at most `most` bytes; nothing is allocated for a larger one.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::TooLarge`], and [`Error::Truncated`] if the store ends an answer early.
    pub fn read(&self, most: u64) -> Result<Bytes> {
        let get = move |asked: Asked| async move {
            let found = asked.objects.get(&asked.path).await.map_err(|error| asked.error(&error))?;
            let bytes = found.meta.size;
            if bytes > most {
                return Err(Error::TooLarge { url: asked.url, bytes, most });
            }
            let read = found.bytes().await.map_err(|error| asked.error(&error))?;
            whole(&asked.url, read, bytes)
        };
        self.start("reading", get)?.wait()
    }

    /// Reads a range of one version of the object.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Changed`] if the object has another version; [`Error::TooLarge`] if this version
    /// ends before the range; [`Error::Truncated`].
    pub fn read_range(&self, range: Range<u64>, version: &Meta) -> Result<Bytes> {
        if range.end > version.bytes || range.start > range.end {
            return Err(Error::TooLarge { url: self.url(), bytes: range.end, most: version.bytes });
        }
        if range.is_empty() { Ok(Bytes::new()) } else { self.start_range(range, version)?.wait() }
    }

    pub(crate) fn start_range(&self, range: Range<u64>, version: &Meta) -> Result<Pending<Bytes>> {
        let expected = range.end.saturating_sub(range.start);
        let version = version.e_tag.clone();
        self.start("reading", move |asked: Asked| {
            let (range, if_match) = (Some(GetRange::Bounded(range.clone())), version.clone());
            async move {
                let options = GetOptions { range, if_match, ..GetOptions::default() };
                let found = asked.objects.get_opts(&asked.path, options).await.map_err(|error| asked.error(&error))?;
                let read = found.bytes().await.map_err(|error| asked.error(&error))?;
                whole(&asked.url, read, expected)
            }
        })
    }

    /// Writes the object, replacing an earlier one as a whole.
    pub fn write(&self, bytes: impl Into<Bytes>) -> Result<()> {
        self.put(PutMode::Overwrite, &bytes.into())
    }

    /// Writes a new object: of several processes that do so at the same time, one succeeds. With a store that does not
    /// support this (some that speak S3's protocol), two may; an object that existed before is left as it is.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is an object of this name with another content.
    pub fn create(&self, bytes: impl Into<Bytes>) -> Result<()> {
        let bytes = bytes.into();
        // Some stores overlook the condition of a request to write, and others refuse it.
        let denied = match self.meta() {
            Ok(Some(_)) => return self.check_created(&bytes),
            Ok(None) => None,
            // A credential may be allowed to write and not to look.
            Err(denied @ Error::Denied { .. }) => Some(denied),
            Err(error) => return Err(error),
        };
        match self.put(PutMode::Create, &bytes) {
            Err(Error::Exists { .. }) => self.check_created(&bytes),
            Err(Error::Answer { .. }) => denied.map_or_else(|| self.write(bytes), Err),
            outcome => outcome,
        }
    }

    /// Checks that an object that exists is the one that was to be created: the answer to an earlier attempt may have
    /// been lost.
    fn check_created(&self, bytes: &Bytes) -> Result<()> {
        match self.read(bytes.len() as u64) {
            Ok(found) if found == bytes => Ok(()),
            Ok(_) | Err(Error::TooLarge { .. }) => Err(Error::Exists { url: self.url() }),
            Err(error) => Err(error),
        }
    }

    fn put(&self, mode: PutMode, bytes: &Bytes) -> Result<()> {
        let bytes = bytes.clone();
        let put = move |asked: Asked| {
            let (options, bytes) = (PutOptions { mode: mode.clone(), ..PutOptions::default() }, bytes.clone());
            async move {
                let outcome = asked.objects.put_opts(&asked.path, bytes.into(), options).await;
                outcome.map(drop).map_err(|error| asked.error(&error))
            }
        };
        self.start("writing", put)?.wait()
    }

    /// Copies the object within its store, replacing one at `to`. One that is too large for the store's own copy (5 GiB
    /// on S3) is read and written in parts.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Url`] if `to` is in another store.
    pub fn copy(&self, to: &Location) -> Result<()> {
        self.copy_with_progress(to, || ())
    }

    /// Copies the object like [`Location::copy`]; `progress` is called after each part of one that is copied in parts.
    ///
    /// # Errors
    /// The errors of [`Location::copy`].
    pub fn copy_with_progress(&self, to: &Location, progress: impl FnMut()) -> Result<()> {
        if to.store.url != self.store.url {
            return Err(Error::Url { url: to.url(), problem: "an object is only copied within its own store" });
        }
        if self.store.most_copied < u64::MAX {
            let version = self.meta()?.ok_or_else(|| Error::NotFound { url: self.url() })?;
            if version.bytes > self.store.most_copied {
                return self.copy_parts(&version, to, progress);
            }
        }
        let to = to.path.clone();
        let copy = move |objects: Objects, from: Path| {
            let to = to.clone();
            async move { objects.copy(&from, &to).await }
        };
        self.request("copying", copy)?.wait()
    }

    fn copy_parts(&self, version: &Meta, to: &Location, mut progress: impl FnMut()) -> Result<()> {
        let mut upload = to.upload()?;
        for start in (0..version.bytes).step_by(PART_BYTES) {
            let end = version.bytes.min(start + PART_BYTES as u64);
            upload.push(self.read_range(start..end, version)?)?;
            progress();
        }
        upload.finish()
    }

    /// Removes the object; removing one that does not exist succeeds.
    pub fn delete(&self) -> Result<()> {
        match self.request("removing", async |objects, path| objects.delete(&path).await)?.wait() {
            Err(Error::NotFound { .. }) => Ok(()),
            outcome => outcome,
        }
    }

    /// Lists the objects and folders directly in this folder, sorted by name; none if there are none.
    pub fn list(&self) -> Result<Vec<Listed>> {
        let found = async |objects: Objects, path: Path| objects.list_with_delimiter(Some(&path)).await;
        let found = self.request("listing", found)?.wait()?;
        let folders = found.common_prefixes.iter().filter_map(|prefix| name_below(&self.path, prefix));
        let folders = folders.map(|name| Listed { name, meta: None });
        let objects = found.objects.iter().filter_map(|object| listed(&self.path, object));
        Ok(sorted(folders.chain(objects).collect()))
    }

    /// Lists all objects below this folder, in its folders too, sorted by name; none if there are none.
    pub fn list_below(&self) -> Result<Vec<Listed>> {
        let found = async |objects: Objects, path: Path| objects.list(Some(&path)).try_collect::<Vec<_>>().await;
        let found = self.request("listing", found)?.wait()?;
        Ok(sorted(found.iter().filter_map(|object| listed(&self.path, object)).collect()))
    }

    /// Returns whether there is an object of this name, or any in a folder of this name.
    pub fn exists(&self) -> Result<bool> {
        if self.path.as_ref().is_empty() || self.meta()?.is_none() {
            let first = async |objects: Objects, path: Path| objects.list(Some(&path)).try_next().await;
            return Ok(self.request("listing", first)?.wait()?.is_some());
        }
        Ok(true)
    }

    /// Starts a request whose errors are the store's.
    fn request<T, F>(
        &self,
        action: &'static str,
        request: impl Fn(Objects, Path) -> F + Send + Sync + 'static,
    ) -> Result<Pending<T>>
    where
        T: Send + 'static,
        F: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        self.start(action, move |asked: Asked| {
            let outcome = request(Arc::clone(&asked.objects), asked.path.clone());
            async move { outcome.await.map_err(|error| asked.error(&error)) }
        })
    }

    /// Starts a request, which is made again after retryable errors. The store's client repeats most requests itself,
    /// but not those whose answers are cut in the middle.
    pub(crate) fn start<T, F>(
        &self,
        action: &'static str,
        request: impl Fn(Asked) -> F + Send + Sync + 'static,
    ) -> Result<Pending<T>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let asked = self.asked(action);
        let (retry, since) = (self.store.retry, Instant::now());
        let pauses = ExponentialBuilder::default().with_min_delay(FIRST_PAUSE).with_max_delay(LONGEST_PAUSE);
        let again = move || request(asked.clone());
        let again = again.retry(pauses.with_jitter().without_max_times());
        let again = again.when(move |error: &Error| error.is_retryable() && since.elapsed() < retry);
        runtime::start(self.url(), action, self.store.limit(), again)
    }

    pub(crate) fn asked(&self, action: &'static str) -> Asked {
        let (objects, path) = (Arc::clone(&self.store.objects), self.path.clone());
        Asked { objects, path, url: self.url(), action, tried: self.store.retry }
    }
}

type Objects = Arc<dyn ObjectStore>;

/// The parts of a request, for one attempt.
#[derive(Clone)]
pub(crate) struct Asked {
    pub(crate) objects: Objects,
    pub(crate) path: Path,
    pub(crate) url: String,
    pub(crate) action: &'static str,
    tried: Duration,
}

impl Asked {
    /// Converts the store's error.
    pub(crate) fn error(&self, error: &object_store::Error) -> Error {
        Error::request(&self.url, self.action, error, self.tried)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url())
    }
}

/// The URL alone: a store's settings hold credentials.
impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Location({})", self.url())
    }
}

impl PartialEq for Location {
    fn eq(&self, other: &Location) -> bool {
        (&self.store.url, &self.path) == (&other.store.url, &other.path)
    }
}

impl Meta {
    fn of(object: &ObjectMeta) -> Meta {
        let e_tag = object.e_tag.clone();
        let tag = e_tag.clone().unwrap_or_else(|| object.last_modified.to_rfc3339());
        Meta { bytes: object.size, tag, e_tag }
    }
}

/// Checks that everything has arrived.
fn whole(url: &str, read: Bytes, expected: u64) -> Result<Bytes> {
    let got = read.len() as u64;
    if got == expected { Ok(read) } else { Err(Error::Truncated { url: url.to_owned(), got, expected }) }
}

fn listed(folder: &Path, object: &ObjectMeta) -> Option<Listed> {
    let name = name_below(folder, &object.location)?;
    Some(Listed { name, meta: Some(Meta::of(object)) })
}

/// Returns a name relative to a folder; `None` if it is not below it.
fn name_below(folder: &Path, path: &Path) -> Option<String> {
    let parts: Vec<String> = path.prefix_match(folder)?.map(|part| part.as_ref().to_owned()).collect();
    (!parts.is_empty()).then(|| parts.join("/"))
}

fn sorted(mut listed: Vec<Listed>) -> Vec<Listed> {
    listed.sort_by(|one, other| one.name.cmp(&other.name));
    listed
}

/// Divides a URL into scheme, bucket and path. A URL with a user, password or query may hold a secret, and is not
/// repeated in the error.
fn parts(url: &str) -> Result<(&str, &str, Path)> {
    // Joined as a path on Windows.
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(Error::Url { url: url.to_owned(), problem: "it is not a URL such as s3://bucket/path" });
    };
    let cut = rest.find(['/', '\\']).unwrap_or(rest.len());
    let (bucket, path) = rest.split_at(cut);
    if bucket.contains('@') || rest.contains('?') {
        let url = format!("{scheme}://…");
        let problem = "the URL holds a user, a password or a query, which may be secret and are not taken from it; \
                       write SCHEME://BUCKET/PATH, and give credentials by the environment";
        return Err(Error::Url { url, problem });
    }
    let wrong = |problem| Error::Url { url: url.to_owned(), problem };
    if bucket.is_empty() || bucket.contains(|c: char| c.is_whitespace() || c.is_control() || c == ':') {
        return Err(wrong("it has no valid name of a bucket; write SCHEME://BUCKET/PATH"));
    }
    let path = path.replace('\\', "/");
    let path = Path::parse(path.trim_matches('/'));
    let path = path.map_err(|_| wrong("its path is not valid: it has empty parts, or \".\" or \"..\""))?;
    Ok((scheme, bucket, path))
}

#[cfg(test)]
mod tests;

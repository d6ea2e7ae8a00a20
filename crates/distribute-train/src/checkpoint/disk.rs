//! The file operations that checkpoints consist of. Each is one step that can fail, that tests can make fail, and that
//! records what it operates on, so that an error can name the operation in which a disk hangs.

use std::ffi::OsString;
use std::io::{self, Read, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

#[cfg(test)]
pub(super) use faults::{Fault, Faults};
#[cfg(not(test))]
use no_faults::Faults;

use files::{FileSystem, OpenFolder, System};

use super::manifest::MANIFEST;
use super::run::temporary_suffix;
use crate::objects::{self, Object};
use crate::{Error, Result};

#[cfg(test)]
mod faults;
pub(super) mod files;
#[cfg(not(test))]
mod no_faults;
#[cfg_attr(unix, path = "disk/unix.rs")]
#[cfg_attr(not(unix), path = "disk/by_path.rs")]
mod system;
mod writing;

pub(super) use writing::Writing;

/// A disk as used by one writer or reader.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    under_way: Arc<Mutex<UnderWay>>,
    faults: Faults,
    files: Arc<dyn FileSystem>,
}

impl Default for Disk {
    fn default() -> Disk {
        Disk { under_way: Arc::default(), faults: Default::default(), files: Arc::new(System) }
    }
}

/// The operation in progress, or the last one.
#[derive(Clone, Debug)]
struct UnderWay {
    verb: &'static str,
    path: PathBuf,
    since: Instant,
    /// Whether it is not the disk that is waited for.
    rests: bool,
}

impl Default for UnderWay {
    fn default() -> UnderWay {
        UnderWay { verb: "starting with", path: PathBuf::new(), since: Instant::now(), rests: false }
    }
}

/// A file's length and checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub(super) bytes: u64,
    pub(super) crc32c: u32,
}

impl Disk {
    /// Returns a handle for other work on the same disk, which starts now.
    pub(super) fn afresh(&self) -> Disk {
        Disk { under_way: Arc::default(), faults: self.faults.clone(), files: self.files.clone() }
    }

    /// Returns a disk whose operations fail as a test determines.
    #[cfg(test)]
    pub(super) fn with(faults: &Faults) -> Disk {
        Disk { faults: faults.clone(), ..Disk::default() }
    }

    /// Returns a disk with another file system.
    #[cfg(test)]
    pub(super) fn of(files: Arc<dyn FileSystem>) -> Disk {
        Disk { files, ..Disk::default() }
    }

    /// Starts a thread for work on the disk.
    pub(super) fn spawn(&self, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        self.faults.spawn()?;
        thread::Builder::new().name("checkpoint".to_owned()).spawn(work)
    }

    /// Returns the operation in progress, such as `writing model.safetensors`, and how long it has taken so far.
    pub(super) fn under_way(&self) -> (String, Duration) {
        let now = self.under_way.lock();
        let waited = if now.rests { Duration::ZERO } else { now.since.elapsed() };
        (format!("{} {}", now.verb, now.path.display()), waited)
    }

    /// Adopts the operation of another user of the disk while this one waits for it.
    pub(super) fn wait_with(&self, other: &Disk) {
        let of_other = other.under_way.lock().clone();
        *self.under_way.lock() = of_other;
    }

    /// Runs an operation, recording it while it runs.
    fn step<T>(&self, verb: &'static str, path: &Path, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.begin(verb, path);
        self.faults.before(verb, path)?;
        run()
    }

    /// Records the operation in progress from now on.
    pub(super) fn begin(&self, verb: &'static str, path: &Path) {
        *self.under_way.lock() = UnderWay { verb, path: path.to_owned(), since: Instant::now(), rests: false };
    }

    /// Records that the disk has nothing to do until the next operation, so that no wait takes it for hanging.
    pub(super) fn rest(&self) {
        let mut now = self.under_way.lock();
        (now.since, now.rests) = (Instant::now(), true);
    }

    /// Runs an operation like [`Disk::step`], and adds the path to its error.
    fn named<T>(&self, verb: &'static str, path: &Path, run: impl FnOnce() -> io::Result<T>) -> Result<T> {
        self.step(verb, path, run).map_err(|source| Error::File { path: path.to_owned(), source })
    }

    pub(super) fn exists(&self, path: &Path) -> Result<bool> {
        self.named("looking for", path, || match objects::of(path)? {
            Some(object) => object.exists(),
            None => self.files.exists(path),
        })
    }

    /// Returns whether a checkpoint of this name has been published and not been removed.
    pub(super) fn is_published(&self, path: &Path) -> Result<bool> {
        let is_store = self.is_store(path);
        self.exists(&if is_store { path.join(MANIFEST) } else { path.to_owned() })
    }

    /// Returns whether a path is in a store of objects, where nothing is renamed, and a folder is its objects.
    pub(super) fn is_store(&self, path: &Path) -> bool {
        objects::of(path).is_ok_and(|object| object.is_some())
    }

    /// Creates a folder and its missing parents. Returns once the disk holds the names of all of them, also of those
    /// that a process has made that was killed before it had synced them.
    pub(super) fn create_folders(&self, path: &Path) -> Result<()> {
        if self.is_store(path) {
            return Ok(());
        }
        let mut missing = Vec::new();
        for folder in path.ancestors().filter(|folder| !folder.as_os_str().is_empty()) {
            if self.exists(folder)? {
                self.sync_name(folder)?;
                break;
            }
            missing.push(folder);
        }
        // The name of one is synced before the next is made, so that only the last one's can be unsynced.
        for folder in missing.into_iter().rev() {
            match self.create_folder(folder) {
                // Another process has made it meanwhile.
                Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {}
                outcome => outcome?,
            }
            self.sync_name(folder)?;
        }
        Ok(())
    }

    /// Syncs the name of a folder, as far as the folder above can be synced: not without the permission to read it.
    fn sync_name(&self, folder: &Path) -> Result<()> {
        let Some(above) = folder.parent() else { return Ok(()) };
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        let unable = [io::ErrorKind::PermissionDenied, io::ErrorKind::InvalidInput, io::ErrorKind::Unsupported];
        match self.sync_folder(above) {
            Err(Error::File { source, .. }) if unable.contains(&source.kind()) => Ok(()),
            outcome => outcome,
        }
    }

    /// Creates one folder. In a store, an object in it takes the name, which another process may have done before.
    pub(super) fn create_folder(&self, path: &Path) -> Result<()> {
        self.named("making", path, || match objects::of(path)? {
            Some(object) => object.join(TAKEN).create(temporary_suffix().as_bytes()),
            None => self.files.create_folder(path),
        })
    }

    /// Writes a small object that no other process has written before.
    pub(super) fn create(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        match self.object(path)? {
            Some(object) => self.named("publishing", path, || object.create(bytes)),
            None => self.write(path, bytes).map(drop),
        }
    }

    /// Returns the object that a path names, if it is in a store.
    fn object(&self, path: &Path) -> Result<Option<Object>> {
        objects::of(path).map_err(|source| Error::File { path: path.to_owned(), source })
    }

    /// Syncs the names in a folder.
    pub(super) fn sync_folder(&self, path: &Path) -> Result<()> {
        if self.is_store(path) {
            return Ok(());
        }
        self.named("syncing", path, || self.files.sync_folder(path))
    }

    /// Renames a file or folder atomically. A folder of a store is copied into another one, which exists, and then
    /// removed: the manifest is copied last, and removed first.
    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        if !self.is_store(from) {
            return self.named("renaming to", to, || self.files.rename(from, to));
        }
        let mut names = self.names(from)?;
        names.retain(|name| name != TAKEN);
        names.sort_by_key(|name| name == MANIFEST);
        for name in names {
            let (from, to) = (from.join(&name), to.join(&name));
            self.named("copying to", &to, || match (objects::of(&from)?, objects::of(&to)?) {
                (Some(object), Some(other)) => object.copy(&other, || self.begin("copying to", &to)),
                _ => Err(io::ErrorKind::Unsupported.into()),
            })?;
        }
        self.remove_folder(from)
    }

    /// Gives a file of a folder another name. In a store, the object is copied, and then removed.
    pub(super) fn rename_file(&self, from: &Path, to: &Path) -> Result<()> {
        let (Some(object), Some(other)) = (self.object(from)?, self.object(to)?) else {
            return self.named("renaming to", to, || self.files.rename(from, to));
        };
        self.named("copying to", to, || object.copy(&other, || self.begin("copying to", to)))?;
        self.remove_file(from)
    }

    /// Exchanges two names atomically; returns whether the system and the file system support it.
    pub(super) fn exchange(&self, one: &Path, other: &Path) -> Result<bool> {
        let outcome = self.step("exchanging", other, || {
            self.faults.exchange()?;
            self.files.exchange(one, other)
        });
        match outcome {
            Ok(()) => Ok(true),
            Err(error) if system::is_unsupported(&error) => Ok(false),
            Err(source) => Err(Error::File { path: other.to_owned(), source }),
        }
    }

    /// Removes a folder and its contents. In a store, the manifest is removed first, since the folder is a checkpoint
    /// as long as it has one, and the object that takes the name last.
    pub(super) fn remove_folder(&self, path: &Path) -> Result<()> {
        if self.is_store(path) {
            let mut names = self.names(path)?;
            names.sort_by_key(|name| if name == MANIFEST { 0 } else { 1 + u8::from(name == TAKEN) });
            return names.iter().try_for_each(|name| self.remove_file(&path.join(name)));
        }
        for name in self.names(path)? {
            let file = path.join(name);
            self.named("removing", &file, || self.files.remove(&file))?;
        }
        self.named("removing", path, || self.files.remove_folder(path))
    }

    pub(super) fn remove_file(&self, path: &Path) -> Result<()> {
        self.named("removing", path, || match objects::of(path)? {
            Some(object) => object.delete(),
            None => self.files.remove_file(path),
        })
    }

    /// Removes a folder if it is empty.
    pub(super) fn remove_empty_folder(&self, path: &Path) {
        if !self.is_store(path) {
            drop(self.step("removing", path, || self.files.remove_folder(path)));
        }
    }

    /// Returns the names in a folder; none if it does not exist.
    pub(super) fn names(&self, path: &Path) -> Result<Vec<OsString>> {
        let list = || match objects::of(path)? {
            Some(object) => object.names(),
            None => self.files.names(path),
        };
        self.named("listing", path, list)
    }

    /// Opens a folder, whose files are then read by name from this very folder even if another takes its place.
    pub(super) fn open_folder(&self, path: &Path) -> io::Result<Folder> {
        self.step("opening", path, || match objects::of(path)? {
            Some(object) => object.open_folder().map(Folder::Objects),
            None => self.files.open_folder(path).map(Folder::Local),
        })
    }

    /// Returns the length of a regular file in a folder.
    pub(super) fn length(&self, folder: &Folder, path: &Path, name: &str) -> io::Result<u64> {
        self.step("looking at", &path.join(name), || match folder {
            Folder::Local(folder) => folder.length(name)?.ok_or_else(not_regular),
            Folder::Objects(folder) => folder.length(name),
        })
    }

    /// Reads a regular file of at most `most` bytes in a folder; nothing is allocated for a larger one.
    pub(super) fn read(&self, folder: &Folder, path: &Path, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let path = path.join(name);
        let folder = match folder {
            Folder::Local(folder) => folder,
            Folder::Objects(folder) => return self.read_object(folder, &path, name, most),
        };
        let (mut file, length) = self.step("opening", &path, || {
            let (file, length) = folder.file(name)?;
            Ok((file, length.ok_or_else(not_regular)?))
        })?;
        let (mut bytes, wanted) = room_for(length, most)?;
        loop {
            let before = bytes.len();
            let mut read = |bytes: &mut Vec<u8>| Read::by_ref(&mut file).take(PART_BYTES as u64).read_to_end(bytes);
            self.step("reading", &path, || read(&mut bytes))?;
            // A file of a checkpoint does not grow while it is read.
            if bytes.len() > wanted {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it grows while it is read"));
            }
            if bytes.len() - before < PART_BYTES {
                return Ok(bytes);
            }
        }
    }

    /// Reads a part of a regular file in a folder, from a position on, into the whole of `bytes`.
    pub(super) fn read_at(
        &self,
        folder: &Folder,
        path: &Path,
        name: &str,
        start: u64,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let path = path.join(name);
        let folder = match folder {
            Folder::Local(folder) => folder,
            Folder::Objects(folder) => {
                let mut at = start;
                for part in bytes.chunks_mut(objects::PART_BYTES) {
                    let end = at + part.len() as u64;
                    let read = self.step("reading", &path, || folder.read(name, at..end))?;
                    if read.len() != part.len() {
                        return Err(shorter());
                    }
                    part.copy_from_slice(&read);
                    at = end;
                }
                return Ok(());
            }
        };
        let mut file = self.step("opening", &path, || {
            let (mut file, length) = folder.file(name)?;
            length.ok_or_else(not_regular)?;
            file.seek(SeekFrom::Start(start))?;
            Ok(file)
        })?;
        let outcome =
            bytes.chunks_mut(PART_BYTES).try_for_each(|part| self.step("reading", &path, || file.read_exact(part)));
        outcome.map_err(|error| if error.kind() == io::ErrorKind::UnexpectedEof { shorter() } else { error })
    }

    /// Reads an object of a folder in parts; nothing is allocated for one of more than `most` bytes.
    fn read_object(&self, folder: &objects::Folder, path: &Path, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let length = self.step("opening", path, || folder.length(name))?;
        let (mut bytes, wanted) = room_for(length, most)?;
        while bytes.len() < wanted {
            let (start, end) = (bytes.len(), wanted.min(bytes.len() + objects::PART_BYTES));
            bytes.extend_from_slice(&self.step("reading", path, || folder.read(name, start as u64..end as u64))?);
        }
        Ok(bytes)
    }
}

/// An open folder of a file system, or the listing of one in a store.
#[derive(Debug)]
pub(super) enum Folder {
    Local(Box<dyn OpenFolder>),
    Objects(objects::Folder),
}

impl Folder {
    /// Returns whether the other was opened from the same path after another folder had taken the place of this one.
    pub(super) fn is_another(&self, other: &Folder) -> bool {
        match (self, other) {
            (Folder::Local(one), Folder::Local(other)) => {
                let (one, other) = (one.identity(), other.identity());
                one != other || one.is_none()
            }
            // Names in a store are used once.
            _ => false,
        }
    }

    /// Returns whether the folder is one of a store that no manifest makes a checkpoint: it is being written or
    /// removed, or the process that did so was killed.
    pub(super) fn is_unpublished(&self) -> bool {
        matches!(self, Folder::Objects(folder) if folder.length(MANIFEST).is_err())
    }
}

/// Returns whether the error means that the file is damaged or gone, not that it cannot be reached.
pub(super) fn is_damage(error: &io::Error) -> bool {
    objects::is_missing(error) || system::is_damage(error)
}

/// Returns an empty vector with room for a file; nothing is allocated for one of more than `most` bytes.
fn room_for(length: u64, most: u64) -> io::Result<(Vec<u8>, usize)> {
    let too_long = || io::Error::new(io::ErrorKind::InvalidData, format!("it has {length} bytes, of at most {most}"));
    let wanted = usize::try_from(length).ok().filter(|_| length <= most).ok_or_else(too_long)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(wanted).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    Ok((bytes, wanted))
}

/// The object by which the writer of a checkpoint takes the name of its folder in a store.
pub(super) const TAKEN: &str = ".folder";

fn shorter() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it has become shorter while it is read")
}

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file")
}

/// Bytes that are written or read at once: seconds on a slow disk.
const PART_BYTES: usize = 64 << 20;

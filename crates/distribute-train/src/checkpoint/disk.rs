//! The file operations that checkpoints consist of. Each is one step that can fail, that tests can make fail, and that
//! records what it operates on, so that an error can name the operation in which a disk hangs.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

#[cfg(test)]
pub(super) use faults::{Fault, Faults};
#[cfg(not(test))]
use no_faults::Faults;
pub(super) use system::{Folder, is_damage};

use crate::{Error, Result};

#[cfg(test)]
mod faults;
#[cfg_attr(unix, path = "disk/unix.rs")]
#[cfg_attr(not(unix), path = "disk/by_path.rs")]
mod system;

/// A disk as used by one writer or reader.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    under_way: Arc<Mutex<UnderWay>>,
    faults: Faults,
}

/// The operation in progress, or the last one.
#[derive(Clone, Debug)]
struct UnderWay {
    verb: &'static str,
    path: PathBuf,
    since: Instant,
}

impl Default for UnderWay {
    fn default() -> UnderWay {
        UnderWay { verb: "starting with", path: PathBuf::new(), since: Instant::now() }
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
        Disk { under_way: Arc::default(), faults: self.faults.clone() }
    }

    /// Returns a disk whose operations fail as a test determines.
    #[cfg(test)]
    pub(super) fn with(faults: &Faults) -> Disk {
        Disk { under_way: Arc::default(), faults: faults.clone() }
    }

    /// Returns the operation in progress, such as `writing model.safetensors`, and how long it has taken so far.
    pub(super) fn under_way(&self) -> (String, Duration) {
        let now = self.under_way.lock();
        (format!("{} {}", now.verb, now.path.display()), now.since.elapsed())
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
        *self.under_way.lock() = UnderWay { verb, path: path.to_owned(), since: Instant::now() };
    }

    /// Runs an operation like [`Disk::step`], and adds the path to its error.
    fn named<T>(&self, verb: &'static str, path: &Path, run: impl FnOnce() -> io::Result<T>) -> Result<T> {
        self.step(verb, path, run).map_err(|source| Error::File { path: path.to_owned(), source })
    }

    pub(super) fn exists(&self, path: &Path) -> Result<bool> {
        self.named("looking for", path, || fs::exists(path))
    }

    /// Creates a folder and its missing parents, and syncs them.
    pub(super) fn create_folders(&self, path: &Path) -> Result<()> {
        let mut missing = Vec::new();
        for folder in path.ancestors().filter(|folder| !folder.as_os_str().is_empty()) {
            if self.exists(folder)? {
                break;
            }
            missing.push(folder);
        }
        self.named("making", path, || fs::create_dir_all(path))?;
        for folder in missing {
            let above = folder.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
            // A folder without read permission cannot be synced.
            drop(self.sync_folder(above));
        }
        Ok(())
    }

    /// Creates one folder.
    pub(super) fn create_folder(&self, path: &Path) -> Result<()> {
        self.named("making", path, || fs::create_dir(path))
    }

    /// Writes a new file and syncs it.
    pub(super) fn write(&self, path: &Path, bytes: &[u8]) -> Result<Entry> {
        let mut file = self.named("making", path, || OpenOptions::new().write(true).create_new(true).open(path))?;
        // Written in parts, so that a slow disk can be told from one that hangs.
        for part in bytes.chunks(PART_BYTES) {
            let torn = self.faults.torn(part);
            if let Some(torn) = torn {
                drop(file.write_all(torn));
            }
            self.named("writing", path, || file.write_all(part))?;
            if bytes.len() > PART_BYTES {
                self.named("syncing", path, || file.sync_data())?;
            }
        }
        self.named("syncing", path, || file.sync_all())?;
        Ok(Entry { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) })
    }

    /// Syncs the names in a folder.
    pub(super) fn sync_folder(&self, path: &Path) -> Result<()> {
        self.named("syncing", path, || system::sync_folder(path))
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.named("renaming to", to, || fs::rename(from, to))
    }

    /// Exchanges two names atomically; returns whether the system and the file system support it.
    pub(super) fn exchange(&self, one: &Path, other: &Path) -> Result<bool> {
        let outcome = self.step("exchanging", other, || {
            self.faults.exchange()?;
            system::exchange(one, other)
        });
        match outcome {
            Ok(()) => Ok(true),
            Err(error) if system::is_unsupported(&error) => Ok(false),
            Err(source) => Err(Error::File { path: other.to_owned(), source }),
        }
    }

    /// Removes a folder and its contents.
    pub(super) fn remove_folder(&self, path: &Path) -> Result<()> {
        for name in self.names(path)? {
            let file = path.join(name);
            self.named("removing", &file, || match fs::symlink_metadata(&file)?.is_dir() {
                true => fs::remove_dir_all(&file),
                false => fs::remove_file(&file),
            })?;
        }
        self.named("removing", path, || fs::remove_dir(path))
    }

    pub(super) fn remove_file(&self, path: &Path) -> Result<()> {
        self.named("removing", path, || fs::remove_file(path))
    }

    /// Removes a folder if it is empty.
    pub(super) fn remove_empty_folder(&self, path: &Path) {
        drop(self.step("removing", path, || fs::remove_dir(path)));
    }

    /// Returns the names in a folder; none if it does not exist.
    pub(super) fn names(&self, path: &Path) -> Result<Vec<OsString>> {
        let list = || match fs::read_dir(path) {
            Ok(entries) => entries.map(|entry| entry.map(|entry| entry.file_name())).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        self.named("listing", path, list)
    }

    /// Opens a folder, whose files are then read by name from this very folder even if another takes its place.
    pub(super) fn open_folder(&self, path: &Path) -> io::Result<Folder> {
        self.step("opening", path, || Folder::open(path))
    }

    /// Returns the length of a regular file in a folder.
    pub(super) fn length(&self, folder: &Folder, path: &Path, name: &str) -> io::Result<u64> {
        self.step("looking at", &path.join(name), || folder.length(name)?.ok_or_else(not_regular))
    }

    /// Reads a regular file of at most `most` bytes in a folder; nothing is allocated for a larger one.
    pub(super) fn read(&self, folder: &Folder, path: &Path, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let path = path.join(name);
        let (mut file, length) = self.step("opening", &path, || {
            let file = folder.file(name)?;
            let about = file.metadata()?;
            if about.is_file() { Ok((file, about.len())) } else { Err(not_regular()) }
        })?;
        let too_long =
            || io::Error::new(io::ErrorKind::InvalidData, format!("it has {length} bytes, of at most {most}"));
        let wanted = usize::try_from(length).ok().filter(|_| length <= most).ok_or_else(too_long)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(wanted).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
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
}

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file")
}

/// Bytes that are written or read at once: seconds on a slow disk.
const PART_BYTES: usize = 64 << 20;

#[cfg(not(test))]
mod no_faults {
    use std::io;
    use std::path::Path;

    /// Outside tests, no faults are injected.
    #[derive(Clone, Debug, Default)]
    pub(super) struct Faults;

    impl Faults {
        pub(super) fn before(&self, _: &'static str, _: &Path) -> io::Result<()> {
            Ok(())
        }

        pub(super) fn torn<'a>(&self, _: &'a [u8]) -> Option<&'a [u8]> {
            None
        }

        pub(super) fn exchange(&self) -> io::Result<()> {
            Ok(())
        }
    }
}

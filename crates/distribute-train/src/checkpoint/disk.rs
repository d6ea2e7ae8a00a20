//! The operations on files that checkpoints are made of. Each is one step that can fail, that tests can make fail, and that
//! says what it is about, so that whoever waits for a disk that hangs can name it.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};

#[cfg(test)]
pub(super) use faults::{Fault, Faults};
#[cfg(not(test))]
use no_faults::Faults;

use crate::{Error, Result};

#[cfg(test)]
mod faults;

/// A disk as one writer or reader uses it.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    under_way: Arc<Mutex<UnderWay>>,
    faults: Faults,
}

/// The operation that is under way, or that ended last.
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
    /// The same disk for other work, which begins now.
    pub(super) fn afresh(&self) -> Disk {
        Disk { under_way: Arc::default(), faults: self.faults.clone() }
    }

    /// As this one, with operations that fail as a test says.
    #[cfg(test)]
    pub(super) fn with(faults: &Faults) -> Disk {
        Disk { under_way: Arc::default(), faults: faults.clone() }
    }

    /// What is under way, such as `writing model.safetensors`, and for how long it has been.
    pub(super) fn under_way(&self) -> (String, Duration) {
        let now = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        (format!("{} {}", now.verb, now.path.display()), now.since.elapsed())
    }

    /// Shows what another user of the disk is at, while this one waits for it.
    pub(super) fn wait_with(&self, other: &Disk) {
        let of_other = other.under_way.lock().unwrap_or_else(PoisonError::into_inner).clone();
        *self.under_way.lock().unwrap_or_else(PoisonError::into_inner) = of_other;
    }

    /// Runs an operation, and names it while it runs.
    fn step<T>(&self, verb: &'static str, path: &Path, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.begin(verb, path);
        self.faults.before(verb, path)?;
        run()
    }

    /// Names what is under way from now on.
    pub(super) fn begin(&self, verb: &'static str, path: &Path) {
        *self.under_way.lock().unwrap_or_else(PoisonError::into_inner) =
            UnderWay { verb, path: path.to_owned(), since: Instant::now() };
    }

    /// As [`Disk::step`], with the path in the error.
    fn named<T>(&self, verb: &'static str, path: &Path, run: impl FnOnce() -> io::Result<T>) -> Result<T> {
        self.step(verb, path, run).map_err(|source| Error::File { path: path.to_owned(), source })
    }

    pub(super) fn exists(&self, path: &Path) -> Result<bool> {
        self.named("looking for", path, || fs::exists(path))
    }

    /// Makes a folder and those above it that are missing, to the medium.
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
            // One that may not be read cannot be synced either.
            drop(self.sync_folder(above));
        }
        Ok(())
    }

    /// Makes one folder.
    pub(super) fn create_folder(&self, path: &Path) -> Result<()> {
        self.named("making", path, || fs::create_dir(path))
    }

    /// Writes a file that is not there yet, to the medium.
    pub(super) fn write(&self, path: &Path, bytes: &[u8]) -> Result<Entry> {
        let mut file = self.named("making", path, || OpenOptions::new().write(true).create_new(true).open(path))?;
        // In parts, so that a slow disk can be told from one that hangs.
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

    /// Makes the names in a folder last.
    pub(super) fn sync_folder(&self, path: &Path) -> Result<()> {
        self.named("syncing", path, || File::open(path)?.sync_all())
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.named("renaming to", to, || fs::rename(from, to))
    }

    /// Swaps two names at once; whether the system and the file system know how.
    pub(super) fn exchange(&self, one: &Path, other: &Path) -> Result<bool> {
        let outcome = self.step("exchanging", other, || {
            self.faults.exchange()?;
            exchange(one, other)
        });
        match outcome {
            Ok(()) => Ok(true),
            Err(error) if is_unsupported(&error) => Ok(false),
            Err(source) => Err(Error::File { path: other.to_owned(), source }),
        }
    }

    /// Removes a folder with all that is in it.
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

    /// Removes a folder if nothing is in it.
    pub(super) fn remove_empty_folder(&self, path: &Path) {
        drop(self.step("removing", path, || fs::remove_dir(path)));
    }

    /// The names in a folder; none where it is not there.
    pub(super) fn names(&self, path: &Path) -> Result<Vec<OsString>> {
        let list = || match fs::read_dir(path) {
            Ok(entries) => entries.map(|entry| entry.map(|entry| entry.file_name())).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        self.named("listing", path, list)
    }

    /// Opens a folder. Its files are then read by name from this very folder, also where another one has taken its place.
    pub(super) fn open_folder(&self, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.step("opening", path, || Ok(openat(CWD, path, flags, Mode::empty())?))
    }

    /// The length of a regular file in a folder.
    pub(super) fn length(&self, folder: &impl AsFd, path: &Path, name: &str) -> io::Result<u64> {
        self.step("looking at", &path.join(name), || {
            let about = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(about.st_mode).is_file() {
                true => Ok(u64::try_from(about.st_size).unwrap_or(0)),
                false => Err(not_regular()),
            }
        })
    }

    /// Reads a regular file in a folder, which must have at most so many bytes: nothing is allocated for one that has more.
    pub(super) fn read(&self, folder: &impl AsFd, path: &Path, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let path = path.join(name);
        let (mut file, length) = self.step("opening", &path, || {
            let file = open(folder, name)?;
            let length = file.metadata()?.len();
            Ok((file, length))
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
            // One that grows while it is read is no file of a checkpoint.
            if bytes.len() > wanted {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it grows while it is read"));
            }
            if bytes.len() - before < PART_BYTES {
                return Ok(bytes);
            }
        }
    }
}

/// Opens a regular file of a folder, never by way of a link: what a name leads to must be in the folder. Pipes and devices do
/// not block.
fn open(folder: &impl AsFd, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(folder, name, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(not_regular()),
    }
}

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file")
}

#[cfg(target_os = "linux")]
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, one, CWD, other, rustix::fs::RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Old kernels and some file systems do not exchange.
fn is_unsupported(error: &io::Error) -> bool {
    use rustix::io::Errno;
    error.kind() == io::ErrorKind::Unsupported
        || Errno::from_io_error(error).is_some_and(|errno| [Errno::INVAL, Errno::NOSYS, Errno::NOTSUP].contains(&errno))
}

/// What is written or read at once: seconds on a slow disk.
const PART_BYTES: usize = 64 << 20;

#[cfg(not(test))]
mod no_faults {
    use std::io;
    use std::path::Path;

    /// Outside of tests the disk alone fails.
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

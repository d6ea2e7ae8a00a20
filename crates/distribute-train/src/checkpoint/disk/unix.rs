//! Folders and their names on Unix.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;

/// An open folder. Its files are read by name from this very folder even if another takes its place.
#[derive(Debug)]
pub(in super::super) struct Folder(OwnedFd);

impl Folder {
    pub(super) fn open(path: &Path) -> io::Result<Folder> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Folder(openat(CWD, path, flags, Mode::empty())?))
    }

    /// Opens a file without following links, so that the file is in the folder. Pipes and devices do not block.
    pub(super) fn open_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.0, name, flags, Mode::empty())?))
    }

    /// Returns the length of a file; `None` if it is not a regular one.
    pub(super) fn length_of(&self, name: &str) -> io::Result<Option<u64>> {
        let about = statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_file = FileType::from_raw_mode(about.st_mode).is_file();
        Ok(is_file.then(|| u64::try_from(about.st_size).unwrap_or(0)))
    }

    /// Returns the device and the number of the folder.
    #[allow(clippy::unnecessary_cast, reason = "the types differ between systems")]
    pub(super) fn identity_of(&self) -> Option<(u64, u64)> {
        fstat(&self.0).ok().map(|about| (about.st_dev as u64, about.st_ino as u64))
    }
}

/// Syncs the names in a folder.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Exchanges two names atomically.
pub(super) fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    return Ok(rustix::fs::renameat_with(CWD, one, CWD, other, rustix::fs::RenameFlags::EXCHANGE)?);
    #[cfg(not(target_os = "linux"))]
    return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{} and {}", one.display(), other.display())));
}

/// Returns whether the error means that the kernel or the file system does not support the exchange.
pub(super) fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || Errno::from_io_error(error).is_some_and(|errno| [Errno::INVAL, Errno::NOSYS, Errno::NOTSUP].contains(&errno))
}

/// Returns whether the error means that the file is damaged. A bad sector is damage, as is a removal by another
/// machine; an unreachable network is not.
pub(in super::super) fn is_damage(error: &io::Error) -> bool {
    let known = [Errno::NOENT, Errno::NOTDIR, Errno::ISDIR, Errno::LOOP, Errno::STALE, Errno::IO];
    error.kind() == io::ErrorKind::InvalidData
        || Errno::from_io_error(error).is_some_and(|errno| known.contains(&errno))
}

//! Where the launchers of a user leave the sockets by which `distribute top` finds and asks their jobs.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, test_kill_process};

use crate::environment;

/// The socket of a running launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Job {
    /// The id of the launcher's process.
    pub(crate) launcher: u32,
    pub(crate) socket: PathBuf,
}

/// Returns the path for the socket of this process, in a folder that only its user can enter. Sockets of launchers that
/// were killed are removed.
///
/// # Errors
/// An [`io::Error`] if there is no such folder, and it cannot be created.
pub(crate) fn own_socket() -> io::Result<PathBuf> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for folder in folders(own_user()) {
        match prepare(&folder) {
            Ok(()) => {
                remove_old(&folder);
                let path = folder.join(format!("{}.{ENDING}", std::process::id()));
                let _ = fs::remove_file(&path);
                return Ok(path);
            }
            Err(error) => last = io::Error::new(error.kind(), format!("{}: {error}", folder.display())),
        }
    }
    Err(last)
}

/// Returns the jobs that a user's launchers run on this host, in the order of their process ids.
pub(crate) fn of_user(user: u32) -> Vec<Job> {
    let mut jobs: Vec<Job> =
        folders(user).iter().filter(|folder| check(folder, user).is_ok()).flat_map(|f| in_folder(f)).collect();
    jobs.retain(|job| lives(job.launcher));
    jobs.sort_by_key(|job| job.launcher);
    jobs.dedup_by_key(|job| job.launcher);
    jobs
}

/// Returns the user of this process.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the user of a process, if it runs.
pub(crate) fn user_of(process: u32) -> Option<u32> {
    fs::metadata(format!("/proc/{process}")).ok().map(|found| found.uid())
}

/// Returns the folders in which a user's sockets may be. They do not depend on the terminal, so that a job of a
/// scheduler is found as well.
pub(crate) fn folders(user: u32) -> Vec<PathBuf> {
    match environment::jobs_folder() {
        Some(folder) => vec![folder],
        None => {
            let of_session = PathBuf::from(format!("/run/user/{user}"));
            let session = fs::metadata(&of_session).is_ok_and(|found| found.uid() == user);
            let session = session.then(|| of_session.join("distribute"));
            session.into_iter().chain([PathBuf::from(format!("/tmp/distribute-{user}"))]).collect()
        }
    }
}

/// Creates a folder if it is not there, and checks that no other user can enter it.
fn prepare(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    check(folder, own_user())
}

/// Checks that a folder belongs to a user, and that only this user can enter it.
fn check(folder: &Path, user: u32) -> io::Result<()> {
    // Not through a link, which another user could have made in a folder that all may write to.
    let found = fs::symlink_metadata(folder)?;
    let problem = if !found.is_dir() {
        "it is not a folder"
    } else if found.uid() != user {
        "it belongs to another user"
    } else if found.mode() & 0o077 != 0 {
        "others than its owner can enter it; set its mode to 0700"
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

fn in_folder(folder: &Path) -> Vec<Job> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let job = |path: PathBuf| {
        let launcher = path.file_stem()?.to_str()?.parse().ok()?;
        (path.extension() == Some(OsStr::new(ENDING))).then_some(Job { launcher, socket: path })
    };
    entries.filter_map(|entry| job(entry.ok()?.path())).collect()
}

/// Removes the sockets of launchers that do not live any more.
fn remove_old(folder: &Path) {
    for job in in_folder(folder).into_iter().filter(|job| !lives(job.launcher)) {
        let _ = fs::remove_file(job.socket);
    }
}

/// Returns whether a process lives; one of another user may be seen, but not be signalled.
fn lives(process: u32) -> bool {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}

/// How the names of sockets end.
const ENDING: &str = "sock";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_that_others_can_enter_is_not_used() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("jobs");
        prepare(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(prepare(&folder).unwrap_err().to_string().contains("set its mode to 0700"));
        let link = parent.path().join("link");
        std::os::unix::fs::symlink(parent.path(), &link).unwrap();
        assert!(prepare(&link).unwrap_err().to_string().contains("it is not a folder"));
        assert!(check(parent.path(), own_user() + 1).unwrap_err().to_string().contains("another user"));
    }

    #[test]
    fn sockets_of_launchers_that_have_ended_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        for name in [
            format!("{}.sock", ended.id()),
            format!("{}.sock", std::process::id()),
            "notes.txt".into(),
            "x.sock".into(),
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_old(folder.path());
        let left = in_folder(folder.path());
        assert_eq!(left.iter().map(|job| job.launcher).collect::<Vec<_>>(), [std::process::id()]);
        assert!(folder.path().join("notes.txt").exists());
    }
}

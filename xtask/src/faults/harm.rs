//! How faults are made.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use distribute_testkit::Job;
use rustix::net::{AddressFamily, connect_unspec, getpeername, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::crew::Member;
use crate::error::text;

/// A file system of a few MiB that only processes in its mount namespace see.
pub(super) struct Disk {
    /// Holds the namespace.
    holder: Job,
    folder: PathBuf,
}

impl Disk {
    /// Returns why none can be mounted here, if none can: it mounts one in a namespace that ends at once.
    pub(super) fn missing() -> Option<String> {
        let mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs"];
        let output = Command::new("unshare").arg("--mount").args(mount).arg(std::env::temp_dir()).output();
        let why = match output {
            Ok(output) if output.status.success() => return None,
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => format!("unshare: {error}"),
        };
        Some(format!("no file system of its own can be mounted here, which takes root: {why}"))
    }

    /// # Errors
    /// A message, if it cannot be mounted; where disks are not [missing](Disk::missing), that is a defect.
    pub(super) fn mount(folder: &Path) -> Result<Disk, String> {
        std::fs::create_dir(folder).map_err(text)?;
        let script = format!("mount -t tmpfs -o size=4m tmpfs {} && echo ready && exec sleep 600", folder.display());
        let holder = Job::builder("unshare").args(["--mount", "sh", "-c", &script]).start().map_err(text)?;
        let ready = holder.wait_for_line(0, "ready", Duration::from_secs(10));
        ready.map_err(|error| format!("no file system was mounted at {}: {error}", folder.display()))?;
        Ok(Disk { holder, folder: folder.to_owned() })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn pid(&self) -> String {
        self.holder.pid(0).map_or_else(|_| "0".to_owned(), |pid| pid.to_string())
    }

    /// Returns the command that starts another one where the disk is mounted.
    pub(super) fn enter(&self) -> [String; 3] {
        ["nsenter".to_owned(), format!("--mount=/proc/{}/ns/mnt", self.pid()), "--".to_owned()]
    }

    /// The disk's folder as this process sees it.
    fn seen_from_here(&self) -> PathBuf {
        let folder = self.folder.strip_prefix("/").unwrap_or(&self.folder);
        PathBuf::from(format!("/proc/{}/root", self.pid())).join(folder)
    }

    /// Fills the disk.
    pub(super) fn fill(&self) -> Result<(), String> {
        let mut filler = std::fs::File::create(self.seen_from_here().join("filler")).map_err(text)?;
        while filler.write_all(&[0; 4096]).is_ok() {}
        Ok(())
    }

    pub(super) fn empty(&self) -> Result<(), String> {
        std::fs::remove_file(self.seen_from_here().join("filler")).map_err(text)
    }

    /// Allows writing, or forbids it, as soon as no file is open for writing.
    pub(super) fn remount(&self, how: &str) -> Result<(), String> {
        let [program, namespace, end] = self.enter();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let mut command = Command::new(&program);
            command.args([&namespace, &end]).args(["mount", "-o", &format!("remount,{how}")]).arg(&self.folder);
            let output = command.output().map_err(text)?;
            if output.status.success() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("mount -o remount,{how}: {}", String::from_utf8_lossy(&output.stderr).trim()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Resets all TCP connections of a task, as a broken switch or firewall does; returns their number.
pub(super) fn reset_connections(member: &Member) -> Result<usize, String> {
    let pid = member.pid()?;
    let descriptor = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or("no process id")?;
    let process = pidfd_open(descriptor, PidfdFlags::empty()).map_err(text)?;
    let mut count = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(text)? {
        let entry = entry.map_err(text)?;
        let is_socket =
            std::fs::read_link(entry.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"));
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()).filter(|_| is_socket) else {
            continue;
        };
        // It may be closed by now.
        let Ok(socket) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) else { continue };
        count += usize::from(reset(&socket));
    }
    Ok(count)
}

/// Has the kernel forget a TCP connection, and tell its peer so.
fn reset(socket: &OwnedFd) -> bool {
    let is_tcp = sockopt::socket_domain(socket)
        .is_ok_and(|domain| [AddressFamily::INET, AddressFamily::INET6].contains(&domain));
    is_tcp && getpeername(socket).is_ok_and(|peer| peer.is_some()) && connect_unspec(socket).is_ok()
}

//! The prerequisites of shared memory between processes of one machine.

use std::io;
use std::path::Path;

use super::report::Check;
use super::seen::{Seen, bytes, field};
use super::software::container;

/// A file system, as seen from one of its folders.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    /// Whether this process may create files there.
    pub(crate) writable: io::Result<()>,
}

impl Space {
    /// Examines a folder by creating a file without a name, which leaves nothing behind.
    pub(crate) fn of(folder: &Path) -> io::Result<Self> {
        let is = rustix::fs::statvfs(folder)?;
        let writable = tempfile::tempfile_in(folder).map(drop);
        Ok(Self { total_bytes: is.f_blocks * is.f_frsize, free_bytes: is.f_bavail * is.f_frsize, writable })
    }
}

/// Checks `/dev/shm`. These crates share memory without it, but other software does not.
pub(crate) fn dev_shm(seen: &Seen, space: io::Result<Space>) -> Check {
    let need = "shared memory of ours needs none of it, but NCCL between processes and data loaders of others do";
    let remedy = match container(seen) {
        Some("Kubernetes") => "mount an emptyDir with medium: Memory at /dev/shm",
        Some(_) => "docker run --shm-size=1g, or --ipc=host",
        None => {
            "mount -o remount,size=1g /dev/shm; in a container docker run --shm-size=1g, in a pod an emptyDir with \
                 medium: Memory there"
        }
    };
    let Space { total_bytes, free_bytes, writable } = match space {
        Ok(space) => space,
        Err(error) => return Check::warn(TOPIC, format!("it cannot be looked at: {error}")).why(need).remedy(remedy),
    };
    let found = format!("{}, {} free", bytes(total_bytes), bytes(free_bytes));
    match writable {
        Err(error) => {
            let remedy = "mount it with mode 1777, and not read-only";
            Check::warn(TOPIC, format!("{found}, cannot be written: {error}")).why(need).remedy(remedy)
        }
        Ok(()) if total_bytes < ENOUGH => Check::warn(TOPIC, found).why(need).remedy(remedy),
        Ok(()) if free_bytes < ENOUGH => {
            let remedy = "remove what ended programs have left there: ls -l /dev/shm";
            Check::warn(TOPIC, found).why(need).remedy(remedy)
        }
        Ok(()) => Check::ok(TOPIC, found),
    }
}

/// Checks whether processes of one user may read each other's memory, so that long messages are copied only once.
pub(crate) fn ptrace(seen: &Seen) -> Check {
    let scope = seen.line("/proc/sys/kernel/yama/ptrace_scope").and_then(|scope| scope.parse::<u32>().ok());
    let status = seen.text("/proc/self/status").unwrap_or_default();
    let effective = field(&status, "CapEff").and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    let capable = effective >> CAP_SYS_PTRACE & 1 == 1;
    let fetch = "processes may fetch long messages from each other's memory";
    let why = "long messages between processes are copied twice instead of once";
    match scope {
        None | Some(0) => Check::ok("ptrace", fetch),
        Some(scope @ 1..=2) if capable => {
            Check::ok("ptrace", fetch).why(format!("ptrace_scope is {scope}, with CAP_SYS_PTRACE"))
        }
        Some(scope @ 1..=2) => Check::warn("ptrace", format!("ptrace_scope is {scope}"))
            .why(why)
            .remedy("sysctl kernel.yama.ptrace_scope=0; for a container alone docker run --cap-add=SYS_PTRACE"),
        Some(scope) => {
            let remedy = "sysctl kernel.yama.ptrace_scope=0 at boot, as this one cannot be taken back";
            Check::warn("ptrace", format!("ptrace_scope is {scope}")).why(why).remedy(remedy)
        }
    }
}

const TOPIC: &str = "/dev/shm";

/// NCCL takes about 10 MiB for each pair of GPUs and channel; Docker gives a container 64 MiB by default.
const ENOUGH: u64 = 512 << 20;

/// The number of the capability, from capabilities(7).
const CAP_SYS_PTRACE: u32 = 19;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    fn space(total: u64, free: u64) -> io::Result<Space> {
        Ok(Space { total_bytes: total << 20, free_bytes: free << 20, writable: Ok(()) })
    }

    #[test]
    fn a_small_dev_shm_is_warned_about_with_what_mends_it_here() {
        let bare = Seen::variables_only(&[]);
        assert_eq!(dev_shm(&bare, space(1024, 900)), Check::ok("/dev/shm", "1 GiB, 900 MiB free"));
        let small = dev_shm(&bare, space(64, 64));
        assert_eq!((small.status, small.found.as_str()), (Status::Warn, "64 MiB, 64 MiB free"));
        assert!(small.remedy.unwrap().contains("--shm-size=1g"));
        let pod = Seen::variables_only(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
        assert!(dev_shm(&pod, space(64, 64)).remedy.unwrap().contains("emptyDir"));
        assert!(dev_shm(&bare, space(1024, 3)).remedy.unwrap().contains("remove"));
    }

    #[test]
    fn a_dev_shm_that_cannot_be_used_says_why() {
        let bare = Seen::variables_only(&[]);
        let missing = dev_shm(&bare, Space::of(Path::new("/nowhere/shm")));
        assert_eq!(missing.status, Status::Warn);
        assert!(missing.found.contains("No such file"), "{missing:?}");
        let read_only = Space { writable: Err(io::ErrorKind::PermissionDenied.into()), ..space(1024, 900).unwrap() };
        assert!(dev_shm(&bare, Ok(read_only)).found.contains("cannot be written: permission denied"));
    }

    #[test]
    fn a_folder_is_tried_without_leaving_anything() {
        let folder = tempfile::tempdir().unwrap();
        let space = Space::of(folder.path()).unwrap();
        assert!(space.writable.is_ok() && space.total_bytes >= space.free_bytes && space.free_bytes > 0);
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn reading_others_memory_depends_on_the_scope_and_the_capability() {
        let ptrace = |scope: &str, capabilities: &str| {
            let status = format!("Name:\tx\nCapEff:\t{capabilities}\n");
            let files = [("proc/sys/kernel/yama/ptrace_scope", scope), ("proc/self/status", &status)];
            let (seen, _folder) = Seen::variables_only(&[]).with_files(&files);
            ptrace(&seen).status
        };
        assert_eq!(ptrace("0\n", "0000000000000000"), Status::Ok);
        assert_eq!(ptrace("1\n", "0000000000000000"), Status::Warn);
        assert_eq!(ptrace("1\n", "0000000000080000"), Status::Ok);
        assert_eq!(ptrace("3\n", "000001ffffffffff"), Status::Warn);
        assert_eq!(super::ptrace(&Seen::variables_only(&[])).status, Status::Ok);
    }
}

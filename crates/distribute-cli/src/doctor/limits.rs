//! Limits of the system on one process.

use rustix::process::{Resource, getrlimit};

use super::report::Check;
use super::seen::{Seen, bytes};

/// A resource limit: the current one, and the highest that this process may set; `None` for no limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) now: Option<u64>,
    pub(crate) highest: Option<u64>,
}

impl Limit {
    pub(crate) fn of_open_files() -> Self {
        Self::of(Resource::Nofile)
    }

    pub(crate) fn of_locked_memory() -> Self {
        Self::of(Resource::Memlock)
    }

    fn of(resource: Resource) -> Self {
        let limit = getrlimit(resource);
        Self { now: limit.current, highest: limit.maximum }
    }
}

/// Checks whether a process can hold its connections to the others of a job of `world_size`.
pub(crate) fn open_files(limit: Limit, world_size: u32) -> Check {
    let Some(now) = limit.now else { return Check::ok("open files", "no limit") };
    let need = OWN_FILES + FILES_PER_PEER * u64::from(world_size.saturating_sub(1));
    let found = match limit.highest {
        Some(highest) if highest > now => format!("{now} (can be raised to {highest})"),
        Some(_) => format!("{now} (cannot be raised by this user)"),
        None => format!("{now} (can be raised without limit)"),
    };
    let wanted = need.max(USUAL).next_power_of_two();
    let remedy = match limit.highest.is_none_or(|highest| highest >= wanted) {
        true => format!("ulimit -n {wanted}"),
        false => format!("docker run --ulimit nofile={wanted}, or raise it in /etc/security/limits.conf"),
    };
    if now < need {
        let why = match world_size {
            0 | 1 => format!("even a process alone needs about {need}"),
            size => format!("a group of {size} processes needs about {need} in each of them"),
        };
        Check::fail("open files", found).why(why).remedy(remedy)
    } else if now < USUAL {
        Check::warn("open files", found).why("data sets of many files and further groups need more").remedy(remedy)
    } else {
        Check::ok("open files", found)
    }
}

/// Checks the limit of locked memory, which InfiniBand needs for sending.
pub(crate) fn locked_memory(seen: &Seen, limit: Limit) -> Check {
    let Some(now) = limit.now else { return Check::ok("locked memory", "no limit") };
    match seen.exists("/dev/infiniband") {
        false => Check::ok("locked memory", bytes(now)).why("there is no InfiniBand, which would need more"),
        true => Check::warn("locked memory", bytes(now))
            .why("NCCL over InfiniBand locks all of its buffers")
            .remedy("ulimit -l unlimited, or docker run --ulimit memlock=-1"),
    }
}

/// Standard streams, listeners, event loops, a data set's files.
const OWN_FILES: u64 = 64;

/// Two sockets to each other process, and one more at the leader.
const FILES_PER_PEER: u64 = 3;

/// The traditional default limit of processes.
const USUAL: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn connections_to_all_others_must_fit() {
        let check = |now, highest, world_size| open_files(Limit { now: Some(now), highest }, world_size);
        assert_eq!(check(1024, Some(1 << 20), 8).status, Status::Ok);
        assert_eq!(open_files(Limit { now: None, highest: None }, 9).status, Status::Ok);
        let low = check(256, Some(4096), 8);
        assert_eq!((low.status, low.remedy.as_deref()), (Status::Warn, Some("ulimit -n 1024")));
        let fixed = check(64, Some(64), 2);
        assert_eq!(fixed.status, Status::Fail);
        assert!(fixed.found.contains("cannot be raised") && fixed.remedy.unwrap().contains("--ulimit nofile=1024"));
        let many = check(1024, None, 1000);
        assert_eq!((many.status, many.remedy.as_deref()), (Status::Fail, Some("ulimit -n 4096")));
    }

    #[test]
    fn locked_memory_matters_with_infiniband_only() {
        let limit = Limit { now: Some(8 << 20), highest: None };
        let (with, _folder) = Seen::variables_only(&[]).with_files(&[("dev/infiniband/uverbs0", "")]);
        assert_eq!(locked_memory(&with, limit).status, Status::Warn);
        assert_eq!(locked_memory(&with, Limit { now: None, ..limit }).status, Status::Ok);
        assert_eq!(locked_memory(&Seen::variables_only(&[]), limit).found, "8 MiB");
    }

    #[test]
    fn this_process_has_limits() {
        assert!(Limit::of_open_files().now.is_none_or(|now| now > 2));
    }
}

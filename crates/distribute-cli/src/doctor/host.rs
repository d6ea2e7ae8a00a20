//! Processor, threads and memory.

use super::report::Check;
use super::seen::{Seen, bytes, count, field};

/// The number of cores, and how many of them this process may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cores {
    /// Cores of the machine.
    pub(crate) online: Option<usize>,
    /// Cores that the scheduler may run this process on.
    pub(crate) affinity: Option<usize>,
    /// Cores that the control group's quota leaves of these.
    pub(crate) usable: usize,
}

impl Cores {
    pub(crate) fn of_this_process(seen: &Seen) -> Self {
        let processors = |text: &String| text.lines().filter(|line| line.starts_with("processor")).count();
        let online = seen.text("/proc/cpuinfo").as_ref().map(processors).filter(|count| *count > 0);
        let affinity = rustix::thread::sched_getaffinity(None).ok().map(|set| set.count() as usize);
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        Self { online, affinity, usable }
    }
}

/// Checks the processor's model and cores.
pub(crate) fn cpu(model: &str, cores: Cores) -> Check {
    let Cores { online, affinity, usable } = cores;
    let online = online.unwrap_or(usable).max(usable);
    if usable == online {
        return Check::ok("cpu", format!("{model}, {}", count(online, "core")));
    }
    let check = Check::ok("cpu", format!("{model}, {usable} of {} can be used", count(online, "core")));
    match affinity {
        Some(affinity) if affinity > usable && affinity < online => {
            check.why(format!("the affinity allows {affinity}, and the control group's quota {usable} of these"))
        }
        Some(affinity) if affinity > usable => check.why("the control group's quota allows no more"),
        _ => check.why("the affinity allows no more"),
    }
}

/// Checks RAYON_NUM_THREADS, by which tensor libraries decide how many threads an operation uses.
pub(crate) fn threads(seen: &Seen, cores: usize) -> Check {
    let local = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"];
    let local = local.iter().find_map(|name| seen.variable(name)?.trim().parse::<usize>().ok()).unwrap_or(1).max(1);
    let share = (cores / local).max(1);
    let remedy = format!("set RAYON_NUM_THREADS={share} for each process, as `distribute run` does");
    match (seen.variable("RAYON_NUM_THREADS"), local) {
        (None, 1) => Check::ok("threads", format!("an operation uses up to {}", count(cores, "thread")))
            .why("RAYON_NUM_THREADS is not set; `distribute run` gives each task its share"),
        (None, local) => Check::warn("threads", "RAYON_NUM_THREADS is not set")
            .why(format!("each of {local} processes on this machine uses all of its {}", count(cores, "core")))
            .remedy(remedy),
        (Some(given), local) => match given.trim().parse::<usize>() {
            Ok(threads) if threads > 0 && (threads == 1 || threads * local <= cores) => {
                Check::ok("threads", format!("RAYON_NUM_THREADS={threads}"))
            }
            Ok(threads) if threads > 0 => Check::warn("threads", format!("RAYON_NUM_THREADS={threads}"))
                .why(format!(
                    "{} on this machine would use {} threads on {}",
                    if local == 1 { "1 process".to_owned() } else { format!("{local} processes") },
                    threads.saturating_mul(local),
                    count(cores, "core")
                ))
                .remedy(remedy),
            _ => Check::warn(
                "threads",
                format!("RAYON_NUM_THREADS={given} is not a number above 0, and counts as unset"),
            )
            .remedy(remedy),
        },
    }
}

/// Checks the total and the available memory.
pub(crate) fn memory(seen: &Seen) -> Check {
    let meminfo = seen.text("/proc/meminfo").unwrap_or_default();
    let kib = |name| field(&meminfo, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024);
    let Some(total) = kib("MemTotal") else {
        return Check::skipped("memory", "/proc/meminfo does not say how much there is");
    };
    let (limit, used) = limit(seen).filter(|(limit, _)| *limit < total).unzip();
    let of_limit = limit.map(|limit| limit.saturating_sub(used.flatten().unwrap_or(0)));
    let available = kib("MemAvailable").into_iter().chain(of_limit).min();
    let mut found = bytes(total);
    if let Some(limit) = limit {
        found.push_str(&format!(", limited to {} by the control group", bytes(limit)));
    }
    if let Some(available) = available {
        found.push_str(&format!(", {} available", bytes(available)));
    }
    match available {
        Some(available) if available < LITTLE => {
            Check::warn("memory", found).why("a process that needs more is killed by the kernel").remedy(
                if limit.is_some() { "raise the container's memory limit" } else { "end programs that hold memory" },
            )
        }
        _ => Check::ok("memory", found),
    }
}

/// Returns the lowest memory limit of this process's control groups, and the usage that counts towards it. A namespace
/// hides some of the groups.
fn limit(seen: &Seen) -> Option<(u64, Option<u64>)> {
    let groups = seen.text("/proc/self/cgroup")?;
    let number = |path: String| seen.line(&path)?.parse::<u64>().ok();
    let of_group = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (base, limit, used) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => return None,
        };
        let parents = std::path::Path::new(path).ancestors().filter_map(|path| path.to_str());
        let limits = parents.filter_map(|path| {
            let folder = format!("{base}/{}", path.trim_start_matches('/'));
            Some((number(format!("{folder}/{limit}"))?, number(format!("{folder}/{used}"))))
        });
        limits.min_by_key(|(limit, _)| *limit)
    };
    groups.lines().filter_map(of_group).min_by_key(|(limit, _)| *limit)
}

/// A small program and its data use about this much.
const LITTLE: u64 = 512 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn what_keeps_cores_from_this_process_is_named() {
        let cpu = |online, affinity, usable| {
            let check = cpu("Xeon", Cores { online: Some(online), affinity: Some(affinity), usable });
            (check.found, check.why.unwrap_or_default())
        };
        assert_eq!(cpu(16, 16, 16), ("Xeon, 16 cores".into(), String::new()));
        assert_eq!(cpu(16, 4, 4), ("Xeon, 4 of 16 cores can be used".into(), "the affinity allows no more".into()));
        assert!(cpu(16, 16, 8).1.contains("quota allows no more"));
        assert!(cpu(16, 8, 2).1.contains("allows 8, and the control group's quota 2"));
    }

    #[test]
    fn threads_are_counted_over_the_processes_of_the_machine() {
        let threads = |variables: &[(&str, &str)]| threads(&Seen::variables_only(variables), 8);
        let status = |variables: &[(&str, &str)]| threads(variables).status;
        assert_eq!(status(&[]), Status::Ok);
        assert_eq!(status(&[("RAYON_NUM_THREADS", "8")]), Status::Ok);
        assert_eq!(status(&[("RAYON_NUM_THREADS", "4"), ("LOCAL_WORLD_SIZE", "2")]), Status::Ok);
        for wrong in [
            &[("LOCAL_WORLD_SIZE", "2")][..],
            &[("RAYON_NUM_THREADS", "8"), ("LOCAL_WORLD_SIZE", "2")],
            &[("RAYON_NUM_THREADS", "many"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")],
        ] {
            let check = threads(wrong);
            assert_eq!(check.status, Status::Warn, "{check:?}");
            assert!(check.remedy.as_deref().unwrap().contains("RAYON_NUM_THREADS=4"), "{check:?}");
        }
        assert!(
            threads(&[("RAYON_NUM_THREADS", "64")]).why.unwrap().contains("1 process on this machine would use 64")
        );
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n");

    fn memory_with(files: &[(&str, &str)]) -> Check {
        let (seen, _folder) = Seen::variables_only(&[]).with_files(&[&[MEMINFO], files].concat());
        memory(&seen)
    }

    #[test]
    fn memory_limits_are_found_in_both_kinds_of_control_groups() {
        assert_eq!(memory_with(&[]).found, "64 GiB, 32 GiB available");
        let v2 = [
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/a/memory.current", "1073741824\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
        ];
        assert_eq!(memory_with(&v2).found, "64 GiB, limited to 4 GiB by the control group, 3 GiB available");
        let v1 = [
            ("proc/self/cgroup", "4:cpu,memory:/x\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        let check = memory_with(&v1);
        assert_eq!(check.status, Status::Warn);
        assert_eq!(check.found, "64 GiB, limited to 256 MiB by the control group, 256 MiB available");
    }
}

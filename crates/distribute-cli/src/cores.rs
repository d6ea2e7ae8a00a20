//! The cores that tasks are pinned to.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// The cores of this host that the launcher may use, grouped by NUMA node, so that a task's cores share memory where
/// possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cores {
    per_task: usize,
    nodes: Vec<Vec<usize>>,
}

impl Cores {
    /// Reads the cores that the launcher may use.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel does not tell.
    pub(crate) fn of_this_host(per_task: u32) -> Result<Cores, Error> {
        let allowed = sched_getaffinity(None).map_err(std::io::Error::from);
        let allowed = allowed.map_err(Error::system("read the cores that the launcher may use"))?;
        let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
        Ok(Cores { per_task: per_task as usize, nodes: by_node(&allowed, &numa_nodes()) })
    }

    /// Returns the number of cores of each task.
    pub(crate) fn per_task(&self) -> usize {
        self.per_task
    }

    /// Returns the cores of each of `tasks` tasks. No two tasks share one.
    ///
    /// # Errors
    /// [`Error::Cores`] if there are too few.
    pub(crate) fn places(&self, tasks: usize) -> Result<Vec<Place>, Error> {
        let all: usize = self.nodes.iter().map(Vec::len).sum();
        if tasks * self.per_task > all {
            return Err(Error::Cores { tasks, per_task: self.per_task, all });
        }
        // Whole tasks in each node first; what is left over of the nodes makes up the others.
        let mut places: Vec<Place> = Vec::new();
        let mut rest = Vec::new();
        for node in &self.nodes {
            let blocks = node.chunks_exact(self.per_task);
            rest.extend_from_slice(blocks.remainder());
            places.extend(blocks.map(|cores| Place { cores: cores.to_vec() }));
        }
        places.extend(rest.chunks_exact(self.per_task).map(|cores| Place { cores: cores.to_vec() }));
        places.truncate(tasks);
        Ok(places)
    }
}

/// The cores of one task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    cores: Vec<usize>,
}

impl Place {
    /// Pins the calling thread to these cores until the result is dropped: processes that it starts inherit them.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel refuses.
    pub(crate) fn pin(&self) -> Result<Pinned, Error> {
        let mut set = CpuSet::new();
        self.cores.iter().for_each(|core| set.set(*core));
        let pin = || {
            let before = sched_getaffinity(None)?;
            sched_setaffinity(None, &set)?;
            Ok(Pinned { before })
        };
        pin()
            .map_err(|error: rustix::io::Errno| std::io::Error::from(error))
            .map_err(Error::system("pin a task to its cores"))
    }
}

/// A thread that is pinned.
#[derive(Debug)]
pub(crate) struct Pinned {
    before: CpuSet,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Can fail only if these cores were taken from the launcher meanwhile.
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Returns the cores of each NUMA node; empty if the kernel does not tell.
fn numa_nodes() -> Vec<Vec<usize>> {
    let lists = (0..MOST_NODES)
        .map_while(|node| fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok());
    lists.map(|list| parse(&list)).collect()
}

/// Parses the kernel's form of a list, such as `0-3,8`.
fn parse(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (last < CpuSet::MAX_CPU).then_some(first..=last)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

/// Returns the allowed cores by node, those of no node last.
fn by_node(allowed: &[usize], nodes: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> =
        nodes.iter().map(|node| node.iter().copied().filter(|core| allowed.contains(core)).collect()).collect();
    let of_no_node = |core: &usize| nodes.iter().all(|node| !node.contains(core));
    groups.push(allowed.iter().copied().filter(of_no_node).collect());
    groups.retain(|group| !group.is_empty());
    groups
}

/// Nodes beyond it are of no known machine.
const MOST_NODES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(per_task: usize, nodes: &[&[usize]]) -> Cores {
        Cores { per_task, nodes: nodes.iter().map(|node| node.to_vec()).collect() }
    }

    #[test]
    fn tasks_stay_within_a_node_where_possible() {
        let places = |cores: Cores, tasks| -> Vec<Vec<usize>> {
            cores.places(tasks).unwrap().into_iter().map(|place| place.cores).collect()
        };
        assert_eq!(places(cores(2, &[&[0, 1, 2], &[4, 5, 6]]), 3), [[0, 1], [4, 5], [2, 6]]);
        assert_eq!(places(cores(1, &[&[7, 9]]), 1), [[7]]);
        let error = cores(2, &[&[0, 1, 2]]).places(2).unwrap_err();
        assert!(matches!(error, Error::Cores { tasks: 2, per_task: 2, all: 3 }), "{error}");
    }

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(parse("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(parse(""), [0; 0]);
        assert_eq!(parse("x,1-9999999"), [0; 0]);
        assert_eq!(by_node(&[0, 2, 3, 9], &[vec![0, 1], vec![2, 3], vec![5]]), [vec![0], vec![2, 3], vec![9]]);
        assert_eq!(by_node(&[0, 1], &[]), [[0, 1]]);
    }

    #[test]
    fn a_pinned_thread_is_free_again_afterwards() {
        let before = sched_getaffinity(None).unwrap();
        let place = Cores::of_this_host(1).unwrap().places(1).unwrap().remove(0);
        let pinned = place.pin().unwrap();
        let now = sched_getaffinity(None).unwrap();
        assert_eq!((now.count(), now.is_set(place.cores[0])), (1, true));
        drop(pinned);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}

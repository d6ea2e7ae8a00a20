//! The tasks of a job, the hosts that they run on, and their environment.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::Error;

/// One task, displayed as `worker-0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) rank: usize,
    pub(crate) job: &'static str,
    pub(crate) index: usize,
    /// The host that it runs on, counted from 0.
    pub(crate) node: usize,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}-{}", self.job, self.index))
    }
}

/// The numbers of tasks of a job, by role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Roles {
    pub(crate) chief: u32,
    pub(crate) workers: u32,
    pub(crate) ps: u32,
    pub(crate) evaluator: u32,
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = [("chief", self.chief), ("worker", self.workers), ("ps", self.ps), (EVALUATOR, self.evaluator)];
        let several = named.iter().filter(|(_, count)| *count > 0).map(|(name, count)| format!("{count} {name}"));
        f.write_str(&several.collect::<Vec<_>>().join(" + "))
    }
}

impl Roles {
    /// Returns the tasks in the order of their ranks: the chief, the workers, the parameter servers, the evaluator.
    ///
    /// Workers and parameter servers are dealt to the hosts in blocks of equal size; the first hosts get one more where
    /// the number is not a multiple of theirs. The chief is on the first host, the evaluator on the last one.
    pub(crate) fn tasks(&self, nodes: usize) -> Vec<Task> {
        let of = |job, count: u32, node: fn(usize, usize, usize) -> usize| {
            (0..count as usize).map(move |index| (job, index, node(index, count as usize, nodes)))
        };
        let all = of("chief", self.chief, |_, _, _| 0)
            .chain(of("worker", self.workers, block))
            .chain(of("ps", self.ps, block))
            .chain(of(EVALUATOR, self.evaluator, |_, _, nodes| nodes - 1));
        all.enumerate().map(|(rank, (job, index, node))| Task { rank, job, index, node }).collect()
    }
}

/// Returns the block of the element `index` of `count`, dealt to `blocks` blocks.
fn block(index: usize, count: usize, blocks: usize) -> usize {
    let (each, more) = (count / blocks, count % blocks);
    let first = more * (each + 1);
    if index < first { index / (each + 1) } else { more + (index - first) / each.max(1) }
}

/// The job of the task that evaluates while the others train.
pub(crate) const EVALUATOR: &str = "evaluator";

/// Returns the rank of a task given as `worker-1`, `worker:1` or, for rank 0, `chief`.
pub(crate) fn find(tasks: &[Task], given: &str) -> Result<usize, Error> {
    let name = given.trim().to_ascii_lowercase().replace(':', "-");
    let found = tasks.iter().find(|task| task.to_string() == name).map(|task| task.rank);
    found.or((name == "chief").then_some(0)).ok_or_else(|| {
        let names: Vec<_> = match tasks {
            [first, .., last] if tasks.len() > 6 => vec![first.to_string(), "…".into(), last.to_string()],
            _ => tasks.iter().map(Task::to_string).collect(),
        };
        Error::Only { given: given.to_owned(), expected: format!("{}, or chief for rank 0", names.join(", ")) }
    })
}

/// Where the tasks of one host listen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ports {
    /// One port per task of the host, in the order of ranks.
    pub(crate) tasks: Vec<u16>,
    /// MASTER_PORT, if the task with rank 0 runs there. The next port is free too, since programs that use it derive
    /// theirs from it.
    pub(crate) master: u16,
}

/// Where the tasks of a job are reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addresses {
    /// The hosts, by their numbers.
    pub(crate) hosts: Vec<String>,
    /// The ports of each host's tasks.
    pub(crate) ports: Vec<Ports>,
}

impl Addresses {
    /// Returns the `host:port` of every task, in the order of ranks; `None` if the ports are not as many as the tasks.
    fn of_tasks(&self, tasks: &[Task]) -> Option<Vec<String>> {
        let mut ports: Vec<_> = self.ports.iter().map(|ports| ports.tasks.iter()).collect();
        let of = |task: &Task| {
            let host = self.hosts.get(task.node)?;
            let port = ports.get_mut(task.node)?.next()?;
            Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
        };
        tasks.iter().map(of).collect()
    }
}

/// Returns the variables that tell `task` its place; `None` stands for one that must not be set. The result is `None`
/// if the addresses are not those of the tasks.
pub(crate) fn environment(
    tasks: &[Task],
    task: &Task,
    addresses: &Addresses,
) -> Option<Vec<(&'static str, Option<String>)>> {
    let all = addresses.of_tasks(tasks)?;
    let mut cluster = serde_json::Map::new();
    for job in ["chief", "worker", "ps"] {
        let of_job = |(task, address): (&Task, &String)| (task.job == job).then(|| address.clone());
        let addresses: Vec<_> = tasks.iter().zip(&all).filter_map(of_job).collect();
        if !addresses.is_empty() {
            cluster.insert(job.into(), addresses.into());
        }
    }
    let config = json!({"cluster": cluster, "task": {"type": task.job, "index": task.index}});
    let master = addresses.ports.first()?.master;
    let size = tasks.iter().filter(|task| task.job != EVALUATOR).count();
    let on_host = |of: &Task| of.node == task.node && of.job != EVALUATOR;
    let local_rank = tasks.iter().filter(|of| on_host(of) && of.rank < task.rank).count();
    let local_size = tasks.iter().filter(|of| on_host(of)).count();
    let place = [
        ("RANK", task.rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", local_size.to_string()),
        ("GROUP_RANK", task.node.to_string()),
        ("MASTER_ADDR", addresses.hosts.first()?.clone()),
        ("MASTER_PORT", master.to_string()),
        ("DISTRIBUTE_PORT", master.checked_add(1)?.to_string()),
    ];
    // An evaluator has no rank in the training.
    let place = place.map(|(name, value)| (name, (task.job != EVALUATOR).then_some(value)));
    // It would let each of several tasks train by itself, and an evaluator train too.
    let alone = (size > 1 || task.job == EVALUATOR).then_some((ALONE, None));
    // Of an elastic job in one of whose tasks this launcher runs.
    let other = (TASK_RESTARTS, None);
    let config = ("TF_CONFIG", Some(config.to_string()));
    Some([config, other].into_iter().chain(place).chain(alone).collect())
}

/// The variable by which each of several processes trains by itself.
const ALONE: &str = "DISTRIBUTE_ALONE";

/// The variable with the number of earlier starts of the same task in an elastic job.
pub(crate) const TASK_RESTARTS: &str = "DISTRIBUTE_TASK_RESTARTS";

/// The host of a job of one machine.
pub(crate) const LOOPBACK: &str = "127.0.0.1";

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks(chief: u32, workers: u32, ps: u32) -> Vec<Task> {
        Roles { chief, workers, ps, evaluator: 0 }.tasks(1)
    }

    fn variable(tasks: &[Task], rank: usize, name: &str) -> String {
        let ports = Ports { tasks: vec![7001, 7002, 7003], master: 7100 };
        let addresses = Addresses { hosts: vec![LOOPBACK.to_owned()], ports: vec![ports] };
        let all = environment(tasks, &tasks[rank], &addresses).unwrap();
        all.into_iter().find(|(key, _)| *key == name).unwrap().1.unwrap()
    }

    #[test]
    fn tasks_are_dealt_to_hosts_in_blocks() {
        let nodes = |roles: Roles, nodes| roles.tasks(nodes).iter().map(|task| task.node).collect::<Vec<_>>();
        let workers = |workers| Roles { workers, ..Roles::default() };
        assert_eq!(nodes(workers(5), 2), [0, 0, 0, 1, 1]);
        assert_eq!(nodes(workers(4), 2), [0, 0, 1, 1]);
        assert_eq!(nodes(workers(2), 3), [0, 1]);
        assert_eq!(nodes(Roles { chief: 1, workers: 3, ps: 2, evaluator: 1 }, 3), [0, 0, 1, 2, 0, 1, 2]);
        for (count, blocks) in (0..20).flat_map(|count| (1..6).map(move |blocks| (count, blocks))) {
            let all: Vec<_> = (0..count).map(|index| block(index, count, blocks)).collect();
            let size = |at| all.iter().filter(|it| **it == at).count();
            assert!(all.is_sorted() && (1..blocks).all(|at| size(at) <= size(at - 1)), "{all:?}");
            assert!(blocks < 2 || size(0) - size(blocks - 1) <= 1, "{all:?}");
        }
    }

    #[test]
    fn tasks_of_several_hosts_learn_each_others_addresses() {
        let tasks = Roles { workers: 3, evaluator: 1, ..Roles::default() }.tasks(2);
        let ports = [vec![1, 2], vec![3, 4]].map(|tasks| Ports { tasks, master: 9 });
        let mut addresses = Addresses { hosts: vec!["a".into(), "fe80::1".into()], ports: ports.into() };
        let of = |rank: usize, addresses: &Addresses| environment(&tasks, &tasks[rank], addresses);
        let variables = of(2, &addresses).unwrap();
        let value = |name| variables.iter().find(|(key, _)| *key == name).unwrap().1.clone().unwrap();
        assert!(value("TF_CONFIG").contains(r#"{"worker":["a:1","a:2","[fe80::1]:3"]}"#), "{variables:?}");
        assert_eq!(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"].map(value), ["2", "3", "0", "1"]);
        assert_eq!(["GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTE_PORT"].map(value), ["1", "a", "9", "10"]);
        let evaluator = of(3, &addresses).unwrap();
        assert!(evaluator[0].1.as_ref().unwrap().contains(r#""type":"evaluator""#), "{evaluator:?}");
        assert!(evaluator[1..].iter().all(|(_, value)| value.is_none()), "{evaluator:?}");
        assert!(evaluator.contains(&("DISTRIBUTE_ALONE", None)), "{evaluator:?}");
        addresses.ports[1].tasks.clear();
        assert_eq!(of(0, &addresses), None);
    }

    #[test]
    fn the_chief_has_rank_0() {
        let names: Vec<_> = tasks(1, 2, 0).iter().map(|task| format!("{} {task}", task.rank)).collect();
        assert_eq!(names, ["0 chief-0", "1 worker-0", "2 worker-1"]);
        assert_eq!(format!("{:<10}|", tasks(0, 1, 0)[0]), "worker-0  |");
    }

    #[test]
    fn every_task_learns_its_place() {
        let tasks = tasks(1, 2, 0);
        let config: serde_json::Value = serde_json::from_str(&variable(&tasks, 2, "TF_CONFIG")).unwrap();
        let expected = json!({
            "cluster": {"chief": ["127.0.0.1:7001"], "worker": ["127.0.0.1:7002", "127.0.0.1:7003"]},
            "task": {"type": "worker", "index": 1},
        });
        assert_eq!(config, expected);
        for (name, value) in [
            ("RANK", "2"),
            ("WORLD_SIZE", "3"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "7100"),
            ("DISTRIBUTE_PORT", "7101"),
        ] {
            assert_eq!(variable(&tasks, 2, name), value, "{name}");
        }
    }

    #[test]
    fn a_task_of_several_does_not_train_alone() {
        let is_removed = |roles: Roles, rank: usize| {
            let tasks = roles.tasks(1);
            let ports = Ports { tasks: vec![1, 2, 3], master: 9 };
            let addresses = Addresses { hosts: vec![LOOPBACK.to_owned()], ports: vec![ports] };
            environment(&tasks, &tasks[rank], &addresses).unwrap().contains(&("DISTRIBUTE_ALONE", None))
        };
        let workers = |workers| Roles { workers, ..Roles::default() };
        assert!(is_removed(workers(2), 0) && is_removed(workers(2), 1));
        assert!(is_removed(Roles { chief: 1, ps: 1, ..workers(1) }, 2));
        // A single worker may be one of several that train alone; its evaluator is never one of them.
        let evaluated = Roles { evaluator: 1, ..workers(1) };
        assert!(!is_removed(workers(1), 0) && !is_removed(evaluated, 0) && is_removed(evaluated, 1));
    }

    #[test]
    fn parameter_servers_come_last() {
        let tasks = tasks(1, 1, 1);
        let config: serde_json::Value = serde_json::from_str(&variable(&tasks, 2, "TF_CONFIG")).unwrap();
        let expected = json!({
            "cluster": {"chief": ["127.0.0.1:7001"], "worker": ["127.0.0.1:7002"], "ps": ["127.0.0.1:7003"]},
            "task": {"type": "ps", "index": 0},
        });
        assert_eq!(config, expected);
    }

    #[test]
    fn a_job_without_a_chief_names_none() {
        let config = variable(&tasks(0, 2, 0), 0, "TF_CONFIG");
        assert!(!config.contains("chief"), "{config}");
    }

    #[test]
    fn tasks_are_found_by_either_spelling() {
        let with_chief = tasks(1, 2, 0);
        for (given, rank) in [("worker-1", 2), ("worker:0", 1), ("chief", 0), ("chief-0", 0), (" Worker-1 ", 2)] {
            assert_eq!(find(&with_chief, given).unwrap(), rank, "{given}");
        }
        assert_eq!(find(&tasks(0, 2, 0), "chief").unwrap(), 0);
        let error = find(&tasks(0, 2, 0), "worker-2").unwrap_err();
        assert_eq!(error.details()[1], ("expected", "worker-0, worker-1, or chief for rank 0".into()));
        let error = find(&tasks(0, 9, 0), "x").unwrap_err();
        assert_eq!(error.details()[1].1, "worker-0, …, worker-8, or chief for rank 0");
    }
}

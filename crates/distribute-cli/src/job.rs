//! The tasks of a job and their environment.

use std::fmt;

use serde_json::json;

use crate::error::Error;

/// One task, displayed as `worker-0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) rank: usize,
    pub(crate) job: &'static str,
    pub(crate) index: usize,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}-{}", self.job, self.index))
    }
}

/// Returns the tasks in the order of their ranks: the chief, the workers, the parameter servers.
pub(crate) fn tasks(chief: u32, workers: u32, ps: u32) -> Vec<Task> {
    let of = |job, count| (0..count as usize).map(move |index| (job, index));
    let all = of("chief", chief).chain(of("worker", workers)).chain(of("ps", ps)).enumerate();
    all.map(|(rank, (job, index))| Task { rank, job, index }).collect()
}

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

/// The ports on which the tasks of a job listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// One port per task, in the order of ranks.
    pub(crate) tasks: Vec<u16>,
    /// MASTER_PORT. The next port is free too, since programs that use it derive theirs from it.
    pub(crate) master: u16,
}

/// Returns the variables that tell `task` its place.
pub(crate) fn environment(tasks: &[Task], task: &Task, addresses: &Addresses) -> Vec<(&'static str, String)> {
    let of = |job: &str| -> Vec<_> {
        let pairs = tasks.iter().zip(&addresses.tasks).filter(|(task, _)| task.job == job);
        pairs.map(|(_, port)| format!("{HOST}:{port}")).collect()
    };
    let mut cluster = serde_json::Map::new();
    for job in ["chief", "worker", "ps"] {
        let addresses = of(job);
        if !addresses.is_empty() {
            cluster.insert(job.into(), addresses.into());
        }
    }
    let config = json!({"cluster": cluster, "task": {"type": task.job, "index": task.index}});
    let (rank, size) = (task.rank.to_string(), tasks.len().to_string());
    vec![
        ("TF_CONFIG", config.to_string()),
        ("RANK", rank.clone()),
        ("WORLD_SIZE", size.clone()),
        ("LOCAL_RANK", rank),
        ("LOCAL_WORLD_SIZE", size),
        ("MASTER_ADDR", HOST.into()),
        ("MASTER_PORT", addresses.master.to_string()),
        ("DISTRIBUTE_PORT", (addresses.master + 1).to_string()),
    ]
}

const HOST: &str = "127.0.0.1";

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(tasks: &[Task], rank: usize, name: &str) -> String {
        let addresses = Addresses { tasks: vec![7001, 7002, 7003], master: 7100 };
        let all = environment(tasks, &tasks[rank], &addresses);
        all.into_iter().find(|(key, _)| *key == name).unwrap().1
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

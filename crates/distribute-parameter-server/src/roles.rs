//! The tasks of a cluster with parameter servers.

use distribute_cluster::{ClusterSpec, Error as ClusterError, Task, TaskType};

use crate::Result;

/// The addresses of the servers and workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Roles {
    pub(crate) servers: Vec<String>,
    pub(crate) workers: Vec<String>,
}

impl Roles {
    /// Reads a cluster.
    ///
    /// # Errors
    /// [`distribute_cluster::Error::Config`] if there is no worker or no parameter server, the evaluator is part of the
    /// cluster, or indices are missing.
    pub(crate) fn of(spec: &ClusterSpec) -> Result<Roles> {
        if spec.is_empty() {
            return Err(wrong(
                spec,
                "no cluster is described".to_owned(),
                "workers and parameter servers",
                "Set TF_CONFIG on every task; on one machine: distribute run --ps 2 --workers 3 -- PROGRAM.",
            ));
        }
        if spec.num_tasks(TaskType::Evaluator) > 0 {
            return Err(wrong(
                spec,
                "the evaluator is one of the cluster's tasks".to_owned(),
                "chief, worker and ps",
                "Take \"evaluator\" out of the cluster of every task: it reads checkpoints and does not communicate, \
                 and those who meet would wait for it.",
            ));
        }
        Ok(Roles { servers: job(spec, TaskType::Ps)?, workers: job(spec, TaskType::Worker)? })
    }
}

fn job(spec: &ClusterSpec, kind: TaskType) -> Result<Vec<String>> {
    let indices = spec.task_indices(kind);
    if indices.is_empty() {
        let problem = format!("training with parameter servers needs at least one {kind}, and the cluster has none");
        return Err(wrong(spec, problem, "at least one worker and one ps", "Add its address to the cluster."));
    }
    if let Some(hole) = (0..).zip(&indices).find(|(place, index)| place != *index) {
        let problem = format!("{kind}:{} is missing", hole.0);
        return Err(wrong(spec, problem, "indices 0, 1, 2, … without holes", "Give every task of a job."));
    }
    let address = |index: &u32| Ok(spec.task_address(Task::new(kind, *index))?.to_owned());
    indices.iter().map(address).collect()
}

fn wrong(spec: &ClusterSpec, problem: String, expected: &str, remedy: &str) -> crate::Error {
    let (given, expected) = (spec.to_json().to_string(), expected.to_owned());
    ClusterError::Config { subject: "cluster", problem, given, expected, remedy: remedy.to_owned() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> Result<Roles> {
        Roles::of(&ClusterSpec::from_json(&serde_json::from_str(json).unwrap())?)
    }

    #[test]
    fn servers_and_workers_by_index() {
        let roles = spec(r#"{"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": {"0": "d:1"}}"#).unwrap();
        assert_eq!((roles.servers, roles.workers), (vec!["b:1".to_owned(), "c:1".to_owned()], vec!["d:1".to_owned()]));
    }

    #[test]
    fn clusters_that_cannot_be_are_refused_in_words() {
        for (json, words) in [
            (r#"{"chief": ["a:1"], "worker": ["d:1"]}"#, "at least one ps"),
            (r#"{"chief": ["a:1"], "ps": ["d:1"]}"#, "at least one worker"),
            (r#"{"chief": ["a:1", "b:1"], "ps": ["d:1"], "worker": ["e:1"]}"#, "2 tasks of type chief"),
            (r#"{"ps": ["d:1"], "worker": ["e:1"], "evaluator": ["f:1"]}"#, "evaluator"),
            (r#"{"ps": ["d:1"], "worker": ["e:1"], "chef": ["f:1"]}"#, "chief"),
            (r#"{"ps": ["d:1"], "worker": {"1": "e:1"}}"#, "worker:0 is missing"),
            (r#"{"ps": [], "worker": ["e:1"]}"#, "at least one ps"),
            ("{}", "distribute run --ps 2"),
        ] {
            let error = spec(json).unwrap_err().to_string();
            assert!(error.contains(words), "{json}: {error}");
        }
    }
}

//! The jobs of a cluster and the addresses of their tasks.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::text::clean;
use crate::{Error, Result, Task, TaskType};

mod address;

pub(crate) use address::host_problem;

/// The jobs of a cluster, and the addresses of their tasks.
///
/// A job is a list of addresses, or a sparse map from index to address in which some indices are missing.
///
/// # Examples
/// ```
/// use distribute_cluster::{ClusterSpec, Task, TaskType};
/// let spec = ClusterSpec::new().with_job(TaskType::Worker, ["a:2222", "b:2222"])?;
/// assert_eq!(spec.task_address(Task::new(TaskType::Worker, 1))?, "b:2222");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.train.ClusterSpec`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSpec {
    jobs: BTreeMap<TaskType, BTreeMap<u32, String>>,
    /// The task that owns each address, in lower case.
    owners: BTreeMap<String, Task>,
}

impl ClusterSpec {
    /// The largest number of tasks.
    pub const MAX_TASKS: usize = 100_000;

    /// Creates a cluster without tasks.
    pub fn new() -> ClusterSpec {
        ClusterSpec::default()
    }

    /// Adds a job whose tasks are numbered from 0.
    ///
    /// # Errors
    /// [`Error::Config`] if an address is malformed or used twice, a task is given twice, there are several chiefs or
    /// evaluators, or the cluster has more than [`MAX_TASKS`](ClusterSpec::MAX_TASKS) tasks.
    pub fn with_job<A: Into<String>>(
        self,
        kind: TaskType,
        addresses: impl IntoIterator<Item = A>,
    ) -> Result<ClusterSpec> {
        self.with_sparse_job(kind, (0u32..).zip(addresses))
    }

    /// Adds a job whose tasks are known only in part.
    ///
    /// # Errors
    /// [`Error::Config`] as for [`with_job`](ClusterSpec::with_job), or if an index is above 999,999.
    pub fn with_sparse_job<A: Into<String>>(
        mut self,
        kind: TaskType,
        addresses: impl IntoIterator<Item = (u32, A)>,
    ) -> Result<ClusterSpec> {
        for (index, address) in addresses {
            self.insert(Task::new(kind, index), address.into())?;
        }
        Ok(self)
    }

    /// Reads the `cluster` object of TF_CONFIG, which maps job names to lists of addresses or to maps from index to
    /// address.
    ///
    /// # Errors
    /// [`Error::Config`] if the value has another form, or if a job violates a rule of
    /// [`with_job`](ClusterSpec::with_job).
    pub fn from_json(cluster: &Value) -> Result<ClusterSpec> {
        let expected = "an object such as {\"worker\": [\"host:2222\"]}";
        let Value::Object(jobs) = cluster else {
            return Err(wrong("cluster", "it is not an object", cluster, expected));
        };
        let mut spec = ClusterSpec::new();
        for (name, tasks) in jobs {
            let kind: TaskType = name.parse().map_err(|error: Error| error.about("cluster"))?;
            spec = match tasks {
                Value::Array(list) => {
                    spec.with_job(kind, list.iter().map(|address| text(name, address)).collect::<Result<Vec<_>>>()?)?
                }
                Value::Object(map) => {
                    let sparse = map.iter().map(|(key, address)| Ok((index(name, key)?, text(name, address)?)));
                    spec.with_sparse_job(kind, sparse.collect::<Result<Vec<_>>>()?)?
                }
                other => {
                    let problem = format!("job {name:?} is not a list of addresses");
                    return Err(wrong("cluster", &problem, other, "[\"host:port\", …] or {\"0\": \"host:port\", …}"));
                }
            };
        }
        Ok(spec)
    }

    /// Returns the `cluster` object of TF_CONFIG; jobs with missing indices become maps.
    pub fn to_json(&self) -> Value {
        let jobs = self.jobs.iter().map(|(kind, tasks)| {
            let dense = (0u32..).zip(tasks.keys()).all(|(place, index)| place == *index);
            let value = if dense {
                Value::from(tasks.values().cloned().collect::<Vec<_>>())
            } else {
                Value::from(
                    tasks.iter().map(|(index, address)| (index.to_string(), json!(address))).collect::<Map<_, _>>(),
                )
            };
            (kind.name().to_owned(), value)
        });
        Value::Object(jobs.collect())
    }

    /// Returns the jobs that have tasks.
    pub fn jobs(&self) -> impl Iterator<Item = TaskType> + '_ {
        self.jobs.keys().copied()
    }

    /// Returns all tasks, chief first.
    pub fn tasks(&self) -> impl Iterator<Item = Task> + '_ {
        self.jobs.iter().flat_map(|(kind, tasks)| tasks.keys().map(|index| Task::new(*kind, *index)))
    }

    /// Returns the number of tasks of a job.
    pub fn num_tasks(&self, kind: TaskType) -> usize {
        self.jobs.get(&kind).map_or(0, BTreeMap::len)
    }

    /// Returns the indices of a job's tasks in ascending order.
    pub fn task_indices(&self, kind: TaskType) -> Vec<u32> {
        self.jobs.get(&kind).map(|tasks| tasks.keys().copied().collect()).unwrap_or_default()
    }

    /// Returns the addresses of a job's tasks by index, with `None` for missing indices.
    pub fn job_tasks(&self, kind: TaskType) -> Vec<Option<&str>> {
        let Some(tasks) = self.jobs.get(&kind) else { return Vec::new() };
        let last = tasks.keys().next_back().copied().unwrap_or(0);
        (0..=last).map(|index| tasks.get(&index).map(String::as_str)).collect()
    }

    /// Returns the address of a task.
    ///
    /// # Errors
    /// [`Error::Config`] if the cluster has no such task.
    pub fn task_address(&self, task: Task) -> Result<&str> {
        if let Some(address) = self.jobs.get(&task.kind).and_then(|tasks| tasks.get(&task.index)) {
            return Ok(address);
        }
        let job = task.kind.name();
        Err(match self.task_indices(task.kind).as_slice() {
            [] => Error::config(
                "cluster",
                format!("task {task} is not there, because job {job:?} has no tasks"),
                format!("jobs {}", shown(&self.to_json())),
                format!("a job {job:?}"),
                format!("Add job {job:?} to cluster, or correct the task's type."),
            ),
            indices => Error::config(
                "cluster",
                format!("task index {} is outside job {job:?}, which has {} addresses", task.index, indices.len()),
                format!("index {}", task.index),
                format!("one of {}", listed(indices)),
                format!("Correct the task's index, or add its address to job {job:?}."),
            ),
        })
    }

    /// Returns whether the cluster has no tasks.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    fn insert(&mut self, task: Task, address: String) -> Result<()> {
        address::check(task, &address)?;
        if task.index > MAX_INDEX {
            let problem = format!("the index of {task} is too large");
            return Err(Error::config(
                "cluster",
                problem,
                task.index.to_string(),
                format!("0 to {MAX_INDEX}"),
                "Lower it.",
            ));
        }
        if let Some(earlier) = self.jobs.get(&task.kind).and_then(|tasks| tasks.get(&task.index)) {
            let given = format!("{earlier} and {address}");
            let remedy = "Keep one of the addresses; `master` is another word for `chief`.";
            return Err(Error::config(
                "cluster",
                format!("{task} is given twice"),
                given,
                "one address for each task",
                remedy,
            ));
        }
        let owner = address.to_ascii_lowercase();
        if let Some(other) = self.owners.get(&owner) {
            let problem = format!("{other} and {task} have the same address");
            let expected = "an address of its own for every task";
            return Err(Error::config("cluster", problem, address, expected, "Correct the address of one of them."));
        }
        if self.owners.len() == ClusterSpec::MAX_TASKS {
            let problem = format!("it has more than {} tasks", ClusterSpec::MAX_TASKS);
            let given = format!("{task} at {address}, and as many before it");
            let remedy = "Describe fewer tasks; several devices can belong to one.";
            return Err(Error::config(
                "cluster",
                problem,
                given,
                format!("at most {}", ClusterSpec::MAX_TASKS),
                remedy,
            ));
        }
        self.owners.insert(owner, task);
        let alone = matches!(task.kind, TaskType::Chief | TaskType::Evaluator);
        let job = self.jobs.entry(task.kind).or_default();
        job.insert(task.index, address);
        if alone && job.len() > 1 {
            let given = job.values().cloned().collect::<Vec<_>>().join(", ");
            let remedy = match task.kind {
                TaskType::Chief => "Keep one chief; further tasks are workers.",
                _ => "Keep one evaluator; start further ones as programs of their own.",
            };
            let problem = format!("there are {} tasks of type {}", job.len(), task.kind);
            return Err(Error::config("cluster", problem, given, format!("at most one {}", task.kind), remedy));
        }
        Ok(())
    }
}

/// Bounds the memory that [`job_tasks`](ClusterSpec::job_tasks) allocates for a sparse job.
const MAX_INDEX: u32 = 999_999;

/// Returns the error of a JSON value of the wrong form.
pub(crate) fn wrong(subject: &'static str, problem: &str, given: &Value, expected: &str) -> Error {
    Error::config(subject, problem, shown(given), expected, "Correct that part.")
}

/// Formats a JSON value for a message.
pub(crate) fn shown(value: &Value) -> String {
    clean(&value.to_string(), 200)
}

/// Formats ascending indices: `0, 1, 2`, or `0 to 99` for a long range without gaps.
fn listed(indices: &[u32]) -> String {
    match indices {
        [first, .., last] if indices.len() > 8 && (last - first) as usize == indices.len() - 1 => {
            format!("{first} to {last}")
        }
        _ if indices.len() > MAX_LISTED => {
            let first: Vec<String> = indices.iter().take(MAX_LISTED).map(u32::to_string).collect();
            format!("{} and {} more", first.join(", "), indices.len() - MAX_LISTED)
        }
        _ => indices.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// The number of indices that a message lists.
const MAX_LISTED: usize = 32;

fn index(job: &str, key: &str) -> Result<u32> {
    let problem = || format!("an index of job {job:?} is not a whole number");
    let wrong = |_| wrong("cluster", &problem(), &json!(key), "0, 1, 2, …");
    key.parse().map_err(wrong)
}

fn text(job: &str, address: &Value) -> Result<String> {
    let wrong = || wrong("cluster", &format!("an address of job {job:?} is not a string"), address, "\"host:port\"");
    address.as_str().map(str::to_owned).ok_or_else(wrong)
}

#[cfg(test)]
mod tests;

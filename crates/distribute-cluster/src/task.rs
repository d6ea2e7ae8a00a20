//! Tasks and task types.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// The function of a task in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TaskType {
    /// The worker that also saves; in a parameter-server cluster, the coordinator.
    Chief,
    /// Computes.
    Worker,
    /// Parameter server: holds variables.
    Ps,
    /// Evaluates checkpoints, independently of the other tasks.
    Evaluator,
}

impl TaskType {
    /// All types, chief first.
    pub const ALL: [TaskType; 4] = [TaskType::Chief, TaskType::Worker, TaskType::Ps, TaskType::Evaluator];

    /// Returns the job's name as TF_CONFIG spells it.
    pub const fn name(self) -> &'static str {
        match self {
            TaskType::Chief => "chief",
            TaskType::Worker => "worker",
            TaskType::Ps => "ps",
            TaskType::Evaluator => "evaluator",
        }
    }

    /// Returns whether tasks of this type belong to the training group: chief and workers.
    pub const fn trains(self) -> bool {
        matches!(self, TaskType::Chief | TaskType::Worker)
    }
}

impl fmt::Display for TaskType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TaskType {
    type Err = Error;

    /// Parses a job's name; `master` is TensorFlow's former name for `chief`.
    ///
    /// # Errors
    /// [`Error::Config`] if the name is unknown; the message suggests the nearest name, if one is similar.
    fn from_str(given: &str) -> Result<Self, Error> {
        if given == "master" {
            return Ok(TaskType::Chief);
        }
        TaskType::ALL.into_iter().find(|kind| kind.name() == given).ok_or_else(|| {
            let remedy = match nearest(given) {
                Some(near) => format!("Did you mean {near}?"),
                None => "Use one of these names.".to_owned(),
            };
            let problem = format!("{given:?} is not a type of task");
            Error::config("task type", problem, given, "chief, worker, ps or evaluator", remedy)
        })
    }
}

/// A task of a cluster; printed `worker:3`.
///
/// # Examples
/// ```
/// use distribute_cluster::{Task, TaskType};
/// let task: Task = "worker:3".parse()?;
/// assert_eq!(task, Task::new(TaskType::Worker, 3));
/// assert_eq!(task.to_string(), "worker:3");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// The type of the task.
    pub kind: TaskType,
    /// The index of the task within its job.
    pub index: u32,
}

impl Task {
    /// Creates a task.
    pub const fn new(kind: TaskType, index: u32) -> Task {
        Task { kind, index }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Padded as a whole so that tables align.
        f.pad(&format!("{}:{}", self.kind.name(), self.index))
    }
}

impl FromStr for Task {
    type Err = Error;

    /// Parses the form `worker:3`.
    ///
    /// # Errors
    /// [`Error::Config`] if the type is unknown or the index is not a whole number.
    fn from_str(given: &str) -> Result<Self, Error> {
        let wrong = |problem: &str| {
            Error::config(
                "task",
                problem,
                format!("{given:?}"),
                "type:index, such as worker:3",
                "Write it in that form.",
            )
        };
        let (kind, index) = given.split_once(':').ok_or_else(|| wrong("it has no index"))?;
        let kind = kind.parse()?;
        let index = index.parse().map_err(|_| wrong("its index is not a whole number from 0"))?;
        Ok(Task { kind, index })
    }
}

/// Returns the type whose name is most similar to a misspelt one, if any is similar enough.
fn nearest(given: &str) -> Option<TaskType> {
    let given = given.to_lowercase();
    let distance = |kind: &TaskType| strsim::osa_distance(kind.name(), &given);
    TaskType::ALL.into_iter().min_by_key(distance).filter(|kind| distance(kind) <= given.len().div_ceil(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_misses_are_guessed() {
        for (given, near) in [
            ("wroker", "worker"),
            ("workers", "worker"),
            ("Worker", "worker"),
            ("cheif", "chief"),
            ("evalutor", "evaluator"),
            ("pss", "ps"),
        ] {
            let error = given.parse::<TaskType>().unwrap_err().to_string();
            assert!(error.contains(&format!("Did you mean {near}?")), "{error}");
        }
        for far in ["driver", "node", "tf", "", "launcher"] {
            let error = far.parse::<TaskType>().unwrap_err().to_string();
            assert!(!error.contains("Did you mean") && error.contains("chief, worker, ps or evaluator"), "{error}");
        }
        assert_eq!("master".parse::<TaskType>().unwrap(), TaskType::Chief);
    }

    #[test]
    fn tasks_are_printed_and_read() {
        for kind in TaskType::ALL {
            let task = Task::new(kind, 12);
            assert_eq!(task.to_string().parse::<Task>().unwrap(), task);
        }
        assert_eq!(format!("{:>10}|", Task::new(TaskType::Ps, 1)), "      ps:1|");
        for (given, words) in
            [("worker", "no index"), ("worker:x", "whole number"), ("worker:-1", "whole number"), ("x:1", "not a type")]
        {
            let error = given.parse::<Task>().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}

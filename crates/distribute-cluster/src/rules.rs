//! Leadership and task ids, derived from a cluster's description.

use crate::{ClusterSpec, Error, Result, Task, TaskType};

/// Returns whether a task acts as chief: the chief itself, worker 0 if there is no chief, and evaluator 0, which is
/// alone.
///
/// # Errors
/// [`Error::Config`] if the cluster has no such task.
///
/// # Source
/// `tensorflow.python.distribute.multi_worker_util.is_chief`.
pub fn is_chief(spec: &ClusterSpec, task: Task) -> Result<bool> {
    if task.kind == TaskType::Evaluator {
        return Ok(task.index == 0);
    }
    spec.task_address(task)?;
    Ok(match task.kind {
        TaskType::Chief => true,
        TaskType::Worker => task.index == 0 && spec.num_tasks(TaskType::Chief) == 0,
        _ => false,
    })
}

/// Returns a task's id among the tasks that train together: 0 for the chief, then the workers in order; 0 for an
/// evaluator.
///
/// If some worker indices are missing, the ids have no gaps.
///
/// # Errors
/// [`Error::Config`] if the task is a parameter server, which has no id, or if the cluster has no such task.
///
/// # Source
/// `tensorflow.python.distribute.multi_worker_util.id_in_cluster`.
pub fn id_in_cluster(spec: &ClusterSpec, task: Task) -> Result<u32> {
    match task.kind {
        TaskType::Chief => spec.task_address(task).map(|_| 0),
        TaskType::Evaluator => Ok(0),
        TaskType::Worker => {
            spec.task_address(task)?;
            let place = spec.task_indices(TaskType::Worker).iter().position(|index| *index == task.index).unwrap_or(0);
            Ok((place + spec.num_tasks(TaskType::Chief)) as u32)
        }
        TaskType::Ps => Err(parameter_server(&task.to_string())),
    }
}

/// Returns the number of tasks that train together with a task of this type; 1 for an evaluator.
///
/// # Errors
/// [`Error::Config`] if `kind` is [`TaskType::Ps`]: parameter servers are not members of a training group.
///
/// # Source
/// `tensorflow.python.distribute.multi_worker_util.worker_count`.
pub fn worker_count(spec: &ClusterSpec, kind: TaskType) -> Result<usize> {
    match kind {
        TaskType::Evaluator => Ok(1),
        TaskType::Ps => Err(parameter_server(TaskType::Ps.name())),
        _ => Ok(spec.num_tasks(TaskType::Chief) + spec.num_tasks(TaskType::Worker)),
    }
}

/// Returns the task that leads collectives: the chief, else worker 0; `None` for an evaluator, which has no group.
///
/// # Source
/// `tensorflow.python.distribute.multi_worker_util.collective_leader`.
pub fn collective_leader(spec: &ClusterSpec, task: Task) -> Option<Task> {
    let first = |kind| spec.task_indices(kind).first().map(|index| Task::new(kind, *index));
    match task.kind {
        TaskType::Evaluator => None,
        _ => first(TaskType::Chief).or_else(|| first(TaskType::Worker)),
    }
}

/// Returns the task that runs the coordination service of a whole cluster: ps 0, else the chief, else worker 0.
///
/// Training groups, which have no parameter servers, meet at their [`collective_leader`] instead.
///
/// # Source
/// `tensorflow.python.distribute.multi_worker_util.coordination_leader`.
pub fn coordination_leader(spec: &ClusterSpec) -> Option<Task> {
    [TaskType::Ps, TaskType::Chief, TaskType::Worker]
        .into_iter()
        .find_map(|kind| spec.task_indices(kind).first().map(|index| Task::new(kind, *index)))
}

fn parameter_server(task: &str) -> Error {
    Error::config(
        "cluster",
        format!("{task} is a parameter server, which is not a member of the group that trains"),
        format!("task {task}"),
        "a chief or worker",
        "Use a parameter-server strategy in this cluster, or correct task.type.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(jobs: &[(TaskType, usize)]) -> ClusterSpec {
        jobs.iter().fold(ClusterSpec::new(), |spec, (kind, count)| {
            spec.with_job(*kind, (0..*count).map(|index| format!("{kind}{index}:1"))).unwrap()
        })
    }

    const WITH_CHIEF: &[(TaskType, usize)] = &[(TaskType::Chief, 1), (TaskType::Worker, 2), (TaskType::Ps, 1)];
    const WITHOUT: &[(TaskType, usize)] = &[(TaskType::Worker, 3)];

    #[test]
    fn the_chief_is_optional() {
        let task = Task::new;
        assert!(is_chief(&spec(WITH_CHIEF), task(TaskType::Chief, 0)).unwrap());
        assert!(!is_chief(&spec(WITH_CHIEF), task(TaskType::Worker, 0)).unwrap());
        assert!(is_chief(&spec(WITHOUT), task(TaskType::Worker, 0)).unwrap());
        assert!(!is_chief(&spec(WITHOUT), task(TaskType::Worker, 1)).unwrap());
        assert!(is_chief(&spec(WITHOUT), task(TaskType::Evaluator, 0)).unwrap());
        assert!(is_chief(&spec(WITHOUT), task(TaskType::Worker, 3)).is_err());
    }

    #[test]
    fn ids_count_the_chief_first() {
        let ids = |jobs| {
            let spec = spec(jobs);
            spec.tasks().filter_map(|task| id_in_cluster(&spec, task).ok()).collect::<Vec<_>>()
        };
        assert_eq!(ids(WITH_CHIEF), [0, 1, 2]);
        assert_eq!(ids(WITHOUT), [0, 1, 2]);
        assert!(id_in_cluster(&spec(WITH_CHIEF), Task::new(TaskType::Ps, 0)).is_err());
        assert!(id_in_cluster(&spec(WITHOUT), Task::new(TaskType::Worker, 3)).is_err());
        assert!(id_in_cluster(&spec(WITHOUT), Task::new(TaskType::Chief, 0)).is_err());
        assert_eq!(id_in_cluster(&spec(WITHOUT), Task::new(TaskType::Evaluator, 0)).unwrap(), 0);
        let holes = ClusterSpec::new().with_sparse_job(TaskType::Worker, [(1, "b:1"), (4, "e:1")]).unwrap();
        assert_eq!(id_in_cluster(&holes, Task::new(TaskType::Worker, 4)).unwrap(), 1);
    }

    #[test]
    fn counts() {
        assert_eq!(worker_count(&spec(WITH_CHIEF), TaskType::Worker).unwrap(), 3);
        assert_eq!(worker_count(&spec(WITH_CHIEF), TaskType::Chief).unwrap(), 3);
        assert_eq!(worker_count(&spec(WITHOUT), TaskType::Worker).unwrap(), 3);
        assert_eq!(worker_count(&spec(WITH_CHIEF), TaskType::Evaluator).unwrap(), 1);
        let text = worker_count(&spec(WITH_CHIEF), TaskType::Ps).unwrap_err().to_string();
        assert!(text.contains("parameter server"), "{text}");
    }

    #[test]
    fn leaders() {
        let worker = Task::new(TaskType::Worker, 1);
        assert_eq!(collective_leader(&spec(WITH_CHIEF), worker).unwrap().to_string(), "chief:0");
        assert_eq!(collective_leader(&spec(WITHOUT), worker).unwrap().to_string(), "worker:0");
        assert_eq!(collective_leader(&spec(WITHOUT), Task::new(TaskType::Evaluator, 0)), None);
        assert_eq!(coordination_leader(&spec(WITH_CHIEF)).unwrap().to_string(), "ps:0");
        assert_eq!(coordination_leader(&spec(WITHOUT)).unwrap().to_string(), "worker:0");
        assert_eq!(coordination_leader(&spec(&WITH_CHIEF[..2])).unwrap().to_string(), "chief:0");
        assert_eq!(coordination_leader(&ClusterSpec::new()), None);
    }
}

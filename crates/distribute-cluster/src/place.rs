//! This process's task in a cluster that a cloud lists.

use std::sync::{Mutex, PoisonError};

use crate::resolver::with_layer;
use crate::{ClusterSpec, Error, JobId, Result, Task, TaskType, host};

/// How a process knows the index of its task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OwnTask {
    /// It is given.
    Index(u32),
    /// By this machine's internal address, which the metadata server gives, among those of the cluster's tasks.
    ByAddress,
}

/// This process's task, and the last description of its cluster.
#[derive(Debug)]
pub(crate) struct Place {
    /// The name of the resolver, for messages.
    subject: &'static str,
    /// The job of the cluster in which it is searched for.
    job: TaskType,
    task: Task,
    /// This machine's address, if the index is that of the address.
    own: Option<String>,
    /// DISTRIBUTE_JOB_ID.
    id: Option<JobId>,
    last: Mutex<Option<ClusterSpec>>,
}

impl Place {
    pub(crate) fn new(subject: &'static str, job: TaskType, task: Task, id: Option<JobId>) -> Place {
        Place { subject, job, task, own: None, id, last: Mutex::new(None) }
    }

    /// Returns the same place with the index that this machine's address has in a cluster.
    ///
    /// # Errors
    /// [`Error::Config`] if none or several of the addresses are this machine's.
    pub(crate) fn by_address(mut self, own: String, spec: ClusterSpec) -> Result<Place> {
        self.task.index = self.index_of(&own, &spec)?;
        self.own = Some(own);
        self.last = Mutex::new(Some(spec));
        Ok(self)
    }

    pub(crate) fn task(&self) -> Task {
        self.task
    }

    /// Returns DISTRIBUTE_JOB_ID.
    #[cfg(feature = "tpu")]
    pub(crate) fn given_id(&self) -> Option<JobId> {
        self.id.clone()
    }

    /// Records a description of the cluster.
    ///
    /// # Errors
    /// [`Error::Config`] if this machine has another index there than before.
    pub(crate) fn seen(&self, spec: ClusterSpec) -> Result<ClusterSpec> {
        if let Some(own) = &self.own {
            let (now, before) = (self.index_of(own, &spec)?, self.task.index);
            if now != before {
                let problem = format!("the members have changed: this machine, {own}, had index {before}");
                let expected = format!("index {before}");
                let remedy = "Start the program again on all members.";
                return Err(Error::config(self.subject, problem, format!("index {now}"), expected, remedy));
            }
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(spec.clone());
        Ok(spec)
    }

    /// Returns the identity of the job, derived from the last description if no identity is given.
    pub(crate) fn job_id(&self, describe: impl FnOnce() -> Result<ClusterSpec>) -> Result<JobId> {
        if let Some(id) = &self.id {
            return Ok(id.clone());
        }
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(JobId::of_cluster(&last.map_or_else(describe, Ok)?))
    }

    /// Returns the address of a task, which is this process's unless the arguments name another.
    pub(crate) fn address(
        &self,
        spec: &ClusterSpec,
        task_type: Option<TaskType>,
        task_id: Option<u32>,
        layer: Option<&str>,
    ) -> Result<String> {
        let task = Task::new(task_type.unwrap_or(self.task.kind), task_id.unwrap_or(self.task.index));
        Ok(with_layer(spec.task_address(task)?, layer))
    }

    fn index_of(&self, own: &str, spec: &ClusterSpec) -> Result<u32> {
        let addresses = spec.job_tasks(self.job);
        let is_own = |address: &&str| host::split(address).is_ok_and(|(host, _)| host.trim_matches(['[', ']']) == own);
        let places: Vec<u32> = (0u32..)
            .zip(&addresses)
            .filter(|(_, address)| address.as_ref().is_some_and(is_own))
            .map(|(index, _)| index)
            .collect();
        match places[..] {
            [index] => Ok(index),
            _ => {
                let problem = format!("{} of the addresses are this machine's, {own}", places.len());
                let given = addresses.iter().flatten().copied().collect::<Vec<_>>().join(", ");
                let remedy = "Start the program on the machines of the cluster alone, or give the index of its task.";
                Err(Error::config(self.subject, problem, given, "its address, once", remedy))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(addresses: &[&str]) -> ClusterSpec {
        ClusterSpec::new().with_job(TaskType::Worker, addresses.iter().copied()).unwrap()
    }

    fn place() -> Place {
        Place::new("a cloud", TaskType::Worker, Task::new(TaskType::Worker, 0), None)
    }

    #[test]
    fn an_address_is_found_once() {
        let spec = spec(&["10.0.0.1:1", "10.0.0.2:1", "[fd00::1]:1", "10.0.0.1:2"]);
        let found = |own: &str| place().by_address(own.to_owned(), spec.clone()).map(|place| place.task().index);
        assert_eq!((found("10.0.0.2").unwrap(), found("fd00::1").unwrap()), (1, 2));
        for (own, words) in [("10.0.0.1", "2 of the addresses are this"), ("10.0.0.9", "0 of the addresses are this")] {
            let text = found(own).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn a_change_of_the_members_is_noticed() {
        let place = place().by_address("b".to_owned(), spec(&["a:1", "b:1"])).unwrap();
        assert!(place.seen(spec(&["x:1", "b:1"])).is_ok());
        let text = place.seen(spec(&["b:1"])).unwrap_err().to_string();
        assert!(text.contains("this machine, b, had index 1. Given: index 0."), "{text}");
    }

    #[test]
    fn the_job_is_that_of_the_last_description() {
        let fresh = || Ok(spec(&["z:1"]));
        let place = place();
        assert_eq!(place.job_id(fresh).unwrap(), JobId::of_cluster(&spec(&["z:1"])));
        place.seen(spec(&["a:1"])).unwrap();
        assert_eq!(place.job_id(fresh).unwrap(), JobId::of_cluster(&spec(&["a:1"])));
    }
}

//! The union of several cluster descriptions.

use std::collections::BTreeMap;

use crate::resolver::with_layer;
use crate::{ClusterResolver, ClusterSpec, Error, JobId, Result, Task, TaskType};

/// The union of several cluster descriptions; the first determines this process's task.
///
/// If every resolver describes a job by a complete list, the lists are concatenated. If a job has missing indices in
/// any of them, it is merged by index, and two addresses for one index are an error.
///
/// The job's identity is that of the first if it was given one, else it is derived from the union.
///
/// # Source
/// `tf.distribute.cluster_resolver.UnionResolver`.
pub struct UnionResolver {
    first: Box<dyn ClusterResolver>,
    others: Vec<Box<dyn ClusterResolver>>,
}

impl UnionResolver {
    /// Creates the union of several resolvers.
    ///
    /// # Errors
    /// [`Error::Config`] if the list is empty.
    pub fn new(resolvers: Vec<Box<dyn ClusterResolver>>) -> Result<UnionResolver> {
        let mut others = resolvers;
        if others.is_empty() {
            let problem = "no resolver was given";
            return Err(Error::config(SUBJECT, problem, "an empty list", "at least one resolver", "Pass one."));
        }
        let first = others.remove(0);
        Ok(UnionResolver { first, others })
    }
}

impl ClusterResolver for UnionResolver {
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        let all = std::iter::once(&self.first).chain(&self.others);
        let specs: Vec<ClusterSpec> = all.map(|resolver| resolver.cluster_spec()).collect::<Result<_>>()?;
        let mut union = ClusterSpec::new();
        for kind in TaskType::ALL {
            union = union.with_sparse_job(kind, merge(kind, &specs)?).map_err(|error| error.about(SUBJECT))?;
        }
        Ok(union)
    }

    fn task_type(&self) -> Option<TaskType> {
        self.first.task_type()
    }

    fn task_id(&self) -> Option<u32> {
        self.first.task_id()
    }

    fn job_id(&self) -> Result<JobId> {
        let own = self.first.job_id()?;
        if !own.is_derived() || own == JobId::unknown() {
            return Ok(own);
        }
        Ok(JobId::of_cluster(&self.cluster_spec()?))
    }

    /// Returns whether the only description is a part of the cluster; several are taken to complete each other.
    fn is_partial(&self) -> bool {
        self.others.is_empty() && self.first.is_partial()
    }

    fn rpc_layer(&self) -> Option<&str> {
        self.first.rpc_layer()
    }

    fn environment(&self) -> &str {
        self.first.environment()
    }

    fn num_accelerators(&self) -> BTreeMap<String, usize> {
        self.first.num_accelerators()
    }

    /// Returns the address of the named task in the union. If none is named, asks the first resolver.
    fn master(&self, task_type: Option<TaskType>, task_id: Option<u32>, rpc_layer: Option<&str>) -> Result<String> {
        match (task_type, task_id) {
            (Some(kind), Some(index)) => {
                let spec = self.cluster_spec()?;
                Ok(with_layer(spec.task_address(Task::new(kind, index))?, rpc_layer.or(self.rpc_layer())))
            }
            _ => self.first.master(None, None, rpc_layer),
        }
    }
}

const SUBJECT: &str = "UnionResolver";

/// Merges one job of all descriptions.
fn merge(kind: TaskType, specs: &[ClusterSpec]) -> Result<BTreeMap<u32, String>> {
    let parts: Vec<Vec<Option<&str>>> = specs.iter().map(|spec| spec.job_tasks(kind)).collect();
    if parts.iter().flatten().all(Option::is_some) {
        return Ok((0u32..).zip(parts.into_iter().flatten().flatten().map(str::to_owned)).collect());
    }
    let mut merged: BTreeMap<u32, String> = BTreeMap::new();
    for (index, address) in parts.into_iter().flat_map(|part| (0u32..).zip(part)) {
        let Some(address) = address else { continue };
        if let Some(other) = merged.insert(index, address.to_owned()) {
            let problem = format!("two resolvers describe {}", Task::new(kind, index));
            let given = format!("{other} and {address}");
            let remedy = "Give the tasks different indices, or describe the job by complete lists.";
            return Err(Error::config(SUBJECT, problem, given, "each index of a job with holes once", remedy));
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests;

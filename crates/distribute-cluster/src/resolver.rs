//! Sources of cluster descriptions.

use std::collections::BTreeMap;

use crate::{ClusterSpec, Error, JobId, Result, Task, TaskType};

/// A source of cluster descriptions.
///
/// # Source
/// `tf.distribute.cluster_resolver.ClusterResolver`.
pub trait ClusterResolver {
    /// Returns the tasks of the cluster; an empty specification for a local program.
    ///
    /// # Errors
    /// [`Error::Config`] if the description is invalid, or the source's own error if it cannot be obtained.
    fn cluster_spec(&self) -> Result<ClusterSpec>;

    /// Returns the type of this process's task, if the source contains it.
    fn task_type(&self) -> Option<TaskType>;

    /// Returns the index of this process's task, if the source contains it.
    fn task_id(&self) -> Option<u32>;

    /// Returns this process's task, if the source contains it.
    fn task(&self) -> Option<Task> {
        Some(Task::new(self.task_type()?, self.task_id()?))
    }

    /// Returns the identity of the job: the source's own, else one derived from the cluster.
    ///
    /// # Errors
    /// The errors of [`cluster_spec`](ClusterResolver::cluster_spec).
    fn job_id(&self) -> Result<JobId> {
        Ok(JobId::of_cluster(&self.cluster_spec()?))
    }

    /// Returns whether the source describes only a part of the cluster, as TFJob's `sparseCluster` does: this process
    /// and the parameter servers. Tasks of such a cluster do not find each other to train together.
    fn is_partial(&self) -> bool {
        false
    }

    /// Returns the protocol that is put before addresses, such as `grpc`. How workers communicate is an option of the
    /// strategies.
    fn rpc_layer(&self) -> Option<&str> {
        None
    }

    /// Returns the environment that the job runs in, such as `cloud`; empty if the source does not contain it. It is
    /// for the program's own use: nothing here depends on it.
    fn environment(&self) -> &str {
        ""
    }

    /// Returns the number of accelerators per type, such as `GPU`, at one task; empty if the source does not contain
    /// it. Strategies whose devices are not named use this number of GPUs in each process.
    fn num_accelerators(&self) -> BTreeMap<String, usize> {
        BTreeMap::new()
    }

    /// Returns the address to connect to in order to use a task, prefixed with the protocol; empty for a local program.
    ///
    /// Arguments override the values of the source; an empty `rpc_layer` means no protocol prefix.
    ///
    /// # Errors
    /// [`Error::Config`] if the cluster has no such task, or if neither the arguments nor the source name one.
    fn master(&self, task_type: Option<TaskType>, task_id: Option<u32>, rpc_layer: Option<&str>) -> Result<String> {
        let spec = self.cluster_spec()?;
        if spec.tasks().count() <= 1 {
            return Ok(String::new());
        }
        match (task_type.or(self.task_type()), task_id.or(self.task_id())) {
            (Some(kind), Some(index)) => {
                Ok(with_layer(spec.task_address(Task::new(kind, index))?, rpc_layer.or(self.rpc_layer())))
            }
            _ => Err(Error::config(
                "cluster resolver",
                "nothing says which task's address is wanted",
                "no task",
                "a task type and index",
                "Pass both, or set them where the cluster is described.",
            )),
        }
    }
}

pub(crate) fn with_layer(address: &str, layer: Option<&str>) -> String {
    match layer {
        Some(layer) if !layer.is_empty() && !address.is_empty() => format!("{layer}://{address}"),
        _ => address.to_owned(),
    }
}

/// A resolver of values that are given directly.
///
/// # Examples
/// ```
/// use distribute_cluster::{ClusterResolver, ClusterSpec, SimpleResolver, TaskType};
/// let spec = ClusterSpec::new().with_job(TaskType::Worker, ["a:2222", "b:2222"])?;
/// let resolver = SimpleResolver { spec, rpc_layer: Some("grpc".to_owned()), ..SimpleResolver::default() };
/// assert_eq!(resolver.master(Some(TaskType::Worker), Some(1), None)?, "grpc://b:2222");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.cluster_resolver.SimpleClusterResolver`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimpleResolver {
    /// The cluster.
    pub spec: ClusterSpec,
    /// The address that [`ClusterResolver::master`] returns if no task is named.
    pub master: String,
    /// The type of this process's task.
    pub task_type: Option<TaskType>,
    /// The index of this process's task.
    pub task_id: Option<u32>,
    /// The protocol of addresses.
    pub rpc_layer: Option<String>,
    /// The environment that the job runs in.
    pub environment: String,
    /// The number of accelerators of each type at one task.
    pub num_accelerators: BTreeMap<String, usize>,
    /// The identity of the job; `None` to derive it from the cluster.
    pub job_id: Option<JobId>,
    /// Whether `spec` is only a part of the cluster; see [`ClusterResolver::is_partial`].
    pub is_partial: bool,
}

impl SimpleResolver {
    /// Returns a resolver that answers what `resolver` answers now, whatever it reads later.
    ///
    /// # Errors
    /// The errors of the resolver.
    ///
    /// # Examples
    /// ```
    /// use distribute_cluster::{ClusterResolver, SimpleResolver, TaskType, TfConfigResolver};
    /// let cluster = TfConfigResolver::from_json(r#"{"cluster": {"worker": ["a:1", "b:1"]},
    ///     "task": {"type": "worker", "index": 1}}"#)?;
    /// let kept = SimpleResolver::of(&cluster)?;
    /// assert_eq!((kept.cluster_spec()?, kept.task()), (cluster.cluster_spec()?, cluster.task()));
    /// # Ok::<(), distribute_cluster::Error>(())
    /// ```
    pub fn of(resolver: &dyn ClusterResolver) -> Result<SimpleResolver> {
        let master = match resolver.task() {
            Some(_) => resolver.master(None, None, Some(""))?,
            None => String::new(),
        };
        let (spec, job) = (resolver.cluster_spec()?, resolver.job_id()?);
        let job_id = (job != JobId::of_cluster(&spec)).then_some(job);
        Ok(SimpleResolver {
            spec,
            master,
            task_type: resolver.task_type(),
            task_id: resolver.task_id(),
            rpc_layer: resolver.rpc_layer().map(str::to_owned),
            environment: resolver.environment().to_owned(),
            num_accelerators: resolver.num_accelerators(),
            job_id,
            is_partial: resolver.is_partial(),
        })
    }
}

impl ClusterResolver for SimpleResolver {
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        Ok(self.spec.clone())
    }

    fn task_type(&self) -> Option<TaskType> {
        self.task_type
    }

    fn task_id(&self) -> Option<u32> {
        self.task_id
    }

    fn job_id(&self) -> Result<JobId> {
        Ok(self.job_id.clone().unwrap_or_else(|| JobId::of_cluster(&self.spec)))
    }

    fn is_partial(&self) -> bool {
        self.is_partial
    }

    fn rpc_layer(&self) -> Option<&str> {
        self.rpc_layer.as_deref()
    }

    fn environment(&self) -> &str {
        &self.environment
    }

    fn num_accelerators(&self) -> BTreeMap<String, usize> {
        self.num_accelerators.clone()
    }

    /// Returns the address of the named task, or the stored `master` if none is named.
    fn master(&self, task_type: Option<TaskType>, task_id: Option<u32>, rpc_layer: Option<&str>) -> Result<String> {
        let layer = rpc_layer.or(self.rpc_layer());
        match (task_type, task_id) {
            (Some(kind), Some(index)) => Ok(with_layer(self.spec.task_address(Task::new(kind, index))?, layer)),
            _ => Ok(with_layer(&self.master, layer)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simple() -> SimpleResolver {
        SimpleResolver {
            spec: ClusterSpec::new().with_job(TaskType::Worker, ["a:1", "b:1"]).unwrap(),
            master: "m:1".to_owned(),
            task_type: Some(TaskType::Worker),
            task_id: Some(1),
            rpc_layer: Some("grpc".to_owned()),
            environment: "cloud".to_owned(),
            num_accelerators: [("GPU".to_owned(), 8)].into(),
            job_id: Some(JobId::new("mine").unwrap()),
            is_partial: true,
        }
    }

    #[test]
    fn what_is_stored_is_answered() {
        let resolver = simple();
        assert_eq!(resolver.cluster_spec().unwrap().num_tasks(TaskType::Worker), 2);
        assert_eq!(resolver.task(), Some(Task::new(TaskType::Worker, 1)));
        assert_eq!((resolver.rpc_layer(), resolver.environment()), (Some("grpc"), "cloud"));
        assert_eq!(resolver.num_accelerators()["GPU"], 8);
        assert_eq!(SimpleResolver::default().task(), None);
    }

    #[test]
    fn a_copy_answers_as_the_original() {
        let resolver = simple();
        let copy = SimpleResolver::of(&resolver).unwrap();
        assert_eq!(SimpleResolver { master: resolver.master.clone(), ..copy.clone() }, resolver);
        assert_eq!(copy.master(None, None, None).unwrap(), "grpc://m:1");
        assert_eq!((copy.job_id().unwrap().name(), copy.is_partial()), ("mine", true));
        let derived = SimpleResolver { job_id: None, ..resolver };
        assert_eq!(SimpleResolver::of(&derived).unwrap().job_id().unwrap(), JobId::of_cluster(&derived.spec));
    }

    #[test]
    fn explicit_arguments_beat_stored_ones_even_when_zero_or_empty() {
        let resolver = simple();
        assert_eq!(resolver.master(None, None, None).unwrap(), "grpc://m:1");
        assert_eq!(resolver.master(None, None, Some("")).unwrap(), "m:1");
        assert_eq!(resolver.master(Some(TaskType::Worker), Some(0), Some("http")).unwrap(), "http://a:1");
        assert_eq!(resolver.master(Some(TaskType::Worker), Some(1), Some("")).unwrap(), "b:1");
        assert!(resolver.master(Some(TaskType::Worker), Some(2), None).is_err());
        assert_eq!(SimpleResolver::default().master(None, None, Some("grpc")).unwrap(), "");
    }

    #[test]
    fn a_resolver_with_only_the_required_methods_has_the_defaults() {
        struct Bare(ClusterSpec, Option<Task>);
        impl ClusterResolver for Bare {
            fn cluster_spec(&self) -> Result<ClusterSpec> {
                Ok(self.0.clone())
            }
            fn task_type(&self) -> Option<TaskType> {
                self.1.map(|task| task.kind)
            }
            fn task_id(&self) -> Option<u32> {
                self.1.map(|task| task.index)
            }
        }
        let spec = simple().spec;
        let bare = Bare(spec.clone(), Some(Task::new(TaskType::Worker, 0)));
        assert_eq!((bare.rpc_layer(), bare.environment(), bare.num_accelerators().len()), (None, "", 0));
        assert_eq!(bare.master(None, None, None).unwrap(), "a:1");
        assert_eq!(bare.master(None, Some(1), Some("grpc")).unwrap(), "grpc://b:1");
        let text = Bare(spec, None).master(None, None, None).unwrap_err().to_string();
        assert!(text.contains("which task's address"), "{text}");
        assert_eq!(Bare(ClusterSpec::new(), None).master(None, None, None).unwrap(), "");
    }
}

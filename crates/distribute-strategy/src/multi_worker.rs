//! Replicas in several processes.

use std::ops::RangeInclusive;
use std::time::Duration;

use distribute_cluster::Authority;
use distribute_cluster::{ClusterResolver, Membership, SimpleResolver};

use crate::devices::DeviceChoice;
use crate::workers::{Workers, described};
use crate::{CommunicationOptions, Error, Replicas, Result, Strategy, StrategyExtended};

/// Synchronous training on the devices of several processes, each replica with its own copy of every variable.
///
/// Every process runs the same program. Its task is that of TF_CONFIG, of RANK and WORLD_SIZE, of another launcher's
/// variables (see [`Membership::from_env`]), or of a [`ClusterResolver`].
///
/// # Source
/// `tf.distribute.MultiWorkerMirroredStrategy`.
pub struct MultiWorkerMirroredStrategy {
    replicas: Replicas,
    cluster: Option<SimpleResolver>,
}

impl MultiWorkerMirroredStrategy {
    /// Returns a builder to choose devices, communication and membership.
    pub fn builder() -> MultiWorkerMirroredBuilder {
        MultiWorkerMirroredBuilder::default()
    }
}

/// Builds a [`MultiWorkerMirroredStrategy`].
#[derive(Clone, Debug, Default)]
pub struct MultiWorkerMirroredBuilder {
    workers: Workers,
    elastic: Option<RangeInclusive<u32>>,
    authority: Option<Authority>,
}

impl MultiWorkerMirroredBuilder {
    /// Sets the devices of this process's replicas; every process must have the same number. Default: as
    /// [`MirroredBuilder::devices`](crate::MirroredBuilder::devices), where processes of the job on the same machine
    /// divide the GPUs that they see. The number for each is that of the resolver's
    /// [`num_accelerators`](ClusterResolver::num_accelerators), if it contains `GPU`, else that of
    /// [`Membership::gpus_per_task`].
    pub fn devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.workers.devices(DeviceChoice::named(devices));
        self
    }

    /// Runs replicas on the first `count` GPUs of this process.
    pub fn num_gpus(mut self, count: usize) -> Self {
        self.workers.devices(DeviceChoice::Gpus(count));
        self
    }

    /// Runs this number of replicas in each process, as
    /// [`MirroredBuilder::num_replicas`](crate::MirroredBuilder::num_replicas) does.
    pub fn num_replicas(mut self, count: usize) -> Self {
        self.workers.devices(DeviceChoice::Replicas(count));
        self
    }

    /// Sets how replicas communicate.
    pub fn communication(mut self, options: CommunicationOptions) -> Self {
        self.workers.communication(options);
        self
    }

    /// Makes each `ranks` neighbours in the list of devices one tensor group, which is one replica, as
    /// [`MirroredBuilder::tensor_parallel`](crate::MirroredBuilder::tensor_parallel) does. The ranks of a tensor group
    /// are in one process, and every process must have the same mesh. Default: 1.
    pub fn tensor_parallel(mut self, ranks: usize) -> Self {
        self.workers.tensor_parallel(ranks);
        self
    }

    /// Lets processes join and leave while they train, as long as there are at least as many as the range's start, and
    /// at most as many as its end.
    ///
    /// The strategy trains by itself until `Trainer::fit`, or the program's own loop by `distribute_train::elastic`,
    /// joins the others: models are built without communication, and get the values of those that have them. When a
    /// process is lost, the others repeat the step that failed with its data divided anew; a process that joins gets
    /// the state of a live one. No step and no example is lost. The global batch stays as it is.
    ///
    /// Which processes form the next generation is decided by a majority of the present one, who find each other at the
    /// addresses of TF_CONFIG; or, if [`generations`](MultiWorkerMirroredBuilder::generations) or
    /// DISTRIBUTE_GENERATIONS names a folder, by the process that writes there first, so that a single survivor may
    /// train on.
    ///
    /// All processes read the whole dataset and keep their rows. Refused: sharded optimizer state, tensor parallelism.
    ///
    /// # Source
    /// TorchElastic's `--nnodes=MIN:MAX`, and torchft, whose step is lost with a process.
    pub fn elastic(mut self, processes: RangeInclusive<u32>) -> Self {
        self.elastic = Some(processes);
        self
    }

    /// Sets how it is decided which processes form the next generation of an [elastic] job.
    ///
    /// [elastic]: MultiWorkerMirroredBuilder::elastic
    pub fn generations(mut self, authority: Authority) -> Self {
        self.authority = Some(authority);
        self
    }

    /// Sets the silence after which a process counts as lost: it may be frozen, or its network cut. One that ends is
    /// noticed at once. Default: 10 s. Every process must have the same.
    pub fn heartbeat_timeout(mut self, timeout: Duration) -> Self {
        self.workers.heartbeat_timeout(timeout);
        self
    }

    /// Sets the membership of the cluster, instead of reading it from the environment.
    pub fn membership(mut self, membership: Membership) -> Self {
        self.workers.membership(membership);
        self
    }

    /// Sets the cluster, and this process's task in it, instead of reading them from the environment.
    ///
    /// # Errors
    /// [`Error::Cluster`](crate::Error::Cluster) if the resolver's description is invalid, or does not name this
    /// process's task.
    ///
    /// # Examples
    /// ```
    /// use distribute_cluster::{ClusterResolver, TfConfigResolver};
    /// use distribute_strategy::MultiWorkerMirroredStrategy;
    /// let cluster = TfConfigResolver::from_json(r#"{"cluster": {"worker": ["localhost:2222"]}}"#)?;
    /// let strategy = MultiWorkerMirroredStrategy::builder().cluster_resolver(&cluster)?.build()?;
    /// assert_eq!(strategy.num_replicas_in_sync(), 1);
    /// let kept = strategy.cluster_resolver().expect("it was given");
    /// assert_eq!(kept.spec, cluster.cluster_spec()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn cluster_resolver(mut self, resolver: &dyn ClusterResolver) -> Result<Self> {
        self.workers.cluster_resolver(resolver)?;
        Ok(self)
    }

    /// Connects to the other processes and builds the strategy.
    ///
    /// # Errors
    /// [`Error::Devices`] if the list of devices is invalid, or cannot be divided into tensor groups;
    /// [`Error::Cluster`] if the environment is invalid or tasks are missing; [`Error::Collective`] if the group cannot
    /// be joined; [`Error::Elastic`] if the settings of an elastic job do not fit together.
    pub fn build(self) -> Result<Strategy> {
        let strategy = "MultiWorkerMirroredStrategy";
        let (replicas, cluster) = match (self.elastic, self.authority) {
            (Some(processes), authority) => self.workers.elastic(strategy, processes, authority)?,
            (None, None) => self.workers.join(strategy)?,
            (None, Some(_)) => {
                let problem = "generations has an effect on elastic jobs only; call elastic too, or leave it out";
                return Err(Error::Elastic { problem: problem.to_owned() });
            }
        };
        Ok(Strategy::new(MultiWorkerMirroredStrategy { replicas, cluster }))
    }
}

impl StrategyExtended for MultiWorkerMirroredStrategy {
    fn name(&self) -> &'static str {
        "MultiWorkerMirrored"
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn cluster_resolver(&self) -> Option<&SimpleResolver> {
        self.cluster.as_ref()
    }

    fn describe(&self) -> String {
        format!("MultiWorkerMirrored {}", described(&self.replicas))
    }
}

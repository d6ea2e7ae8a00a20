//! Replicas in several processes.

use std::sync::Arc;

use distribute_cluster::{ClusterResolver, Coordination, CoordinationOptions, Membership, SimpleResolver};

use crate::devices::check_devices;
use crate::mesh::Mesh;
use crate::{CommunicationOptions, Replicas, Result, Strategy, StrategyExtended, intra_op};

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
    devices: Option<Vec<String>>,
    communication: CommunicationOptions,
    membership: Option<Membership>,
    cluster: Option<SimpleResolver>,
    tensor_parallel: Option<usize>,
}

impl MultiWorkerMirroredBuilder {
    /// Sets the devices of this process's replicas; every process must have the same number. Default: `CPU:0`.
    pub fn devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.devices = Some(devices.into_iter().map(Into::into).collect());
        self
    }

    /// Sets how replicas communicate.
    pub fn communication(mut self, options: CommunicationOptions) -> Self {
        self.communication = options;
        self
    }

    /// Makes each `ranks` neighbours in the list of devices one tensor group, which is one replica, as
    /// [`MirroredBuilder::tensor_parallel`](crate::MirroredBuilder::tensor_parallel) does. The ranks of a tensor group
    /// are in one process, and every process must have the same mesh. Default: 1.
    pub fn tensor_parallel(mut self, ranks: usize) -> Self {
        self.tensor_parallel = Some(ranks);
        self
    }

    /// Sets the membership of the cluster, instead of reading it from the environment.
    pub fn membership(mut self, membership: Membership) -> Self {
        self.membership = Some(membership);
        self.cluster = None;
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
        let alone = || Membership::new(0, 1, "");
        self.membership = Some(Membership::from_resolver(resolver)?.map_or_else(alone, Ok)?);
        self.cluster = Some(SimpleResolver::of(resolver)?);
        Ok(self)
    }

    /// Connects to the other processes and builds the strategy.
    ///
    /// # Errors
    /// [`Error::Devices`](crate::Error::Devices) if the list of devices is invalid, or cannot be divided into tensor
    /// groups;
    /// [`Error::Cluster`](crate::Error::Cluster) if the environment is invalid or tasks are missing;
    /// [`Error::Collective`](crate::Error::Collective) if the group cannot be joined.
    pub fn build(self) -> Result<Strategy> {
        let names = self.devices.unwrap_or_else(|| vec!["CPU:0".to_owned()]);
        let devices = check_devices("MultiWorkerMirroredStrategy", names, None)?;
        let mesh = Mesh::new("MultiWorkerMirroredStrategy", devices.len(), self.tensor_parallel.unwrap_or(1))?;
        intra_op::share_cores(devices.len());
        let options = self.communication.options(&devices)?;
        let membership = match self.membership {
            Some(membership) => Some(membership),
            None => Membership::from_env()?,
        };
        let cluster = self.cluster.or_else(|| membership.as_ref()?.cluster());
        let replicas = match membership {
            None => Replicas::local_in(mesh, devices, options)?,
            Some(membership) => {
                let coordination = Coordination::start(&membership, CoordinationOptions::from_env()?)?;
                Replicas::joined_in(mesh, devices, Arc::new(coordination), options)?
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
        let topology = self.replicas.topology;
        let transport = self.replicas.transport();
        let ranks = match self.replicas.mesh.tensor() {
            1 => String::new(),
            ranks => format!(" × {ranks} tensor ranks"),
        };
        format!(
            "MultiWorkerMirrored {} workers × {} CPU{ranks} · {transport}",
            topology.workers(),
            topology.replicas_per_worker()
        )
    }
}

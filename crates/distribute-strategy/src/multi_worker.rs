//! Replicas in several processes.

use std::sync::Arc;

use distribute_cluster::{Coordination, CoordinationOptions, Membership};

use crate::devices::check_devices;
use crate::{CommunicationOptions, Replicas, Result, Strategy, StrategyExtended, intra_op};

/// Synchronous training on the devices of several processes, each replica with its own copy of every variable.
///
/// Every process runs the same program; TF_CONFIG, RANK and WORLD_SIZE, Open MPI or Slurm identify each process's task.
///
/// # Source
/// `tf.distribute.MultiWorkerMirroredStrategy`.
pub struct MultiWorkerMirroredStrategy {
    replicas: Replicas,
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

    /// Sets the membership of the cluster, instead of reading it from the environment.
    pub fn membership(mut self, membership: Membership) -> Self {
        self.membership = Some(membership);
        self
    }

    /// Connects to the other processes and builds the strategy.
    ///
    /// # Errors
    /// [`Error::Devices`](crate::Error::Devices) if the list of devices is invalid;
    /// [`Error::Cluster`](crate::Error::Cluster) if the environment is invalid or tasks are missing;
    /// [`Error::Collective`](crate::Error::Collective) if the group cannot be joined.
    pub fn build(self) -> Result<Strategy> {
        let names = self.devices.unwrap_or_else(|| vec!["CPU:0".to_owned()]);
        let devices = check_devices("MultiWorkerMirroredStrategy", names, None)?;
        intra_op::share_cores(devices.len());
        let options = self.communication.options(&devices)?;
        let membership = match self.membership {
            Some(membership) => Some(membership),
            None => Membership::from_env()?,
        };
        let replicas = match membership {
            None => Replicas::local(devices, options)?,
            Some(membership) => {
                let coordination = Coordination::start(&membership, CoordinationOptions::from_env()?)?;
                Replicas::joined(devices, Arc::new(coordination), options)?
            }
        };
        Ok(Strategy::new(MultiWorkerMirroredStrategy { replicas }))
    }
}

impl StrategyExtended for MultiWorkerMirroredStrategy {
    fn name(&self) -> &'static str {
        "MultiWorkerMirrored"
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn describe(&self) -> String {
        let topology = self.replicas.topology;
        let transport = self.replicas.transport();
        format!(
            "MultiWorkerMirrored {} workers × {} CPU · {transport}",
            topology.workers(),
            topology.replicas_per_worker()
        )
    }
}

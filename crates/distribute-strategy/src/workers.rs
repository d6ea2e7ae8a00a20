//! The settings of strategies over several processes, and how their processes find each other.

use std::sync::Arc;

use distribute_cluster::{ClusterResolver, Coordination, CoordinationOptions, Membership, SimpleResolver};
use distribute_device::{DeviceKind, DeviceSpec};

use crate::devices::check_devices;
use crate::mesh::Mesh;
use crate::{CommunicationOptions, Replicas, Result, intra_op};

/// The devices of this process, how its replicas communicate, and its place in the cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Workers {
    devices: Option<Vec<String>>,
    communication: CommunicationOptions,
    membership: Option<Membership>,
    cluster: Option<SimpleResolver>,
    tensor_parallel: Option<usize>,
}

impl Workers {
    pub(crate) fn devices<D: Into<String>>(&mut self, devices: impl IntoIterator<Item = D>) {
        self.devices = Some(devices.into_iter().map(Into::into).collect());
    }

    pub(crate) fn communication(&mut self, options: CommunicationOptions) {
        self.communication = options;
    }

    pub(crate) fn membership(&mut self, membership: Membership) {
        self.membership = Some(membership);
        self.cluster = None;
    }

    pub(crate) fn cluster_resolver(&mut self, resolver: &dyn ClusterResolver) -> Result<()> {
        let alone = || Membership::new(0, 1, "");
        self.membership = Some(Membership::from_resolver(resolver)?.map_or_else(alone, Ok)?);
        self.cluster = Some(SimpleResolver::of(resolver)?);
        Ok(())
    }

    pub(crate) fn tensor_parallel(&mut self, ranks: usize) {
        self.tensor_parallel = Some(ranks);
    }

    /// Connects to the other processes of the strategy of this name. Without a membership, it is read from the
    /// environment; a process that the environment does not describe is by itself.
    pub(crate) fn join(self, strategy: &'static str) -> Result<(Replicas, Option<SimpleResolver>)> {
        let names = self.devices.unwrap_or_else(|| vec!["CPU:0".to_owned()]);
        let devices = check_devices(strategy, names, None)?;
        let mesh = Mesh::new(strategy, devices.len(), self.tensor_parallel.unwrap_or(1))?;
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
        Ok((replicas, cluster))
    }
}

/// Describes replicas on several workers: how many, on which kind of device, and the transport between them.
pub(crate) fn described(replicas: &Replicas) -> String {
    let (workers, per_worker) = (replicas.topology.workers(), replicas.topology.replicas_per_worker());
    let kind = replicas.devices.first().and_then(DeviceSpec::kind).unwrap_or(DeviceKind::Cpu);
    let ranks = tensor_ranks(replicas);
    format!("{workers} workers × {per_worker} {kind}{ranks} · {}", replicas.transport())
}

/// Describes the size of tensor groups that have several ranks.
pub(crate) fn tensor_ranks(replicas: &Replicas) -> String {
    match replicas.mesh.tensor() {
        1 => String::new(),
        ranks => format!(" × {ranks} tensor ranks"),
    }
}

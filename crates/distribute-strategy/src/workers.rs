//! The settings of strategies over several processes, and how their processes find each other.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::{Authority, ElasticOptions};
use distribute_cluster::{ClusterResolver, Coordination, CoordinationOptions, LocalPlace, Membership, SimpleResolver};
use distribute_collectives::{Options, on_local_ranks};
use distribute_device::{DeviceKind, DeviceSpec};

use crate::devices::{DeviceChoice, OwnDevices};
use crate::elastic::Elastic;
use crate::mesh::Mesh;
use crate::{CommunicationOptions, Error, Replicas, Request, Result, intra_op};

/// The devices of this process, how its replicas communicate, and its place in the cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Workers {
    devices: DeviceChoice,
    communication: CommunicationOptions,
    membership: Option<Membership>,
    cluster: Option<SimpleResolver>,
    tensor_parallel: Option<usize>,
    heartbeat_timeout: Option<Duration>,
}

impl Workers {
    pub(crate) fn devices(&mut self, devices: DeviceChoice) {
        self.devices = devices;
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

    pub(crate) fn heartbeat_timeout(&mut self, timeout: Duration) {
        self.heartbeat_timeout = Some(timeout);
    }

    /// Returns how members of the job join, and notice that one is lost.
    fn coordination(&self) -> Result<CoordinationOptions> {
        let options = CoordinationOptions::from_env()?;
        Ok(match self.heartbeat_timeout {
            None => options,
            Some(timeout) => {
                let interval = (timeout / 10).min(options.heartbeat_interval).max(Duration::from_millis(1));
                options.heartbeat_timeout(timeout).heartbeat_interval(interval)
            }
        })
    }

    pub(crate) fn tensor_parallel(&mut self, ranks: usize) {
        self.tensor_parallel = Some(ranks);
    }

    /// Connects to the other processes of the strategy of this name. Without a membership, it is read from the
    /// environment; a process that the environment does not describe is by itself.
    pub(crate) fn join(self, strategy: &'static str) -> Result<(Replicas, Option<SimpleResolver>)> {
        let membership = match self.membership.clone() {
            Some(membership) => Some(membership),
            None => Membership::from_env()?,
        };
        let is_first = membership.as_ref().is_none_or(Membership::is_leader);
        if let Some(register) = ElasticOptions::register_of_env()?.filter(|_| is_first) {
            distribute_notice::warn!(
                "DISTRIBUTE_GENERATIONS={register} has no effect: {strategy} is not elastic, so that the job ends when \
                 a worker is lost; build it by MultiWorkerMirroredBuilder::elastic, or leave the variable out (and \
                 --elastic of distribute run)"
            );
        }
        let is_found = !matches!(self.devices, DeviceChoice::Named(_));
        let coordination = self.coordination()?;
        let Own { mesh, devices, options, cluster } = self.own(strategy, membership.as_ref())?;
        let replicas = match membership {
            None => Replicas::local_in(mesh, devices, options)?,
            Some(membership) => {
                let coordination = Coordination::start(&membership, coordination)?;
                let replicas = Replicas::joined_in(mesh, devices, Arc::new(coordination), options)?;
                check_kinds(strategy, &replicas, is_found)?;
                replicas
            }
        };
        Ok((replicas, cluster))
    }

    /// Makes replicas of this process that join those of others later, whose number may change.
    pub(crate) fn elastic(
        self,
        strategy: &'static str,
        processes: RangeInclusive<u32>,
        authority: Option<Authority>,
    ) -> Result<(Replicas, Option<SimpleResolver>)> {
        let refuse = |problem: String| Err(Error::Elastic { problem });
        if let Some(ranks) = self.tensor_parallel.filter(|ranks| *ranks != 1) {
            return refuse(format!("elastic does not go with tensor_parallel({ranks}); leave one of them out"));
        }
        let membership = match self.membership.clone() {
            Some(membership) => Some(membership),
            None => Membership::from_env()?,
        };
        let coordination = self.coordination()?;
        let Own { mesh, devices, options, cluster } = self.own(strategy, membership.as_ref())?;
        let replicas = Replicas::local_in(mesh, devices, options)?;
        let Some(membership) = membership else {
            tracing::info!("no variable describes a job: this process trains alone, and others cannot join it");
            return Ok((replicas, cluster));
        };
        Membership::mark_joined();
        let job = ElasticOptions::from_env(&membership, processes, authority)?;
        let job = job.stop(Arc::clone(replicas.step.asked(Request::Leave)));
        Ok((replicas.with_elastic(|groups| Elastic::new(membership, job, coordination, groups)), cluster))
    }

    /// Returns what this process brings along.
    fn own(self, strategy: &'static str, membership: Option<&Membership>) -> Result<Own> {
        let place = membership.map(LocalPlace::from_env).transpose()?.flatten();
        let accelerators = self.cluster.as_ref().map(ClusterResolver::num_accelerators);
        let gpus_per_task = match accelerators.and_then(|accelerators| accelerators.get("GPU").copied()) {
            Some(gpus) => Some(gpus),
            None => membership.map(Membership::gpus_per_task).transpose()?.flatten(),
        };
        let ranks = self.tensor_parallel.unwrap_or(1);
        let devices = self.devices.devices(&OwnDevices { strategy, table: None, gpus_per_task, place }, ranks)?;
        let mesh = Mesh::new(strategy, devices.len(), ranks)?;
        intra_op::share_cores(devices.len());
        let options = self.communication.options(&devices)?;
        let cluster = self.cluster.or_else(|| membership?.cluster());
        Ok(Own { mesh, devices, options, cluster })
    }
}

/// The devices of this process, and how their replicas communicate.
struct Own {
    mesh: Mesh,
    devices: Vec<DeviceSpec>,
    options: Options,
    cluster: Option<SimpleResolver>,
}

/// Returns an error on all workers if they have found devices of different kinds: one of them would be far slower than
/// the others, because its GPU or its driver is missing. Workers whose devices were named may mix kinds.
fn check_kinds(strategy: &'static str, replicas: &Replicas, is_found: bool) -> Result<()> {
    let kind = replicas.devices.first().and_then(DeviceSpec::kind).unwrap_or(DeviceKind::Cpu);
    let code = match (is_found, kind) {
        (false, _) => NAMED,
        (true, DeviceKind::Cpu) => FOUND_CPU,
        (true, _) => FOUND_GPU,
    };
    let all = on_local_ranks(&replicas.groups(), |_, group| {
        group.start().all_gather(vec![code], vec![0u8; group.world_size()])
    })?;
    let [_, all] = all.unwrap_or_default();
    different_kinds(&all, replicas.mesh).map_or(Ok(()), |problem| Err(Error::Devices { strategy, problem }))
}

/// How a rank's device was chosen, as ranks tell each other.
const NAMED: u8 = 0;
const FOUND_CPU: u8 = 1;
const FOUND_GPU: u8 = 2;

/// Returns the problem if some ranks of a group have found GPUs and others CPUs; each worker has this mesh, and in the
/// group one rank of each of its replicas.
fn different_kinds(ranks: &[u8], mesh: Mesh) -> Option<String> {
    let worker = |code: u8| ranks.iter().position(|of| *of == code).map(|rank| rank / mesh.replicas().max(1));
    let (cpu, gpu) = (worker(FOUND_CPU)?, worker(FOUND_GPU)?);
    Some(format!(
        "worker {gpu} has found GPUs, and worker {cpu} only CPUs; see `distribute doctor` on worker {cpu}, or name the \
         devices"
    ))
}

/// Describes replicas on several workers: how many, on which kind of device, and the transport between them.
pub(crate) fn described(replicas: &Replicas) -> String {
    let (workers, per_worker) = (replicas.topology().workers(), replicas.topology().replicas_per_worker());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_find_different_kinds_of_devices_are_named() {
        let mesh = |devices, tensor| Mesh::new("test", devices, tensor).unwrap();
        assert_eq!(different_kinds(&[FOUND_GPU; 4], mesh(2, 1)), None);
        assert_eq!(different_kinds(&[FOUND_CPU; 3], mesh(1, 1)), None);
        // Devices that the program names may be of different kinds.
        assert_eq!(different_kinds(&[NAMED, FOUND_GPU, NAMED], mesh(1, 1)), None);
        for (devices, tensor) in [(2, 1), (4, 2)] {
            let ranks = [FOUND_GPU, FOUND_GPU, FOUND_CPU, FOUND_CPU];
            let problem = different_kinds(&ranks, mesh(devices, tensor)).unwrap();
            assert!(problem.starts_with("worker 0 has found GPUs, and worker 1 only CPUs"), "{problem}");
        }
    }
}

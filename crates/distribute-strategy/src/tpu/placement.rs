//! The devices of a TPU's replicas.

use std::time::Duration;

use distribute_cluster::tpu::{Coordinates, DeviceAssignment, Topology, TpuResolver};
use distribute_device::pjrt::PjrtDevice;

use crate::{Error, Result};

/// How often a TPU that is not healthy is asked again.
const HEALTH_INTERVAL: Duration = Duration::from_secs(30);

fn wrong(problem: String) -> Error {
    Error::Devices { strategy: "TpuStrategy", problem }
}

/// Returns an error for a TPU of several hosts, or one that is not healthy in time.
pub(super) fn check_hosts(resolver: &TpuResolver, timeout: Duration) -> Result<()> {
    let hosts = resolver.membership()?.map_or(1, |membership| membership.world_size());
    if hosts > 1 {
        return Err(wrong(format!(
            "the TPU has {hosts} hosts, and programs run on the devices of one: take a TPU of one host, or train on \
             the CPUs of its hosts with MultiWorkerMirroredStrategy"
        )));
    }
    Ok(resolver.wait_for_healthy(timeout, HEALTH_INTERVAL.min(timeout))?)
}

/// Compares the number of the TPU's cores with that of the plugin's devices, each of which has one core, or from v4 on
/// the two of a chip. Those of a local TPU are the plugin's, whatever they are.
pub(super) fn check_cores(resolver: &TpuResolver, devices: usize) -> Result<()> {
    if resolver.is_local() {
        return Ok(());
    }
    match resolver.cores_per_task()?.map(|cores| cores as usize) {
        Some(cores) if cores != devices && cores != 2 * devices => Err(wrong(format!(
            "the TPU has {cores} cores on this host, but the plugin has {devices} devices: another process may use \
             some, or the resolver or the plugin may be of another TPU"
        ))),
        _ => Ok(()),
    }
}

/// Returns the mesh of devices, by the coordinates that the plugin tells. Those of plugins that tell none are a line.
pub(crate) fn topology(devices: &[PjrtDevice]) -> Result<Topology> {
    let mut of_tasks: Vec<Vec<Coordinates>> = Vec::new();
    let mut mesh: Coordinates = [1; 4];
    for (place, device) in (0u32..).zip(devices) {
        let (description, at) = (device.description(), coordinates(device));
        let at = match at {
            None => [place, 0, 0, 0],
            Some(at) => {
                let natural = at.map(u32::try_from);
                let is_natural = natural.iter().all(std::result::Result::is_ok);
                if !is_natural {
                    return Err(wrong(format!("{description} is at {at:?}, and coordinates are from 0")));
                }
                natural.map(|coordinate| coordinate.unwrap_or(0))
            }
        };
        for (size, coordinate) in mesh.iter_mut().zip(at) {
            *size = (*size).max(coordinate.saturating_add(1));
        }
        let task = usize::try_from(description.process_index).unwrap_or(0);
        if of_tasks.len() <= task {
            of_tasks.resize(task + 1, Vec::new());
        }
        of_tasks[task].push(at);
    }
    Ok(Topology::new(mesh, of_tasks)?)
}

/// Returns the coordinates of a device's core, if the plugin tells them.
fn coordinates(device: &PjrtDevice) -> Option<[i64; 4]> {
    let description = device.description();
    let at = description.coords()?;
    let coordinate = |axis: usize| at.get(axis).copied().unwrap_or(0);
    Some([coordinate(0), coordinate(1), coordinate(2), description.core_on_chip().unwrap_or(0)])
}

/// Returns the device of each replica's core, found by its coordinates, or in a line by its number.
pub(super) fn assigned(
    assignment: &DeviceAssignment,
    devices: &[PjrtDevice],
) -> std::result::Result<Vec<PjrtDevice>, String> {
    if assignment.num_cores_per_replica() != 1 {
        let cores = assignment.num_cores_per_replica();
        return Err(format!(
            "the assignment gives each replica {cores} cores; programs are not partitioned among cores (no spatial \
             partitioning), so give each one core"
        ));
    }
    let of = |replica: u32| -> std::result::Result<PjrtDevice, String> {
        let core = assignment.coordinates(replica, 0).map_err(|error| error.to_string())?.map(i64::from);
        let place = |(place, device): (i64, &PjrtDevice)| coordinates(device).unwrap_or([place, 0, 0, 0]) == core;
        let found = (0..).zip(devices).find(|device| place(*device)).map(|(_, device)| device.clone());
        found.ok_or_else(|| {
            format!("the assignment gives replica {replica} the core {core:?}, which this process does not have")
        })
    };
    (0..assignment.num_replicas()).map(of).collect()
}

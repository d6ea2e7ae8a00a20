use std::path::{Path, PathBuf};
use std::time::Duration;

use distribute_cluster::tpu::{AssignmentOptions, DeviceAssignment, Topology, TpuOptions, TpuResolver};
use simulated_pjrt::{Script, install};

use super::{TpuBuilder, TpuStrategy};
use crate::{Error, Strategy};

/// Installs a plugin with two chips of two cores, whose order is not that of their places.
fn of_two_chips() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let places = vec![[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]];
    let plugin = install(folder.path(), &Script { devices: 4, places, ..Script::default() }).unwrap();
    (folder, plugin.path().to_owned())
}

fn on(plugin: &Path) -> TpuBuilder {
    TpuStrategy::builder().plugin(plugin).timeout(Duration::from_secs(10))
}

fn ids(strategy: &Strategy) -> Vec<i32> {
    strategy.pjrt().unwrap().devices().iter().map(|device| device.id()).collect()
}

fn resolver(variables: &'static [(&'static str, &'static str)]) -> TpuResolver {
    let variable = |name: &str| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned());
    TpuResolver::from_vars(variable, TpuOptions::default()).unwrap()
}

fn problem(built: Result<Strategy, Error>) -> String {
    built.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn cores_are_assigned_by_the_topology_of_the_plugin() {
    let (_folder, plugin) = of_two_chips();
    let all = on(&plugin).build().unwrap();
    assert_eq!(ids(&all), [0, 1, 2, 3]);
    let topology = all.pjrt().unwrap().topology().unwrap();
    assert_eq!((topology.mesh_shape(), topology.num_tasks()), ([2, 1, 1, 2], 1));
    let built = on(&plugin).assign(AssignmentOptions::default().num_replicas(4)).build().unwrap();
    // In the order of coordinates: the places [0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0] and [1, 0, 0, 1].
    assert_eq!(ids(&built), [1, 3, 2, 0]);
    let given = DeviceAssignment::new(topology, vec![vec![[1, 0, 0, 0]], vec![[0, 0, 0, 1]]]).unwrap();
    assert_eq!(ids(&on(&plugin).device_assignment(given).build().unwrap()), [2, 3]);
}

#[test]
fn partitions_and_places_that_are_not_there_are_refused() {
    let (_folder, plugin) = of_two_chips();
    let chips = AssignmentOptions::default().computation_shape([1, 1, 1, 2]).num_replicas(2);
    let text = problem(on(&plugin).assign(chips).build());
    assert!(text.contains("2 cores") && text.contains("spatial partitioning"), "{text}");
    let text = problem(on(&plugin).assign(AssignmentOptions::default().num_replicas(5)).build());
    assert!(text.contains('5') || text.contains("fit"), "{text}");
    let other = Topology::new([3, 1, 1, 1], vec![vec![[0, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0]]]).unwrap();
    let given = DeviceAssignment::new(other, vec![vec![[2, 0, 0, 0]]]).unwrap();
    let text = problem(on(&plugin).device_assignment(given).build());
    assert!(text.contains("[2, 0, 0, 0], which this process does not have"), "{text}");
}

#[test]
fn a_resolver_must_be_of_one_host_with_the_plugins_cores() {
    let (_folder, plugin) = of_two_chips();
    let fits = resolver(&[("TPU_WORKER_HOSTNAMES", "tpu-0"), ("TPU_ACCELERATOR_TYPE", "v5litepod-4")]);
    assert_eq!(ids(&on(&plugin).resolver(fits).build().unwrap()).len(), 4);
    let local = resolver(&[("TPU_NAME", "local")]);
    assert_eq!(ids(&on(&plugin).resolver(local).build().unwrap()).len(), 4);
    let larger = resolver(&[("TPU_WORKER_HOSTNAMES", "tpu-0"), ("TPU_ACCELERATOR_TYPE", "v5litepod-1")]);
    let text = problem(on(&plugin).resolver(larger).build());
    assert!(text.contains("1 cores on this host, but the plugin has 4 devices"), "{text}");
    let hosts = resolver(&[
        ("TPU_WORKER_HOSTNAMES", "tpu-0,tpu-1"),
        ("TPU_WORKER_ID", "0"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
    ]);
    let text = problem(on(&plugin).resolver(hosts).build());
    assert!(text.contains("the TPU has 2 hosts") && text.contains("one host"), "{text}");
}

//! A cluster of this process, for tests.

use distribute_cluster::{ClusterSpec, SimpleResolver, TaskType};
use distribute_testkit::Ports;

/// Returns the resolvers of a server, a worker and a chief on free ports.
pub(super) fn resolver() -> impl Fn(TaskType) -> SimpleResolver {
    let ports = Ports::reserve(2).unwrap();
    let addresses = ports.addresses();
    drop(ports);
    let spec = ClusterSpec::new().with_job(TaskType::Ps, [addresses[0].clone()]).unwrap();
    let spec = spec.with_job(TaskType::Worker, [addresses[1].clone()]).unwrap();
    move |kind| {
        let (spec, task_type) = (spec.clone(), Some(kind));
        SimpleResolver { spec, task_type, task_id: Some(0), ..SimpleResolver::default() }
    }
}

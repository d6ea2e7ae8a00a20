//! Decoders of bytes from outside, for fuzzers and for the replay of their corpora. Not part of the public interface.
//!
//! Each function decodes its input, checks what it decoded, and returns whether the input was accepted. The crate has
//! them in its tests, and in builds by cargo-fuzz, which sets `cfg(fuzzing)`.

#[cfg(feature = "coordination")]
mod arrivals;
mod handshake;
mod input;
#[cfg(test)]
mod tests;
mod variables;

use serde_json::Value;

#[cfg(all(test, feature = "coordination"))]
pub(crate) use self::arrivals::connection;
#[cfg(feature = "coordination")]
pub(crate) use self::arrivals::{messages, runtime};
pub(crate) use self::input::Input;
pub use self::{
    handshake::{handshake, handshake_between},
    variables::launcher_variables,
};
use crate::{ClusterResolver, ClusterSpec, Membership, Task, TfConfigResolver, hostlist};

/// TF_CONFIG.
pub fn tf_config(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let Ok(resolver) = TfConfigResolver::from_json(&text) else { return false };
    let spec = resolver.cluster_spec().expect("it was parsed");
    let json: Value = spec.to_json();
    assert_eq!(ClusterSpec::from_json(&json).expect("a cluster that was accepted"), spec);
    assert!(resolver.is_local() || resolver.task_type().is_some() || spec.tasks().count() == 1);
    assert!(resolver.master(None, None, None).is_ok());
    if let Ok(Some(membership)) = Membership::from_resolver(&resolver) {
        assert!(membership.rank < membership.world_size());
        assert!(membership.tasks.len() <= ClusterSpec::MAX_TASKS);
    }
    true
}

/// Lists of hosts, and of numbers of tasks, as Slurm's variables have them.
pub fn host_list(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let tasks = crate::slurm::tasks_per_node(&text).inspect(|tasks| assert!(tasks.len() <= ClusterSpec::MAX_TASKS));
    let Some(hosts) = hostlist::expand(&text) else { return tasks.is_ok() };
    assert!(!hosts.is_empty() && hosts.len() <= ClusterSpec::MAX_TASKS);
    assert!(hosts.iter().all(|host| !host.is_empty() && host.len() <= hostlist::MAX_NAME_BYTES));
    // The lists of large clusters take long to compare.
    let few = &hosts[..hosts.len().min(300)];
    // A comma or a bracket within a name would be read as one of the list.
    if few.iter().all(|host| !host.contains([',', '['])) {
        assert_eq!(hostlist::expand(&hostlist::compress(few)).as_deref(), Some(few));
    }
    true
}

/// The names of tasks, and addresses.
pub fn task_names(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let task = text.parse::<Task>().inspect(|task| assert_eq!(task.to_string().parse::<Task>().ok(), Some(*task)));
    let spec = ClusterSpec::new().with_job(crate::TaskType::Worker, [text.clone()]);
    if let Ok(spec) = &spec {
        let address = spec.task_address(Task::new(crate::TaskType::Worker, 0)).expect("the task was added");
        assert_eq!(address, text);
        assert!(crate::host::split(address).is_ok_and(|(host, port)| !host.is_empty() && port > 0));
    }
    task.is_ok() || spec.is_ok()
}

/// The messages of members to the leader of the coordination service, as they arrive, and its state.
#[cfg(feature = "coordination")]
pub fn coordination(bytes: &[u8]) -> bool {
    crate::coordination::fuzz::member_messages(bytes)
}

/// The messages of the leader of the coordination service, as they arrive.
#[cfg(feature = "coordination")]
pub fn coordination_leader(bytes: &[u8]) -> bool {
    crate::coordination::fuzz::leader_messages(bytes)
}

/// The messages between the processes of an elastic job, as they arrive, and the state machine.
#[cfg(feature = "coordination")]
pub fn elastic(bytes: &[u8]) -> bool {
    crate::elastic::fuzz::messages(bytes)
}

/// The register's file.
#[cfg(feature = "coordination")]
pub fn elastic_register(bytes: &[u8]) -> bool {
    crate::elastic::fuzz::register(bytes)
}

/// gRPC's messages, as they arrive in pieces.
#[cfg(feature = "grpc")]
pub fn grpc_pieces(bytes: &[u8]) -> bool {
    crate::grpc::fuzz::pieces(bytes)
}

/// The answers of Compute Engine, Cloud TPU and the metadata server, and TPU variables.
#[cfg(all(feature = "gce", feature = "tpu"))]
pub fn cloud_answers(bytes: &[u8]) -> bool {
    let mut input = Input(bytes);
    match input.byte() % 4 {
        0 => crate::gce::fuzz::answers(input.0),
        1 => crate::http::fuzz::refusals(input.0),
        2 => crate::tpu::fuzz::nodes(input.0),
        _ => crate::tpu::fuzz::slices(input.0),
    }
}

/// The answers of Kubernetes' API server.
#[cfg(feature = "kubernetes")]
pub fn kubernetes_answers(bytes: &[u8]) -> bool {
    crate::kubernetes::fuzz::answers(bytes)
}

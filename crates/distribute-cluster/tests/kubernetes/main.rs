//! The resolver of pods, and the register in a Lease, against a stand-in for the API server.
#![cfg(feature = "kubernetes")]
#![expect(clippy::unwrap_used, reason = "tests")]

mod access;
mod faults;
#[cfg(feature = "coordination")]
mod leases;
mod server;
mod tasks;
mod waiting;

use std::time::Duration;

use distribute_cluster::{
    ClusterResolver, Error, KubernetesAccess, KubernetesOptions, KubernetesResolver, Result, TaskType,
};
use serde_json::{Value, json};

use server::Server;

/// Options that look once, at a server.
fn once(server: &Server) -> KubernetesOptions {
    KubernetesOptions::default()
        .access(Some(KubernetesAccess::Url(server.url())))
        .wait(Duration::ZERO)
        .request_timeout(Duration::from_secs(5))
}

fn resolve(options: KubernetesOptions) -> Result<KubernetesResolver> {
    resolve_with(&[], options)
}

fn resolve_with(variables: &[(&str, &str)], options: KubernetesOptions) -> Result<KubernetesResolver> {
    let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    KubernetesResolver::from_vars(find, options)
}

/// A running pod of a job; its number is the last part of its addresses.
fn pod(name: &str, job: &str, number: u8) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"job-name": job}},
        "spec": {"nodeName": "n"},
        "status": {
            "phase": "Running",
            "podIP": format!("10.1.0.{number}"),
            "hostIP": format!("10.9.0.{number}"),
            "containerStatuses": [{"name": "main", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {}}}],
        },
    })
}

/// The same pod in another phase.
fn in_phase(mut pod: Value, phase: &str) -> Value {
    pod["status"] = json!({"phase": phase});
    pod
}

/// The same pod, of which a container waits.
fn held_up(mut pod: Value, phase: &str, reason: &str) -> Value {
    pod["status"]["phase"] = json!(phase);
    pod["status"]["containerStatuses"][0]["state"] = json!({"waiting": {"reason": reason, "message": "back-off"}});
    pod
}

fn addresses(resolver: &KubernetesResolver, kind: TaskType) -> Vec<String> {
    let spec = resolver.cluster_spec().unwrap();
    spec.job_tasks(kind).into_iter().map(|address| address.unwrap().to_owned()).collect()
}

fn text(outcome: Result<KubernetesResolver>) -> String {
    outcome.unwrap_err().to_string()
}

/// The cluster's pods are missing or not running.
fn is_about_pods(error: &Error) -> bool {
    matches!(error, Error::Pods { .. })
}

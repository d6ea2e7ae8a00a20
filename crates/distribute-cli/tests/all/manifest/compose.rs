//! Docker Compose: its schema, its tasks, and its own opinion where the plugin is installed.

use std::fs;
use std::process::Command;

use distribute_testkit::skipped;
use serde_json::{Value, json};

use super::kubernetes::Pod;
use super::schema::{COMPOSE, problems};
use super::{Environment, document, list, membership, print, text};

/// Returns the tasks of a file, in its order.
pub(crate) fn pods(file: &Value) -> Vec<Pod> {
    let services = file["services"].as_object().unwrap();
    let mut all: Vec<_> = services
        .iter()
        .map(|(name, service)| {
            let (role, index) = name.rsplit_once('-').unwrap();
            let environment = service["environment"].as_object().unwrap().iter();
            let environment: Environment =
                environment.map(|(name, value)| (name.clone(), interpolated(value.as_str().unwrap()))).collect();
            Pod {
                // A service is reached by its name in the default network.
                host: Some(name.clone()),
                role: role.to_owned(),
                index: index.parse().unwrap(),
                environment,
                command: list(service, "/entrypoint").iter().map(|part| interpolated(part.as_str().unwrap())).collect(),
            }
        })
        .collect();
    let order = ["chief", "worker", "ps", "evaluator"];
    all.sort_by_key(|pod| (order.iter().position(|role| *role == pod.role), pod.index));
    all
}

/// Replaces `$$` by `$`; any other `$` would be a reference to a variable of the user's shell.
fn interpolated(text: &str) -> String {
    assert!(!text.replace("$$", "").contains('$'), "{text:?}");
    text.replace("$$", "$")
}

#[test]
fn each_task_finds_its_place() {
    for workers in [1_u32, 2, 12] {
        let number = workers.to_string();
        let flags = ["--name", "mnist", "--image", "mnist:1", "-n", &number, "--port", "4000"];
        let file = document(&print("compose", &flags, &["train"]));
        for (pod, rank) in pods(&file).iter().zip(0..) {
            let found = membership(&pod.environment);
            assert_eq!((found.rank, found.world_size()), (rank, workers));
            assert_eq!(found.leader_address, "worker-0:4000");
        }
    }
}

const ALL: [&str; 26] = [
    "--name",
    "mnist",
    "--image",
    "mnist:1",
    "-n",
    "2",
    "--ps",
    "1",
    "--evaluator",
    "1",
    "--cpus",
    "1.5",
    "--memory",
    "2Gi",
    "--gpus",
    "2",
    "--checkpoints",
    "data",
    "--shared-memory",
    "512Mi",
    "--restarts",
    "2",
    "--grace",
    "90",
    "--env",
    "A=$B",
];

#[test]
fn every_option_is_in_the_file_where_compose_reads_it() {
    let file = document(&print("compose", &ALL, &["train"]));
    assert_eq!(problems(&file, COMPOSE), [""; 0]);
    let worker = &file["services"]["worker-1"];
    let expected = json!({
        "image": "mnist:1",
        "entrypoint": ["train"],
        "environment": {"TF_CONFIG": text(worker, "/environment/TF_CONFIG"), "A": "$$B"},
        "restart": "on-failure:2",
        "stop_grace_period": "90s",
        "cpus": "1.5",
        "mem_limit": "2gb",
        "shm_size": "512mb",
        "volumes": [{"type": "volume", "source": "checkpoints", "target": "/checkpoints"}],
        "deploy": {"resources": {"reservations": {"devices": [
            {"driver": "nvidia", "device_ids": ["2", "3"], "capabilities": ["gpu"]},
        ]}}},
    });
    assert_eq!(worker, &expected);
    assert_eq!(file["volumes"], json!({"checkpoints": {"name": "data"}}));
    // Parameter servers and their coordinator use none; each other task has its own.
    assert!(file["services"]["ps-0"].get("deploy").is_none() && file["services"]["chief-0"].get("deploy").is_none());
    let ids = "/services/evaluator-0/deploy/resources/reservations/devices/0/device_ids";
    assert_eq!(file.pointer(ids), Some(&json!(["4", "5"])));
}

#[test]
fn docker_compose_reads_the_file() {
    let version = Command::new("docker").args(["compose", "version"]).output();
    if !version.is_ok_and(|output| output.status.success()) {
        return skipped("docker compose is not installed (apt-get install docker-compose-plugin)");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("compose.yaml");
    fs::write(&path, print("compose", &ALL, &["train", "$X"])).unwrap();
    let mut config = Command::new("docker");
    config.args(["compose", "-f"]).arg(&path).args(["config", "--format", "json"]);
    let output = config.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(read["services"].as_object().unwrap().len(), 5);
    assert_eq!(read["services"]["worker-0"]["mem_limit"], "2147483648");
}

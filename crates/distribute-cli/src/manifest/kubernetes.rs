//! Parts of pods that several kinds of Kubernetes share.

use super::args::{Container, Program};
use super::checks::{Existing, Name, Variable};
use super::yaml::{Map, Node, texts};
use crate::error::Error;

/// Returns the metadata of an object.
pub(super) fn metadata(name: &Name, namespace: Option<&Existing>) -> Map {
    Map::new().with("name", &name.0).maybe("namespace", namespace.map(|namespace| &namespace.0))
}

/// Returns a variable with a text.
pub(super) fn variable(name: impl Into<Node>, value: impl Into<String>) -> Node {
    Map::new().with("name", name).with("value", value.into()).into()
}

/// Returns a variable with the value of a field of the pod.
pub(super) fn field(comment: &str, name: &'static str, path: &str) -> Node {
    let reference = Map::new().with("fieldRef", Map::new().with("fieldPath", path.to_owned()));
    Map::new().noted(comment, "name", name).with("valueFrom", reference).into()
}

/// Returns the user's variables.
pub(super) fn variables(given: &[Variable]) -> impl Iterator<Item = Node> {
    given.iter().map(|given| variable(&given.name, literal(&given.value)))
}

/// Returns the program and its arguments, in place of the image's.
pub(super) fn command(program: &Program) -> Node {
    texts(program.program.iter().map(|part| literal(part)))
}

/// Returns a text that Kubernetes leaves as it is, where it would replace `$(NAME)`.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

/// Returns the container of a task, up to its ports.
pub(super) fn container(
    name: &'static str,
    program: &Program,
    container: &Container,
    env: Vec<Node>,
    computes: bool,
) -> Map {
    let env: Vec<Node> = env.into_iter().chain(variables(&program.env)).collect();
    let map = Map::new().with("name", name).with("image", &container.image.0).with("command", command(program));
    let map = map.maybe("env", (!env.is_empty()).then_some(env)).maybe("resources", resources(container, computes));
    map.maybe("volumeMounts", list(mounts(container)))
}

/// Returns limits, which are also the requests.
pub(super) fn resources(container: &Container, computes: bool) -> Option<Map> {
    let given = &container.resources;
    let limits = Map::new()
        .maybe("cpu", given.cpus.map(|cpus| cpus.quantity()))
        .maybe("memory", given.memory.map(|memory| memory.to_string()))
        .maybe("nvidia.com/gpu", (computes && given.gpus > 0).then(|| given.gpus.to_string()));
    Some(Map::new().noted("Requests equal limits that have none of their own.", "limits", limits.some()?))
}

/// Returns the mounts of a task's container.
pub(super) fn mounts(container: &Container) -> Vec<Node> {
    let mount = |name: &'static str, path: String| Map::new().with("name", name).with("mountPath", path).into();
    let checkpoints = container.checkpoints.as_ref().map(|_| mount("checkpoints", container.checkpoints_at.0.clone()));
    let memory = container.shared_memory.map(|_| mount("shared-memory", "/dev/shm".to_owned()));
    checkpoints.into_iter().chain(memory).collect()
}

/// Returns the volumes of a pod.
pub(super) fn volumes(container: &Container) -> Vec<Node> {
    let checkpoints = container.checkpoints.as_ref().map(|claim| {
        let claim = Map::new().with("claimName", &claim.0);
        let comment = "Tasks on several nodes need a claim with the access mode ReadWriteMany.";
        Map::new().noted(comment, "name", "checkpoints").with("persistentVolumeClaim", claim).into()
    });
    let memory = container.shared_memory.map(|size| {
        let folder = Map::new().with("medium", "Memory").with("sizeLimit", size.to_string());
        let comment = "In place of 64 MiB. It counts as memory of the task.";
        Map::new().noted(comment, "name", "shared-memory").with("emptyDir", folder).into()
    });
    checkpoints.into_iter().chain(memory).collect()
}

/// Returns a list unless it is empty.
pub(super) fn list(items: Vec<Node>) -> Option<Vec<Node>> {
    (!items.is_empty()).then_some(items)
}

/// Returns the rules by which a Job decides about a pod that ended. `FailJob` and `Ignore` need the restart policy
/// `Never`.
pub(super) fn pod_failure_policy(container: &'static str) -> Map {
    let on = |values: &[u32]| {
        let values = Node::Inline(values.iter().map(|code| Node::from(*code)).collect());
        Map::new().with("containerName", container).with("operator", "In").with("values", values)
    };
    let failed = "The program's own error, a wrong description or option, a panic: a restart does not help.";
    let saved = "Told to stop, with a checkpoint saved: restarted, and not counted.";
    let moved = "The node is drained, lost or needed for others: restarted elsewhere, and not counted.";
    let disrupted = Map::new().with("type", "DisruptionTarget").with("status", "True".to_owned());
    // The first rule that fits decides: how a task of a lost node ends says nothing about the program.
    let rules = vec![
        Map::new().noted(moved, "action", "Ignore").with("onPodConditions", vec![disrupted.into()]).into(),
        Map::new().noted(failed, "action", "FailJob").with("onExitCodes", on(&[1, 2, 101])).into(),
        Map::new().noted(saved, "action", "Ignore").with("onExitCodes", on(&[143])).into(),
    ];
    Map::new().with("rules", rules)
}

/// Checks options that contradict each other.
///
/// # Errors
/// [`Error::Manifest`] if /dev/shm is larger than the memory that it is part of, or is also the folder of checkpoints.
pub(super) fn check(container: &Container) -> Result<(), Error> {
    if let (Some(shared), Some(memory)) = (container.shared_memory, container.resources.memory)
        && shared > memory
    {
        return Err(Error::Manifest {
            problem: "/dev/shm is part of a task's memory, and larger than it".into(),
            given: format!("--shared-memory {shared} --memory {memory}"),
            expected: "less shared memory than memory".into(),
            remedy: "give more --memory, or less --shared-memory".into(),
        });
    }
    let path = container.checkpoints_at.0.trim_end_matches('/');
    if container.shared_memory.is_some() && container.checkpoints.is_some() && path == "/dev/shm" {
        return Err(Error::Manifest {
            problem: "checkpoints and shared memory cannot have one folder".into(),
            given: "--checkpoints-at /dev/shm --shared-memory".into(),
            expected: "another folder for checkpoints".into(),
            remedy: "give another --checkpoints-at".into(),
        });
    }
    Ok(())
}

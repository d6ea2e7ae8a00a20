//! A TFJob of Kubeflow's training operator.

use distribute_cluster::JobId;

use super::args::TfJob;
use super::kubernetes::{check, container, list, metadata, volumes};
use super::tasks::{Role, Tasks, fits};
use super::yaml::{Map, Node, documents};
use crate::error::Error;

/// Returns the job file.
///
/// # Errors
/// [`Error::Manifest`] if options contradict each other or a name is too long, [`Error::System`] if the system has no
/// random numbers for an identity.
///
/// # Source
/// kubeflow.org/v1: the operator sets TF_CONFIG in the container `tensorflow`, with the port `tfjob-port`, and restarts
/// exit codes from 128 on under the policy `ExitCode`.
pub(super) fn file(job: &TfJob) -> Result<String, Error> {
    check(&job.container)?;
    let tasks = Tasks::new(&job.program, &job.roles)?;
    let name = &job.program.name;
    let identity = job.program.has_records().then(|| identity(&name.0)).transpose()?;
    let mut replicas = Map::new();
    for role in tasks.roles() {
        fits(&name.0, &format!("{name}-{}-{}", role.name, role.count - 1))?;
        replicas = replicas.with(key(role), replica(job, role, identity.as_ref()));
    }
    let run = Map::new()
        .noted("Tasks that still run when the job ends, such as parameter servers.", "cleanPodPolicy", "Running")
        .maybe("activeDeadlineSeconds", job.limits.time_limit.map(|limit| limit.seconds()));
    let mut spec = Map::new().with("runPolicy", run);
    if tasks.chief == 0 {
        spec = spec.noted("Not worker 0 alone, which others may outlive.", "successPolicy", "AllWorkers");
    }
    let object = Map::new()
        .with("apiVersion", "kubeflow.org/v1")
        .with("kind", "TFJob")
        .with("metadata", metadata(name, job.limits.namespace.as_ref()))
        .with("spec", spec.with("tfReplicaSpecs", replicas));
    let heading = "Tasks of a distributed job, for Kubeflow's training operator, which sets TF_CONFIG.\n\
                   Start: kubectl create -f FILE";
    Ok(documents(heading, &[object]))
}

/// Returns a name for one start of the job: the operator does not tell its pods the uid of theirs.
fn identity(name: &str) -> Result<String, Error> {
    let random = JobId::random().map_err(std::io::Error::other).map_err(Error::system("name the job"))?;
    Ok(format!("{name}-{random:.8}"))
}

fn replica(job: &TfJob, role: Role, identity: Option<&String>) -> Node {
    let port = Map::new().with("name", "tfjob-port").with("containerPort", u32::from(job.port.port));
    let comment = "Of one start of this file: write another name before the next.";
    let variable = |name: &String| Map::new().noted(comment, "name", "DISTRIBUTE_JOB_ID").with("value", name).into();
    let env = identity.map(variable).into_iter().collect();
    let task = container("tensorflow", &job.program, &job.container, env, role.computes).noted(
        "The port in TF_CONFIG, which the operator sets in a container named tensorflow only.",
        "ports",
        vec![port.into()],
    );
    let pod = Map::new()
        .noted("Time to save a checkpoint after SIGTERM.", "terminationGracePeriodSeconds", job.grace.grace)
        .with("containers", vec![task.into()])
        .maybe("volumes", list(volumes(&job.container)));
    let codes = "Restarts exit codes from 128 on (138: another task was lost, 143: told to stop), and fails the job \
                 for others.";
    Map::new()
        .with("replicas", role.count)
        .noted(codes, "restartPolicy", "ExitCode")
        .with("template", Map::new().with("spec", pod))
        .into()
}

/// Returns the name of a role in `tfReplicaSpecs`.
fn key(role: Role) -> &'static str {
    match role.name {
        "chief" => "Chief",
        "ps" => "PS",
        "evaluator" => "Evaluator",
        _ => "Worker",
    }
}

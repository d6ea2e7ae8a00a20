//! An indexed Job of Kubernetes, and the headless Service by which its pods find rank 0.

use super::args::Job;
use super::kubernetes::{check, container, field, list, metadata, pod_failure_policy, variable, volumes};
use super::tasks::fits;
use super::yaml::{Map, documents};
use crate::error::Error;

/// Returns the job file.
///
/// # Errors
/// [`Error::Manifest`] if options contradict each other or a name is too long.
///
/// # Source
/// Kubernetes' reference: Job, "Pod failure policy", "Backoff limit per index", "Job with Pod-to-Pod Communication".
pub(super) fn file(job: &Job) -> Result<String, Error> {
    check(&job.container)?;
    let (name, workers) = (&job.program.name, job.program.workers);
    fits(&name.0, &format!("{name}-{}-xxxxx", workers - 1))?;
    let service_spec = Map::new()
        .with("clusterIP", "None")
        .noted("Workers meet before they are ready.", "publishNotReadyAddresses", "true")
        .with("selector", Map::new().with(NAME_LABEL, &name.0));
    let service = Map::new()
        .with("apiVersion", "v1")
        .noted("Gives each pod the host name NAME-INDEX.NAME.", "kind", "Service")
        .with("metadata", metadata(name, job.limits.namespace.as_ref()))
        .with("spec", service_spec);
    let env = vec![
        field("Read as if torchrun or distribute run had set them.", "RANK", INDEX),
        variable("WORLD_SIZE", workers.to_string()),
        variable("MASTER_ADDR", format!("{name}-0.{name}")),
        variable("DISTRIBUTE_PORT", job.port.port.to_string()),
        field("Pods of an earlier job of this name are refused.", "DISTRIBUTE_JOB_ID", UID),
    ];
    let pod = Map::new()
        .noted("The policy above restarts tasks.", "restartPolicy", "Never")
        .with("subdomain", &name.0)
        .noted("Time to save a checkpoint after SIGTERM.", "terminationGracePeriodSeconds", job.grace.grace)
        .with("containers", vec![container("task", &job.program, &job.container, env, true).into()])
        .maybe("volumes", list(volumes(&job.container)));
    let alone = "One pod per rank. Those that lose another end with 138 and are restarted too, so they meet again.";
    let spec = Map::new()
        .noted(alone, "completionMode", "Indexed")
        .with("completions", workers)
        .with("parallelism", workers)
        .with("backoffLimitPerIndex", job.restarts.restarts)
        .noted("A rank that cannot be restarted ends the job.", "maxFailedIndexes", 0u32)
        .maybe("activeDeadlineSeconds", job.limits.time_limit.map(|limit| limit.seconds()))
        .with("podFailurePolicy", pod_failure_policy("task"))
        .with("template", Map::new().with("spec", pod));
    let object = Map::new()
        .with("apiVersion", "batch/v1")
        .with("kind", "Job")
        .with("metadata", metadata(name, job.limits.namespace.as_ref()))
        .with("spec", spec);
    let heading = "Workers of a distributed job, for Kubernetes 1.29 or newer.\nStart: kubectl create -f FILE";
    Ok(documents(heading, &[service, object]))
}

/// The label with the name of the Job, of its pods.
const NAME_LABEL: &str = "batch.kubernetes.io/job-name";

/// The index of a pod.
pub(super) const INDEX: &str = "metadata.annotations['batch.kubernetes.io/job-completion-index']";

const UID: &str = "metadata.labels['batch.kubernetes.io/controller-uid']";

//! A TrainJob of Kubeflow Trainer.

use super::args::TrainJob;
use super::job_set::UID;
use super::kubernetes::{check, command, field, list, metadata, mounts, resources, variables, volumes};
use super::tasks::fits;
use super::yaml::{Map, documents};
use crate::error::Error;

/// Returns the job file.
///
/// # Errors
/// [`Error::Manifest`] if options contradict each other, a name is too long, or a list has more items than a TrainJob
/// takes.
///
/// # Source
/// trainer.kubeflow.org/v1alpha1 of Kubeflow Trainer 2.3: pods are `TRAINJOB-node-0-INDEX`; a runtime for torch sets
/// PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
pub(super) fn file(job: &TrainJob) -> Result<String, Error> {
    check(&job.container)?;
    let (name, workers) = (&job.program.name, job.program.workers);
    fits(&name.0, &format!("{name}-node-0-{}-xxxxx", workers - 1))?;
    short("parts of the program", job.program.program.len())?;
    short("variables", job.program.env.len() + 1)?;
    let identity = field("Pods of an earlier job of this name are refused.", "DISTRIBUTE_JOB_ID", UID);
    let env: Vec<_> = std::iter::once(identity).chain(variables(&job.program.env)).collect();
    let trainer = Map::new()
        .with("image", &job.container.image.0)
        .with("command", command(&job.program))
        .noted("The runtime sets PET_NODE_RANK and the like in addition.", "env", env)
        .with("numNodes", workers)
        .noted("A process uses all GPUs of its pod itself.", "numProcPerNode", 1u32)
        .maybe("resourcesPerNode", resources(&job.container, true));
    let spec = Map::new()
        .with("runtimeRef", Map::new().with("name", &job.runtime.0))
        .maybe("activeDeadlineSeconds", job.limits.time_limit.map(|limit| limit.seconds()))
        .with("trainer", trainer)
        .maybe("runtimePatches", patch(job).map(|patch| vec![patch.into()]));
    let object = Map::new()
        .with("apiVersion", "trainer.kubeflow.org/v1alpha1")
        .with("kind", "TrainJob")
        .with("metadata", metadata(name, job.limits.namespace.as_ref()))
        .with("spec", spec);
    let heading = "Workers of a distributed job, for Kubeflow Trainer, whose runtime decides about restarts.\n\
                   Start: kubectl create -f FILE";
    Ok(documents(heading, &[object]))
}

/// Returns what the runtime's pods get in addition, if anything.
fn patch(job: &TrainJob) -> Option<Map> {
    let mounts = list(mounts(&job.container));
    let node = mounts.map(|mounts| vec![Map::new().with("name", "node").with("volumeMounts", mounts).into()]);
    let pod = Map::new()
        .maybe("terminationGracePeriodSeconds", job.grace)
        .maybe("containers", node)
        .maybe("volumes", list(volumes(&job.container)))
        .some()?;
    // The template of a JobSet, of its Job, of that one's pods.
    let template = |inner: Map| Map::new().with("template", Map::new().with("spec", inner));
    let job = Map::new().with("name", "node").and(template(template(pod)));
    let specification = template(Map::new().with("replicatedJobs", vec![job.into()]));
    let comment = "In addition to what the runtime says about its pods.";
    Some(Map::new().noted(comment, "manager", "distribute-cli").with("trainingRuntimeSpec", specification))
}

/// Checks the length of a list.
fn short(what: &str, length: usize) -> Result<(), Error> {
    match length <= LONGEST_LIST {
        true => Ok(()),
        false => Err(Error::Manifest {
            problem: format!("a TrainJob does not take as many {what}"),
            given: length.to_string(),
            expected: format!("at most {LONGEST_LIST}"),
            remedy: "put them into a script or a file of the image".into(),
        }),
    }
}

/// Longest list of its schema for `command` and `env`.
const LONGEST_LIST: usize = 128;

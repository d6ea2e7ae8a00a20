//! A JobSet: one Job for each role, with host names that are known beforehand.

use super::args::JobSet;
use super::job::INDEX;
use super::kubernetes::{check, container, field, list, metadata, pod_failure_policy, variable, volumes};
use super::tasks::{EVALUATOR, Role, Tasks, fits};
use super::yaml::{Map, Node, documents, texts};
use crate::error::Error;

/// Returns the job file.
///
/// # Errors
/// [`Error::Manifest`] if options contradict each other, a name is too long, or there are too many tasks for TF_CONFIG.
///
/// # Source
/// JobSet's API, jobset.x-k8s.io/v1alpha2: host names are `JOBSET-ROLE-0-INDEX.SUBDOMAIN`.
pub(super) fn file(job: &JobSet) -> Result<String, Error> {
    check(&job.container)?;
    let tasks = Tasks::new(&job.program, &job.roles)?;
    let name = &job.program.name;
    let roles = tasks.roles();
    for role in &roles {
        fits(&name.0, &format!("{name}-{}-0-{}-xxxxx", role.name, role.count - 1))?;
    }
    let jobs = roles.iter().map(|role| replicated(job, tasks, *role)).collect::<Result<Vec<_>, _>>()?;
    let network = Map::new().with("enableDNSHostnames", "true").with("subdomain", &name.0).noted(
        "Tasks meet before they are ready.",
        "publishNotReadyAddresses",
        "true",
    );
    let permanent = Map::new()
        .noted("Exit codes that a restart does not help, and the time limit.", "name", "permanent")
        .with("action", "FailJobSet")
        .with("onJobFailureReasons", texts(["PodFailurePolicy", "DeadlineExceeded"]));
    let policy = match tasks.ps {
        0 => Map::new()
            .noted("Any other failure restarts all tasks, which meet again.", "maxRestarts", job.restarts.restarts)
            .with("rules", vec![permanent.into()]),
        _ => Map::new().noted("Each task is restarted alone; the others wait for it.", "maxRestarts", 0u32),
    };
    let spec = Map::new().with("network", network);
    let spec = match tasks.evaluator {
        0 => spec,
        _ => {
            let comment = "The evaluator waits for further checkpoints; it is removed when training has ended.";
            let names = roles.iter().map(|role| role.name).filter(|name| *name != EVALUATOR);
            let policy = Map::new().with("operator", "All").with("targetReplicatedJobs", texts(names));
            spec.noted(comment, "successPolicy", policy)
        }
    };
    let spec = spec.with("failurePolicy", policy).with("replicatedJobs", jobs);
    let object = Map::new()
        .with("apiVersion", "jobset.x-k8s.io/v1alpha2")
        .with("kind", "JobSet")
        .with("metadata", metadata(name, job.limits.namespace.as_ref()))
        .with("spec", spec);
    let heading =
        "Tasks of a distributed job, for Kubernetes 1.29 or newer with JobSet.\nStart: kubectl create -f FILE";
    Ok(documents(heading, &[object]))
}

/// Returns the Job of a role.
fn replicated(job: &JobSet, tasks: Tasks, role: Role) -> Result<Node, Error> {
    let (name, port) = (&job.program.name, job.port.port);
    let address = |role: Role, index| format!("{name}-{}-0-{index}.{name}:{port}", role.name);
    let config = tasks.tf_config(address, role, "$(JOB_COMPLETION_INDEX)");
    if config.len() > LONGEST_VARIABLE {
        return Err(Error::Manifest {
            problem: "the addresses of all tasks do not fit into TF_CONFIG".into(),
            given: format!("{} tasks, whose TF_CONFIG has {} bytes", tasks.total(), config.len()),
            expected: format!("at most {LONGEST_VARIABLE} bytes, which is what Linux passes to a program"),
            remedy: "start fewer tasks; or workers alone by distribute manifest job, which lists no addresses".into(),
        });
    }
    let env = vec![
        field("TF_CONFIG refers to it, so it is first.", "JOB_COMPLETION_INDEX", INDEX),
        variable("TF_CONFIG", config),
        field("Pods of an earlier job of this name are refused.", "DISTRIBUTE_JOB_ID", UID),
    ];
    let pod = Map::new()
        .noted("The policies above restart tasks.", "restartPolicy", "Never")
        .noted("Time to save a checkpoint after SIGTERM.", "terminationGracePeriodSeconds", job.grace.grace)
        .with("containers", vec![container("task", &job.program, &job.container, env, role.computes).into()])
        .maybe("volumes", list(volumes(&job.container)));
    let spec =
        Map::new().with("completionMode", "Indexed").with("completions", role.count).with("parallelism", role.count);
    let spec = match tasks.ps {
        0 => spec.with("backoffLimit", 0u32),
        _ => spec.with("backoffLimitPerIndex", job.restarts.restarts).noted(
            "A task that cannot be restarted ends the job.",
            "maxFailedIndexes",
            0u32,
        ),
    };
    let spec = spec
        .maybe("activeDeadlineSeconds", job.limits.time_limit.map(|limit| limit.seconds()))
        .with("podFailurePolicy", pod_failure_policy("task"))
        .with("template", Map::new().with("spec", pod));
    Ok(Map::new().with("name", role.name).with("template", Map::new().with("spec", spec)).into())
}

pub(super) const UID: &str = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']";

/// Longest text of a variable with its name and the zero at its end: MAX_ARG_STRLEN of Linux is 32 pages.
const LONGEST_VARIABLE: usize = 131_072 - "TF_CONFIG=".len() - 1;

//! The source that describes this process's place in a job.

use distribute_cluster::{ClusterResolver, ClusterSpec, Error, Membership, Task, TaskType, TfConfigResolver};

use super::report::Check;
use super::seen::Seen;

/// Checks which source describes the job and what it makes of this process, or reports that source's own error.
///
/// Also returns the membership in the group that trains, which parameter servers do not have.
pub(crate) fn cluster(seen: &Seen) -> (Check, Option<Membership>) {
    let resolver = match TfConfigResolver::from_vars(seen.raw()) {
        Ok(resolver) => resolver,
        Err(error) => return (sentence("cluster", error), None),
    };
    // An invalid description was returned as an error above.
    let spec = resolver.cluster_spec().unwrap_or_default();
    if let Some(task) = resolver.task().filter(|task| task.kind == TaskType::Ps) {
        return (Check::ok("cluster", format!("TF_CONFIG: this is {task} of {}", jobs(&spec))), None);
    }
    match Membership::from_vars(seen.raw()) {
        Err(error) => (by_process_manager(seen).unwrap_or_else(|| sentence("cluster", error)), None),
        Ok(None) => (alone(seen), None),
        Ok(Some(membership)) => (member(seen, &membership, &spec), Some(membership)),
    }
}

/// Checks a process of MPICH, where the process manager knows the rest. It can be asked once only, by the program.
fn by_process_manager(seen: &Seen) -> Option<Check> {
    let number = |name: &str| seen.variable(name)?.trim().parse::<u32>().ok();
    let (rank, size) = (number("PMI_RANK")?, number("PMI_SIZE")?);
    let is_asked = seen.variable("PMI_FD").is_some() && seen.variable("MASTER_ADDR").is_none();
    (is_asked && rank < size).then(|| {
        let found = format!("PMI_RANK and PMI_SIZE: this is worker:{rank}, rank {rank} of {size}");
        Check::ok("cluster", found).why("the process manager of mpiexec tells the program where rank 0 is")
    })
}

/// Converts an error of a description to a check: the problem, what was given and expected, and the remedy.
pub(crate) fn sentence(topic: &str, error: Error) -> Check {
    match error {
        Error::Config { subject, problem, given, expected, remedy } => {
            Check::fail(topic, format!("{subject}: {problem}"))
                .why(format!("given: {given}; expected: {expected}"))
                .remedy(remedy)
        }
        error => Check::fail(topic, error.to_string()),
    }
}

fn member(seen: &Seen, membership: &Membership, spec: &ClusterSpec) -> Check {
    let (task, rank, size) = (membership.task(), membership.rank, membership.world_size());
    let mut found = format!("{}: this is {task}, rank {rank} of {size}", membership.source);
    if spec.jobs().count() > 1 {
        found.push_str(&format!(", in a cluster of {}", jobs(spec)));
    }
    let check = Check::ok("cluster", found).details((0..size.min(LISTED)).map(|rank| {
        let more = if rank + 1 == LISTED && size > LISTED { " …" } else { "" };
        format!("rank {rank} is {}{more}", membership.named(rank))
    }));
    // The winning source is not repeated.
    let mut others: Vec<&str> = membership.also_seen.clone();
    others.extend(
        launchers(seen)
            .filter(|name| !membership.source.contains(name))
            .filter(|name| !membership.also_seen.contains(name)),
    );
    match others.as_slice() {
        [] => check,
        others => check.why(format!("also seen, not used: {}", others.join(", "))),
    }
}

/// Checks a process without any supported description, which is fine unless another launcher has left traces.
fn alone(seen: &Seen) -> Check {
    let found = "no variable describes a job: this process is alone";
    let seen_others: Vec<&str> = launchers(seen).collect();
    if seen.variable("DISTRIBUTE_ALONE").is_some_and(|value| value.trim() == "1") {
        return Check::ok("cluster", "DISTRIBUTE_ALONE=1: this process is alone");
    }
    let by_hand = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from its variables before the program starts";
    if let Some(task) = unread_tf_job(seen) {
        return Check::warn("cluster", format!("{found}, although this pod is called as if it were {task}"))
            .why("a TFJob sets TF_CONFIG in the container named tensorflow only, and not for a single replica")
            .remedy("name the container tensorflow");
    }
    match seen_others.as_slice() {
        [] if seen.variable("TF_CONFIG").is_some() => {
            Check::ok("cluster", "TF_CONFIG names no cluster: this process is alone")
        }
        [] => Check::ok("cluster", found),
        [SLURM, ..] => Check::warn("cluster", found)
            .why("there is a Slurm job, but this is not a task of one of its steps")
            .remedy("start the program by srun"),
        others => Check::warn("cluster", found)
            .why(format!("{} is there, which distribute does not read", others.join(", ")))
            .remedy(by_hand),
    }
}

/// Returns the launchers and platforms that have left traces.
fn launchers(seen: &Seen) -> impl Iterator<Item = &'static str> {
    let set = |names: &[&str]| names.iter().any(|name| seen.variable(name).is_some());
    let traces = [
        (SLURM, set(&["SLURM_JOB_ID"])),
        ("SageMaker", !set(&["SM_HOSTS"]) && seen.exists("/opt/ml/input/config/resourceconfig.json")),
        ("JOB_COMPLETION_INDEX (Kubernetes)", set(&["JOB_COMPLETION_INDEX"])),
        ("TPU_*", set(&["TPU_NAME", "TPU_WORKER_ID"])),
    ];
    traces.into_iter().filter(|(_, seen)| *seen).map(|(name, _)| name)
}

/// Returns the task in which the name of this pod ends, as in the pods of a TFJob.
fn unread_tf_job(seen: &Seen) -> Option<Task> {
    seen.variable("KUBERNETES_SERVICE_HOST")?;
    let host = seen.variable("HOSTNAME")?;
    let (rest, index) = host.rsplit_once('-')?;
    let (_, kind) = rest.rsplit_once('-')?;
    format!("{kind}:{index}").parse().ok().filter(|_| seen.variable("TF_CONFIG").is_none())
}

/// Formats as `chief 1, worker 2, ps 1`.
fn jobs(spec: &ClusterSpec) -> String {
    let jobs = spec.jobs().map(|kind| format!("{kind} {}", spec.num_tasks(kind)));
    jobs.collect::<Vec<_>>().join(", ")
}

const SLURM: &str = "Slurm";

/// Maximum number of members in the details.
const LISTED: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    fn with(variables: &[(&str, &str)]) -> (Check, Option<Membership>) {
        cluster(&Seen::variables_only(variables))
    }

    const CLUSTER: &str = r#""cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}"#;

    fn tf_config(kind: &str, index: u32) -> String {
        format!(r#"{{{CLUSTER}, "task": {{"type": "{kind}", "index": {index}}}}}"#)
    }

    #[test]
    fn the_source_that_wins_says_what_this_process_is() {
        let (check, membership) = with(&[("TF_CONFIG", &tf_config("worker", 1)), ("SLURM_JOB_ID", "7")]);
        let expected = "TF_CONFIG: this is worker:1, rank 2 of 3, in a cluster of chief 1, worker 2, ps 1";
        assert_eq!((check.status, check.found.as_str()), (Status::Ok, expected));
        assert_eq!(check.why.as_deref(), Some("also seen, not used: Slurm"));
        assert_eq!(check.details[0], "rank 0 is chief:0 at a:1");
        assert_eq!(membership.unwrap().world_size(), 3);

        let ranks = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
        let (check, _) = with(&[&ranks[..], &[("PET_NODE_RANK", "1"), ("PET_NNODES", "2")]].concat());
        assert_eq!(check.found, "RANK and WORLD_SIZE: this is worker:1, rank 1 of 2");
        assert!(check.why.unwrap().contains("PET_NODE_RANK"));
    }

    #[test]
    fn a_parameter_server_is_a_task_as_good_as_any() {
        let (check, membership) = with(&[("TF_CONFIG", &tf_config("ps", 0))]);
        assert_eq!((check.status, membership), (Status::Ok, None));
        assert_eq!(check.found, "TF_CONFIG: this is ps:0 of chief 1, worker 2, ps 1");
    }

    #[test]
    fn what_is_wrong_is_said_in_the_words_of_whoever_reads_it() {
        let (check, membership) = with(&[("TF_CONFIG", &tf_config("wroker", 0))]);
        assert_eq!((check.status, membership), (Status::Fail, None));
        assert!(check.found.contains("TF_CONFIG: \"wroker\" is not a type of task"), "{check:?}");
        assert!(check.why.unwrap().contains("expected: chief, worker, ps or evaluator"));
        assert_eq!(check.remedy.as_deref(), Some("Did you mean worker?"));
        assert_eq!(with(&[("TF_CONFIG", "{")]).0.status, Status::Fail);
        assert_eq!(with(&[("RANK", "2"), ("WORLD_SIZE", "2")]).0.status, Status::Fail);
    }

    #[test]
    fn a_process_alone_is_fine_unless_somebody_meant_otherwise() {
        assert_eq!(with(&[]).0.status, Status::Ok);
        assert_eq!(with(&[("TF_CONFIG", "{}")]).0.found, "TF_CONFIG names no cluster: this process is alone");
        for (variables, words) in [
            (&[("SLURM_JOB_ID", "7")][..], "srun"),
            (&[("TPU_NAME", "pod")], "set RANK"),
            (&[("KUBERNETES_SERVICE_HOST", "h"), ("HOSTNAME", "mnist-worker-0")], "name the container tensorflow"),
        ] {
            let (check, _) = with(variables);
            assert_eq!(check.status, Status::Warn, "{check:?}");
            assert!(check.remedy.as_deref().unwrap().contains(words), "{check:?}");
        }
        assert_eq!(with(&[("KUBERNETES_SERVICE_HOST", "h"), ("HOSTNAME", "web-7")]).0.status, Status::Ok);
        let mpich = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_FD", "8"), ("MPI_LOCALNRANKS", "2")];
        let check = with(&mpich).0;
        assert_eq!((check.status, &*check.found), (Status::Ok, "PMI_RANK and PMI_SIZE: this is worker:1, rank 1 of 2"));
        assert_eq!(with(&mpich[..2]).0.status, Status::Fail);
        let alone = with(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("DISTRIBUTE_ALONE", "1")]).0;
        assert_eq!((alone.status, alone.found.as_str()), (Status::Ok, "DISTRIBUTE_ALONE=1: this process is alone"));
        assert_eq!(with(&[("JAX_NUM_PROCESSES", "2")]).0.status, Status::Fail);
        let files = [("opt/ml/input/config/resourceconfig.json", "{}")];
        let (sagemaker, _folder) = Seen::variables_only(&[]).with_files(&files);
        assert!(cluster(&sagemaker).0.why.unwrap().contains("SageMaker"));
    }
}

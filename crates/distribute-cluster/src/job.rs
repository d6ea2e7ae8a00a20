//! Which job a process belongs to, and which meeting of it.

use std::fmt;

use crate::{ClusterResolver, ClusterSpec, Error, Result, TaskType, env};

mod digest;

pub(crate) use digest::Digest;

/// The identity of a job: equal on all of its processes, different in every other job.
///
/// It is given by DISTRIBUTE_JOB_ID, which `distribute run` sets; else it is that of the scheduler (the step of Slurm,
/// TORCHELASTIC_RUN_ID of torchrun, the namespace of Open MPI's processes) where this has described the job; else it is
/// derived from the description of the cluster. Processes compare it before they talk to each other, so that two jobs
/// that were given the same ports refuse each other in words.
///
/// A derived identity tells clusters apart, but not two jobs with the same description that run at the same time; these are
/// told apart by the [`Incarnation`] of their groups.
///
/// # Examples
/// ```
/// use distribute_cluster::JobId;
/// let job = JobId::new("mnist-42")?;
/// assert_eq!(job.to_string(), "mnist-42");
/// assert_ne!(job.to_bytes(), JobId::new("mnist-43")?.to_bytes());
/// assert!(JobId::new("two words").is_err());
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JobId {
    name: String,
    digest: [u8; 16],
    derived: bool,
}

impl JobId {
    /// The longest name, in bytes.
    pub const MAX_BYTES: usize = 128;

    /// An identity by its name, as DISTRIBUTE_JOB_ID gives it.
    ///
    /// # Errors
    /// [`Error::Config`] for an empty name, one of more than [`MAX_BYTES`](JobId::MAX_BYTES) bytes, and one with other
    /// characters than printable ones of ASCII without spaces.
    pub fn new(name: impl Into<String>) -> Result<JobId> {
        JobId::named("given", VARIABLE, name.into())
    }

    /// A new identity that no other job has.
    ///
    /// # Errors
    /// [`Error::Random`] if the system has no random numbers.
    pub fn random() -> Result<JobId> {
        JobId::new(hex(&random()?))
    }

    /// The identity that DISTRIBUTE_JOB_ID gives; `None` if it is unset or empty.
    ///
    /// # Errors
    /// As [`new`](JobId::new).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<JobId>> {
        env::set(&variable)(VARIABLE).map(|given| JobId::new(given.trim())).transpose()
    }

    /// The identity of the job that this process takes part in as a resolver describes it: DISTRIBUTE_JOB_ID, else the
    /// [resolver's](ClusterResolver::job_id).
    ///
    /// # Errors
    /// [`Error::Config`] for a malformed variable, and the resolver's.
    pub fn from_env(resolver: &dyn ClusterResolver) -> Result<JobId> {
        let given = env::read(|variable| JobId::from_vars(variable))?;
        given.map_or_else(|| resolver.job_id(), Ok)
    }

    /// The identity derived from the description of a cluster: a digest of the addresses of chief, workers and parameter
    /// servers.
    ///
    /// An evaluator does not count: it meets nobody, and launchers leave it out of the other tasks' descriptions.
    pub fn of_cluster(spec: &ClusterSpec) -> JobId {
        let mut digest = Digest::new("cluster");
        let tasks: Vec<_> = spec.tasks().filter(|task| task.kind != TaskType::Evaluator).collect();
        digest.number(tasks.len() as u64);
        for task in tasks {
            digest.text(&task.to_string());
            digest.text(&spec.task_address(task).unwrap_or_default().to_ascii_lowercase());
        }
        JobId::derived(digest)
    }

    /// The identity of jobs of which each task knows another part, as with `sparseCluster`: nothing in their descriptions is
    /// common to all tasks. All such jobs share it unless DISTRIBUTE_JOB_ID is set.
    pub fn unknown() -> JobId {
        JobId::derived(Digest::new("unknown"))
    }

    /// The identity derived from what launchers say that describe no addresses: the size, and the port of the leader, whose
    /// host some of them call by another name on the leader itself.
    pub(crate) fn of_ranks(world_size: u32, leader_address: &str) -> JobId {
        let mut digest = Digest::new("ranks");
        digest.number(world_size.into());
        digest.text(leader_address.rsplit_once(':').map_or("", |(_, port)| port));
        JobId::derived(digest)
    }

    /// An identity that a scheduler gives.
    pub(crate) fn of_scheduler(variable: &'static str, name: String) -> Result<JobId> {
        JobId::named(variable, variable, name)
    }

    /// The name, or a short form of the digest if the identity is derived.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The form that is sent and compared: 16 bytes.
    pub fn to_bytes(&self) -> [u8; 16] {
        self.digest
    }

    /// Whether it is derived from the description of the cluster, because nobody gave one.
    pub fn is_derived(&self) -> bool {
        self.derived
    }

    fn named(scheme: &str, subject: &'static str, name: String) -> Result<JobId> {
        let problem = match name.len() {
            0 => Some("it is empty".to_owned()),
            long if long > JobId::MAX_BYTES => Some(format!("it has {long} bytes")),
            _ => name.chars().find(|c| !c.is_ascii_graphic()).map(|c| format!("it has the character {c:?}")),
        };
        if let Some(problem) = problem {
            let given: String = name.escape_debug().take(80).collect();
            let expected = format!("1 to {} printable ASCII characters without spaces", JobId::MAX_BYTES);
            let mend = "Set DISTRIBUTE_JOB_ID to the same such name on every task of the job.";
            return Err(Error::config(subject, problem, given, expected, mend));
        }
        let mut digest = Digest::new(scheme);
        digest.text(&name);
        Ok(JobId { name, digest: digest.finish(), derived: false })
    }

    fn derived(digest: Digest) -> JobId {
        let digest = digest.finish();
        JobId { name: format!("derived-{}", hex(&digest[..4])), digest, derived: true }
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// One meeting of a job's members: drawn by the leader each time it starts, handed out to those who join, and equal on all of
/// them. Connections between members carry it beside the [`JobId`], so that members of an earlier start, or of another job with the
/// same description, are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation([u8; 16]);

impl Incarnation {
    /// A new one.
    ///
    /// # Errors
    /// [`Error::Random`] if the system has no random numbers.
    pub fn random() -> Result<Incarnation> {
        random().map(Incarnation)
    }

    /// The form that is sent and compared.
    pub fn to_bytes(&self) -> [u8; 16] {
        self.0
    }

    /// The incarnation that was sent in this form.
    pub fn from_bytes(bytes: [u8; 16]) -> Incarnation {
        Incarnation(bytes)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex(&self.0[..4]))
    }
}

/// The variable that gives an identity.
pub(crate) const VARIABLE: &str = "DISTRIBUTE_JOB_ID";

/// Bytes that nobody can guess.
pub(crate) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::Random(error.to_string()))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;

//! The identity of a job, and of one incarnation of it.

use std::fmt;

use crate::{ClusterResolver, ClusterSpec, Error, Result, TaskType, environment};

mod digest;

pub(crate) use digest::Digest;

/// The identity of a job: equal on all of its processes and different from other jobs.
///
/// The first source that is present decides: DISTRIBUTE_JOB_ID, which `distribute run` sets; the scheduler's identity,
/// if the scheduler described the job (the step of Slurm, TORCHELASTIC_RUN_ID of torchrun, the namespace of Open MPI's
/// processes); a digest of the cluster's description. Processes compare identities before they exchange anything else,
/// so that two jobs that were given the same ports refuse each other with a clear error.
///
/// A derived identity distinguishes clusters, but not two jobs with the same description that run at the same time; the
/// [`Incarnation`] of their groups distinguishes those.
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
    /// Whether several starts of the job may have it.
    repeats: bool,
    /// The digest of the elastic job and the generation's number, if this is the identity of a generation.
    generation: Option<([u8; 16], u64)>,
}

impl JobId {
    /// The length limit of a name, in bytes.
    pub const MAX_BYTES: usize = 128;

    /// Creates an identity from a name, as DISTRIBUTE_JOB_ID does.
    ///
    /// # Errors
    /// [`Error::Config`] if the name is empty, is longer than [`MAX_BYTES`](JobId::MAX_BYTES) bytes, or contains a
    /// character that is not printable ASCII or is a space.
    pub fn new(name: impl Into<String>) -> Result<JobId> {
        JobId::named("given", VARIABLE, name.into())
    }

    /// Creates a random identity.
    ///
    /// # Errors
    /// [`Error::Random`] if the system returns no random numbers.
    pub fn random() -> Result<JobId> {
        JobId::new(hex(&random()?))
    }

    /// Returns the identity that DISTRIBUTE_JOB_ID names, or `None` if the variable is unset or empty.
    ///
    /// # Errors
    /// [`Error::Config`] if the name is malformed, see [`new`](JobId::new).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<JobId>> {
        environment::set(&variable)(VARIABLE).map(|given| JobId::new(given.trim())).transpose()
    }

    /// Returns the identity of this process's job: DISTRIBUTE_JOB_ID if it is set, else the
    /// [resolver's](ClusterResolver::job_id).
    ///
    /// # Errors
    /// [`Error::Config`] if the variable is malformed, and the errors of the resolver's
    /// [`job_id`](ClusterResolver::job_id).
    pub fn from_env(resolver: &dyn ClusterResolver) -> Result<JobId> {
        let given = environment::read(|variable| JobId::from_vars(variable))?;
        given.map_or_else(|| resolver.job_id(), Ok)
    }

    /// Derives an identity from the description of a cluster: a digest of the addresses of chief, workers and parameter
    /// servers.
    ///
    /// Evaluators are excluded: they join no group, and launchers omit them from the other tasks' descriptions.
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

    /// Returns the identity of jobs whose tasks each know a different part of the cluster, as with `sparseCluster`:
    /// their descriptions have nothing in common that an identity could be derived from. All such jobs share this
    /// identity unless DISTRIBUTE_JOB_ID is set.
    pub fn unknown() -> JobId {
        JobId::derived(Digest::new("unknown"))
    }

    /// Derives an identity for launchers that describe no addresses, from the world size and the leader's port. The
    /// leader's host is excluded because some launchers name it differently on the leader itself.
    pub(crate) fn of_ranks(world_size: u32, leader_address: &str) -> JobId {
        let mut digest = Digest::new("ranks");
        digest.number(world_size.into());
        digest.text(leader_address.rsplit_once(':').map_or("", |(_, port)| port));
        JobId::derived(digest)
    }

    /// Returns the identity of a generation of an elastic job, whose members have this digest.
    #[cfg(feature = "coordination")]
    pub(crate) fn of_generation(&self, number: u64, members: &[u8; 16]) -> JobId {
        let mut digest = Digest::new("generation of a job");
        digest.text(&hex(&self.digest));
        digest.number(number);
        digest.text(&hex(members));
        let generation = Some((self.digest, number));
        let (name, digest) = (format!("{}.{number}", self.name), digest.finish());
        JobId { name, digest, derived: false, repeats: false, generation }
    }

    /// Returns the elastic job and the number of the generation of which this is the identity.
    #[cfg(feature = "coordination")]
    pub(crate) fn generation(&self) -> Option<([u8; 16], u64)> {
        self.generation
    }

    /// Creates an identity from a scheduler's variable.
    pub(crate) fn of_scheduler(variable: &'static str, name: String) -> Result<JobId> {
        // torchrun's is an option of the user, and stays the same when torchrun starts the workers again.
        Ok(JobId { repeats: variable == RUN_ID, ..JobId::named(variable, variable, name)? })
    }

    /// Returns whether each start of the job has another identity.
    #[cfg(feature = "coordination")]
    pub(crate) fn is_of_one_start(&self) -> bool {
        !self.repeats
    }

    /// Returns the name, or a short form of the digest if the identity is derived.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the 16 bytes by which identities are sent and compared.
    pub fn to_bytes(&self) -> [u8; 16] {
        self.digest
    }

    /// Returns the text by which calls name the job in their headers: the digest, which is compared, and after a space
    /// the name, for messages.
    pub fn header_text(&self) -> String {
        format!("{} {self}", hex(&self.digest))
    }

    /// Returns whether the identity is derived from the description of the cluster because none was given.
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
            let remedy = "Set DISTRIBUTE_JOB_ID to the same such name on every task of the job.";
            return Err(Error::config(subject, problem, given, expected, remedy));
        }
        let mut digest = Digest::new(scheme);
        digest.text(&name);
        Ok(JobId { name, digest: digest.finish(), derived: false, repeats: false, generation: None })
    }

    fn derived(digest: Digest) -> JobId {
        let digest = digest.finish();
        JobId { name: format!("derived-{}", hex(&digest[..4])), digest, derived: true, repeats: true, generation: None }
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// The identity of one start of a job's coordination. The leader draws it at random when it starts and sends it to
/// every member that joins. Connections between members carry it together with the [`JobId`], so that members of an
/// earlier start, or of another job with the same description, are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation([u8; 16]);

impl Incarnation {
    /// Draws a new incarnation.
    ///
    /// # Errors
    /// [`Error::Random`] if the system returns no random numbers.
    pub fn random() -> Result<Incarnation> {
        random().map(Incarnation)
    }

    /// Returns the bytes by which incarnations are sent and compared.
    pub fn to_bytes(&self) -> [u8; 16] {
        self.0
    }

    /// Creates an incarnation from its bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Incarnation {
        Incarnation(bytes)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex(&self.0[..4]))
    }
}

/// The environment variable that names a job.
pub(crate) const VARIABLE: &str = "DISTRIBUTE_JOB_ID";

/// torchrun's variable of `--rdzv-id`.
pub(crate) const RUN_ID: &str = "TORCHELASTIC_RUN_ID";

/// Returns 16 bytes from the system's cryptographic random number generator.
pub(crate) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::Random(error.to_string()))?;
    Ok(bytes)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;

//! This process's place among those that train together.

use crate::{ClusterResolver, ClusterSpec, Error, JobId, Result, Task, TaskType, TfConfigResolver, env, id_in_cluster};

mod launchers;

/// This process's rank among the processes of a job, and where they meet.
///
/// # Examples
/// ```
/// use distribute_cluster::Membership;
/// let vars = |name: &str| match name {
///     "RANK" => Some("1".to_owned()),
///     "WORLD_SIZE" => Some("4".to_owned()),
///     "MASTER_ADDR" => Some("10.0.0.1".to_owned()),
///     "MASTER_PORT" => Some("29500".to_owned()),
///     _ => None,
/// };
/// let membership = Membership::from_vars(vars)?.expect("RANK is set");
/// assert_eq!((membership.rank, membership.world_size()), (1, 4));
/// assert_eq!(membership.leader_address, "10.0.0.1:29501");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// This process's place.
    pub rank: u32,
    /// All members, by rank.
    pub tasks: Vec<Task>,
    /// Each member's own address, by rank, where the description says; for messages.
    pub addresses: Vec<Option<String>>,
    /// Where rank 0 listens for the others, as host:port; empty for a job of one process that needs no address.
    pub leader_address: String,
    /// The host or interface that the leader listens on; `None` to derive it from `leader_address`: an IP address and
    /// `localhost` as they are, all interfaces for any other name, because it may mean another address there than
    /// elsewhere.
    pub bind_host: Option<String>,
    /// The host by which others reach this process; `None` where it is to be found out from the route to the leader.
    pub advertised_host: Option<String>,
    /// What described the job, such as `TF_CONFIG`.
    pub source: &'static str,
    /// What else was seen and not used.
    pub also_seen: Vec<&'static str>,
    /// The job's identity; `None` to derive it from the size and the leader's port. See [`job_id`](Membership::job_id).
    pub job: Option<JobId>,
}

impl Membership {
    /// A place among `world_size` workers that meet at `leader_address`.
    ///
    /// # Errors
    /// [`Error::Config`] where the rank is outside the job, or several workers have no address to meet at.
    pub fn new(rank: u32, world_size: u32, leader_address: impl Into<String>) -> Result<Membership> {
        let leader_address = leader_address.into();
        if rank >= world_size {
            let expected = format!("a rank from 0 to {}", world_size.saturating_sub(1));
            let problem = format!("rank {rank} is outside a job of {world_size}");
            return Err(Error::config(
                "membership",
                problem,
                rank.to_string(),
                expected,
                "Correct the rank or the size.",
            ));
        }
        if world_size > 1 {
            // Checks the address's form.
            ClusterSpec::new()
                .with_job(TaskType::Worker, [leader_address.clone()])
                .map_err(|error| error.about("membership"))?;
        }
        Ok(Membership {
            rank,
            tasks: (0..world_size).map(|index| Task::new(TaskType::Worker, index)).collect(),
            addresses: vec![None; world_size as usize],
            leader_address,
            bind_host: None,
            advertised_host: None,
            source: "explicit arguments",
            also_seen: Vec::new(),
            job: None,
        })
    }

    /// The place of a task in a described cluster: chief and workers train together, an evaluator is alone.
    ///
    /// # Errors
    /// [`Error::Config`] for a parameter server, and where the cluster has no such task.
    pub fn from_cluster(spec: &ClusterSpec, task: Task) -> Result<Membership> {
        let rank = id_in_cluster(spec, task)?;
        let tasks: Vec<Task> = match task.kind {
            TaskType::Evaluator => vec![task],
            _ => spec.tasks().filter(|task| task.kind.trains()).collect(),
        };
        let addresses: Vec<Option<String>> =
            tasks.iter().map(|task| spec.task_address(*task).ok().map(str::to_owned)).collect();
        let own = addresses.get(rank as usize).cloned().flatten();
        Ok(Membership {
            rank,
            leader_address: addresses.first().cloned().flatten().unwrap_or_default(),
            bind_host: None,
            advertised_host: own.and_then(|address| Some(address.rsplit_once(':')?.0.to_owned())),
            tasks,
            addresses,
            source: "a cluster specification",
            also_seen: Vec::new(),
            job: Some(JobId::of_cluster(spec)),
        })
    }

    /// The place that a resolver describes; `None` where it describes a program of one process.
    ///
    /// # Errors
    /// [`Error::Config`] where the resolver does not know which task this process is, and as
    /// [`from_cluster`](Membership::from_cluster).
    pub fn from_resolver(resolver: &dyn ClusterResolver) -> Result<Option<Membership>> {
        let spec = resolver.cluster_spec()?;
        let task = match (resolver.task(), spec.tasks().collect::<Vec<_>>().as_slice()) {
            (Some(task), _) if task.kind == TaskType::Evaluator => task,
            (_, []) => return Ok(None),
            (Some(task), _) => task,
            (None, [only]) => *only,
            (None, _) => {
                let problem = "it does not say which task this process is";
                let mend = "Set them on the resolver.";
                return Err(Error::config("cluster resolver", problem, "no task", "a task type and index", mend));
            }
        };
        Ok(Some(Membership::from_cluster(&spec, task)?.with_job_id(resolver.job_id()?)))
    }

    /// The place that the environment describes; `None` where this process is alone.
    ///
    /// The first that matches decides: TF_CONFIG; RANK and WORLD_SIZE with MASTER_ADDR and MASTER_PORT; Open MPI's
    /// OMPI_COMM_WORLD_RANK and SIZE with MASTER_ADDR; Slurm's SLURM_PROCID and SLURM_NTASKS in a step of `srun`. The
    /// leader listens on its own address of TF_CONFIG, else on DISTRIBUTE_PORT, else on MASTER_PORT + 1: never on
    /// MASTER_PORT itself, where other launchers keep a store of their own. DISTRIBUTE_JOB_ID is the job's identity, whoever
    /// describes it; see [`JobId`] for what counts where it is unset.
    ///
    /// # Errors
    /// [`Error::Config`] where variables are missing, malformed or contradict each other, are not UTF-8, or where one that says
    /// what this process is has been set to nothing.
    pub fn from_env() -> Result<Option<Membership>> {
        env::read(|variable| Membership::from_vars(variable))
    }

    /// As [`from_env`](Membership::from_env), with the variables looked up by a function.
    ///
    /// # Errors
    /// As [`from_env`](Membership::from_env).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Membership>> {
        launchers::membership(&variable)
    }

    /// The same place in a job of this identity.
    #[must_use]
    pub fn with_job_id(mut self, job: JobId) -> Membership {
        self.job = Some(job);
        self
    }

    /// The job's identity, which all members share and verify when they meet.
    pub fn job_id(&self) -> JobId {
        self.job.clone().unwrap_or_else(|| JobId::of_ranks(self.world_size(), &self.leader_address))
    }

    /// The number of processes.
    pub fn world_size(&self) -> u32 {
        self.tasks.len() as u32
    }

    /// This process as a task.
    ///
    /// # Panics
    /// Where `rank` was changed to one outside the job.
    pub fn task(&self) -> Task {
        self.tasks[self.rank as usize]
    }

    /// The task of a rank.
    pub fn task_of(&self, rank: u32) -> Option<Task> {
        self.tasks.get(rank as usize).copied()
    }

    /// Whether this process is rank 0.
    pub fn is_leader(&self) -> bool {
        self.rank == 0
    }

    /// The name of a rank with its address, where that is known: `worker:1 at host:port`.
    pub fn named(&self, rank: u32) -> String {
        let task = self.task_of(rank).map_or_else(|| format!("rank {rank}"), |task| task.to_string());
        match self.addresses.get(rank as usize) {
            Some(Some(address)) => format!("{task} at {address}"),
            _ => task,
        }
    }
}

/// The membership that TF_CONFIG describes.
fn from_tf_config(json: &str) -> Result<Option<Membership>> {
    let membership = Membership::from_resolver(&TfConfigResolver::from_json(json)?)?;
    Ok(membership.map(|membership| Membership { source: "TF_CONFIG", ..membership }))
}

#[cfg(test)]
mod tests;

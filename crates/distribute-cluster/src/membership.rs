//! This process's rank among the processes that train together.

use crate::{
    ClusterResolver, ClusterSpec, Error, JobId, Result, SimpleResolver, Task, TaskType, TfConfigResolver, environment,
    id_in_cluster, process_manager, sage_maker, slurm,
};

use std::sync::atomic::{AtomicBool, Ordering};

mod launchers;
mod variables;

/// This process's rank among the processes of a job, and the address at which they meet.
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
    /// This process's rank.
    pub rank: u32,
    /// All members, by rank.
    pub tasks: Vec<Task>,
    /// Each member's own address, by rank, if the description contains it; used in messages.
    pub addresses: Vec<Option<String>>,
    /// The `host:port` at which rank 0 listens for the others; empty for a job of one process, which needs none.
    pub leader_address: String,
    /// The host or interface that the leader listens on. If `None`, it is derived from `leader_address`: an IP address
    /// and `localhost` are used as they are; for any other name the leader listens on all interfaces, because the name
    /// may resolve to another address there than elsewhere.
    pub bind_host: Option<String>,
    /// The host at which other members reach this process, unless the choice of an interface gives another for data;
    /// `None` to detect it from the route to the leader.
    pub advertised_host: Option<String>,
    /// The source of the description, such as `TF_CONFIG`.
    pub source: &'static str,
    /// Other sources that were found and not used.
    pub also_seen: Vec<&'static str>,
    /// The job's identity; `None` to derive it from the world size and the leader's port. See
    /// [`job_id`](Membership::job_id).
    pub job: Option<JobId>,
}

impl Membership {
    /// Creates a membership in a job of `world_size` workers that meet at `leader_address`.
    ///
    /// # Errors
    /// [`Error::Config`] if `rank` is not below `world_size`, or if there are several workers and `leader_address` is
    /// malformed.
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
            // `with_job` validates the form of the address.
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

    /// Returns the membership of a task in a cluster: chief and workers train together, an evaluator is alone.
    ///
    /// # Errors
    /// [`Error::Config`] if the task is a parameter server or is not in the cluster.
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

    /// Returns the membership that a resolver describes, or `None` if it describes a program of one process.
    ///
    /// # Errors
    /// [`Error::Config`] if the resolver does not name this process's task, if that task is a parameter server or is
    /// not in the cluster, or if it trains and the resolver describes only a
    /// [part](ClusterResolver::is_partial) of the cluster; and the errors of the resolver.
    pub fn from_resolver(resolver: &dyn ClusterResolver) -> Result<Option<Membership>> {
        Membership::resolved(resolver, "cluster resolver", "Describe all tasks to each of them.")
    }

    /// Returns the membership that a resolver describes; `subject` and `remedy` are for the error of a resolver that
    /// describes only a part of the cluster.
    fn resolved(resolver: &dyn ClusterResolver, subject: &'static str, remedy: &str) -> Result<Option<Membership>> {
        let spec = resolver.cluster_spec()?;
        let task = match (resolver.task(), spec.tasks().collect::<Vec<_>>().as_slice()) {
            (Some(task), _) if task.kind == TaskType::Evaluator => task,
            (_, []) => return Ok(None),
            (Some(task), _) => task,
            (None, [only]) => *only,
            (None, _) => {
                let problem = "it does not say which task this process is";
                let remedy = "Set them on the resolver.";
                return Err(Error::config("cluster resolver", problem, "no task", "a task type and index", remedy));
            }
        };
        let membership = Membership::from_cluster(&spec, task)?;
        // A worker other than the first one is never the only task that trains.
        let lacks_others = membership.world_size() == 1 && task.kind == TaskType::Worker && task.index > 0;
        if task.kind.trains() && (resolver.is_partial() || lacks_others) {
            let problem = format!("it describes only a part of the cluster, so that {task} would train alone");
            let given = spec.tasks().map(|task| task.to_string()).collect::<Vec<_>>().join(", ");
            return Err(Error::config(subject, problem, given, "the addresses of all tasks that train", remedy));
        }
        Ok(Some(membership.with_job_id(resolver.job_id()?)))
    }

    /// Returns the membership that the environment describes, or `None` for a program of one process.
    ///
    /// The first source that is present decides: TF_CONFIG; RANK and WORLD_SIZE with MASTER_ADDR and MASTER_PORT; PET_*
    /// of Kubeflow's pods; JAX_*; HOROVOD_*; Open MPI's OMPI_COMM_WORLD_RANK and SIZE; PMI_RANK and PMI_SIZE of MPICH,
    /// whose process manager is asked where rank 0 is; Slurm's SLURM_PROCID and SLURM_NTASKS in a step of `srun`;
    /// SM_HOSTS of SageMaker, or the `resourceconfig.json` of its containers; CLUSTER_SPEC of Vertex AI. Others that
    /// are present must agree with it.
    ///
    /// The leader listens on its own address of TF_CONFIG, else on DISTRIBUTE_PORT, else on MASTER_PORT + 1: never on
    /// MASTER_PORT itself, where other launchers run a store of their own. DISTRIBUTE_JOB_ID overrides the job's
    /// identity for every source; see [`JobId`] for the order of precedence.
    ///
    /// # Errors
    /// [`Error::Config`] if variables are missing, malformed, contradictory or not UTF-8, if a variable that identifies
    /// this process is set but empty, or if a variable is a sign of several processes that nothing describes, unless
    /// DISTRIBUTE_ALONE is 1.
    pub fn from_env() -> Result<Option<Membership>> {
        environment::read(|variable| {
            let container = sage_maker::variables_of_container(variable, sage_maker::read_container)?;
            let known = |name: &str| variable(name).or_else(|| container.get(name).cloned());
            launchers::membership(&known, &process_manager::ask)
        })
    }

    /// Reads the membership like [`from_env`](Membership::from_env), with a function that looks up variables. No
    /// process manager is asked.
    ///
    /// # Errors
    /// [`Error::Config`] if variables are missing, malformed or contradictory, or if a variable that identifies this
    /// process is set but empty.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Membership>> {
        launchers::membership(&variable, &process_manager::absent)
    }

    /// Returns the membership that the environment describes, if it is one of several processes of which this one has
    /// joined none: a program that trains nevertheless would train alone, as each of the others.
    ///
    /// # Errors
    /// The errors of [`from_env`](Membership::from_env).
    pub fn not_joined() -> Result<Option<Membership>> {
        if JOINED.load(Ordering::Relaxed) {
            return Ok(None);
        }
        Ok(Membership::from_env()?.filter(|membership| membership.world_size() > 1))
    }

    /// Records that this process has joined its job, by a service of its own.
    pub fn mark_joined() {
        // Relaxed: it orders nothing else.
        JOINED.store(true, Ordering::Relaxed);
    }

    /// Returns the number of GPUs that the scheduler gives to each process of the job, if it says so: by
    /// `--gpus-per-task` of Slurm, if the processes are the tasks of a step. A process may see those of its node's
    /// other tasks too.
    ///
    /// # Errors
    /// [`Error::Config`] if a variable is not UTF-8.
    pub fn gpus_per_task(&self) -> Result<Option<usize>> {
        environment::read(|variable| Ok(self.gpus_per_task_from_vars(variable)))
    }

    /// Returns the number of GPUs like [`gpus_per_task`](Membership::gpus_per_task), with a function that looks up
    /// variables.
    ///
    /// # Examples
    /// ```
    /// use distribute_cluster::Membership;
    /// let vars = |name: &str| match name {
    ///     "SLURM_PROCID" => Some("1".to_owned()),
    ///     "SLURM_NTASKS" => Some("4".to_owned()),
    ///     "SLURM_STEP_NODELIST" => Some("n[1-2]".to_owned()),
    ///     "SLURM_GPUS_PER_TASK" => Some("h100:2".to_owned()),
    ///     _ => None,
    /// };
    /// let membership = Membership::from_vars(vars)?.expect("it is a task of a step");
    /// assert_eq!(membership.gpus_per_task_from_vars(vars), Some(2));
    /// # Ok::<(), distribute_cluster::Error>(())
    /// ```
    pub fn gpus_per_task_from_vars(&self, variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
        // A launcher that runs in a task may start several processes there.
        slurm::is_task(&variable, self.rank, self.world_size()).then(|| slurm::gpus_per_task(&variable)).flatten()
    }

    /// Returns the cluster of the members, if their addresses are known.
    ///
    /// # Examples
    /// ```
    /// use distribute_cluster::{ClusterResolver, ClusterSpec, Membership, Task, TaskType};
    /// let spec = ClusterSpec::new().with_job(TaskType::Worker, ["a:1", "b:1"])?;
    /// let membership = Membership::from_cluster(&spec, Task::new(TaskType::Worker, 1))?;
    /// let cluster = membership.cluster().expect("both addresses are known");
    /// assert_eq!((cluster.cluster_spec()?, cluster.task()), (spec, Some(membership.task())));
    /// # Ok::<(), distribute_cluster::Error>(())
    /// ```
    pub fn cluster(&self) -> Option<SimpleResolver> {
        let mut spec = ClusterSpec::new();
        for (task, address) in self.tasks.iter().zip(&self.addresses) {
            spec = spec.with_sparse_job(task.kind, [(task.index, address.clone()?)]).ok()?;
        }
        let task = self.task();
        let master = self.addresses.get(self.rank as usize)?.clone()?;
        let (task_type, task_id) = (Some(task.kind), Some(task.index));
        let job_id = self.job.clone();
        Some(SimpleResolver { spec, master, task_type, task_id, job_id, ..SimpleResolver::default() })
    }

    /// Returns the same membership with another job identity.
    #[must_use]
    pub fn with_job_id(mut self, job: JobId) -> Membership {
        self.job = Some(job);
        self
    }

    /// Returns the job's identity, which all members share and verify when they connect.
    pub fn job_id(&self) -> JobId {
        self.job.clone().unwrap_or_else(|| JobId::of_ranks(self.world_size(), &self.leader_address))
    }

    /// Returns the job's identity, in place of a derived one that of DISTRIBUTE_JOB_ID if the variable is set.
    ///
    /// # Errors
    /// [`Error::Config`] if the variable is malformed.
    pub(crate) fn job_id_or_given(&self, variable: impl Fn(&str) -> Option<String>) -> Result<JobId> {
        let job = self.job_id();
        let given = if job.is_derived() { JobId::from_vars(variable)? } else { None };
        Ok(given.unwrap_or(job))
    }

    /// Returns the error of joining a generation of an elastic job when a newer one is decided.
    #[cfg(feature = "coordination")]
    pub(crate) fn generation_over(&self, newer: u64) -> Error {
        let generation = self.job_id().generation().map_or(0, |(_, number)| number);
        Error::GenerationOver { task: self.task().to_string(), generation, newer }
    }

    /// Returns the number of processes.
    pub fn world_size(&self) -> u32 {
        self.tasks.len() as u32
    }

    /// Returns this process's task.
    ///
    /// # Panics
    /// If `rank` was set to a value outside the job.
    pub fn task(&self) -> Task {
        self.tasks[self.rank as usize]
    }

    /// Returns the task of a rank.
    pub fn task_of(&self, rank: u32) -> Option<Task> {
        self.tasks.get(rank as usize).copied()
    }

    /// Returns whether this process is rank 0.
    pub fn is_leader(&self) -> bool {
        self.rank == 0
    }

    /// Returns the name of a rank with its address if known: `worker:1 at host:port`.
    pub fn named(&self, rank: u32) -> String {
        let task = self.task_of(rank).map_or_else(|| format!("rank {rank}"), |task| task.to_string());
        match self.addresses.get(rank as usize) {
            Some(Some(address)) => format!("{task} at {address}"),
            _ => task,
        }
    }
}

/// Whether this process has joined a job.
static JOINED: AtomicBool = AtomicBool::new(false);

/// Returns the membership that a TF_CONFIG text describes.
fn from_tf_config(json: &str) -> Result<Option<Membership>> {
    let remedy = "Set enableDynamicWorker of the TFJob to false, or build a strategy with parameter servers first; set \
                  DISTRIBUTE_ALONE=1 if each process is to train alone.";
    let membership = Membership::resolved(&TfConfigResolver::from_json(json)?, "TF_CONFIG", remedy)?;
    Ok(membership.map(|membership| Membership { source: "TF_CONFIG", ..membership }))
}

#[cfg(test)]
mod tests;

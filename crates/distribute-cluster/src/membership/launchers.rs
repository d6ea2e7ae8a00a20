//! Chooses among the descriptions of a job that launchers leave in the environment.

use super::variables::{ENVIRONMENT, Vars, wrong};
use super::{Membership, from_tf_config};
use crate::job::RUN_ID;
use crate::process_manager::Meeting;
use crate::{
    ClusterSpec, Error, JobId, Result, SageMakerResolver, Task, TaskType, environment, het_step, hostlist, json,
};

/// Looks up a variable of the environment.
type Variable<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Asks MPICH's process manager, whose socket the variables name.
type Manager<'a> = dyn for<'v> Fn(&'v Variable<'v>) -> Result<Meeting> + 'a;

/// Returns the membership that the variables describe; `manager` asks MPICH's process manager.
pub(super) fn membership(variable: &Variable<'_>, manager: &Manager<'_>) -> Result<Option<Membership>> {
    if let Some(name) = DECISIVE.into_iter().find(|name| variable(name).is_some_and(|value| value.trim().is_empty())) {
        let remedy = format!("Unset {name} for a program of one process, else correct what sets it.");
        return Err(Error::config(ENVIRONMENT, format!("{name} is set, but empty"), "nothing", "a value", remedy));
    }
    let variable: &Variable<'_> = &environment::set(variable);
    let job = Job { vars: Vars(variable), manager };
    match job.vars.get(ALONE).as_deref().map(str::trim) {
        None | Some("0") => {}
        Some("1") => return Ok(None),
        Some(other) => return Err(wrong("DISTRIBUTE_ALONE is neither 0 nor 1", other, "1 to train alone, else 0")),
    }
    let seen: Vec<Source> = Source::ALL.into_iter().filter(|source| source.is_set(&job.vars)).collect();
    let Some((&source, others)) = seen.split_first() else {
        job.refuse_signs()?;
        return Ok(None);
    };
    let found = job.described_by(source)?;
    job.agrees(source, found.as_ref(), others)?;
    let Some(mut membership) = found else { return Ok(None) };
    membership.also_seen = others.iter().map(|source| source.name()).collect();
    if let Some(job) = JobId::from_vars(variable)?.or_else(|| job.scheduler_job(source)) {
        membership = membership.with_job_id(job);
    }
    Ok(Some(membership))
}

/// Variables that identify this process within a job. If one is set but empty, for example by a template without a
/// value, each task would otherwise start as a job of one process.
const DECISIVE: [&str; 13] = [
    "TF_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "PET_NODE_RANK",
    "JAX_PROCESS_ID",
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "SLURM_PROCID",
    "SM_HOSTS",
    "SM_CURRENT_HOST",
    "CLUSTER_SPEC",
];

/// Lets each process of a job train by itself.
const ALONE: &str = "DISTRIBUTE_ALONE";

/// A description of a job in the environment, in the order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    TfConfig,
    Ranks,
    Torch,
    Jax,
    Horovod,
    OpenMpi,
    Mpich,
    Slurm,
    SageMaker,
    VertexAi,
}

impl Source {
    const ALL: [Source; 10] = [
        Source::TfConfig,
        Source::Ranks,
        Source::Torch,
        Source::Jax,
        Source::Horovod,
        Source::OpenMpi,
        Source::Mpich,
        Source::Slurm,
        Source::SageMaker,
        Source::VertexAi,
    ];

    fn name(self) -> &'static str {
        match self {
            Source::TfConfig => "TF_CONFIG",
            Source::Ranks => "RANK and WORLD_SIZE",
            Source::Torch => "PET_NODE_RANK and PET_NNODES",
            Source::Jax => "JAX_PROCESS_ID and JAX_NUM_PROCESSES",
            Source::Horovod => "HOROVOD_RANK and HOROVOD_SIZE",
            Source::OpenMpi => "Open MPI",
            Source::Mpich => "PMI_RANK and PMI_SIZE",
            Source::Slurm => "Slurm",
            Source::SageMaker => "SM_HOSTS and SM_CURRENT_HOST",
            Source::VertexAi => "CLUSTER_SPEC",
        }
    }

    /// Returns the variables of the rank and of the number of processes, for sources that have them.
    fn ranks(self) -> Option<(&'static str, &'static str)> {
        match self {
            Source::Ranks => Some(("RANK", "WORLD_SIZE")),
            Source::Torch => Some(("PET_NODE_RANK", "PET_NNODES")),
            Source::Jax => Some(("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")),
            Source::Horovod => Some(("HOROVOD_RANK", "HOROVOD_SIZE")),
            Source::OpenMpi => Some(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
            Source::Mpich => Some(("PMI_RANK", "PMI_SIZE")),
            Source::Slurm => Some(("SLURM_PROCID", "SLURM_NTASKS")),
            Source::TfConfig | Source::SageMaker | Source::VertexAi => None,
        }
    }

    fn is_set(self, vars: &Vars<'_>) -> bool {
        let set = |name: &str| vars.get(name).is_some();
        match self {
            Source::TfConfig => set("TF_CONFIG"),
            // Slurm sets them too, for its own tasks.
            Source::Mpich => set("PMI_RANK") && (set("MPI_LOCALNRANKS") || !Source::Slurm.is_set(vars)),
            // A batch script also has SLURM_PROCID but is one process; only the tasks of a step have the step's
            // variables.
            Source::Slurm => set("SLURM_PROCID") && set("SLURM_STEP_NODELIST"),
            Source::SageMaker => set("SM_HOSTS") || set("SM_CURRENT_HOST"),
            Source::VertexAi => set("CLUSTER_SPEC"),
            other => other.ranks().is_some_and(|(rank, _)| set(rank)),
        }
    }

    /// Returns whether the source describes each process of the program, as opposed to nodes, or to processes that may
    /// themselves be launchers of others.
    fn describes_processes(self) -> bool {
        matches!(self, Source::TfConfig | Source::Ranks | Source::Jax | Source::Horovod | Source::VertexAi)
    }
}

/// The environment of a process.
struct Job<'a> {
    vars: Vars<'a>,
    manager: &'a Manager<'a>,
}

impl Job<'_> {
    fn described_by(&self, source: Source) -> Result<Option<Membership>> {
        let vars = &self.vars;
        let ranks = source.ranks().unwrap_or_default();
        let numbers = |leader: &dyn Fn() -> Result<String>| vars.ranks(source.name(), ranks, leader).map(Some);
        let at_master = |otherwise| vars.at_master(ranks.1, otherwise);
        match source {
            Source::TfConfig => from_tf_config(&vars.get("TF_CONFIG").unwrap_or_default()),
            Source::Ranks => numbers(&|| at_master(None)),
            Source::Torch => {
                self.check_torch()?;
                numbers(&|| vars.at_variable("PET_MASTER_ADDR", "PET_MASTER_PORT"))
            }
            Source::Jax => numbers(&|| vars.at_variable("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")),
            Source::Horovod => numbers(&|| {
                let port = vars.port("HOROVOD_GLOO_RENDEZVOUS_PORT")?.and_then(|port| port.checked_add(1));
                at_master(port.filter(|_| self.is_one_host("HOROVOD_LOCAL_SIZE", ranks.1)).map(|port| Ok(here(port))))
            }),
            Source::OpenMpi => numbers(&|| {
                let job =
                    self.scheduler_job(source).filter(|_| self.is_one_host("OMPI_COMM_WORLD_LOCAL_SIZE", ranks.1));
                at_master(job.map(|job| Ok(here(port_of(&job)))))
            }),
            Source::Mpich => self.mpich(ranks).map(Some),
            Source::Slurm => self.slurm().map(Some),
            Source::SageMaker => self.sage_maker().map(Some),
            Source::VertexAi => self.vertex_ai().map(Some),
        }
    }

    /// Returns whether all processes share this host: as many are here as there are.
    fn is_one_host(&self, local_size: &str, size: &str) -> bool {
        let number = |name: &str| self.vars.number(name).ok().flatten();
        number(local_size).is_some_and(|local| Some(local) == number(size))
    }

    /// Returns the identity that the launcher which described the job gives to all of its processes. Identities from
    /// other launchers are ignored because they may name only a part of the job.
    fn scheduler_job(&self, source: Source) -> Option<JobId> {
        let from = |variable: &'static str| JobId::of_scheduler(variable, self.vars.get(variable)?).ok();
        match source {
            Source::Ranks => from(RUN_ID).filter(|job| job.name() != TORCHRUN_DEFAULT),
            Source::OpenMpi => from("PMIX_NAMESPACE").or_else(|| from("OMPI_MCA_ess_base_jobid")),
            // The components of a heterogeneous job have different numbers.
            Source::Slurm if !het_step::is_heterogeneous(self.vars.0) => {
                let step = self.step()?;
                // A job that is requeued keeps its number, and counts its steps from 0 again.
                let restarts = self.vars.get("SLURM_RESTART_COUNT").filter(|count| count.trim() != "0");
                let restarts = restarts.map_or_else(String::new, |count| format!("-{}", count.trim()));
                let name = format!("slurm-{}.{}{restarts}", self.vars.get("SLURM_JOB_ID")?.trim(), step.trim());
                JobId::of_scheduler("SLURM_STEP_ID", name).ok()
            }
            _ => None,
        }
    }

    /// Refuses pods of which each starts several processes: those need a launcher in the pod.
    fn check_torch(&self) -> Result<()> {
        let (processes, nodes) = ("PET_NPROC_PER_NODE", "PET_NNODES");
        // `auto`, `gpu` and `cpu` are what one process here uses as its replicas.
        if let Some(given) = self.vars.get(processes).filter(|given| given.trim().parse::<u32>().is_ok_and(|n| n > 1)) {
            let problem =
                "PET_NPROC_PER_NODE asks for several processes on each node, and this one was started directly";
            let remedy = "Start the program by `torchrun --no-python`, or set one process on each node.";
            return Err(Error::config(ENVIRONMENT, problem, given, "1, auto, cpu or gpu", remedy));
        }
        match self.vars.get(nodes).filter(|given| given.contains(':')) {
            Some(given) => Err(wrong("PET_NNODES is a range, and groups do not change their size", &given, "a number")),
            None => Ok(()),
        }
    }

    /// Asks the process manager where the members meet, if the variables do not say it.
    fn mpich(&self, ranks: (&str, &str)) -> Result<Membership> {
        let name = Source::Mpich.name();
        if self.vars.get("MASTER_ADDR").is_some() || self.vars.number(ranks.1)? == Some(1) {
            return self.vars.ranks(name, ranks, || self.vars.at_master(ranks.1, None));
        }
        // A rank outside of the job is refused before anything is asked.
        self.vars.ranks(name, ranks, || Ok("none:1".to_owned()))?;
        let meeting = (self.manager)(self.vars.0)?;
        let job = JobId::of_scheduler("PMI_RANK", meeting.job)?;
        let leader = (meeting.host.unwrap_or_else(|| LOOPBACK.to_owned()), port_of(&job));
        Ok(self.vars.ranks(name, ranks, || self.vars.at_master(ranks.1, Some(Ok(leader))))?.with_job_id(job))
    }

    /// Returns the number of Slurm's step within its job.
    fn step(&self) -> Option<String> {
        self.vars.get("SLURM_STEP_ID").or_else(|| self.vars.get("SLURM_STEPID"))
    }

    fn slurm(&self) -> Result<Membership> {
        let vars = &self.vars;
        let list = vars.get("SLURM_STEP_NODELIST").unwrap_or_default();
        let hosts = hostlist::expand(&list).ok_or_else(|| {
            wrong(
                "SLURM_STEP_NODELIST is not a list of hosts",
                &list,
                "a list such as node1 or node[1-4,7]; or set MASTER_ADDR",
            )
        });
        let host = hosts.and_then(|mut hosts| {
            // An expanded list has at least one host.
            let first = het_step::order(vars.0, &hosts)?.first().copied().unwrap_or(0);
            Ok(hosts.swap_remove(first))
        });
        let job = vars.number(het_step::job_number(vars.0))?.unwrap_or(0);
        // A port in the dynamic range that is the same on every task and differs between jobs and their steps. The
        // components of a heterogeneous job have different numbers of steps.
        let step = match het_step::is_heterogeneous(vars.0) {
            true => None,
            false => self.step().and_then(|step| step.trim().parse::<u32>().ok()),
        };
        let number = job.wrapping_add(step.unwrap_or(0).wrapping_mul(STEP_PORTS));
        let address = host.map(|host| (host, FIRST_PORT + (number % u32::from(PORTS)) as u16));
        // The size of the step, which may differ from that of the allocation.
        let size = if vars.get("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
        vars.ranks(Source::Slurm.name(), ("SLURM_PROCID", size), || vars.at_master(size, Some(address)))
    }

    fn sage_maker(&self) -> Result<Membership> {
        let found = Membership::from_resolver(&SageMakerResolver::from_vars(self.vars.0)?)?;
        let nothing = || wrong("SM_HOSTS has no hosts", "[]", "at least one");
        Ok(Membership { source: Source::SageMaker.name(), ..found.ok_or_else(nothing)? })
    }

    /// Reads Vertex AI's description. Its pools are the chief, the workers, the parameter servers and the evaluator.
    fn vertex_ai(&self) -> Result<Membership> {
        const SUBJECT: &str = "CLUSTER_SPEC";
        let text = self.vars.get(SUBJECT).unwrap_or_default();
        let expected = r#"{"cluster": {"workerpool0": ["host:2222"], …}, "task": {"type": "workerpool0", "index": 0}}"#;
        let malformed = |problem: &str| {
            Error::config(SUBJECT, problem, text.clone(), expected, "Correct it, or unset it and set TF_CONFIG.")
        };
        let value = json::parse(&text).map_err(|error| malformed(&error.to_string()))?;
        let kind = |pool: &str| match pool {
            "workerpool0" => Ok(TaskType::Chief),
            "workerpool1" => Ok(TaskType::Worker),
            "workerpool2" => Ok(TaskType::Ps),
            "workerpool3" => Ok(TaskType::Evaluator),
            _ => Err(malformed("it has a pool other than workerpool0 to workerpool3")),
        };
        let mut spec = ClusterSpec::new();
        let pools = value["cluster"].as_object().ok_or_else(|| malformed("it has no cluster"))?;
        for (pool, hosts) in pools {
            let hosts = hosts.as_array().ok_or_else(|| malformed("a pool is not a list"))?;
            let hosts = hosts.iter().map(|host| host.as_str().map(str::to_owned));
            let hosts = hosts.collect::<Option<Vec<_>>>().ok_or_else(|| malformed("a host is not a string"))?;
            spec = spec.with_job(kind(pool)?, hosts).map_err(|error| error.about(SUBJECT))?;
        }
        let task = &value["task"];
        let own = kind(task["type"].as_str().ok_or_else(|| malformed("it does not say which task this process is"))?)?;
        let index = task["index"].as_u64().and_then(|index| u32::try_from(index).ok());
        let index = index.ok_or_else(|| malformed("the index of this process's task is not a number"))?;
        let membership =
            Membership::from_cluster(&spec, Task::new(own, index)).map_err(|error| error.about(SUBJECT))?;
        Ok(Membership { source: SUBJECT, ..membership })
    }

    /// Checks that the descriptions that are not used agree with the one that is. Otherwise two launchers are active,
    /// or one started several processes with the same description.
    fn agrees(&self, source: Source, found: Option<&Membership>, others: &[Source]) -> Result<()> {
        if found.is_some_and(|found| !found.task().kind.trains()) {
            return Ok(());
        }
        let (rank, size) = found.map_or((0, 1), |found| (found.rank, found.world_size()));
        for other in others {
            let Some((their_rank, their_size)) = self.place(*other)? else { continue };
            let agrees = match other.describes_processes() && source.describes_processes() {
                true => (rank, size) == (their_rank, their_size),
                // A launcher may have started another one, which started several processes.
                false => size > 1 || their_size == 1,
            };
            if !agrees {
                return Err(Error::config(
                    ENVIRONMENT,
                    format!("{} and {} contradict each other", source.name(), other.name()),
                    format!(
                        "{} with rank {rank} of {size}; {} with rank {their_rank} of {their_size}",
                        source.name(),
                        other.name()
                    ),
                    "one description of the job, or two that agree",
                    "Unset one of them, or set DISTRIBUTE_ALONE=1 if each process is to train alone.",
                ));
            }
        }
        if size == 1 { self.refuse_signs() } else { Ok(()) }
    }

    /// Returns the rank and the number of processes of a description, if it is complete.
    fn place(&self, source: Source) -> Result<Option<(u32, u32)>> {
        Ok(match source.ranks() {
            Some((rank, size)) => {
                let step = "SLURM_STEP_NUM_TASKS";
                let size = if source == Source::Slurm && self.vars.get(step).is_some() { step } else { size };
                // The numbers of a launcher in which this one runs may be of any form.
                match source.describes_processes() {
                    true => self.vars.number(rank)?.zip(self.vars.number(size)?),
                    false => self.vars.number(rank).ok().flatten().zip(self.vars.number(size).ok().flatten()),
                }
            }
            None => self.described_by(source)?.map(|found| (found.rank, found.world_size())),
        })
    }

    /// Refuses to train alone where a variable says that there are several processes, and nothing describes them.
    fn refuse_signs(&self) -> Result<()> {
        let several = |name: &&str| self.vars.get(name).is_some_and(|size| size.trim() != "1");
        let sizes = Source::ALL.into_iter().filter(|source| *source != Source::Slurm).filter_map(Source::ranks);
        let missing = |(rank, size): (&'static str, &'static str)| {
            let is_lonely = several(&size) && self.vars.get(rank).is_none();
            is_lonely.then(|| format!("{size} is set, but {rank} is not"))
        };
        let problem = sizes.into_iter().find_map(missing).or_else(|| {
            let value = |name: &str| self.vars.get(name);
            if value("JAX_COORDINATOR_ADDRESS").is_some() && value("JAX_PROCESS_ID").is_none() {
                return Some("JAX_COORDINATOR_ADDRESS is set, but JAX_PROCESS_ID is not".to_owned());
            }
            let ours = |name: &str, is_sign: &dyn Fn(&str) -> bool| value(name).filter(|text| is_sign(text.trim()));
            if let Some(index) = ours("JOB_COMPLETION_INDEX", &|index| index != "0") {
                return Some(format!("JOB_COMPLETION_INDEX={index} is one of several pods, and nothing says how many"));
            }
            if let Some(hosts) = ours("TPU_WORKER_HOSTNAMES", &|hosts| hosts.contains(',')) {
                return Some(format!("TPU_WORKER_HOSTNAMES={hosts} are several hosts, and no description of a job"));
            }
            let rank = ours("PMIX_RANK", &|rank| rank != "0")?;
            (value("OMPI_COMM_WORLD_RANK").is_none() && value("SLURM_PROCID").is_none())
                .then(|| format!("PMIX_RANK={rank} is one of several processes, and nothing says how many"))
        });
        match problem {
            None => Ok(()),
            Some(problem) => {
                let expected = "a description of the job, such as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT";
                let remedy = "Set them on every process, or set DISTRIBUTE_ALONE=1 if each process is to train alone.";
                Err(Error::config(ENVIRONMENT, problem, "signs of several processes", expected, remedy))
            }
        }
    }
}

/// The address of a leader on this host.
fn here(port: u16) -> (String, u16) {
    (LOOPBACK.to_owned(), port)
}

/// Returns a port in the dynamic range that is the same on every task of a job and differs between jobs.
fn port_of(job: &JobId) -> u16 {
    // The last bytes differ most between names that differ in their ends.
    let [.., high, low] = job.to_bytes();
    FIRST_PORT + u16::from_be_bytes([high, low]) % PORTS
}

const LOOPBACK: &str = "127.0.0.1";

/// The last 4096 ports, which systems give to outgoing connections last.
const FIRST_PORT: u16 = 61_440;
const PORTS: u16 = 4096;
/// The distance of the ports of two steps of a Slurm job, far enough that it does not meet the jobs after it.
const STEP_PORTS: u32 = 257;

/// The run id of torchrun jobs that were not given one.
const TORCHRUN_DEFAULT: &str = "none";

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the leader's address of a task of job 5.
    fn leader(vars: &[(&str, &str)]) -> String {
        let task = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_ID", "5"),
            ("SLURM_STEP_NODELIST", "n1"),
            ("SLURM_JOB_NODELIST_HET_GROUP_0", "n1"),
        ];
        let all = [vars, &task].concat();
        let variable = |name: &str| all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let manager = |_: &Variable<'_>| -> Result<Meeting> { panic!("no process manager is asked") };
        membership(&variable, &manager).unwrap().unwrap().leader_address
    }

    #[test]
    fn steps_of_a_slurm_job_that_run_at_once_meet_at_different_ports() {
        assert_eq!(leader(&[("SLURM_STEP_ID", "0")]), "n1:61445");
        assert_eq!(leader(&[("SLURM_STEP_ID", "1")]), "n1:61702");
        assert_eq!(leader(&[("SLURM_STEPID", "2")]), "n1:61959");
        assert_eq!(leader(&[("SLURM_STEP_ID", "4294967295")]), "n1:65284");
        // Not a number, and the components of a job that has several.
        assert_eq!(leader(&[("SLURM_STEP_ID", "batch")]), "n1:61445");
        assert_eq!(leader(&[("SLURM_STEP_ID", "1"), ("SLURM_HET_SIZE", "1")]), "n1:61445");
    }
}

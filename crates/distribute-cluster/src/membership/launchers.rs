//! Reads the environment variables of launchers.

use super::{Membership, from_tf_config};
use crate::slurm::first_host;
use crate::spec::host_problem;
use crate::{ClusterSpec, Error, JobId, Result, environment};

/// Returns the membership that the variables describe.
pub(super) fn membership(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Membership>> {
    if let Some(name) = DECISIVE.into_iter().find(|name| variable(name).is_some_and(|value| value.trim().is_empty())) {
        let remedy = format!("Unset {name} for a program of one process, else correct what sets it.");
        return Err(Error::config(ENVIRONMENT, format!("{name} is set, but empty"), "nothing", "a value", remedy));
    }
    let variable: &dyn Fn(&str) -> Option<String> = &environment::set(variable);
    let vars = Vars(variable);
    let set = |name: &str| vars.get(name).is_some();
    // A batch script of Slurm also has SLURM_PROCID but is one process; only the tasks of a step have the step's
    // variables.
    let sources = [
        (TF_CONFIG, set("TF_CONFIG")),
        (RANKS, set("RANK")),
        (OPEN_MPI, set("OMPI_COMM_WORLD_RANK")),
        (SLURM, set("SLURM_PROCID") && set("SLURM_STEP_NODELIST")),
    ];
    let seen: Vec<&'static str> = sources.into_iter().filter(|(_, set)| *set).map(|(source, _)| source).collect();
    let Some((&source, others)) = seen.split_first() else {
        return match vars.get("WORLD_SIZE") {
            Some(size) if size.trim() != "1" => {
                Err(wrong("WORLD_SIZE is set, but RANK is not", "no RANK", "RANK from 0 to WORLD_SIZE - 1"))
            }
            _ => Ok(None),
        };
    };
    let found = match source {
        TF_CONFIG => {
            let found = from_tf_config(&vars.get("TF_CONFIG").unwrap_or_default())?;
            if let Some(membership) = &found {
                vars.agrees_with(membership)?;
            }
            found
        }
        OPEN_MPI => Some(vars.ranks(OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None)?),
        SLURM => Some(vars.slurm()?),
        _ => Some(vars.ranks(RANKS, "RANK", "WORLD_SIZE", None)?),
    };
    let Some(mut membership) = found else { return Ok(None) };
    membership.also_seen = others.to_vec();
    if let Some(job) = JobId::from_vars(variable)?.or_else(|| vars.scheduler_job(source)) {
        membership = membership.with_job_id(job);
    }
    Ok(Some(membership))
}

/// Variables that identify this process within a job. If one is set but empty, for example by a template without a
/// value, each task would otherwise start as a job of one process.
const DECISIVE: [&str; 6] =
    ["TF_CONFIG", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"];

const TF_CONFIG: &str = "TF_CONFIG";
const RANKS: &str = "RANK and WORLD_SIZE";
const OPEN_MPI: &str = "Open MPI";
const SLURM: &str = "Slurm";

/// The environment variables of a process.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    /// Returns the identity that the launcher which described the job gives to all of its processes. Identities from
    /// other launchers are ignored because they may name only a part of the job.
    fn scheduler_job(&self, source: &str) -> Option<JobId> {
        let from = |variable: &'static str| JobId::of_scheduler(variable, self.get(variable)?).ok();
        match source {
            RANKS => from("TORCHELASTIC_RUN_ID").filter(|job| job.name() != TORCHRUN_DEFAULT),
            OPEN_MPI => from("PMIX_NAMESPACE").or_else(|| from("OMPI_MCA_ess_base_jobid")),
            // The components of a heterogeneous job have different numbers.
            SLURM if self.get("SLURM_HET_SIZE").is_none() => {
                let step = self.get("SLURM_STEP_ID").or_else(|| self.get("SLURM_STEPID"))?;
                let name = format!("slurm-{}.{}", self.get("SLURM_JOB_ID")?.trim(), step.trim());
                JobId::of_scheduler("SLURM_STEP_ID", name).ok()
            }
            _ => None,
        }
    }

    fn slurm(&self) -> Result<Membership> {
        let list = self.get("SLURM_STEP_NODELIST").unwrap_or_default();
        let host = first_host(&list).ok_or_else(|| {
            wrong(
                "SLURM_STEP_NODELIST is not a list of hosts",
                &list,
                "a list such as node1 or node[1-4,7]; or set MASTER_ADDR",
            )
        });
        let job = match self.get("SLURM_JOB_ID") {
            Some(id) => {
                id.trim().parse::<u32>().map_err(|_| wrong("SLURM_JOB_ID is not a whole number", &id, "1, 2, …"))?
            }
            None => 0,
        };
        // A port in the dynamic range that is the same on every task and differs between jobs.
        let address = host.map(|host| (host, (61_440 + job % 4096) as u16));
        // The size of the step, which may differ from that of the allocation.
        let size = if self.get("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
        self.ranks(SLURM, "SLURM_PROCID", size, Some(address))
    }

    /// Returns the membership for a rank and size; `otherwise` is the leader's address if MASTER_ADDR is not set.
    fn ranks(
        &self,
        source: &'static str,
        rank_name: &str,
        size_name: &str,
        otherwise: Option<Result<(String, u16)>>,
    ) -> Result<Membership> {
        let number = |name: &str| -> Result<u32> {
            let missing =
                || wrong(&format!("{rank_name} is set, but {name} is not"), &format!("no {name}"), "a number");
            let given = self.get(name).ok_or_else(missing)?;
            given.trim().parse().map_err(|_| wrong(&format!("{name} is not a whole number"), &given, "0, 1, 2, …"))
        };
        let (rank, size) = (number(rank_name)?, number(size_name)?);
        if rank >= size {
            let expected = format!("a rank from 0 to {}", size.saturating_sub(1));
            return Err(wrong(
                &format!("{rank_name}={rank} is outside {size_name}={size}"),
                &rank.to_string(),
                &expected,
            ));
        }
        if size as usize > ClusterSpec::MAX_TASKS {
            let expected = format!("at most {}", ClusterSpec::MAX_TASKS);
            return Err(wrong(&format!("{size_name} is too large"), &size.to_string(), &expected));
        }
        let leader_address = if size == 1 { String::new() } else { self.leader_address(size_name, size, otherwise)? };
        Ok(Membership { source, ..Membership::new(rank, size, leader_address)? })
    }

    fn leader_address(&self, size_name: &str, size: u32, otherwise: Option<Result<(String, u16)>>) -> Result<String> {
        let own_port = self.port("DISTRIBUTE_PORT")?;
        let master_port = self.port("MASTER_PORT")?;
        if let (Some(own), Some(master)) = (own_port, master_port)
            && own == master
        {
            let problem =
                "DISTRIBUTE_PORT and MASTER_PORT are the same, but launchers listen on MASTER_PORT themselves";
            return Err(wrong(problem, &own.to_string(), "two different ports"));
        }
        let port_after_master = || match master_port {
            Some(u16::MAX) => {
                let expected = "a port below 65535, or DISTRIBUTE_PORT";
                Err(wrong("MASTER_PORT leaves no port after it", &u16::MAX.to_string(), expected))
            }
            Some(master) => Ok(Some(master + 1)),
            None => Ok(None),
        };
        let port = match own_port {
            Some(port) => Some(port),
            None => port_after_master()?,
        };
        match (self.get("MASTER_ADDR"), otherwise) {
            (Some(given), otherwise) => {
                let host = self.master_host(&given)?;
                let fallback = otherwise.and_then(Result::ok).map(|(_, port)| port);
                let missing = || {
                    let problem = "MASTER_ADDR is set, but neither MASTER_PORT nor DISTRIBUTE_PORT is";
                    wrong(problem, "no port", "MASTER_PORT, such as 29500")
                };
                Ok(format!("{host}:{}", port.or(fallback).ok_or_else(missing)?))
            }
            (None, Some(address)) => {
                let (host, otherwise) = address?;
                Ok(format!("{host}:{}", port.unwrap_or(otherwise)))
            }
            (None, None) => {
                let problem = format!("{size_name}={size}, but MASTER_ADDR does not say where rank 0 is");
                Err(wrong(&problem, "no MASTER_ADDR", "the host of rank 0"))
            }
        }
    }

    /// Returns the host of MASTER_ADDR; an IPv6 address may be without brackets.
    fn master_host(&self, given: &str) -> Result<String> {
        let given = given.trim();
        let host = match given.parse::<std::net::Ipv6Addr>() {
            Ok(address) => format!("[{address}]"),
            Err(_) => given.to_owned(),
        };
        match host_problem(&host) {
            None => Ok(host),
            Some(_) => {
                let expected = "a host name or IP address, without a port";
                Err(wrong("MASTER_ADDR is not a host", given, expected))
            }
        }
    }

    fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(given) = self.get(name) else { return Ok(None) };
        match given.trim().parse::<u16>() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(wrong(&format!("{name} is not a port"), &given, "a number from 1 to 65535")),
        }
    }

    /// Checks that RANK and WORLD_SIZE agree with TF_CONFIG. If they do not, two launchers are active or one started
    /// several processes with the same TF_CONFIG.
    fn agrees_with(&self, described: &Membership) -> Result<()> {
        let number = |name: &str| -> Result<Option<u32>> {
            let wrong = |given: &str| wrong(&format!("{name} is not a whole number"), given, "0, 1, 2, …");
            self.get(name).map(|given| given.trim().parse().map_err(|_| wrong(&given))).transpose()
        };
        let (Some(rank), Some(size)) = (number("RANK")?, number("WORLD_SIZE")?) else { return Ok(()) };
        let trains = described.task().kind.trains();
        if !trains || (rank, size) == (described.rank, described.world_size()) {
            return Ok(());
        }
        Err(Error::config(
            ENVIRONMENT,
            "TF_CONFIG and RANK with WORLD_SIZE contradict each other",
            format!(
                "TF_CONFIG with {}, rank {} of {}; RANK={rank}, WORLD_SIZE={size}",
                described.task(),
                described.rank,
                described.world_size()
            ),
            "one description of the job, or two that agree",
            "Unset TF_CONFIG, or unset RANK and WORLD_SIZE.",
        ))
    }
}

/// The run id of torchrun jobs that were not given one.
const TORCHRUN_DEFAULT: &str = "none";

const ENVIRONMENT: &str = "the environment";

fn wrong(problem: &str, given: &str, expected: &str) -> Error {
    let remedy = "Set the variables alike on every process, or start the program with `distribute run`.";
    Error::config(ENVIRONMENT, problem, given, expected, remedy)
}

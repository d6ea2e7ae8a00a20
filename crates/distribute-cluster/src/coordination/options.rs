//! How members meet and watch each other.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use super::driver::Driver;
use super::{HostDecision, InterfaceChoice, LocalHost, host};
use crate::error::seconds;
use crate::{Error, JobId, Membership, Result, Task, env};

/// How members meet and watch each other; every member uses the same heartbeats.
#[derive(Clone)]
pub struct CoordinationOptions {
    /// How long to wait for all members. Default 5 minutes; [`from_env`](CoordinationOptions::from_env) reads
    /// DISTRIBUTE_TIMEOUT.
    pub join_timeout: Duration,
    /// How often each side says that it is alive. Default 1 s, at least 1 ms.
    pub heartbeat_interval: Duration,
    /// After how much silence a member counts as lost. Default 10 s, at least twice the interval.
    pub heartbeat_timeout: Duration,
    /// How often to say who is still missing. Default 3 s.
    pub progress_interval: Duration,
    /// Who is told; by default a line of `tracing` at level info.
    pub progress: Option<Arc<Progress>>,
    /// Which network interface the others reach this process by: one of its addresses, or names as
    /// [`from_env`](CoordinationOptions::from_env) takes them. Default: the one towards the leader.
    pub interface: Option<InterfaceChoice>,
    /// The job's identity, before that of the [`Membership`]. Default: the membership's;
    /// [`from_env`](CoordinationOptions::from_env) reads DISTRIBUTE_JOB_ID.
    pub job_id: Option<JobId>,
    /// A listener of the leader that exists already; for tests and launchers.
    pub listener: Option<Arc<TcpListener>>,
}

impl Default for CoordinationOptions {
    fn default() -> Self {
        CoordinationOptions {
            join_timeout: Duration::from_secs(300),
            heartbeat_interval: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_secs(10),
            progress_interval: Duration::from_secs(3),
            progress: None,
            interface: None,
            job_id: None,
            listener: None,
        }
    }
}

impl CoordinationOptions {
    /// The defaults, with the join timeout of DISTRIBUTE_TIMEOUT (seconds), the identity of DISTRIBUTE_JOB_ID, and the interface of DISTRIBUTE_INTERFACE, or else
    /// NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: `eth` (names that begin so), `=eth0` (that one), `^lo,docker` (all others),
    /// or an address of this machine.
    ///
    /// # Errors
    /// [`Error::Config`] where the timeout is not a number above 0, the identity is malformed, or a variable is not UTF-8.
    pub fn from_env() -> Result<CoordinationOptions> {
        env::read(|variable| CoordinationOptions::from_vars(variable))
    }

    /// As [`from_env`](CoordinationOptions::from_env), with the variables looked up by a function.
    ///
    /// # Errors
    /// As [`from_env`](CoordinationOptions::from_env).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<CoordinationOptions> {
        let variable = env::set(&variable);
        let interface = InterfaceChoice::from_vars(&variable);
        let mut options = CoordinationOptions { interface, ..CoordinationOptions::default() };
        options.job_id = JobId::from_vars(&variable)?;
        if let Some(given) = variable("DISTRIBUTE_TIMEOUT") {
            let seconds = given.trim().parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds < 1e9);
            let wrong = || {
                let mend = "Correct it, or leave it unset for 5 minutes.";
                let problem = "it is not a number of seconds above 0";
                Error::config("DISTRIBUTE_TIMEOUT", problem, &given, "seconds, such as 30 or 0.5", mend)
            };
            options.join_timeout = seconds.map(Duration::from_secs_f64).ok_or_else(wrong)?;
        }
        Ok(options)
    }

    /// The host by which the others reach this process as `membership`: its own address in the description of the job, else
    /// the chosen interface, else the one towards the leader, whose name is looked up for at most 5 s. Joins nothing.
    ///
    /// # Errors
    /// [`Error::Config`] where [`interface`](CoordinationOptions::interface) chooses none of this machine.
    pub fn local_host(&self, membership: &Membership) -> Result<LocalHost> {
        match self.decided_host(membership)? {
            Some(decided) => Ok(decided),
            None => Ok(host::towards_leader(membership, &Driver::start("lookup")?)),
        }
    }

    /// What needs no look at the leader. A wrong choice is an error even where the description counts before it.
    pub(super) fn decided_host(&self, membership: &Membership) -> Result<Option<LocalHost>> {
        let like = membership.leader_address.parse::<SocketAddr>().ok().map(|address| address.ip());
        let chosen = self.interface.as_ref().map(|choice| Ok((choice, choice.address(like)?))).transpose()?;
        let described = membership.advertised_host.clone();
        let described = described.map(|host| LocalHost { host, decided_by: HostDecision::Description });
        Ok(described.or_else(|| {
            let (choice, address) = chosen?;
            Some(LocalHost { host: address.to_string(), decided_by: HostDecision::Interface(choice.variable()) })
        }))
    }

    /// Refuses what could not work, and bounds what clocks cannot add.
    pub(super) fn check(&mut self, membership: &Membership) -> Result<()> {
        let (size, given) = (membership.world_size(), membership.rank.to_string());
        if membership.rank >= size {
            let problem = format!("rank {given} is outside a job of {size}");
            return Err(Error::config(
                "membership",
                problem,
                given,
                "a rank below the size",
                "Correct the membership.",
            ));
        }
        if self.heartbeat_interval < Duration::from_millis(1) || self.heartbeat_timeout < self.heartbeat_interval * 2 {
            let given = format!(
                "every {} s, at most {} s",
                seconds(&self.heartbeat_interval),
                seconds(&self.heartbeat_timeout)
            );
            let expected = "an interval of at least 1 ms and a timeout of at least twice the interval";
            let problem = "a member that lives would count as lost";
            return Err(Error::config("heartbeats", problem, given, expected, "Raise heartbeat_timeout."));
        }
        self.join_timeout = self.join_timeout.min(LONGEST);
        self.heartbeat_timeout = self.heartbeat_timeout.min(LONGEST);
        self.progress_interval = self.progress_interval.clamp(Duration::from_millis(10), LONGEST);
        Ok(())
    }

    /// The same without the listener, which belongs to the leader's service alone.
    pub(super) fn clone_for_join(&self) -> CoordinationOptions {
        CoordinationOptions { listener: None, ..self.clone() }
    }

    pub(super) fn tell(&self, waiting: &Waiting) {
        match &self.progress {
            Some(progress) => progress(waiting),
            None => tracing::info!(task = %waiting.task, "{waiting}"),
        }
    }
}

/// Is told, every few seconds, what a task waits for while it joins.
pub type Progress = dyn Fn(&Waiting) + Send + Sync;

/// Durations above this are as good as for ever.
pub(super) const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

impl fmt::Debug for CoordinationOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoordinationOptions")
            .field("join_timeout", &self.join_timeout)
            .field("heartbeat_interval", &self.heartbeat_interval)
            .field("heartbeat_timeout", &self.heartbeat_timeout)
            .field("progress_interval", &self.progress_interval)
            .field("progress", &self.progress.is_some())
            .field("interface", &self.interface)
            .field("job_id", &self.job_id)
            .field("listener", &self.listener)
            .finish()
    }
}

/// What a task waits for while it joins; printed as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// The task that waits.
    pub task: Task,
    /// Who is missing, as far as the leader has said; in large jobs the first of them.
    pub missing: Vec<Task>,
    /// How many are missing.
    pub missing_count: u32,
    /// The number of tasks of the job.
    pub world_size: u32,
    /// The leader and its address.
    pub leader: String,
    /// Why this task is not connected to the leader; `None` while it is.
    pub problem: Option<String>,
    /// How long it has waited.
    pub waited: Duration,
    /// How long it waits in all.
    pub timeout: Duration,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waited, timeout) = (self.waited.as_secs(), seconds(&self.timeout));
        match &self.problem {
            Some(problem) => write!(f, "waiting for the leader {} ({waited} s of {timeout} s): {problem}", self.leader),
            None => {
                let shown: Vec<String> = self.missing.iter().take(8).map(Task::to_string).collect();
                let more = if self.missing_count > 8 { ", …" } else { "" };
                let (missing, size) = (self.missing_count, self.world_size);
                let names = shown.join(", ");
                write!(f, "waiting for {missing} of {size} tasks: {names}{more} ({waited} s of {timeout} s)")
            }
        }
    }
}

//! Options for joining a job and for failure detection.

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::limits::LONGEST;
use crate::error::seconds;
use crate::{Error, InterfaceChoice, JobId, JobSecret, JobTls, LocalHost, Membership, Result, Task, environment, host};

/// Options for joining a job and for failure detection. Every member must use the same heartbeats; the leader refuses
/// one whose heartbeats are others.
#[derive(Clone)]
#[non_exhaustive]
pub struct CoordinationOptions {
    /// How long to wait for all members. Default 5 minutes; [`from_env`](CoordinationOptions::from_env) reads
    /// DISTRIBUTE_TIMEOUT.
    pub join_timeout: Duration,
    /// Interval between heartbeats in each direction. Default 1 s, at least 1 ms.
    pub heartbeat_interval: Duration,
    /// Silence after which a member is considered lost. Default 10 s, at least twice the interval.
    pub heartbeat_timeout: Duration,
    /// Interval between reports of the tasks that are still missing. Default 3 s.
    pub progress_interval: Duration,
    /// Receives the reports; by default they are logged by `tracing` at level info.
    pub progress: Option<Arc<Progress>>,
    /// The network interface at which other members reach this process for data: one of its addresses, or names in the
    /// syntax of [`from_env`](CoordinationOptions::from_env). The leader's address, at which members join, stays as it
    /// is. Default: this process's own address in the description of the job, else the one towards the leader.
    pub interface: Option<InterfaceChoice>,
    /// The job's identity; overrides that of the [`Membership`]. Default: the membership's;
    /// [`from_env`](CoordinationOptions::from_env) reads DISTRIBUTE_JOB_ID.
    pub job_id: Option<JobId>,
    /// The job's secret, which members and leader prove to each other before anything else; the same on all of them.
    /// Default: none; [`from_env`](CoordinationOptions::from_env) reads DISTRIBUTE_JOB_SECRET_FILE or
    /// DISTRIBUTE_JOB_SECRET.
    pub secret: Option<JobSecret>,
    /// The certificate of this process, by which members and leader use TLS; all of them, or none. Default: none;
    /// [`from_env`](CoordinationOptions::from_env) reads DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and
    /// DISTRIBUTE_TLS_KEY.
    pub tls: Option<JobTls>,
    /// An existing listener for the leader, for tests and launchers.
    pub listener: Option<Arc<TcpListener>>,
    /// The number of the newest generation of the elastic job, which ends the joining of an earlier one.
    pub(crate) newest: Option<watch::Receiver<u64>>,
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
            secret: None,
            tls: None,
            listener: None,
            newest: None,
        }
    }
}

distribute_types::setters! {
    CoordinationOptions {
        join_timeout: Duration,
        heartbeat_interval: Duration,
        heartbeat_timeout: Duration,
        progress_interval: Duration,
    } into {
        progress: Option<Arc<Progress>>,
        interface: Option<InterfaceChoice>,
        job_id: Option<JobId>,
        secret: Option<JobSecret>,
        tls: Option<JobTls>,
        listener: Option<Arc<TcpListener>>,
    }
}

impl CoordinationOptions {
    /// Returns the defaults, modified by the environment: the join timeout from DISTRIBUTE_TIMEOUT (seconds), the
    /// identity from DISTRIBUTE_JOB_ID, the secret from DISTRIBUTE_JOB_SECRET_FILE or DISTRIBUTE_JOB_SECRET, the
    /// certificate from DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY, and the interface from the first
    /// of DISTRIBUTE_INTERFACE, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: `eth` (names with this prefix), `=eth0`
    /// (this name), `^lo,docker` (all but names with these prefixes), or an address of this machine.
    ///
    /// # Errors
    /// [`Error::Config`] if the timeout is not a number above 0, the identity is malformed, the secret cannot be read,
    /// see [`JobSecret::from_env`], or the certificate cannot be used, see [`JobTls::from_env`], or a variable is not
    /// UTF-8.
    pub fn from_env() -> Result<CoordinationOptions> {
        environment::read(|variable| CoordinationOptions::from_vars(variable))
    }

    /// Reads the options like [`from_env`](CoordinationOptions::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`] if the timeout is not a number above 0, the identity is malformed, the secret cannot be read,
    /// or the certificate cannot be used.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<CoordinationOptions> {
        let variable = environment::set(&variable);
        let interface = InterfaceChoice::from_vars(&variable);
        let mut options = CoordinationOptions { interface, ..CoordinationOptions::default() };
        options.job_id = JobId::from_vars(&variable)?;
        options.secret = JobSecret::from_vars(&variable)?;
        options.tls = JobTls::from_vars(&variable)?;
        options.join_timeout = environment::timeout(&variable)?.unwrap_or(options.join_timeout);
        Ok(options)
    }

    /// Returns the host at which other members reach this process: the chosen interface, else its own address in the
    /// description of the job, else the one towards the leader, whose name lookup takes at most 5 s. Does not join the
    /// job.
    ///
    /// # Errors
    /// [`Error::Config`] if [`interface`](CoordinationOptions::interface) matches no interface of this machine.
    pub fn local_host(&self, membership: &Membership) -> Result<LocalHost> {
        host::decide(membership, self.interface.as_ref())
    }

    /// Rejects invalid options, and bounds durations so that they can be added to clocks.
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
        let least = self.heartbeat_interval.saturating_mul(2);
        if self.heartbeat_interval < Duration::from_millis(1) || self.heartbeat_timeout < least {
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
        self.heartbeat_interval = self.heartbeat_interval.min(LONGEST / 2);
        self.heartbeat_timeout = self.heartbeat_timeout.min(LONGEST);
        self.progress_interval = self.progress_interval.clamp(Duration::from_millis(10), LONGEST);
        Ok(())
    }

    /// Returns the same options without the listener, which belongs to the leader's service only.
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

/// A callback that receives, at every progress interval, what a task waits for while it joins.
pub type Progress = dyn Fn(&Waiting) + Send + Sync;

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
            .field("secret", &self.secret)
            .field("tls", &self.tls)
            .field("listener", &self.listener)
            .finish()
    }
}

/// The progress of a joining task and what it waits for; its `Display` form is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// The task that waits.
    pub task: Task,
    /// The missing tasks as last reported by the leader; in large jobs only the first of them.
    pub missing: Vec<Task>,
    /// The number of missing tasks.
    pub missing_count: u32,
    /// The number of tasks of the job.
    pub world_size: u32,
    /// The leader and its address.
    pub leader: String,
    /// Why this task is not connected to the leader; `None` while it is connected.
    pub problem: Option<String>,
    /// How long the task has waited.
    pub waited: Duration,
    /// The timeout.
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

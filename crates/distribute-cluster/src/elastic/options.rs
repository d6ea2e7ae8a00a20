//! Options of an elastic job.

use std::collections::HashSet;
use std::fmt;
use std::net::TcpListener;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::generation::{Generation, check_address};
use super::register::{FileRegister, Register};
use crate::coordination::LONGEST;
use crate::{Error, InterfaceChoice, JobId, JobSecret, JobTls, Membership, Result, environment, host};

/// Who decides the next generation.
#[derive(Clone)]
#[non_exhaustive]
pub enum Authority {
    /// A majority of the members of the generation before; of the seeds for the first. Fewer members decide nothing, so
    /// that two parts of a network never continue both. A job of two ends when one of them is lost.
    Majority,
    /// A register alone. A single survivor can continue.
    Register(Arc<dyn Register>),
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Authority::Majority => "Majority",
            Authority::Register(_) => "Register",
        })
    }
}

/// Options for joining an elastic job. All processes must use the same `members`, `authority` and `job_id`, and those
/// that found the job by a majority the same `seeds`. Processes compare them when they connect: one that finds others
/// before the first generation ends with an error, and later only the one that comes with them does.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ElasticOptions {
    /// The smallest and the largest number of members; at most 4096.
    pub members: RangeInclusive<u32>,
    /// How long processes that ask to join are gathered before a generation is decided that has them. Default 500 ms.
    pub join_window: Duration,
    /// How long the members' answers are awaited before one that does not answer is left out. Default 500 ms, at least
    /// 10 ms.
    pub answer_window: Duration,
    /// How long a process waits for a generation that has it, when it joins and when its generation is over. Default 5
    /// minutes; [`from_env`](ElasticOptions::from_env) reads DISTRIBUTE_TIMEOUT.
    pub join_timeout: Duration,
    /// Who decides. Default: a majority.
    pub authority: Authority,
    /// The control addresses (`host:port`) by which processes find each other at first. Under a majority, most of them
    /// must be there for the first generation. They may be none with a register and a smallest number of 1.
    pub seeds: Vec<String>,
    /// The address to listen on for control messages. Default: that of the seed whose host is `host`, if it is the only
    /// one, else any free port.
    pub bind: Option<String>,
    /// The host at which others reach this process. Default: that of `bind`, or the own address on the route to the
    /// first seed.
    pub host: Option<String>,
    /// The job's identity.
    pub job_id: JobId,
    /// The job's secret, which processes prove to each other before anything else; the same on all of them. Default:
    /// none; [`from_env`](ElasticOptions::from_env) reads DISTRIBUTE_JOB_SECRET_FILE or DISTRIBUTE_JOB_SECRET.
    pub secret: Option<JobSecret>,
    /// The certificate of this process, by which processes use TLS; all of them, or none. Default: none;
    /// [`from_env`](ElasticOptions::from_env) reads DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY.
    pub tls: Option<JobTls>,
    /// An existing listener for control messages, used instead of `bind`; for tests and launchers.
    pub listener: Option<Arc<TcpListener>>,
    /// Whether this process may decide the first generation if it is at the address of a seed. Default true. Set it to
    /// false for a process that replaces one that was lost: it has forgotten the promises of its predecessor, which
    /// could let a second first generation come about on the other side of a broken network.
    pub founding: bool,
    /// A flag that ends the wait for a generation with [`Error::Stopped`] when it is set, for a process that is told to
    /// stop: at once before its first generation, and after 3 s later, in which those that are left may decide the next
    /// one. Default: none.
    pub stop: Option<Arc<AtomicBool>>,
}

impl ElasticOptions {
    /// Creates the options of a job with defaults.
    ///
    /// # Examples
    /// ```
    /// use distribute_cluster::{ElasticOptions, JobId};
    /// let options = ElasticOptions::new(2..=8, ["a:2222", "b:2222", "c:2222"], JobId::new("mnist")?);
    /// assert_eq!(options.seeds.len(), 3);
    /// # Ok::<(), distribute_cluster::Error>(())
    /// ```
    pub fn new<S: Into<String>>(
        members: RangeInclusive<u32>,
        seeds: impl IntoIterator<Item = S>,
        job_id: JobId,
    ) -> ElasticOptions {
        ElasticOptions {
            members,
            join_window: Duration::from_millis(500),
            answer_window: Duration::from_millis(500),
            join_timeout: Duration::from_secs(300),
            authority: Authority::Majority,
            seeds: seeds.into_iter().map(Into::into).collect(),
            bind: None,
            host: None,
            job_id,
            secret: None,
            tls: None,
            listener: None,
            founding: true,
            stop: None,
        }
    }

    /// Returns the options of the process that a launcher's description makes one of several.
    ///
    /// The addresses of all workers are the seeds, if the description has them, as TF_CONFIG does. Without `authority`,
    /// DISTRIBUTE_GENERATIONS, if it is set, names the folder of a [`FileRegister`], `file:/shared/folder`, or a Lease
    /// of Kubernetes, `lease:NAME` or `lease:NAME@NAMESPACE` (feature `kubernetes`); else a majority decides. Where a
    /// majority decides, a process that a launcher has started again in the same job (DISTRIBUTE_TASK_RESTARTS) is not
    /// [founding](ElasticOptions::founding). DISTRIBUTE_TIMEOUT is the [`join_timeout`](ElasticOptions::join_timeout)
    /// in seconds.
    ///
    /// The identity is that of the membership; if that one is [derived](JobId::is_derived), DISTRIBUTE_JOB_ID comes
    /// first. A register that DISTRIBUTE_GENERATIONS names needs an identity that no other start has: other jobs, and
    /// later starts of this one, would continue the job that the register holds. A derived identity is refused
    /// therefore, and so is that of TORCHELASTIC_RUN_ID, which torchrun keeps when it starts the workers again.
    ///
    /// If the addresses are not known, others reach this process at the interface that DISTRIBUTE_INTERFACE,
    /// NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME chooses, else at its address in the description, else at the one
    /// towards the leader. The interface of data is that of
    /// [`CoordinationOptions`](crate::CoordinationOptions::interface) in any case.
    ///
    /// # Errors
    /// [`Error::Config`] if DISTRIBUTE_GENERATIONS, DISTRIBUTE_JOB_ID, DISTRIBUTE_TASK_RESTARTS or DISTRIBUTE_TIMEOUT
    /// is malformed, DISTRIBUTE_GENERATIONS is set and other starts may have the identity, the secret or the
    /// certificate cannot be read, a variable matches no interface of this machine, or the processes cannot find each
    /// other: without a register or with a smallest number above 1, their addresses must be known.
    pub fn from_env(
        membership: &Membership,
        members: RangeInclusive<u32>,
        authority: Option<Authority>,
    ) -> Result<ElasticOptions> {
        environment::read(|variable| ElasticOptions::from_vars(membership, members, authority, variable))
    }

    /// Reads the options like [`from_env`](ElasticOptions::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// The errors of [`from_env`](ElasticOptions::from_env) occur in the same cases.
    pub fn from_vars(
        membership: &Membership,
        members: RangeInclusive<u32>,
        authority: Option<Authority>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<ElasticOptions> {
        let variable = environment::set(&variable);
        let given = variable("DISTRIBUTE_GENERATIONS");
        let job_id = membership.job_id_or_given(&variable)?;
        let authority = match (authority, given) {
            (Some(authority), _) => authority,
            (None, None) => Authority::Majority,
            (None, Some(given)) => Authority::Register(register(&given, &job_id, &variable)?),
        };
        let seeds: Option<Vec<String>> = membership.addresses.iter().cloned().collect();
        let is_again = task_restarts(&variable)? > 0;
        // A register decides the first generation once, whatever a process has forgotten.
        let founding = !is_again || matches!(authority, Authority::Register(_));
        let mut options = ElasticOptions::new(members, seeds.unwrap_or_default(), job_id);
        options.join_timeout = environment::timeout(&variable)?.unwrap_or(options.join_timeout);
        let own = membership.addresses.get(membership.rank as usize).cloned().flatten();
        (options.authority, options.founding, options.bind) = (authority, founding, own);
        options.host.clone_from(&membership.advertised_host);
        options.secret = JobSecret::from_vars(&variable)?;
        options.tls = JobTls::from_vars(&variable)?;
        if options.seeds.is_empty() {
            let interface = InterfaceChoice::from_vars(&variable);
            options.host = Some(host::decide(membership, interface.as_ref())?.host);
        }
        Ok(options)
    }

    /// Returns the value of DISTRIBUTE_GENERATIONS if it is set: for strategies whose processes do not change, which
    /// warn that it has no effect.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not UTF-8.
    pub fn register_of_env() -> Result<Option<String>> {
        environment::read(|variable| Ok(environment::set(variable)("DISTRIBUTE_GENERATIONS")))
    }

    /// Rejects invalid options, and bounds durations so that they can be added to clocks.
    pub(super) fn check(&mut self) -> Result<()> {
        let refused = |problem: String, given: String, expected: &str, remedy: &str| {
            Err(Error::config("the options of an elastic job", problem, given, expected, remedy))
        };
        let (min, max) = (*self.members.start(), *self.members.end());
        if min == 0 || max < min || max as usize > Generation::MAX_MEMBERS {
            let expected = format!("from 1 to {}", Generation::MAX_MEMBERS);
            return refused(
                "members is not a range of numbers of members".to_owned(),
                format!("{min}..={max}"),
                &expected,
                "Correct members.",
            );
        }
        let mut known = HashSet::new();
        for (place, seed) in self.seeds.iter().enumerate() {
            let problem = check_address(seed).err();
            let twice = (!known.insert(seed)).then(|| "it is there twice".to_owned());
            if let Some(problem) = problem.or(twice) {
                let expected = "distinct addresses of the form host:port";
                return refused(format!("seed {place}: {problem}"), seed.clone(), expected, "Correct seeds.");
            }
        }
        if self.seeds.len() > Generation::MAX_MEMBERS {
            let (given, limit) = (self.seeds.len(), Generation::MAX_MEMBERS);
            let problem = format!("there are {given} seeds");
            return refused(problem, given.to_string(), &format!("at most {limit}"), "Name some of the processes.");
        }
        if self.seeds.is_empty() && (min > 1 || matches!(self.authority, Authority::Majority)) {
            let expected = "the control addresses of some processes";
            let remedy = "Set seeds, alike on all processes.";
            return refused("processes cannot find each other".to_owned(), "no seeds".to_owned(), expected, remedy);
        }
        if self.answer_window < Duration::from_millis(10) {
            let given = format!("{:?}", self.answer_window);
            let problem = "members that live would be left out".to_owned();
            return refused(problem, given, "an answer_window of at least 10 ms", "Raise answer_window.");
        }
        // Multiples of windows are added to clocks.
        for window in [&mut self.join_window, &mut self.answer_window] {
            *window = (*window).min(Duration::from_secs(3600));
        }
        self.join_timeout = self.join_timeout.min(LONGEST);
        Ok(())
    }
}

distribute_types::setters! {
    ElasticOptions {
        join_window: Duration,
        answer_window: Duration,
        join_timeout: Duration,
        authority: Authority,
        founding: bool,
    } into {
        bind: Option<String>,
        host: Option<String>,
        secret: Option<JobSecret>,
        tls: Option<JobTls>,
        listener: Option<Arc<TcpListener>>,
        stop: Option<Arc<AtomicBool>>,
    }
}

/// Returns how often a launcher has started this process again in its job.
fn task_restarts(variable: &dyn Fn(&str) -> Option<String>) -> Result<u64> {
    let Some(given) = variable("DISTRIBUTE_TASK_RESTARTS") else { return Ok(0) };
    given.trim().parse().map_err(|_| {
        let (problem, expected) = ("it is not a number of restarts", "a whole number, 0 at the first start");
        let remedy = "Correct it; distribute run --elastic sets it, and other launchers may leave it out.";
        Error::config("DISTRIBUTE_TASK_RESTARTS", problem, given, expected, remedy)
    })
}

/// Returns the register that DISTRIBUTE_GENERATIONS names.
fn register(given: &str, job: &JobId, variable: &dyn Fn(&str) -> Option<String>) -> Result<Arc<dyn Register>> {
    let wrong = |problem: &str, remedy: &str| {
        let expected = "file:/shared/folder, lease:NAME or lease:NAME@NAMESPACE";
        Error::config("DISTRIBUTE_GENERATIONS", problem.to_owned(), given.to_owned(), expected, remedy)
    };
    if !job.is_of_one_start() {
        let problem = match job.is_derived() {
            true => "it holds the generations of one start of one job, which has no identity of its own",
            false => "it holds the generations of one start of a job, and TORCHELASTIC_RUN_ID is that of several",
        };
        let expected = "an identity that no other start has";
        let remedy = "Set DISTRIBUTE_JOB_ID to a name of this start, the same on all of its processes.";
        return Err(Error::config("DISTRIBUTE_GENERATIONS", problem, format!("{given}, {job}"), expected, remedy));
    }
    if let Some(lease) = given.strip_prefix("lease:") {
        return lease_register(lease, job, variable, &wrong);
    }
    match given.strip_prefix("file:").map(PathBuf::from).filter(|path| path.is_absolute()) {
        Some(folder) => Ok(Arc::new(FileRegister::new(folder, job)?)),
        None => {
            Err(wrong("it does not name a folder or a Lease", "Name a folder or a Lease that all processes reach."))
        }
    }
}

#[cfg(feature = "kubernetes")]
fn lease_register(
    lease: &str,
    job: &JobId,
    variable: &dyn Fn(&str) -> Option<String>,
    _: &dyn Fn(&str, &str) -> Error,
) -> Result<Arc<dyn Register>> {
    let (name, namespace) = match lease.split_once('@') {
        Some((name, namespace)) => (name, Some(namespace)),
        None => (lease, None),
    };
    let options = crate::KubernetesOptions::default();
    Ok(Arc::new(crate::LeaseRegister::from_vars(name, namespace, job, options, variable)?))
}

#[cfg(not(feature = "kubernetes"))]
fn lease_register(
    _: &str,
    _: &JobId,
    _: &dyn Fn(&str) -> Option<String>,
    wrong: &dyn Fn(&str, &str) -> Error,
) -> Result<Arc<dyn Register>> {
    Err(wrong("this program was built without Leases", "Build it with the feature `kubernetes`, or name a folder."))
}

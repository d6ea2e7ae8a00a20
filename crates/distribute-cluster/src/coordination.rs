//! The coordination service, by which the members of a job meet.
//!
//! Rank 0 runs it. Every member, including rank 0, holds one connection to it while it belongs to the job, which
//! carries heartbeats and calls. A process that dies is detected at once by the end of its connection, one that is
//! silent by its missing heartbeats.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::job::hex;
use crate::secret::Terms;
use crate::text::clean;
use crate::{Error, Failure, FailureKind, Incarnation, JobId, JobSecret, JobTls, Membership, Result, host};

mod alarm;
mod alone;
mod calls;
mod connection;
mod driver;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod join;
mod leader;
mod limits;
mod listen;
mod member;
mod options;
mod pulse;
mod roster;
mod service;
mod signal;
#[cfg(test)]
mod simulation;
mod store;
mod wire;

pub use options::{CoordinationOptions, Progress, Waiting};

pub(crate) use driver::Driver;
pub(crate) use leader::QUEUE;
pub(crate) use limits::LONGEST;
pub(crate) use listen::listen;

use alarm::Alarm;
use alone::Alone;
use leader::Leader;
use limits::PUT_TIMEOUT;
use member::Member;

/// This process's membership in a running job.
///
/// [`start`](Coordination::start) joins the job. Members then exchange small values, wait for each other, and learn of
/// each other's failures. Dropping the value [leaves](Coordination::leave) the job, which is not a failure; if the
/// thread is panicking, the panic is reported first. All methods block. An [`on_failure`](Coordination::on_failure)
/// callback may call only [`failure`](Coordination::failure), [`report_error`](Coordination::report_error),
/// [`report_failure`](Coordination::report_failure) and accessors.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_cluster::{Coordination, CoordinationOptions, Membership};
///
/// let second = Duration::from_secs(1);
/// let coordination = Coordination::start(&Membership::new(0, 1, "")?, CoordinationOptions::default())?;
/// coordination.put("model", b"mlp")?;
/// assert_eq!(coordination.get("model", second)?, b"mlp");
/// assert_eq!(coordination.exchange("address", b"here", second)?, [b"here"]);
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// TensorFlow's coordination service and `tf.distribute.cluster_resolver`'s barrier at start-up.
pub struct Coordination {
    membership: Membership,
    local_host: String,
    alarm: Arc<Alarm>,
    incarnation: Incarnation,
    secret: Option<JobSecret>,
    tls: Option<JobTls>,
    backend: Backend,
}

/// The implementation for the size of the job.
enum Backend {
    /// A job of one process needs no service.
    Alone(Alone),
    Joined(Box<Link>),
}

/// The connection to the service. Fields are dropped in order: the thread last.
struct Link {
    member: Member,
    leader: Option<Leader>,
    left: AtomicBool,
    driver: Driver,
}

impl Coordination {
    /// Size limit of a value that is put or exchanged, in bytes.
    pub const MAX_VALUE_BYTES: usize = limits::MAX_VALUE_BYTES;

    /// Length limit of a key, or of the name of an exchange or barrier, in bytes.
    pub const MAX_KEY_BYTES: usize = limits::MAX_KEY_BYTES;

    /// The largest number of keys that the members of a job can put.
    pub const MAX_KEYS: usize = limits::MAX_KEYS;

    /// Size limit of all keys and values of a job together, in bytes.
    pub const MAX_STORED_BYTES: usize = limits::MAX_STORED_BYTES;

    /// Joins the job: rank 0 starts the service, every member connects to it, and the call returns when all have
    /// joined.
    ///
    /// A job of one process starts no thread and opens no socket.
    ///
    /// # Errors
    /// [`Error::Listen`] if the leader's port is taken, [`Error::Unreachable`] if the leader cannot be reached in time,
    /// [`Error::Missing`] if members do not join in time, [`Error::Refused`] if two processes claim one rank, were
    /// given different descriptions of the job or different heartbeats, or belong to different jobs,
    /// [`Error::Secret`] if this process and the leader do not have the same secret or do not accept each other's
    /// certificates, [`Error::GenerationOver`] if this is a generation of an [`ElasticJob`](crate::ElasticJob) and a
    /// newer one is decided, and [`Error::Config`] if options or addresses are invalid.
    pub fn start(membership: &Membership, mut options: CoordinationOptions) -> Result<Coordination> {
        options.check(membership)?;
        Membership::mark_joined();
        let membership = &match options.job_id.take() {
            Some(job) => membership.clone().with_job_id(job),
            None => membership.clone(),
        };
        let task = membership.task();
        let alarm = Arc::new(Alarm::new(membership.clone()));
        if membership.world_size() == 1 {
            let local_host = membership.advertised_host.clone().unwrap_or_else(|| host::LOOPBACK.to_owned());
            let backend = Backend::Alone(Alone::default());
            let incarnation = Incarnation::random()?;
            let (membership, secret, tls) = (membership.clone(), options.secret, options.tls);
            return Ok(Coordination { membership, local_host, alarm, incarnation, secret, tls, backend });
        }
        // Before the service starts, so that an invalid interface fails before other members wait for this task.
        let decided = host::decided(membership, options.interface.as_ref())?;
        let driver = Driver::start(&format!("coord {task}"))?;
        let leader = match membership.is_leader() {
            true => Some(Leader::start(membership, &mut options, &driver)?),
            false => None,
        };
        let address = match &leader {
            Some(leader) => leader.address().to_owned(),
            None => membership.leader_address.clone(),
        };
        let joined = driver.call(
            join::join_unless_over(membership.clone(), address, options.clone_for_join(), alarm.clone()),
            options.join_timeout.saturating_add(Driver::MARGIN),
        );
        let joined = joined.unwrap_or_else(|| {
            let reason = "the service's own thread does not answer".to_owned();
            Err(Error::Call { task: task.to_string(), what: "joining the job".to_owned(), reason })
        });
        let member = match joined {
            Ok(member) => member,
            Err(error) => {
                // Closing tells the others that the job will not start.
                if let Some(leader) = leader {
                    driver.call(leader.close(), Driver::MARGIN);
                }
                return Err(error);
            }
        };
        let local_host = decided.unwrap_or_else(|| host::towards_leader(membership)).host;
        let (incarnation, job) = (member.incarnation(), membership.job_id());
        tracing::debug!(%task, %job, %incarnation, world_size = membership.world_size(), "joined the job");
        let backend = Backend::Joined(Box::new(Link { member, leader, left: AtomicBool::new(false), driver }));
        let (membership, secret, tls) = (membership.clone(), options.secret, options.tls);
        Ok(Coordination { membership, local_host, alarm, incarnation, secret, tls, backend })
    }

    /// Returns the identity of the job, which the leader has compared with its own.
    pub fn job_id(&self) -> JobId {
        self.membership.job_id()
    }

    /// Returns the job's incarnation: drawn by the leader when it starts, the same on all members, and new at each
    /// start.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Returns the secret that all members have proved, if the job has one.
    pub fn secret(&self) -> Option<&JobSecret> {
        self.secret.as_ref()
    }

    /// Returns the certificate by which this process uses TLS, if the job does.
    pub fn tls(&self) -> Option<&JobTls> {
        self.tls.as_ref()
    }

    /// Returns the membership that this process joined with.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Returns the host at which other members reach this process; an IPv6 address is without brackets.
    pub fn local_host(&self) -> String {
        self.local_host.trim_start_matches('[').trim_end_matches(']').to_owned()
    }

    /// Calls `callback` once when a member fails, or at once if one has failed already.
    ///
    /// The callback runs on the service's thread, or on the calling thread if a member has failed already. It must
    /// return soon; a panic in it is caught.
    pub fn on_failure(&self, callback: impl Fn(&Failure) + Send + Sync + 'static) {
        self.alarm.on_failure(Box::new(callback));
    }

    /// Returns the first failure of a member, if any.
    pub fn failure(&self) -> Option<Failure> {
        self.alarm.failure()
    }

    /// Waits for the first failure of a member, and returns it; `None` if there is none within `timeout`. The wait does
    /// not end when the leader or this process leaves, after which no failure is reported any more.
    pub fn await_failure(&self, timeout: Duration) -> Option<Failure> {
        self.alarm.wait_for_failure(timeout)
    }

    /// Tells all members that this one has failed with an error of its own that a restart would not fix. See
    /// [`report_failure`](Coordination::report_failure).
    pub fn report_error(&self, message: &str) {
        self.report_failure(message, FailureKind::Permanent);
    }

    /// Tells all members that this one has failed, and whether a restart may help. Only the first failure of a job,
    /// reported or detected, is kept.
    ///
    /// Returns when the leader has acknowledged the report, or after one second.
    pub fn report_failure(&self, message: &str, kind: FailureKind) {
        if let Backend::Joined(link) = &self.backend {
            link.member.report(message, kind);
            if !link.driver.is_current() {
                self.alarm.wait(REPORT_WAIT);
            }
        }
    }

    /// Stores a value for all members, replacing an earlier one with the same key.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above [`MAX_KEY_BYTES`](Coordination::MAX_KEY_BYTES),
    /// [`MAX_VALUE_BYTES`](Coordination::MAX_VALUE_BYTES), [`MAX_KEYS`](Coordination::MAX_KEYS) or
    /// [`MAX_STORED_BYTES`](Coordination::MAX_STORED_BYTES); [`Error::Call`] or [`Error::Failed`] if the leader cannot
    /// be reached.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        let what = || format!("put {key:?}");
        self.check_size(&what, key, value)?;
        match &self.backend {
            Backend::Alone(alone) => alone.put(key, value).map_err(|problem| self.too_large(&what, problem))?,
            Backend::Joined(link) => link.call(|member| member.put(key, value), PUT_TIMEOUT)?,
        }
        Ok(())
    }

    /// Returns the value of a key as soon as a member has put it.
    ///
    /// # Errors
    /// [`Error::KeyMissing`] if no member has put it within `timeout`, [`Error::Failed`] if a member fails meanwhile,
    /// [`Error::Call`] if the leader cannot be reached.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.check_size(&|| format!("get {key:?}"), key, &[])?;
        let found = match &self.backend {
            Backend::Alone(alone) => alone.get(key, timeout),
            Backend::Joined(link) => link.call(|member| member.get(key, timeout), timeout)?,
        };
        found.ok_or_else(|| Error::KeyMissing { task: self.task(), key: key.to_owned(), waited: timeout })
    }

    /// Returns the value of a key, or `None` if no member has put it.
    ///
    /// # Errors
    /// [`Error::Call`] or [`Error::Failed`] if the leader cannot be reached.
    pub fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.check_size(&|| format!("get {key:?}"), key, &[])?;
        match &self.backend {
            Backend::Alone(alone) => Ok(alone.get(key, Duration::ZERO)),
            Backend::Joined(link) => link.call(|member| member.get(key, Duration::ZERO), PUT_TIMEOUT),
        }
    }

    /// Contributes a value and returns the values of all members, in rank order, once all have contributed. A key can
    /// be reused.
    ///
    /// The first member that times out ends the exchange for all members that are waiting; members that arrive later
    /// begin a new one.
    ///
    /// # Errors
    /// [`Error::Incomplete`] with the names of the members that did not arrive within `timeout` or have left,
    /// [`Error::Failed`] if a member failed, [`Error::TooLarge`] if the key or value is too large, and [`Error::Call`]
    /// if the leader cannot be reached.
    pub fn exchange(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let what = || format!("exchange {key:?}");
        self.check_size(&what, key, value)?;
        match &self.backend {
            Backend::Alone(_) => Ok(vec![value.to_vec()]),
            Backend::Joined(link) => link.call(|member| member.exchange(what(), value, timeout), timeout),
        }
    }

    /// Waits until every member has reached this barrier. A name can be reused.
    ///
    /// # Errors
    /// [`Error::Incomplete`], [`Error::Failed`], [`Error::TooLarge`] or [`Error::Call`], as for
    /// [`exchange`](Coordination::exchange).
    pub fn barrier(&self, name: &str, timeout: Duration) -> Result<()> {
        let what = || format!("barrier {name:?}");
        self.check_size(&what, name, &[])?;
        match &self.backend {
            Backend::Alone(_) => Ok(()),
            Backend::Joined(link) => link.call(|member| member.exchange(what(), &[], timeout), timeout).map(drop),
        }
    }

    /// Leaves the job, which is not a failure; later calls fail. The leader waits up to one second for its last replies
    /// to be read. After it has left, the other members no longer learn of each other's failures through the service.
    pub fn leave(&self) {
        let Backend::Joined(link) = &self.backend else { return };
        if link.left.swap(true, Ordering::AcqRel) {
            return;
        }
        link.driver.call(link.member.leave(), Driver::MARGIN);
        if let Some(leader) = &link.leader {
            link.driver.call(leader.close(), Driver::MARGIN);
        }
    }

    fn task(&self) -> String {
        self.membership.task().to_string()
    }

    fn check_size(&self, what: &dyn Fn() -> String, key: &str, value: &[u8]) -> Result<()> {
        store::check(key, value.len()).map_err(|problem| self.too_large(what, problem))
    }

    fn too_large(&self, what: &dyn Fn() -> String, problem: String) -> Error {
        Error::TooLarge { task: self.task(), what: clean(&what(), SHOWN), problem }
    }
}

/// Length limit of a call's name in an error about that name, in characters.
const SHOWN: usize = 80;

/// Returns what a member and the leader agree on before they prove the job's secret. A derived identity is left out:
/// the leader names how the descriptions differ once the member has joined.
fn terms(membership: &Membership) -> Terms {
    let job = membership.job_id();
    let identity = match job.generation() {
        // The roster tells generations apart, of which one side may know a later one.
        Some((elastic, _)) => format!("the elastic job {}", hex(&elastic)),
        None if job.is_derived() => "a job of no name".to_owned(),
        None => job.header_text(),
    };
    Terms::new("coordination 1", identity)
}

/// How long a report waits for the leader's acknowledgement.
const REPORT_WAIT: Duration = Duration::from_secs(1);

impl Link {
    /// Runs a call on the service's thread and waits for it.
    fn call<T, F>(&self, call: impl FnOnce(&Member) -> F, timeout: Duration) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let refused = |reason: &str| {
            let what = "a call of the coordination service".to_owned();
            Error::Call { task: self.member.task().to_owned(), what, reason: reason.to_owned() }
        };
        if self.left.load(Ordering::Acquire) {
            return Err(refused("this task has left the job"));
        }
        if self.driver.is_current() {
            return Err(refused(
                "it would wait for itself, because an on_failure callback makes it; use another thread",
            ));
        }
        let answer = self.driver.call(call(&self.member), timeout.saturating_add(Driver::MARGIN));
        let answer = answer.unwrap_or_else(|| Err(refused("the service's own thread does not answer")));
        match answer {
            // The end of the connection, which carries the failure, may be detected slightly later than the end of the
            // call.
            Err(Error::Call { task, what, .. }) if self.member.alarm().wait(Duration::from_millis(200)) => {
                match self.member.alarm().failure() {
                    Some(failure) => Err(Error::Failed { task, what, failure }),
                    None => Err(Error::Call { task, what, reason: "the leader has left the job".to_owned() }),
                }
            }
            other => other,
        }
    }
}

impl Drop for Coordination {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report_error("its thread panicked");
        }
        self.leave();
    }
}

impl fmt::Debug for Coordination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coordination").field("membership", &self.membership).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

//! The service at which the members of a job meet.
//!
//! Rank 0 runs it; every member, rank 0 too, holds one stream to it for its whole life. The stream carries heartbeats,
//! and its end is how a death is noticed at once; a member that is merely silent is noticed by its missing heartbeats.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::text::clean;
use crate::{Error, Failure, FailureKind, Incarnation, JobId, Membership, Result};

mod alarm;
mod alone;
mod driver;
mod host;
mod incoming;
mod interface;
mod join;
mod leader;
mod member;
mod options;
mod pulse;
mod roster;
mod service;
mod store;

pub use host::{HostDecision, LocalHost};
pub use incoming::{Acquaintance, Connection, Incoming};
pub use interface::InterfaceChoice;
pub use options::{CoordinationOptions, Progress, Waiting};

use alarm::Alarm;
use alone::Alone;
use driver::Driver;
use leader::Leader;
use member::Member;

/// The messages of the service.
#[expect(unreachable_pub, reason = "generated from the protocol file")]
mod wire {
    tonic::include_proto!("distribute.v1");
}

/// This process's membership in a running job.
///
/// Members meet when it is [started](Coordination::start); then they exchange small values, wait for each other, and
/// learn of each other's failure. Dropping it [leaves](Coordination::leave) the job, which is no failure, unless the
/// thread is panicking: then the panic is reported. All methods block; none may be called by an
/// [`on_failure`](Coordination::on_failure) callback except [`failure`](Coordination::failure),
/// [`report_error`](Coordination::report_error),
/// [`report_failure`](Coordination::report_failure) and what only reads.
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
    place: Place,
}

/// Where the values are kept and the others are met.
enum Place {
    /// A job of one process needs no service.
    Alone(Alone),
    Joined(Box<Link>),
}

/// Fields are dropped in order: the thread last.
struct Link {
    member: Member,
    leader: Option<Leader>,
    left: AtomicBool,
    driver: Driver,
}

impl Coordination {
    /// The largest value that can be put or exchanged, in bytes.
    pub const MAX_VALUE_BYTES: usize = 1 << 20;

    /// The longest key, or name of an exchange or barrier, in bytes.
    pub const MAX_KEY_BYTES: usize = 1 << 10;

    /// The largest number of keys that the members of a job can put.
    pub const MAX_KEYS: usize = 1 << 17;

    /// The most bytes that all keys and values of a job can have together.
    pub const MAX_STORED_BYTES: usize = 256 << 20;

    /// Joins the job: rank 0 starts the service, everybody connects to it, and all return when all have joined.
    ///
    /// A job of one process starts nothing and listens nowhere.
    ///
    /// # Errors
    /// [`Error::Listen`] where the leader's port is taken, [`Error::Unreachable`] where there is no leader,
    /// [`Error::Missing`] where members do not come, [`Error::Refused`] where two processes claim one rank, were given
    /// different descriptions of the job or belong to different jobs, [`Error::Config`] where options or addresses are wrong.
    pub fn start(membership: &Membership, mut options: CoordinationOptions) -> Result<Coordination> {
        options.check(membership)?;
        let membership = &match options.job_id.take() {
            Some(job) => membership.clone().with_job_id(job),
            None => membership.clone(),
        };
        let task = membership.task();
        let alarm = Arc::new(Alarm::new(membership.clone()));
        if membership.world_size() == 1 {
            let local_host = membership.advertised_host.clone().unwrap_or_else(|| host::LOOPBACK.to_owned());
            let place = Place::Alone(Alone::default());
            let incarnation = Incarnation::random()?;
            return Ok(Coordination { membership: membership.clone(), local_host, alarm, incarnation, place });
        }
        // Before anybody waits for this task: a wrong name is its own mistake.
        let decided = options.decided_host(membership)?;
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
            join::join(membership.clone(), address, options.clone_for_join(), alarm.clone()),
            options.join_timeout.saturating_add(Driver::MARGIN),
        );
        let joined = joined.unwrap_or_else(|| {
            let reason = "the service's own thread does not answer".to_owned();
            Err(Error::Call { task: task.to_string(), what: "joining the job".to_owned(), reason })
        });
        let member = match joined {
            Ok(member) => member,
            Err(error) => {
                // The others learn that nobody waits for them any more.
                if let Some(leader) = leader {
                    driver.call(leader.close(), Driver::MARGIN);
                }
                return Err(error);
            }
        };
        let local_host = decided.unwrap_or_else(|| host::towards_leader(membership, &driver)).host;
        let (incarnation, job) = (member.incarnation(), membership.job_id());
        tracing::debug!(%task, %job, %incarnation, world_size = membership.world_size(), "joined the job");
        let place = Place::Joined(Box::new(Link { member, leader, left: AtomicBool::new(false), driver }));
        Ok(Coordination { membership: membership.clone(), local_host, alarm, incarnation, place })
    }

    /// The identity of the job, which the leader has compared with its own.
    pub fn job_id(&self) -> JobId {
        self.membership.job_id()
    }

    /// This meeting of the job: drawn by the leader when it started, the same on all members, and new at each start.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Who takes part.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// The host by which other members reach this process; an IPv6 address is without brackets.
    pub fn local_host(&self) -> String {
        self.local_host.trim_start_matches('[').trim_end_matches(']').to_owned()
    }

    /// Calls `callback` once, when a member fails; at once if one has.
    ///
    /// It is called on the service's own thread, so it must return soon; a panic in it is caught.
    pub fn on_failure(&self, callback: impl Fn(&Failure) + Send + Sync + 'static) {
        self.alarm.on_failure(Box::new(callback));
    }

    /// The first failure of a member, if there was one.
    pub fn failure(&self) -> Option<Failure> {
        self.alarm.failure()
    }

    /// Tells all members that this one has failed by an error of its own, against which a restart does not help. See
    /// [`report_failure`](Coordination::report_failure).
    pub fn report_error(&self, message: &str) {
        self.report_failure(message, FailureKind::Permanent);
    }

    /// Tells all members that this one has failed, and whether a restart helps; the first report or loss of the job counts.
    ///
    /// Returns when the leader has taken note, or after a second.
    pub fn report_failure(&self, message: &str, kind: FailureKind) {
        if let Place::Joined(link) = &self.place {
            link.member.report(message, kind);
            if !link.driver.is_current() {
                self.alarm.wait(REPORT_WAIT);
            }
        }
    }

    /// Stores a value for all members; a later one replaces it.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above [`MAX_KEY_BYTES`](Coordination::MAX_KEY_BYTES),
    /// [`MAX_VALUE_BYTES`](Coordination::MAX_VALUE_BYTES), [`MAX_KEYS`](Coordination::MAX_KEYS) and
    /// [`MAX_STORED_BYTES`](Coordination::MAX_STORED_BYTES), [`Error::Call`] or [`Error::Failed`] where the leader cannot be
    /// reached.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        let what = || format!("put {key:?}");
        self.check_size(&what, key, value)?;
        match &self.place {
            Place::Alone(alone) => alone.put(key, value).map_err(|problem| self.too_large(&what, problem))?,
            Place::Joined(link) => link.call(|member| member.put(key, value), PUT_TIMEOUT)?,
        }
        Ok(())
    }

    /// The value of a key, as soon as some member has put it.
    ///
    /// # Errors
    /// [`Error::KeyMissing`] where nobody has within `timeout`, [`Error::Failed`] where a member failed meanwhile,
    /// [`Error::Call`] where the leader cannot be reached.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.check_size(&|| format!("get {key:?}"), key, &[])?;
        let found = match &self.place {
            Place::Alone(alone) => alone.get(key, timeout),
            Place::Joined(link) => link.call(|member| member.get(key, timeout), timeout)?,
        };
        found.ok_or_else(|| Error::KeyMissing { task: self.task(), key: key.to_owned(), waited: timeout })
    }

    /// The value of a key, if some member has put it.
    ///
    /// # Errors
    /// [`Error::Call`] or [`Error::Failed`] where the leader cannot be reached.
    pub fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.check_size(&|| format!("get {key:?}"), key, &[])?;
        match &self.place {
            Place::Alone(alone) => Ok(alone.get(key, Duration::ZERO)),
            Place::Joined(link) => link.call(|member| member.get(key, Duration::ZERO), PUT_TIMEOUT),
        }
    }

    /// Brings a value and takes everybody's, in rank order, when all have come. A key can be used again.
    ///
    /// The first member whose wait ends, ends it for all who wait; who comes later begins anew.
    ///
    /// # Errors
    /// [`Error::Incomplete`] with the names of those who did not come within `timeout` or have left,
    /// [`Error::Failed`] where a member failed, [`Error::TooLarge`], and [`Error::Call`] where the leader cannot be
    /// reached.
    pub fn exchange(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let what = || format!("exchange {key:?}");
        self.check_size(&what, key, value)?;
        match &self.place {
            Place::Alone(_) => Ok(vec![value.to_vec()]),
            Place::Joined(link) => link.call(|member| member.exchange(what(), value, timeout), timeout),
        }
    }

    /// Waits until every member has come here. A name can be used again.
    ///
    /// # Errors
    /// As [`exchange`](Coordination::exchange).
    pub fn barrier(&self, name: &str, timeout: Duration) -> Result<()> {
        let what = || format!("barrier {name:?}");
        self.check_size(&what, name, &[])?;
        match &self.place {
            Place::Alone(_) => Ok(()),
            Place::Joined(link) => link.call(|member| member.exchange(what(), &[], timeout), timeout).map(drop),
        }
    }

    /// Leaves the job, which is no failure; later calls fail. The leader waits up to a second for its last answers to
    /// be read; after it has left, the others no longer learn of each other's failure here.
    pub fn leave(&self) {
        let Place::Joined(link) = &self.place else { return };
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

/// How much of a call's name is shown where the name itself is the problem.
const SHOWN: usize = 80;

/// How long a call that waits for nobody may take.
const PUT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a report waits for the leader's answer.
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
            // The stream's end, which tells of the failure in words, may be noticed a moment later than the call's.
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

/// Locks; a poisoned lock only means that some thread panicked, what these locks hold is whole at all times.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests;

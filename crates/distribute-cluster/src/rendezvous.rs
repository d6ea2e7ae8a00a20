//! How the members of a job meet and exchange what they need to connect.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::host;
use crate::job::hex;
use crate::text::{LONGEST, clean};
use crate::{Error, Failure, Incarnation, InterfaceChoice, JobSecret, JobTls, Membership, Result, Store};

/// A place where the members of a process group meet.
///
/// [`Coordination`](crate::Coordination) is one, and reports failures; [`StoreRendezvous`] makes one of a [`Store`].
pub trait Rendezvous: Send + Sync {
    /// Returns this process's membership in the job.
    fn membership(&self) -> &Membership;

    /// Returns the host at which other members reach this process; an IPv6 address is without brackets.
    fn local_host(&self) -> String;

    /// Stores a value for all members, replacing an earlier one with the same key.
    ///
    /// # Errors
    /// If the value cannot be stored.
    fn put(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Returns the value of a key as soon as a member has put it.
    ///
    /// # Errors
    /// [`Error::KeyMissing`] if no member has put it within `timeout`; others if it cannot be read.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Contributes a value and returns the values of all members, in rank order, once all have contributed. A key can
    /// be reused.
    ///
    /// # Errors
    /// [`Error::Incomplete`] with the names of the members that did not contribute within `timeout`; others if values
    /// cannot be stored or read, or if the key cannot be used again after a failure.
    fn exchange(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Calls `callback` once when a member fails, if failures are reported here.
    fn on_failure(&self, callback: Box<dyn Fn(&Failure) + Send + Sync>);

    /// Returns the job's secret, which members prove to each other when they connect; `None` if it has none.
    fn secret(&self) -> Option<JobSecret> {
        None
    }

    /// Returns the certificate by which this process uses TLS when members connect; `None` if the job has no TLS.
    fn tls(&self) -> Option<JobTls> {
        None
    }
}

#[cfg(feature = "coordination")]
impl Rendezvous for crate::Coordination {
    fn membership(&self) -> &Membership {
        self.membership()
    }

    fn local_host(&self) -> String {
        self.local_host()
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        self.put(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.get(key, timeout)
    }

    fn exchange(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.exchange(key, value, timeout)
    }

    fn on_failure(&self, callback: Box<dyn Fn(&Failure) + Send + Sync>) {
        self.on_failure(callback);
    }

    fn secret(&self) -> Option<JobSecret> {
        self.secret().cloned()
    }

    fn tls(&self) -> Option<JobTls> {
        self.tls().cloned()
    }
}

/// A meeting of a job's members at a [`Store`].
///
/// A store reports no failures: a member that dies is noticed by those that are connected to it, and by those that wait
/// for it at their timeout.
///
/// Values that an earlier job, or an earlier start of this one, has left in the store are not taken for new ones: each
/// member puts a random number, rank 0 answers with all of them and an [`Incarnation`], and keys contain it from then
/// on. Jobs that use a store at the same time are kept apart by their identities alone, so that a
/// [derived](crate::JobId::is_derived) one, which another job may share, is refused in jobs of several members.
///
/// A store cannot end an exchange for all members at once: one that fails on a member may succeed on others. That
/// member gets [`Error::Call`] whenever it exchanges the key again, until the members meet again.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_cluster::{FileStore, Membership, Rendezvous, StoreRendezvous};
///
/// let (folder, second) = (tempfile::tempdir()?, Duration::from_secs(1));
/// let store = FileStore::new(folder.path())?;
/// let meeting = StoreRendezvous::start(store, Membership::new(0, 1, "")?, second)?;
/// assert_eq!(meeting.exchange("address", b"here", second)?, [b"here"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct StoreRendezvous<S> {
    store: S,
    membership: Membership,
    local_host: String,
    incarnation: Incarnation,
    /// The beginning of all keys.
    prefix: String,
    secret: Option<JobSecret>,
    tls: Option<JobTls>,
    rounds: Mutex<HashMap<String, Round>>,
}

/// State of a key that was exchanged.
#[derive(Clone, Copy)]
enum Round {
    /// The number of the next round.
    Next(u64),
    /// A thread of this process is in a round: another one would take its values.
    Busy,
    /// A round has failed here. It may have ended for others, which are ahead then, so that values of different rounds
    /// would be taken for one.
    Failed,
}

/// A round of a key that a thread is in. Ends with this value, also if the store panics.
struct Entered<'a> {
    rounds: &'a Mutex<HashMap<String, Round>>,
    key: &'a str,
    next: Round,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        lock(self.rounds).insert(self.key.to_owned(), self.next);
    }
}

fn lock(rounds: &Mutex<HashMap<String, Round>>) -> MutexGuard<'_, HashMap<String, Round>> {
    // An entry is read or written whole.
    rounds.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Store> StoreRendezvous<S> {
    /// Meets the other members of a job at a store, and returns when all are there.
    ///
    /// The membership's address of the leader is not needed. The interface at which other members reach this process is
    /// that which DISTRIBUTE_INTERFACE, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME chooses, else that of
    /// [`advertised_host`](Membership::advertised_host), else the one towards the leader, else the one of the default
    /// route, else any; the leader itself takes its own address in the description before the last one.
    ///
    /// The identity is that of the membership; if that one is [derived](crate::JobId::is_derived), DISTRIBUTE_JOB_ID
    /// comes first. Two jobs of several members that use a store at the same time, with the same derived identity,
    /// would meet each other, so it is refused.
    ///
    /// A secret of the job, from DISTRIBUTE_JOB_SECRET_FILE or DISTRIBUTE_JOB_SECRET, and a certificate, from
    /// DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY, are not used for the store, which is protected by
    /// its own permissions, but for connections that members make afterwards.
    ///
    /// # Errors
    /// [`Error::Missing`] with the names of the members that did not come within `timeout`, [`Error::Store`] if the
    /// store cannot be used, [`Error::Config`] if a job of several members has no identity but a derived one,
    /// DISTRIBUTE_JOB_ID is malformed, a variable matches no interface of this machine, the secret cannot be read or
    /// the certificate cannot be used.
    pub fn start(store: S, membership: Membership, timeout: Duration) -> Result<StoreRendezvous<S>> {
        let job = crate::environment::read(|variable| membership.job_id_or_given(variable))?;
        if job.is_derived() && membership.world_size() > 1 {
            let problem = "the job has none of its own, and another job at the store may have the same description";
            let expected = "an identity that no other job has";
            let remedy = "Set DISTRIBUTE_JOB_ID to the same name on every task of the job, or give the membership an \
                          identity by Membership::with_job_id.";
            return Err(Error::config(
                "the identity of a job that meets at a store",
                problem,
                job.name(),
                expected,
                remedy,
            ));
        }
        let membership = membership.with_job_id(job);
        Membership::mark_joined();
        let interface = crate::environment::read(|variable| Ok(InterfaceChoice::from_vars(variable)))?;
        let (secret, tls) = (JobSecret::from_env()?, JobTls::from_env()?);
        let local_host = host::decided(&membership, interface.as_ref())?;
        let local_host = local_host.map_or_else(|| host::by_route(&membership), |decided| decided.host);
        let meeting = Meeting {
            task: membership.task().to_string(),
            prefix: hex(&membership.job_id().to_bytes()),
            store: &store,
            membership: &membership,
            started: Instant::now(),
            timeout,
        };
        let incarnation = meeting.hold()?;
        let prefix = format!("{}/{}", meeting.prefix, hex(&incarnation.to_bytes()));
        let rounds = Mutex::default();
        Ok(StoreRendezvous { store, membership, local_host, incarnation, prefix, secret, tls, rounds })
    }

    /// Returns the job's incarnation: drawn by rank 0, the same on all members, and new at each start.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    /// Exchanges a value in one round of a key.
    fn exchange_in(&self, key: &str, round: u64, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let started = Instant::now();
        let (what, world) = (format!("exchange {key:?}"), self.membership.world_size());
        let of = |rank: u32| self.key(&format!("exchange/{key}/{round}/{rank}"));
        self.store.put(&of(self.membership.rank), value).map_err(self.failed(what.clone()))?;
        let (mut values, mut missing) = (Vec::new(), Vec::new());
        for rank in 0..world {
            let left = timeout.saturating_sub(started.elapsed());
            match self.store.get(&of(rank), left).map_err(self.failed(what.clone()))? {
                Some(value) => values.push(value),
                None => missing.push(self.membership.named(rank)),
            }
        }
        if !missing.is_empty() {
            let (task, waited) = (self.membership.task().to_string(), started.elapsed());
            return Err(Error::Incomplete { task, what, waited, missing: missing.join(", ") });
        }
        Ok(values)
    }

    fn failed(&self, what: String) -> impl FnOnce(std::io::Error) -> Error {
        let task = self.membership.task().to_string();
        move |source| Error::Store { task, what, source }
    }
}

impl<S: Store> Rendezvous for StoreRendezvous<S> {
    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn local_host(&self) -> String {
        self.local_host.trim_start_matches('[').trim_end_matches(']').to_owned()
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.put(&self.key(key), value).map_err(self.failed(format!("put {key:?}")))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let found = self.store.get(&self.key(key), timeout).map_err(self.failed(format!("get {key:?}")))?;
        found.ok_or_else(|| Error::KeyMissing {
            task: self.membership.task().to_string(),
            key: key.to_owned(),
            waited: timeout,
        })
    }

    fn exchange(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let refused = |reason: &str| {
            let (task, what) = (self.membership.task().to_string(), format!("exchange {key:?}"));
            Err(Error::Call { task, what, reason: reason.to_owned() })
        };
        let entered = {
            let mut rounds = lock(&self.rounds);
            let known = rounds.entry(key.to_owned()).or_insert(Round::Next(0));
            match *known {
                Round::Next(_) => std::mem::replace(known, Round::Busy),
                other => other,
            }
        };
        let round = match entered {
            Round::Next(round) => round,
            Round::Busy => return refused("another thread of this task is there already; use a key for each"),
            Round::Failed => {
                return refused(
                    "an earlier exchange of this key failed on this task, and may have succeeded on others; let the \
                     members meet again, or exchange another key",
                );
            }
        };
        let mut entered = Entered { rounds: &self.rounds, key, next: Round::Failed };
        let values = self.exchange_in(key, round, value, timeout)?;
        entered.next = Round::Next(round + 1);
        Ok(values)
    }

    fn on_failure(&self, _: Box<dyn Fn(&Failure) + Send + Sync>) {}

    fn secret(&self) -> Option<JobSecret> {
        self.secret.clone()
    }

    fn tls(&self) -> Option<JobTls> {
        self.tls.clone()
    }
}

impl<S> std::fmt::Debug for StoreRendezvous<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreRendezvous").field("membership", &self.membership).finish_non_exhaustive()
    }
}

/// How the members of one start of a job find each other among what earlier ones have left.
struct Meeting<'a> {
    store: &'a dyn Store,
    membership: &'a Membership,
    task: String,
    prefix: String,
    started: Instant,
    timeout: Duration,
}

impl Meeting<'_> {
    /// Returns the incarnation on which all members agree.
    fn hold(&self) -> Result<Incarnation> {
        match self.membership.rank {
            0 => self.lead(),
            rank => self.follow(rank),
        }
    }

    /// Puts a random number, and waits until rank 0 has answered it.
    fn follow(&self, rank: u32) -> Result<Incarnation> {
        let hello = Incarnation::random()?.to_bytes();
        self.put(&format!("hello/{rank}"), &hello)?;
        let own = rank as usize * BYTES..(rank as usize + 1) * BYTES;
        loop {
            // An answer without this process's number is that of an earlier start.
            if let Some(answer) = self.get("start")?
                && answer.get(own.clone()) == Some(&hello)
                && let Some(incarnation) = answer.first_chunk()
            {
                self.put(&format!("confirmed/{rank}"), incarnation)?;
                return Ok(Incarnation::from_bytes(*incarnation));
            }
            self.pause([0])?;
        }
    }

    /// Answers the numbers of all members until all have confirmed the incarnation: a number that an earlier start has
    /// left is replaced when its member comes.
    fn lead(&self) -> Result<Incarnation> {
        let incarnation = Incarnation::random()?;
        let others = 1..self.membership.world_size();
        let mut answered: Option<Vec<Option<Vec<u8>>>> = None;
        loop {
            let hellos = others.clone().map(|rank| self.get(&format!("hello/{rank}"))).collect::<Result<Vec<_>>>()?;
            if answered.as_ref() != Some(&hellos) {
                let hello = |hello: &Option<Vec<u8>>| {
                    hello.as_deref().and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; BYTES])
                };
                let answer: Vec<u8> = incarnation.to_bytes().into_iter().chain(hellos.iter().flat_map(hello)).collect();
                self.put("start", &answer)?;
                answered = Some(hellos);
            }
            let mut missing = Vec::new();
            for rank in others.clone() {
                if self.get(&format!("confirmed/{rank}"))?.as_deref() != Some(&incarnation.to_bytes()) {
                    missing.push(rank);
                }
            }
            if missing.is_empty() {
                return Ok(incarnation);
            }
            self.pause(missing)?;
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.put(&format!("{}/{key}", self.prefix), value).map_err(|source| self.failed(source))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.get(&format!("{}/{key}", self.prefix), Duration::ZERO).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: std::io::Error) -> Error {
        Error::Store { task: self.task.clone(), what: "meeting the other members".to_owned(), source }
    }

    /// Waits until the store is worth another look; at the timeout the members are missing.
    fn pause(&self, missing: impl IntoIterator<Item = u32>) -> Result<()> {
        if self.started.elapsed() < self.timeout {
            std::thread::sleep(LOOK);
            return Ok(());
        }
        let names: Vec<String> = missing.into_iter().map(|rank| self.membership.named(rank)).collect();
        let missing = clean(&names.join(", "), LONGEST);
        Err(Error::Missing { task: self.task.clone(), waited: self.timeout, missing })
    }
}

/// The size of an incarnation, and of a member's number.
const BYTES: usize = 16;

/// The pause between two looks at the store.
const LOOK: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests;

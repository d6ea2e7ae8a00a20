//! The leader's state, and its answers to members' calls.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use super::CoordinationOptions;
use super::limits::{LONGEST, MAX_KEY_BYTES};
use super::roster::Roster;
use super::signal::Signal;
use super::store::{Store, check};
use super::wire::{
    Absent, CallError, ExchangeReply, ExchangeRequest, GetReply, GetRequest, PutReply, PutRequest, call, reply,
};
use crate::planted::{Defect, planted};
use crate::{Incarnation, Membership, Result};

/// The state that all calls share. The lock is never held across an await.
pub(super) struct Hub {
    pub(super) inner: Mutex<Inner>,
    /// Signals that the roster has changed and members must be told.
    pub(super) members: Signal,
    /// Signals that anything has changed that a call may wait for.
    anything: Signal,
    pub(super) heartbeat_interval: Duration,
    pub(super) incarnation: Incarnation,
}

pub(super) struct Inner {
    pub(super) roster: Roster,
    store: Store,
    rounds: BTreeMap<String, Round>,
}

/// An exchange that is not complete.
#[derive(Default)]
struct Round {
    values: BTreeMap<u32, Bytes>,
    /// The result; every waiter holds a reference to it.
    end: Arc<OnceLock<ExchangeReply>>,
}

impl Hub {
    pub(super) fn new(membership: Membership, options: &CoordinationOptions) -> Result<Hub> {
        let roster = Roster::new(membership, options.heartbeat_interval, options.heartbeat_timeout);
        Ok(Hub {
            inner: Mutex::new(Inner { roster, store: Store::default(), rounds: BTreeMap::new() }),
            members: Signal::default(),
            anything: Signal::default(),
            heartbeat_interval: options.heartbeat_interval,
            incarnation: Incarnation::random()?,
        })
    }

    /// Changes the roster and notifies all waiters if `change` returns true.
    pub(super) fn change(&self, change: impl FnOnce(&mut Inner) -> bool) {
        if change(&mut self.inner.lock()) {
            self.members.change();
            self.anything.change();
        }
    }

    pub(super) fn close(&self) {
        self.change(|inner| {
            inner.roster.close();
            true
        });
    }

    /// Returns when the leader leaves.
    pub(super) async fn closed(&self) {
        let mut changes = self.members.listen();
        while !self.inner.lock().roster.is_closing() {
            changes.changed().await;
        }
    }

    /// Waits until `look` returns a value; `None` at the deadline.
    async fn until<T>(&self, timeout_ms: u64, mut look: impl FnMut(&mut Inner) -> Option<T>) -> Option<T> {
        let deadline = tokio::time::Instant::now() + Duration::from_millis(timeout_ms).min(LONGEST);
        let mut changes = self.anything.listen();
        loop {
            if let Some(found) = look(&mut self.inner.lock()) {
                return Some(found);
            }
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                return None;
            }
        }
    }
}

impl Hub {
    /// Ends a round that timed out for all of its waiters, so that they name the same missing members.
    fn give_up(&self, key: &str, end: &Arc<OnceLock<ExchangeReply>>) -> ExchangeReply {
        let ended = {
            let mut inner = self.inner.lock();
            let current = inner.rounds.get(key).is_some_and(|round| Arc::ptr_eq(&round.end, end));
            current && inner.end(key)
        };
        if ended {
            self.anything.change();
        }
        end.get().cloned().unwrap_or_default()
    }
}

impl Hub {
    /// Answers a call of a member.
    pub(super) async fn answer(&self, rank: u32, request: call::Request) -> reply::Outcome {
        let answer = match request {
            call::Request::Put(request) => self.put(request).map(reply::Outcome::Put),
            call::Request::Get(request) => Ok(reply::Outcome::Get(self.get(request).await)),
            call::Request::Exchange(request) => self.exchange(rank, request).await.map(reply::Outcome::Exchange),
        };
        answer.unwrap_or_else(reply::Outcome::Error)
    }

    fn put(&self, request: PutRequest) -> Result<PutReply, CallError> {
        self.inner.lock().store.put(request.key, request.value).map_err(above_limit)?;
        self.anything.change();
        Ok(PutReply {})
    }

    async fn get(&self, request: GetRequest) -> GetReply {
        let reply = self.until(request.timeout_ms, |inner| {
            let value = inner.store.get(&request.key);
            let (failure, closing) = (inner.roster.failure().cloned(), inner.roster.is_closing());
            let done = value.is_some() || failure.is_some() || closing;
            done.then_some(GetReply { value, failure, closing })
        });
        reply.await.unwrap_or_default()
    }

    async fn exchange(&self, rank: u32, request: ExchangeRequest) -> Result<ExchangeReply, CallError> {
        let ExchangeRequest { key, value, timeout_ms } = request;
        let (end, ended) = {
            let mut inner = self.inner.lock();
            check("", value.len()).map_err(above_limit)?;
            inner.has_room(&key).map_err(above_limit)?;
            let size = inner.roster.world_size() as usize;
            let round = inner.rounds.entry(key.clone()).or_default();
            if round.values.contains_key(&rank) && !planted(Defect::ValuesStay) {
                let reason = "another thread of this task is there already; use a name for each".to_owned();
                return Err(CallError { reason, limit: false });
            }
            round.values.insert(rank, value);
            (round.end.clone(), round.values.len() == size && inner.end(&key))
        };
        if ended {
            self.anything.change();
        }
        let waiter = Waiter { hub: self, key: &key, rank, end: &end };
        let reply = self.until(timeout_ms, |inner| {
            let hopeless = inner.roster.failure().is_some() || inner.roster.is_closing();
            if end.get().is_none() && (hopeless || inner.waits_for_one_that_left(&key)) {
                // For all that wait, so that none takes those for missing that have been told before.
                inner.end(&key);
            }
            end.get().cloned()
        });
        let reply = match reply.await {
            Some(reply) => reply,
            None => self.give_up(&key, &end),
        };
        drop(waiter);
        Ok(reply)
    }
}

fn above_limit(reason: String) -> CallError {
    CallError { reason, limit: true }
}

/// The largest number of exchanges and barriers that wait for members at a time.
const MAX_ROUNDS: usize = 4096;

/// A member that waits in a round. If its wait ends before the round does, it withdraws its value, so that members that
/// arrive later do not count it as present.
struct Waiter<'a> {
    hub: &'a Hub,
    key: &'a str,
    rank: u32,
    end: &'a Arc<OnceLock<ExchangeReply>>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut inner = self.hub.inner.lock();
        if let Some(round) = inner.rounds.get_mut(self.key)
            && Arc::ptr_eq(&round.end, self.end)
            && !planted(Defect::ValuesStay)
        {
            round.values.remove(&self.rank);
            if round.values.is_empty() {
                inner.rounds.remove(self.key);
            }
        }
    }
}

impl Inner {
    /// Checks that a round is open already or may be opened; the error is a message.
    fn has_room(&self, key: &str) -> Result<(), String> {
        // The key of an exchange is its quoted name with a prefix.
        if key.len() > 16 * MAX_KEY_BYTES {
            return Err(format!("the name has {} bytes; at most {} are allowed", key.len(), MAX_KEY_BYTES));
        }
        if self.rounds.len() >= MAX_ROUNDS && !self.rounds.contains_key(key) {
            return Err(format!(
                "{MAX_ROUNDS} exchanges and barriers are waiting for members, as many as are allowed; use fewer names \
                 at a time"
            ));
        }
        Ok(())
    }

    /// Ends a round with the values that it has, so that the next use of its key begins a new one. Returns whether a
    /// round was open.
    fn end(&mut self, key: &str) -> bool {
        let reply = self.reply(key);
        let Some(round) = self.rounds.remove(key) else { return false };
        round.end.set(reply).is_ok()
    }

    /// Returns the values of a round if all members have arrived, else the missing members.
    fn reply(&self, key: &str) -> ExchangeReply {
        let absent = self.absent(key);
        let values = match (self.rounds.get(key), absent.is_empty()) {
            (Some(round), true) => round.values.values().cloned().collect(),
            _ => Vec::new(),
        };
        let (failure, closing) = (self.roster.failure().cloned(), self.roster.is_closing());
        ExchangeReply { values, absent, failure, closing }
    }

    /// Returns whether a member that has not arrived at a round never will.
    fn waits_for_one_that_left(&self, key: &str) -> bool {
        self.roster.anyone_has_left() && self.absent(key).iter().any(|absent| absent.left)
    }

    /// Returns the members that have not arrived at a round, and the round at which each of them waits instead.
    fn absent(&self, key: &str) -> Vec<Absent> {
        let here = |rank: &u32| self.rounds.get(key).is_some_and(|round| round.values.contains_key(rank));
        let elsewhere = |rank: u32| {
            let mut others = self.rounds.iter().filter(|(_, round)| round.values.contains_key(&rank));
            others.next().map(|(key, _)| key.clone()).unwrap_or_default()
        };
        let absent = (0..self.roster.world_size()).filter(|rank| !here(rank));
        absent.map(|rank| Absent { rank, left: self.roster.has_left(rank), elsewhere: elsewhere(rank) }).collect()
    }
}

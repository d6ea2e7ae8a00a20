//! The service's calls, as rank 0 answers them.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prost::bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::CoordinationOptions;
use super::incoming::Acquaintance;
use super::limits::{LONGEST, MAX_KEY_BYTES};
use super::roster::{Answer, CallerError, Roster};
use super::store::{Store, check};
use super::wire::coordination_server::Coordination as Calls;
use super::wire::{
    Absent, Caller, ExchangeReply, ExchangeRequest, GetReply, GetRequest, LeaderMessage, MemberMessage, PutReply,
    PutRequest, Refusal, Welcome, leader_message, member_message,
};
use crate::job::random;
use crate::{Incarnation, Membership, Result};

/// The state that all calls share. The lock is never held across an await.
pub(super) struct Hub {
    inner: Mutex<Inner>,
    /// Signals that the roster has changed and members must be told.
    members: watch::Sender<()>,
    /// Signals that anything has changed that a call may wait for.
    anything: watch::Sender<()>,
    heartbeat_interval: Duration,
    incarnation: Incarnation,
}

pub(super) struct Inner {
    pub(super) roster: Roster,
    store: Store,
    rounds: HashMap<String, Round>,
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
        let roster = Roster::new(membership, options.heartbeat_timeout);
        Ok(Hub {
            inner: Mutex::new(Inner { roster, store: Store::default(), rounds: HashMap::new() }),
            members: watch::channel(()).0,
            anything: watch::channel(()).0,
            heartbeat_interval: options.heartbeat_interval,
            incarnation: Incarnation::random()?,
        })
    }

    /// Changes the roster and notifies all waiters if `change` returns true.
    pub(super) fn change(&self, change: impl FnOnce(&mut Inner) -> bool) {
        if change(&mut self.inner.lock()) {
            self.members.send_replace(());
            self.anything.send_replace(());
        }
    }

    pub(super) fn close(&self) {
        self.change(|inner| {
            inner.roster.close();
            true
        });
    }

    /// Waits until `look` returns a value; `None` at the deadline.
    async fn until<T>(&self, timeout_ms: u64, mut look: impl FnMut(&mut Inner) -> Option<T>) -> Option<T> {
        let deadline = tokio::time::Instant::now() + Duration::from_millis(timeout_ms).min(LONGEST);
        let mut changed = self.anything.subscribe();
        loop {
            if let Some(found) = look(&mut self.inner.lock()) {
                return Some(found);
            }
            if tokio::time::timeout_at(deadline, changed.changed()).await.is_err() {
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
            self.anything.send_replace(());
        }
        end.get().cloned().unwrap_or_default()
    }
}

/// The implementation of the protocol's calls.
pub(super) struct Service(pub(super) Arc<Hub>);

#[tonic::async_trait]
impl Calls for Service {
    type AttendStream = Pin<Box<dyn Stream<Item = Result<LeaderMessage, Status>> + Send>>;

    async fn attend(&self, request: Request<Streaming<MemberMessage>>) -> Result<Response<Self::AttendStream>, Status> {
        let acquaintance = request.extensions().get::<Acquaintance>().cloned();
        let address = acquaintance.as_ref().and_then(Acquaintance::peer);
        let address = address.map_or_else(|| "an unknown address".to_owned(), |address| address.to_string());
        let mut inbox = request.into_inner();
        let first = tokio::time::timeout(FIRST_MESSAGE, inbox.message()).await;
        let Ok(Ok(Some(MemberMessage { kind: Some(member_message::Kind::Join(join)) }))) = first else {
            return Err(Status::invalid_argument("the first message does not join"));
        };
        let session = random().map_err(|error| Status::internal(error.to_string()))?;
        let mut answer = None;
        self.0.change(|inner| {
            let given = answer.insert(inner.roster.admit(&join, session, address, Instant::now()));
            matches!(given, Answer::Seated { .. })
        });
        let (outbox, replies) = mpsc::channel(4);
        match answer {
            Some(Answer::Seated { visit }) => {
                if let Some(acquaintance) = acquaintance {
                    acquaintance.known();
                }
                let incarnation = Vec::from(self.0.incarnation.to_bytes()).into();
                let welcome = Welcome { incarnation, session: Vec::from(session).into() };
                let _ = outbox.try_send(Ok(LeaderMessage { kind: Some(leader_message::Kind::Welcome(welcome)) }));
                tokio::spawn(write(self.0.clone(), join.rank, visit, outbox));
                tokio::spawn(read(self.0.clone(), join.rank, visit, inbox));
            }
            Some(Answer::Refused { reason, passing }) => {
                if !passing {
                    tracing::warn!("a task was refused: {reason}");
                }
                let refusal = leader_message::Kind::Refusal(Refusal { reason, passing });
                let _ = outbox.try_send(Ok(LeaderMessage { kind: Some(refusal) }));
            }
            None => {}
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let acquaintance = request.extensions().get::<Acquaintance>().cloned();
        let request = request.into_inner();
        let mut inner = self.0.inner.lock();
        inner.member(request.caller.as_ref(), acquaintance)?;
        inner.store.put(request.key, request.value).map_err(Status::resource_exhausted)?;
        drop(inner);
        self.0.anything.send_replace(());
        Ok(Response::new(PutReply {}))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let acquaintance = request.extensions().get::<Acquaintance>().cloned();
        let request = request.into_inner();
        self.0.inner.lock().member(request.caller.as_ref(), acquaintance)?;
        let reply = self.0.until(request.timeout_ms, |inner| {
            let value = inner.store.get(&request.key);
            let (failure, closing) = (inner.roster.failure().cloned(), inner.roster.is_closing());
            let done = value.is_some() || failure.is_some() || closing;
            done.then_some(GetReply { value, failure, closing })
        });
        Ok(Response::new(reply.await.unwrap_or_default()))
    }

    async fn exchange(&self, request: Request<ExchangeRequest>) -> Result<Response<ExchangeReply>, Status> {
        let acquaintance = request.extensions().get::<Acquaintance>().cloned();
        let ExchangeRequest { key, value, timeout_ms, caller } = request.into_inner();
        let (rank, end, ended) = {
            let mut inner = self.0.inner.lock();
            let rank = inner.member(caller.as_ref(), acquaintance)?;
            check("", value.len()).map_err(Status::resource_exhausted)?;
            inner.has_room(&key).map_err(Status::resource_exhausted)?;
            let size = inner.roster.world_size() as usize;
            let round = inner.rounds.entry(key.clone()).or_default();
            if round.values.contains_key(&rank) {
                return Err(Status::already_exists(
                    "another thread of this task is there already; use a name for each",
                ));
            }
            round.values.insert(rank, value);
            (rank, round.end.clone(), round.values.len() == size && inner.end(&key))
        };
        if ended {
            self.0.anything.send_replace(());
        }
        let waiter = Waiter { hub: &self.0, key: &key, rank, end: &end };
        let reply = self.0.until(timeout_ms, |inner| {
            let hopeless = inner.roster.failure().is_some() || inner.roster.is_closing();
            match end.get() {
                Some(reply) => Some(reply.clone()),
                None if hopeless || inner.absent(&key).iter().any(|absent| absent.left) => Some(inner.reply(&key)),
                None => None,
            }
        });
        let reply = match reply.await {
            Some(reply) => reply,
            None => self.0.give_up(&key, &end),
        };
        drop(waiter);
        Ok(Response::new(reply))
    }
}

/// The largest number of exchanges and barriers that wait for members at a time.
const MAX_ROUNDS: usize = 4096;

/// How long a connection may take to send its first message and to be identified as a member's.
pub(super) const FIRST_MESSAGE: Duration = Duration::from_secs(10);

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
        {
            round.values.remove(&self.rank);
            if round.values.is_empty() {
                inner.rounds.remove(self.key);
            }
        }
    }
}

impl Inner {
    /// Returns the rank of a caller and marks its connection as identified; refuses callers that are not members.
    fn member(&self, caller: Option<&Caller>, acquaintance: Option<Acquaintance>) -> Result<u32, Status> {
        let rank = self.roster.member(caller).map_err(|error| match error {
            CallerError::OtherJob(reason) => Status::permission_denied(reason),
            CallerError::NoMember => Status::failed_precondition("this task is not a member of the leader's job"),
        })?;
        if let Some(acquaintance) = acquaintance {
            acquaintance.known();
        }
        Ok(rank)
    }

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

/// Sends the state to a member: at once, at every change, and as a heartbeat.
async fn write(hub: Arc<Hub>, rank: u32, visit: u64, outbox: mpsc::Sender<Result<LeaderMessage, Status>>) {
    let mut changed = hub.members.subscribe();
    loop {
        let (state, over) = {
            let inner = hub.inner.lock();
            (inner.roster.state(), inner.roster.is_over(rank, visit))
        };
        let message = LeaderMessage { kind: Some(leader_message::Kind::State(state)) };
        if outbox.send(Ok(message)).await.is_err() || over {
            return;
        }
        let _ = tokio::time::timeout(hub.heartbeat_interval, changed.changed()).await;
    }
}

/// Reads a member's messages until it leaves or is lost.
async fn read(hub: Arc<Hub>, rank: u32, visit: u64, mut inbox: Streaming<MemberMessage>) {
    use member_message::Kind;
    let mut changed = hub.members.subscribe();
    loop {
        let received = tokio::select! {
            received = inbox.message() => received,
            _ = changed.changed() => {
                if hub.inner.lock().roster.is_over(rank, visit) {
                    return;
                }
                continue;
            }
        };
        let now = Instant::now();
        match received {
            Ok(Some(MemberMessage { kind: Some(Kind::Leave(_)) })) => {
                return hub.change(|inner| inner.roster.leave(rank, visit));
            }
            Ok(Some(MemberMessage { kind: Some(Kind::Report(report)) })) => {
                hub.change(|inner| inner.roster.report(rank, visit, &report));
            }
            Ok(Some(_)) => hub.inner.lock().roster.heard(rank, visit, now),
            Ok(None) | Err(_) => return hub.change(|inner| inner.roster.broke(rank, visit, now)),
        }
    }
}

//! Point-to-point messages.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use distribute_cluster::Rendezvous;
use distribute_device::{BufferMut, BufferRef, DType, Element};

use super::children::ChildKey;
use super::job::JobMembership;
use super::join::MAX_CONNECT;
use super::{ProcessGroup, Request};
use crate::call::Kind;
use crate::engine::memory::{Borrowed, Counts};
use crate::sync::lock;
use crate::transport::{self, GroupIdentity, Nonce, Transport};
use crate::{Error, Options, Rank, Result};

/// The groups of a sender and a receiver that one rank belongs to, by both. The first thread that needs one makes it,
/// and others that need the same one wait.
#[derive(Default)]
pub(super) struct Pairs {
    attempts: Mutex<HashMap<(usize, usize), Arc<Attempt>>>,
}

/// The making of a pair, with its outcome once it has ended.
#[derive(Default)]
struct Attempt {
    outcome: Mutex<Option<Result<Arc<ProcessGroup>>>>,
    ended: Condvar,
}

/// An attempt that this thread has begun. Unless it ends well, the next call begins another one.
struct Begun<'a> {
    pairs: &'a Pairs,
    key: (usize, usize),
    attempt: Arc<Attempt>,
}

/// The attempt to make a pair: this thread's, or another's.
enum Found<'a> {
    Begun(Begun<'a>),
    Known(Arc<Attempt>),
}

impl Pairs {
    /// Returns the attempt to make a pair, and begins it if there is none.
    fn find_or_begin(&self, key: (usize, usize)) -> Found<'_> {
        let mut attempts = lock(&self.attempts);
        if let Some(known) = attempts.get(&key) {
            return Found::Known(known.clone());
        }
        let attempt = Arc::<Attempt>::default();
        attempts.insert(key, attempt.clone());
        Found::Begun(Begun { pairs: self, key, attempt })
    }
}

impl Attempt {
    /// Waits for the outcome. Returns `None` if there is none at the deadline.
    fn outcome_by(&self, deadline: Instant) -> Option<Result<Arc<ProcessGroup>>> {
        let mut outcome = lock(&self.outcome);
        while outcome.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            outcome = self.ended.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        outcome.clone()
    }
}

impl Begun<'_> {
    /// Sets the outcome, which threads that wait get as well.
    fn end(self, outcome: Result<Arc<ProcessGroup>>) -> Result<Arc<ProcessGroup>> {
        *lock(&self.attempt.outcome) = Some(outcome.clone());
        outcome
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !matches!(*lock(&self.attempt.outcome), Some(Ok(_))) {
            lock(&self.pairs.attempts).remove(&self.key);
        }
        self.attempt.ended.notify_all();
    }
}

impl ProcessGroup {
    /// Sends values to another rank, which calls [`recv`](ProcessGroup::recv). Returns when the values are on their way
    /// or have arrived.
    ///
    /// Messages from one rank to another arrive in the order in which they were sent. They are independent of the
    /// group's other operations and of messages between other ranks, so several threads may send and receive at once.
    /// They end with the group: after an abort neither side waits for the other, and a message that is on its way may
    /// not arrive. A rank learns of an abort in another process if an earlier message has connected the two, or if
    /// another thread of its process is in an operation of the group.
    ///
    /// # Cost
    /// The first message of a pair connects it, and other threads' messages of the same pair wait for that. Within one
    /// process the receiver copies directly from the sender's memory.
    ///
    /// # Errors
    /// [`Error::RankOutside`] if `to` is not a member or is this rank, [`Error::NotConnectable`] between processes of a
    /// group that met nowhere, [`Error::Connect`] if the other process does not make its first call within
    /// [`Options::timeout`], and the errors of every operation: see [`ProcessGroup`]. Different lengths are a mismatch
    /// on the receiver; a sender in another process may have returned before.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, Rank};
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| ranks[0].send(&[1.0, 2.0], Rank(1)).expect("rank 1 receives"));
    ///     let mut values = [0.0; 2];
    ///     ranks[1].recv(&mut values, Rank(0)).expect("rank 0 sends");
    ///     assert_eq!(values, [1.0, 2.0]);
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    ///
    /// # Source
    /// `MPI_Send`, `ncclSend`; with rendezvous, not buffered.
    pub fn send<T: Element>(&self, values: &[T], to: Rank) -> Result<()> {
        let pair = self.pair(self.rank(), to)?;
        let mut none: [T; 0] = [];
        let (request, counts) = sending(T::DTYPE, values.len());
        pair.blocking(request, Borrowed::apart(BufferRef::from(values), BufferMut::from(&mut none[..]), counts))
    }

    /// Receives values from another rank, which calls [`send`](ProcessGroup::send).
    ///
    /// # Shapes
    /// `values` has the length of the values that the other rank sends.
    ///
    /// # Errors
    /// The errors of [`send`](ProcessGroup::send) occur in the same cases.
    pub fn recv<T: Element>(&self, values: &mut [T], from: Rank) -> Result<()> {
        let pair = self.pair(from, self.rank())?;
        let none: [T; 0] = [];
        let (request, counts) = receiving(T::DTYPE, values.len());
        pair.blocking(request, Borrowed::apart(BufferRef::from(&none[..]), BufferMut::from(values), counts))
    }

    /// Returns the group of a sender and a receiver, one of which is this rank.
    pub(super) fn pair(&self, from: Rank, to: Rank) -> Result<Arc<ProcessGroup>> {
        self.check_rank("rank", from)?;
        self.check_rank("rank", to)?;
        if from == to {
            return Err(Error::RankOutside {
                what: "a message to oneself: rank",
                given: to.0,
                world_size: self.world_size(),
            });
        }
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let (from, to) = (from.index(), to.index());
        match self.pairs.find_or_begin((from, to)) {
            Found::Begun(begun) => begun.end(self.make_pair(from, to).map(Arc::new)),
            Found::Known(attempt) => {
                let deadline = Instant::now() + self.options.timeout;
                let problem = "another thread of this rank has begun to connect the two, and did not finish in time";
                attempt.outcome_by(deadline).unwrap_or_else(|| Err(self.not_connected(from, to, problem.to_owned())))
            }
        }
    }

    /// Builds the error of a thread that has waited in vain for another one, or another rank, to connect a pair.
    fn not_connected(&self, from: usize, to: usize, problem: String) -> Error {
        let other = if self.rank().index() == from { to } else { from };
        Error::Connect {
            name: self.rank_name(self.rank()).to_owned(),
            action: "connect to",
            address: self.rank_name(Rank::of(other)).to_owned(),
            group: format!("{}/{from}-{to}", self.name()),
            source: Arc::new(io::Error::new(io::ErrorKind::TimedOut, problem)),
        }
    }

    fn make_pair(&self, from: usize, to: usize) -> Result<ProcessGroup> {
        let process = |rank: usize| rank / self.engine.context.local_ranks;
        let names = [from, to].map(|rank| self.rank_name(Rank::of(rank)).to_owned()).to_vec();
        let name = format!("{}/{from}-{to}", self.name());
        let options = Options { name, ..self.options.as_ref().clone() };
        if process(from) == process(to) {
            return self.make_local_pair(from, to, names, &options);
        }
        self.connect_pair(from, to, names, &options)
    }

    /// Takes the handle that the other rank has stored, or creates both and stores the other's.
    fn make_local_pair(&self, from: usize, to: usize, names: Vec<String>, options: &Options) -> Result<ProcessGroup> {
        let me = self.rank().index();
        let other = if me == from { to } else { from };
        let (mine, theirs) = (ChildKey::Pair(from, to, me), ChildKey::Pair(from, to, other));
        let handle = self.children.take_or_make(mine, theirs, || {
            let mut handles = ProcessGroup::local_named(names, options);
            let locals = [from, to].map(|rank| rank - self.engine.context.first_rank);
            self.engine.add_dependent(handles[0].engine.engine(), locals.to_vec());
            let (receiver, sender) = (handles.swap_remove(1), handles.swap_remove(0));
            if me == from { (sender, receiver) } else { (receiver, sender) }
        })?;
        if self.engine.has_left(other - self.engine.context.first_rank) {
            drop(self.children.take(theirs));
        }
        Ok(handle)
    }

    /// Connects two processes, which meet where the group met.
    fn connect_pair(&self, from: usize, to: usize, names: Vec<String>, options: &Options) -> Result<ProcessGroup> {
        let needs = "a place to meet";
        let not_connectable = Error::NotConnectable { what: "send", group: self.name().to_owned(), needs };
        let home = self.job().ok_or(not_connectable)?;
        let generation = home.generation;
        let meeting = Meeting {
            group: self,
            rendezvous: &*home.rendezvous,
            key: format!("group/{}/{generation}", options.name),
            pair: (from, to),
            names: &names,
            deadline: Instant::now() + self.options.timeout,
        };
        let is_sender = self.rank().index() == from;
        let transport = if is_sender { meeting.accept(&options.name)? } else { meeting.dial(&options.name)? };
        let process = |rank: usize| home.processes[rank / self.engine.context.local_ranks];
        let job = JobMembership {
            rendezvous: home.rendezvous.clone(),
            processes: vec![process(from), process(to)],
            generation,
        };
        let place = usize::from(!is_sender);
        let pair = super::first(ProcessGroup::connected(transport, place, 1, names, options, Some(job))?)?;
        self.engine.add_dependent(pair.engine.engine(), vec![self.local]);
        Ok(pair)
    }
}

/// Longest wait for another process between two checks whether the group has ended.
const CHECK: Duration = Duration::from_millis(200);

/// Longest silence of the place where processes meet.
const SILENCE: Duration = Duration::from_secs(5);

/// Pause before a key is read again that holds the value of an earlier attempt.
const PAUSE: Duration = Duration::from_millis(20);

/// The value that a sender leaves when it has given up. It is not an address.
const GIVEN_UP: &[u8] = b"given up";

/// The connecting of a sender and a receiver in two processes.
///
/// The sender stores its address with a nonce. The receiver reads both and stores the nonce, for which the sender
/// waits. Then both connect: an abort ends the wait for a process that does not come.
struct Meeting<'a> {
    group: &'a ProcessGroup,
    rendezvous: &'a dyn Rendezvous,
    /// The beginning of the pair's keys.
    key: String,
    /// The sender and the receiver.
    pair: (usize, usize),
    names: &'a [String],
    deadline: Instant,
}

impl Meeting<'_> {
    /// Waits for the receiver, which connects to this process.
    fn accept(&self, name: &str) -> Result<Box<dyn Transport>> {
        let kind = self.group.transport_kind("send")?;
        let (listener, mine, nonce) = self.group.open_listener()?;
        self.rendezvous.put(&self.sender(), format!("{nonce} {mine}").as_bytes())?;
        let told = nonce.to_string();
        let opened = self.wait(&self.receiver(), "recv", |value| value == told.as_bytes()).and_then(|_| {
            let group = GroupIdentity { name, nonce, proofs: self.group.proofs() };
            let deadline = self.deadline.min(Instant::now() + MAX_CONNECT);
            transport::open(kind, 0, &[mine, String::new()], listener, group, &self.names[0], deadline)
        });
        opened.inspect_err(|_| {
            // A later receiver must not connect to a port at which no process listens.
            let _ = self.rendezvous.put(&self.sender(), GIVEN_UP);
        })
    }

    /// Waits for the sender and connects to it. If that fails, the sender may have given up, and listens elsewhere when
    /// it sends again.
    fn dial(&self, name: &str) -> Result<Box<dyn Transport>> {
        let kind = self.group.transport_kind("send")?;
        let mut failed: Option<(Vec<u8>, Error)> = None;
        loop {
            let known = failed.as_ref().map(|(endpoint, _)| &endpoint[..]);
            let waited = self.wait(&self.sender(), "send", |value| value != GIVEN_UP && Some(value) != known);
            let endpoint = match (waited, failed) {
                (Ok(endpoint), _) => endpoint,
                // The error of connecting says more than that no other address was put there.
                (Err(Error::Connect { .. }), Some((_, error))) | (Err(error), _) => return Err(error),
            };
            let text = String::from_utf8_lossy(&endpoint);
            let read = text.split_once(' ').and_then(|(nonce, address)| Some((nonce.parse::<Nonce>().ok()?, address)));
            let (nonce, address) = read.ok_or_else(|| Error::Disagreement {
                group: name.to_owned(),
                what: "protocol".into(),
                here: self.names[1].clone(),
                mine: "a nonce and an address".into(),
                there: self.names[0].clone(),
                theirs: text.escape_debug().to_string().into(),
            })?;
            let (listener, mine, _) = self.group.open_listener()?;
            self.rendezvous.put(&self.receiver(), nonce.to_string().as_bytes())?;
            let group = GroupIdentity { name, nonce, proofs: self.group.proofs() };
            let addresses = [address.to_owned(), mine];
            // Half of the time, so that there is some left for another address.
            let left = self.deadline.saturating_duration_since(Instant::now()) / 2;
            let deadline = Instant::now() + left.min(MAX_CONNECT);
            match transport::open(kind, 1, &addresses, listener, group, &self.names[1], deadline) {
                Err(error @ Error::Connect { .. }) => failed = Some((endpoint, error)),
                opened => return opened,
            }
        }
    }

    /// Waits for a value that the other rank stores in its `call`, and that is wanted.
    fn wait(&self, key: &str, call: &str, is_wanted: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>> {
        let mut silent_since = None;
        loop {
            if let Some(error) = self.group.failure() {
                return Err(error);
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            match self.rendezvous.get(key, left.min(CHECK)) {
                Ok(value) if is_wanted(&value) => return Ok(value),
                Ok(_) | Err(distribute_cluster::Error::KeyMissing { .. }) if left.is_zero() => {
                    let timeout = self.group.options.timeout;
                    let problem =
                        format!("it has not called {call} within {timeout:?}; call it, or set a longer timeout");
                    let (from, to) = self.pair;
                    return Err(self.group.not_connected(from, to, problem));
                }
                Ok(_) => {
                    silent_since = None;
                    std::thread::sleep(PAUSE);
                }
                Err(distribute_cluster::Error::KeyMissing { .. }) => silent_since = None,
                // A leader that is busy may not answer a short call in time, and answers the next one.
                Err(distribute_cluster::Error::Call { .. })
                    if !left.is_zero() && silent_since.get_or_insert_with(Instant::now).elapsed() < SILENCE =>
                {
                    std::thread::sleep(PAUSE);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn sender(&self) -> String {
        format!("{}/sender", self.key)
    }

    fn receiver(&self) -> String {
        format!("{}/receiver", self.key)
    }
}

pub(super) fn sending(dtype: DType, len: usize) -> (Request, Counts) {
    (message(dtype), Counts::Exchange { send: vec![0, len], receive: vec![0, 0] })
}

pub(super) fn receiving(dtype: DType, len: usize) -> (Request, Counts) {
    (message(dtype), Counts::Exchange { send: vec![0, 0], receive: vec![len, 0] })
}

/// The sender is rank 0 of its pair.
fn message(dtype: DType) -> Request {
    Request { root: Some(Rank(0)), ..Request::new(Kind::Send, dtype, 0) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn begun(pairs: &Pairs, key: (usize, usize)) -> Begun<'_> {
        match pairs.find_or_begin(key) {
            Found::Begun(begun) => begun,
            Found::Known(_) => panic!("an earlier attempt is known"),
        }
    }

    #[test]
    fn an_attempt_that_fails_is_told_to_those_who_wait_and_made_again_by_later_calls() {
        let pairs = Pairs::default();
        let first = begun(&pairs, (0, 1));
        let Found::Known(known) = pairs.find_or_begin((0, 1)) else { panic!("two attempts at once") };
        assert!(known.outcome_by(Instant::now() + Duration::from_millis(5)).is_none());
        // Other pairs do not wait for it. This one is given up without an outcome, as by a panic.
        drop(begun(&pairs, (1, 0)));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| known.outcome_by(Instant::now() + Duration::from_secs(20)));
            assert!(first.end(Err(Error::GroupSize { given: 0, max: 1 })).is_err());
            let outcome = waits.join().expect("no panic").expect("it has ended");
            assert!(matches!(outcome, Err(Error::GroupSize { .. })), "{outcome:?}");
        });
        let pair = Arc::new(ProcessGroup::local(1).expect("one rank").remove(0));
        begun(&pairs, (0, 1)).end(Ok(pair.clone())).expect("as given");
        let Found::Known(known) = pairs.find_or_begin((0, 1)) else { panic!("it is made") };
        assert!(Arc::ptr_eq(&known.outcome_by(Instant::now()).expect("made").expect("as given"), &pair));
        begun(&pairs, (1, 0));
    }
}

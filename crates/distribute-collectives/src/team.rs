//! The ranks of one process: how their calls meet, and who does the work.
//!
//! Each call of a rank is deposited in the [`Operation`] of its sequence number. When the last local rank has arrived, the
//! operation is cut into chunks, and every rank that waits for it takes chunks until none are left; the last rank to
//! arrive takes part too, so an asynchronous call needs no thread of its own. Where the group spans processes, the chunks
//! first reduce into the first rank's memory, a [`Bridge`] exchanges that with the other processes, and further chunks
//! spread the result. [`crate::phases`] holds the states.
//!
//! Memory protocol: a rank's buffers may be touched by other threads only in Reducing, Bridging and Spreading.
//! [`Team::wait`] returns only in Done and Failed, and an operation reaches those only when no thread holds a chunk of it.
//! A function of the caller's that panics (a reduction, cross-device operation, algorithm or transport) is caught where it
//! was called: the operation is doomed, the chunks in hand are given back, and the group ends with
//! [`Error::Panicked`] on every rank.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use distribute_cluster::FailureKind;
use distribute_types::ErrorClass;

use crate::bridge::Bridge;
use crate::call::{Call, Kind};
use crate::exchange::Disagreement;
use crate::memory::Buffers;
use crate::phases::{Phase, Phases, State};
use crate::recorder::{FlightHeader, Identity, Recorder};
use crate::work_plan::Plan;
use crate::{Error, Options, ProcessGroup, Rank, Result, SharedCrossDeviceOps};

mod giving_up;
mod handle;

pub(crate) use handle::Handle;

/// Largest number of ranks in one process.
pub(crate) const MAX_LOCAL_RANKS: usize = 256;

/// How long a waiting rank polls before it sleeps. Waking a sleeper costs 1 to 30 µs, so short waits must not sleep.
const SPIN: Duration = Duration::from_micros(40);

/// Longest sleep between two looks at what may have happened.
const NAP: Duration = Duration::from_millis(50);

/// The ranks of this process in one group.
pub(crate) struct Team {
    pub(crate) name: String,
    /// Names of all ranks of the group, local or not.
    pub(crate) names: Vec<String>,
    /// Group rank of the first local rank.
    pub(crate) first_rank: usize,
    pub(crate) local_ranks: usize,
    /// How local ranks combine their values, where not in chunks that all of them take.
    pub(crate) cross_device_ops: Option<SharedCrossDeviceOps>,
    /// Set as soon as the group is aborted; also interrupts the bridge.
    pub(crate) interrupted: AtomicBool,
    /// Whether every rank of this process can have a core; else spinning keeps the one that is waited for from its core.
    has_cores: bool,
    cause: Mutex<Option<Abort>>,
    departed: Vec<AtomicBool>,
    /// Ranks that make no calls for now.
    resting: Vec<AtomicBool>,
    // What every call writes has cache lines of its own: ranks read the rest meanwhile.
    open: CachePadded<Mutex<Open>>,
    sleepers: CachePadded<AtomicUsize>,
    nap: Mutex<()>,
    wake: Condvar,
    bridge: Option<Bridge>,
    /// One per local rank.
    pub(crate) recorders: Vec<CachePadded<Recorder>>,
    /// Handles of groups made from this one, left by the local rank that made them for the others.
    pub(crate) offspring: Mutex<HashMap<Offspring, Result<ProcessGroup>>>,
    /// What else the ranks of this process share.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only GPUs of one process share something"))]
    pub(crate) commons: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
}

/// Which handle this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Offspring {
    /// This rank's handle of a sub-group: the count of splits, and the rank in the parent.
    Split(u64, usize),
    /// A member's handle of the group in which one rank sends to another: sender, receiver, and the member.
    Pair(usize, usize, usize),
}

impl Offspring {
    pub(crate) fn is_for(&self, rank: usize) -> bool {
        let (Offspring::Split(_, member) | Offspring::Pair(.., member)) = self;
        *member == rank
    }
}

/// Operations that not every rank has finished with.
struct Open {
    /// Sequence number of the first one.
    first: u64,
    /// Each with the number of ranks that have joined it.
    operations: VecDeque<(usize, Arc<Operation>)>,
}

#[derive(Clone)]
struct Abort {
    origin: String,
    error: Error,
}

/// One collective call of all local ranks.
pub(crate) struct Operation {
    /// Looked at all the time by ranks that wait.
    phases: CachePadded<Phases>,
    entries: Vec<Mutex<Option<Entry>>>,
    /// Written once by the last rank to arrive, before Reducing.
    plan: std::sync::OnceLock<Plan>,
    failure: Mutex<Option<Error>>,
}

struct Entry {
    call: Call,
    buffers: Buffers,
    deadline: Instant,
    started: Instant,
}

impl Team {
    pub(crate) fn new(
        options: &Options,
        names: Vec<String>,
        first_rank: usize,
        local_ranks: usize,
        bridge: Option<Bridge>,
    ) -> Arc<Team> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new_cyclic(|team| {
            if let Some(bridge) = &bridge {
                bridge.attach(team.clone());
            }
            Team {
                name: options.name.clone(),
                names,
                first_rank,
                local_ranks,
                cross_device_ops: options.cross_device_ops.clone().filter(|_| local_ranks > 1),
                interrupted: AtomicBool::new(false),
                has_cores: local_ranks <= cores,
                cause: Mutex::new(None),
                departed: (0..local_ranks).map(|_| AtomicBool::new(false)).collect(),
                resting: (0..local_ranks).map(|_| AtomicBool::new(false)).collect(),
                open: CachePadded::new(Mutex::new(Open { first: 0, operations: VecDeque::new() })),
                sleepers: CachePadded::new(AtomicUsize::new(0)),
                nap: Mutex::new(()),
                wake: Condvar::new(),
                bridge,
                recorders: (0..local_ranks).map(|_| CachePadded::new(Recorder::from_env())).collect(),
                offspring: Mutex::new(HashMap::new()),
                commons: Mutex::new(None),
            }
        })
    }

    pub(crate) fn bridge(&self) -> Option<&Bridge> {
        self.bridge.as_ref()
    }

    pub(crate) fn processes(&self) -> usize {
        self.bridge.as_ref().map_or(1, Bridge::processes)
    }

    pub(crate) fn process(&self) -> usize {
        self.first_rank / self.local_ranks
    }

    /// The name of a local rank, as errors print it.
    pub(crate) fn local_name(&self, local: usize) -> String {
        self.names[self.first_rank + local].clone()
    }

    /// The rank of the group that a local rank is.
    pub(crate) fn rank(&self, local: usize) -> Rank {
        Rank::of(self.first_rank + local)
    }

    /// Deposits one rank's part of a call; [`start`](Team::start) follows.
    ///
    /// The memory in `buffers` must stay valid and untouched until [`wait`](Team::wait) has returned for this operation.
    pub(crate) fn deposit(
        &self,
        local: usize,
        call: Call,
        buffers: Buffers,
        started: Instant,
        timeout: Duration,
    ) -> Result<Arc<Operation>> {
        self.check_alive(call)?;
        let operation = self.join(call.sequence);
        *lock(&operation.entries[local]) = Some(Entry { call, buffers, deadline: started + timeout, started });
        Ok(operation)
    }

    /// Counts this rank as arrived. The last one starts the operation and does what work there is for it.
    ///
    /// `may_block` says that the caller is going to wait for the operation anyway.
    pub(crate) fn start(&self, operation: &Arc<Operation>, may_block: bool) {
        if operation.phases.arrive(self.local_ranks) {
            self.begin(operation, may_block);
        }
        self.help(operation, may_block);
    }

    /// Waits until the operation is done, working on it meanwhile.
    ///
    /// The one wait without a deadline of its own: while another thread holds a chunk, the memory of this rank is in use.
    /// From the operation's deadline on no further chunk is worked on, so what is left is the chunks in hand: bounded, but
    /// for a function of the caller's that does not return.
    pub(crate) fn wait(&self, local: usize, operation: &Arc<Operation>) -> Result<()> {
        let mut idle_since = None;
        loop {
            let state = operation.phases.state();
            match state {
                State::Done => break,
                State::Failed => {
                    let failure = lock(&operation.failure).clone();
                    return Err(failure.unwrap_or_else(|| self.aborted(None)));
                }
                _ => {}
            }
            if state != State::Gathering && self.help(operation, true) {
                idle_since = None;
                continue;
            }
            let now = Instant::now();
            if now - *idle_since.get_or_insert(now) < SPIN {
                if self.has_cores { std::hint::spin_loop() } else { std::thread::yield_now() }
            } else {
                match state {
                    State::Gathering => self.check_gathering(local, operation),
                    _ => self.check_under_way(local, operation, state),
                }
                self.sleep(operation, state);
            }
        }
        Ok(())
    }

    pub(crate) fn is_over(operation: &Operation) -> bool {
        operation.phases.state().is_over()
    }

    /// Ends the group for everybody; the first cause stays.
    pub(crate) fn abort(&self, origin: &str, error: &Error) {
        {
            let mut cause = lock(&self.cause);
            if cause.is_some() {
                return;
            }
            *cause = Some(Abort { origin: origin.to_owned(), error: error.clone() });
        }
        self.interrupted.store(true, Ordering::SeqCst);
        if let Some(bridge) = &self.bridge {
            bridge.abort(&error.as_reason(origin));
        }
        self.wake_all();
        for (local, recorder) in self.recorders.iter().enumerate() {
            recorder.fail(error, || self.flight_header(local));
        }
    }

    /// What the flight record of a local rank says of it.
    pub(crate) fn flight_header(&self, local: usize) -> FlightHeader {
        let rank = self.first_rank + local;
        let transport = self.bridge.as_ref().map_or("local", Bridge::transport);
        let world_size = self.names.len();
        Identity { group: &self.name, rank, name: &self.names[rank], world_size, transport }.into()
    }

    /// Marks a local rank as gone: whoever waits for it learns that at once.
    pub(crate) fn depart(&self, local: usize) {
        self.departed[local].store(true, Ordering::SeqCst);
        self.wake_all();
    }

    /// Marks a local rank as one that makes no calls for now, or as one that does again.
    pub(crate) fn rest(&self, local: usize, resting: bool) {
        self.resting[local].store(resting, Ordering::SeqCst);
        if resting && self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    pub(crate) fn has_departed(&self, local: usize) -> bool {
        self.departed[local].load(Ordering::SeqCst)
    }

    /// Whether the group lives; `call` is what the caller is about to do.
    pub(crate) fn check_alive(&self, call: Call) -> Result<()> {
        if self.interrupted.load(Ordering::Acquire) { Err(self.aborted(Some(call))) } else { Ok(()) }
    }

    /// Why the group has ended, if it has.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.interrupted.load(Ordering::Acquire).then(|| self.aborted(None))
    }

    /// Why the group has ended, as the error of `call` where it is known.
    pub(crate) fn aborted(&self, call: Option<Call>) -> Error {
        match lock(&self.cause).clone() {
            Some(Abort { error: error @ Error::Aborted { .. }, .. }) => error,
            Some(Abort { error: Error::PeerLost { name, peer, peer_rank, during, how }, .. }) => {
                let during = call.map_or(during, |call| call.to_string());
                Error::PeerLost { name, peer, peer_rank, during, how }
            }
            Some(abort) => {
                Error::aborted(&self.name, &abort.origin, &abort.error.to_string(), abort.error.failure_kind())
            }
            None => {
                let (origin, cause) = ("an earlier failure", "an operation failed");
                Error::aborted(&self.name, origin, cause, FailureKind::Retryable)
            }
        }
    }

    /// The operation of a sequence number, which each rank asks for once, in order.
    fn join(&self, sequence: u64) -> Arc<Operation> {
        let mut open = lock(&self.open);
        let index = (sequence - open.first) as usize;
        while open.operations.len() <= index {
            open.operations.push_back((0, Arc::new(Operation::new(self.local_ranks))));
        }
        let (joined, operation) = &mut open.operations[index];
        *joined += 1;
        let (complete, operation) = (*joined == self.local_ranks, operation.clone());
        if complete {
            // Ranks join in order, so all earlier operations are complete and gone: this one is the first.
            open.operations.pop_front();
            open.first += 1;
        }
        operation
    }

    /// Counts a call in which this process's only rank met nobody.
    pub(crate) fn pass(&self, sequence: u64) {
        debug_assert_eq!(self.local_ranks, 1);
        // Operations of a team of one are complete as soon as they are joined, so none is in the list.
        lock(&self.open).first = sequence + 1;
    }

    /// The last rank has arrived: compares the calls and starts the first phase.
    fn begin(&self, operation: &Arc<Operation>, may_block: bool) {
        let planned = catch_unwind(AssertUnwindSafe(|| self.plan(operation)));
        let planned = planned.unwrap_or_else(|panic| {
            let call = operation.leader_call().map(|(call, ..)| call);
            Err((self.local_name(0), self.panicked(call, &*panic)))
        });
        let plan = match planned {
            Ok(plan) => plan,
            Err((origin, error)) => {
                self.fail(operation, State::Gathering, &origin, error);
                return;
            }
        };
        let Some(plan) = plan else {
            if operation.phases.advance(State::Gathering, State::Done) {
                self.wake_sleepers();
            }
            return;
        };
        let chunks = plan.chunks(Phase::Reduce);
        if !operation.phases.advance(State::Gathering, State::Reducing) {
            return;
        }
        if chunks > 1 {
            self.wake_sleepers();
        }
        match chunks {
            0 => self.finish_phase(operation, Phase::Reduce, may_block),
            _ => self.work_on(operation, plan, Phase::Reduce, 0, may_block),
        }
    }

    /// Sets the plan, by what the ranks' calls amount to, and returns it, or `None` where the last arrival was all that a call
    /// waited for. The error, and whose it is, where they do not fit together.
    fn plan<'a>(&self, operation: &'a Operation) -> Result<Option<&'a Plan>, (String, Error)> {
        let entries: Vec<MutexGuard<'_, Option<Entry>>> = operation.entries.iter().map(lock).collect();
        // Every rank has arrived, so every entry is there.
        let parts: Vec<&Entry> = entries.iter().filter_map(|entry| entry.as_ref()).collect();
        let call = parts[0].call;
        if let Some(other) = parts.iter().position(|part| part.call != call || !part.buffers.fit(&parts[0].buffers)) {
            let there_name = self.local_name(other);
            let error = Error::Mismatch {
                here: Box::new(call),
                here_name: self.local_name(0),
                there: Box::new(parts[other].call),
                there_name: there_name.clone(),
            };
            return Err((there_name, error));
        }
        if call.kind == Kind::Barrier && self.bridge.is_none() {
            return Ok(None);
        }
        match Plan::new(self, call, parts.iter().map(|part| &part.buffers)) {
            // Only the last rank to arrive comes here.
            Ok(plan) => Ok(Some(operation.plan.get_or_init(|| plan))),
            Err(Disagreement { from, to, sent, expected }) => {
                let error = Error::Parts {
                    call: Box::new(call),
                    from: self.names[from].clone(),
                    to: self.names[to].clone(),
                    sent,
                    expected,
                };
                Err((self.local_name(to - self.first_rank), error))
            }
        }
    }

    /// Takes chunks of the current phase until none are left; returns whether any work was done.
    fn help(&self, operation: &Arc<Operation>, may_block: bool) -> bool {
        let mut worked = false;
        loop {
            let phase = match operation.phases.state() {
                State::Reducing => Phase::Reduce,
                State::Spreading => Phase::Spread,
                State::Bridging => {
                    // Only one thread may be in the bridge; whoever waits anyway may as well be it.
                    let crossed = may_block && self.bridge.as_ref().is_some_and(|bridge| bridge.cross(self));
                    return worked | crossed;
                }
                _ => return worked,
            };
            let Some(plan) = operation.plan.get() else { return worked };
            let Some(chunk) = operation.phases.take(phase, plan.chunks(phase)) else { return worked };
            self.work_on(operation, plan, phase, chunk, may_block);
            worked = true;
        }
    }

    /// Works on a chunk in hand, and ends the phase with its last one.
    fn work_on(&self, operation: &Arc<Operation>, plan: &Plan, phase: Phase, chunk: usize, may_block: bool) {
        if !operation.phases.is_doomed()
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| plan.run(phase, chunk)))
        {
            self.doom(operation, self.panicked(Some(plan.call()), &*panic));
        }
        if operation.phases.give_back(phase, plan.chunks(phase)) {
            self.finish_phase(operation, phase, may_block);
        }
    }

    /// All chunks of a phase have been given back.
    fn finish_phase(&self, operation: &Arc<Operation>, phase: Phase, may_block: bool) {
        let state = if phase == Phase::Reduce { State::Reducing } else { State::Spreading };
        if operation.phases.is_doomed() {
            let error = lock(&operation.failure).clone().unwrap_or_else(|| self.aborted(None));
            self.fail(operation, state, &self.local_name(0), error);
            return;
        }
        if phase == Phase::Reduce
            && let Some(bridge) = &self.bridge
        {
            operation.phases.advance(state, State::Bridging);
            // A thread that may block crosses the bridge itself; else the courier does.
            bridge.enqueue(operation.clone(), !may_block);
            self.wake_sleepers();
            return;
        }
        operation.phases.advance(state, State::Done);
        self.wake_sleepers();
    }

    /// Called by the bridge when the other processes' values have arrived.
    pub(crate) fn crossed(&self, operation: &Arc<Operation>, outcome: Result<()>) {
        match outcome {
            Ok(()) => {
                operation.phases.advance(State::Bridging, State::Spreading);
                if operation.plan.get().is_some_and(|plan| plan.chunks(Phase::Spread) == 0) {
                    self.finish_phase(operation, Phase::Spread, false);
                }
                self.wake_sleepers();
            }
            Err(error) => {
                let origin = self.local_name(0);
                self.fail(operation, State::Bridging, &origin, error);
            }
        }
    }

    /// The error of a call in which a function of the caller's panicked.
    pub(crate) fn panicked(&self, call: Option<Call>, panic: &(dyn Any + Send)) -> Error {
        let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
        Error::Panicked {
            name: self.local_name(0),
            during: call.map_or_else(|| "a call".to_owned(), |call| call.to_string()),
            message: message.unwrap_or_else(|| "a value that is no text".to_owned()),
        }
    }

    /// Notes why an operation under way is to fail; the thread that ends the phase then fails it.
    fn doom(&self, operation: &Operation, error: Error) {
        lock(&operation.failure).get_or_insert(error);
        operation.phases.doom();
    }

    fn fail(&self, operation: &Operation, from: State, origin: &str, error: Error) {
        lock(&operation.failure).get_or_insert_with(|| error.clone());
        if operation.phases.advance(from, State::Failed) {
            self.abort(origin, &error);
            self.wake_all();
        }
    }

    /// Sleeps until the operation is no longer in the state that the caller saw.
    fn sleep(&self, operation: &Operation, before: State) {
        // SeqCst: see `Phases::state`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let guard = lock(&self.nap);
        // A state that changes from here on is seen either by this look or by the waker, which counts sleepers after it.
        if operation.phases.state() == before && !(before == State::Gathering && self.news()) {
            let nap = if before == State::Gathering { self.nap_until(operation) } else { NAP };
            drop(self.wake.wait_timeout(guard, nap));
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn nap_until(&self, operation: &Operation) -> Duration {
        let earliest =
            operation.entries.iter().filter_map(|entry| lock(entry).as_ref().map(|entry| entry.deadline)).min();
        earliest.map_or(NAP, |deadline| deadline.saturating_duration_since(Instant::now()).min(NAP))
    }

    fn news(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        drop(lock(&self.nap));
        self.wake.notify_all();
    }
}

impl Operation {
    fn new(ranks: usize) -> Operation {
        Operation {
            phases: CachePadded::new(Phases::new()),
            entries: (0..ranks).map(|_| Mutex::new(None)).collect(),
            plan: std::sync::OnceLock::new(),
            failure: Mutex::new(None),
        }
    }

    pub(crate) fn plan(&self) -> Option<&Plan> {
        self.plan.get()
    }

    /// The call and its deadline, as the first local rank made it.
    pub(crate) fn leader_call(&self) -> Option<(Call, Instant, Instant)> {
        lock(&self.entries[0]).as_ref().map(|entry| (entry.call, entry.deadline, entry.started))
    }
}

/// A poisoned lock only means that some thread panicked; the data under these locks are single values and stay valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

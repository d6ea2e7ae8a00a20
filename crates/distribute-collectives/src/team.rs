//! The ranks of one process: how their calls meet, and who does the work.
//!
//! Each call of a rank is deposited in the [`Operation`] of its sequence number. When the last local rank has arrived, the
//! operation is cut into chunks, and every rank that waits for it takes chunks until none are left; the last rank to
//! arrive takes part too, so an asynchronous call needs no thread of its own. Where the group spans processes, the chunks
//! first reduce into the first rank's memory, a [`Bridge`] exchanges that with the other processes, and further chunks
//! spread the result.
//!
//! ```text
//! Gathering ── last rank arrives ──> Reducing ──> Bridging ──> Spreading ──> Done
//!     └─ deadline, peer gone, group aborted, calls differ ──> Failed <─┘
//! ```
//!
//! Memory protocol: a rank's buffers may be touched by other threads only between Reducing and Spreading. [`Team::wait`]
//! returns only in Done and Failed, and an operation reaches Failed from Gathering only where nobody has touched a byte.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use distribute_cluster::FailureKind;

use crate::bridge::Bridge;
use crate::call::Call;
use crate::exchange::Disagreement;
use crate::memory::Buffers;
use crate::recorder::{FlightHeader, Identity, Recorder};
use crate::work_plan::{Phase, Plan};
use crate::{Error, Options, ProcessGroup, Rank, Result, SharedCrossDeviceOps};

/// Largest number of ranks in one process.
pub(crate) const MAX_LOCAL_RANKS: usize = 256;

/// How long a waiting rank polls before it sleeps. Waking a sleeper costs 1 to 30 µs, so short waits must not sleep.
const SPIN: Duration = Duration::from_micros(40);

/// Longest sleep between two looks at what may have happened.
const NAP: Duration = Duration::from_millis(50);

const GATHERING: u32 = 0;
const REDUCING: u32 = 1;
const BRIDGING: u32 = 2;
const SPREADING: u32 = 3;
const DONE: u32 = 4;
const FAILED: u32 = 5;

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
    open: Mutex<Open>,
    sleepers: AtomicUsize,
    nap: Mutex<()>,
    wake: Condvar,
    bridge: Option<Bridge>,
    /// One per local rank.
    pub(crate) recorders: Vec<Recorder>,
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
    state: AtomicU32,
    arrived: AtomicUsize,
    entries: Vec<Mutex<Option<Entry>>>,
    /// Written once by the last rank to arrive, before Reducing.
    plan: std::sync::OnceLock<Plan>,
    failure: Mutex<Option<Error>>,
    progress: [Progress; 2],
}

/// Chunks of one phase: handed out, and finished.
#[derive(Default)]
struct Progress {
    next: AtomicUsize,
    finished: AtomicUsize,
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
                open: Mutex::new(Open { first: 0, operations: VecDeque::new() }),
                sleepers: AtomicUsize::new(0),
                nap: Mutex::new(()),
                wake: Condvar::new(),
                bridge,
                recorders: (0..local_ranks).map(|_| Recorder::from_env()).collect(),
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

    /// Deposits one rank's part of a call; [`start`](Team::start) follows.
    ///
    /// The memory in `buffers` must stay valid and untouched until [`wait`](Team::wait) has returned for this operation.
    pub(crate) fn deposit(
        &self,
        local: usize,
        call: Call,
        buffers: Buffers,
        timeout: Duration,
    ) -> Result<Arc<Operation>> {
        self.check_alive(call)?;
        let operation = self.join(call.sequence);
        let started = Instant::now();
        *lock(&operation.entries[local]) = Some(Entry { call, buffers, deadline: started + timeout, started });
        Ok(operation)
    }

    /// Counts this rank as arrived. The last one starts the operation and does what work there is for it.
    ///
    /// `may_block` says that the caller is going to wait for the operation anyway.
    pub(crate) fn start(&self, operation: &Arc<Operation>, may_block: bool) {
        if operation.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.local_ranks {
            self.begin(operation, may_block);
        }
        self.help(operation, may_block);
    }

    /// Waits until the operation is done, working on it meanwhile.
    pub(crate) fn wait(&self, local: usize, operation: &Arc<Operation>) -> Result<()> {
        let mut idle_since = None;
        loop {
            let state = operation.state.load(Ordering::SeqCst);
            match state {
                DONE => break,
                FAILED => {
                    let failure = lock(&operation.failure).clone();
                    return Err(failure.unwrap_or_else(|| self.aborted(None)));
                }
                _ => {}
            }
            if self.help(operation, true) {
                idle_since = None;
                continue;
            }
            let since = *idle_since.get_or_insert_with(Instant::now);
            if since.elapsed() < SPIN {
                if self.has_cores { std::hint::spin_loop() } else { std::thread::yield_now() }
            } else {
                if state == GATHERING {
                    self.check_gathering(local, operation);
                }
                self.sleep(operation, state);
            }
        }
        Ok(())
    }

    pub(crate) fn is_over(operation: &Operation) -> bool {
        matches!(operation.state.load(Ordering::Acquire), DONE | FAILED)
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
            bridge.abort(origin, error);
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

    pub(crate) fn has_departed(&self, local: usize) -> bool {
        self.departed[local].load(Ordering::SeqCst)
    }

    /// Whether the group lives; `call` is what the caller is about to do.
    pub(crate) fn check_alive(&self, call: Call) -> Result<()> {
        if self.interrupted.load(Ordering::Acquire) { Err(self.aborted(Some(call))) } else { Ok(()) }
    }

    /// Why the group has ended, if it has.
    #[cfg(feature = "cuda")]
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
        let entries: Vec<MutexGuard<'_, Option<Entry>>> = operation.entries.iter().map(lock).collect();
        // Every rank has arrived, so every entry is there.
        let parts: Vec<&Entry> = entries.iter().filter_map(|entry| entry.as_ref()).collect();
        let call = parts[0].call;
        if let Some(other) = parts.iter().position(|part| part.call != call) {
            let error = Error::Mismatch {
                here: Box::new(call),
                here_name: self.local_name(0),
                there: Box::new(parts[other].call),
                there_name: self.local_name(other),
            };
            drop(parts);
            drop(entries);
            self.fail(operation, GATHERING, &self.local_name(other), error);
            return;
        }
        let plan = Plan::new(self, call, parts.iter().map(|part| &part.buffers));
        drop(parts);
        drop(entries);
        match plan {
            Ok(plan) => drop(operation.plan.set(plan)),
            Err(Disagreement { from, to, sent, expected }) => {
                let error = Error::Parts {
                    call: Box::new(call),
                    from: self.names[from].clone(),
                    to: self.names[to].clone(),
                    sent,
                    expected,
                };
                self.fail(operation, GATHERING, &self.local_name(to - self.first_rank), error);
                return;
            }
        }
        if operation.advance(GATHERING, REDUCING) {
            self.wake_sleepers();
            self.skip_empty(operation, 0, may_block);
        }
    }

    /// Takes chunks of the current phase until none are left; whether any work was done.
    fn help(&self, operation: &Arc<Operation>, may_block: bool) -> bool {
        let mut worked = false;
        loop {
            let (phase, index) = match operation.state.load(Ordering::Acquire) {
                REDUCING => (Phase::Reduce, 0),
                SPREADING => (Phase::Spread, 1),
                BRIDGING => {
                    // Only one thread may be in the bridge; whoever waits anyway may as well be it.
                    let crossed = may_block && self.bridge.as_ref().is_some_and(|bridge| bridge.cross(self));
                    return worked | crossed;
                }
                _ => return worked,
            };
            let Some(plan) = operation.plan.get() else { return worked };
            let total = plan.chunks(phase);
            let chunk = operation.progress[index].next.fetch_add(1, Ordering::AcqRel);
            if chunk >= total {
                return worked;
            }
            plan.run(phase, chunk);
            worked = true;
            if operation.progress[index].finished.fetch_add(1, Ordering::AcqRel) + 1 == total {
                self.finish_phase(operation, index, may_block);
            }
        }
    }

    fn skip_empty(&self, operation: &Arc<Operation>, index: usize, may_block: bool) {
        let phase = if index == 0 { Phase::Reduce } else { Phase::Spread };
        if operation.plan.get().is_some_and(|plan| plan.chunks(phase) == 0) {
            self.finish_phase(operation, index, may_block);
        }
    }

    fn finish_phase(&self, operation: &Arc<Operation>, index: usize, may_block: bool) {
        if index == 0
            && let Some(bridge) = &self.bridge
        {
            operation.state.store(BRIDGING, Ordering::SeqCst);
            // A thread that may block crosses the bridge itself; else the courier does.
            bridge.enqueue(operation.clone(), !may_block);
            self.wake_sleepers();
            return;
        }
        operation.state.store(DONE, Ordering::SeqCst);
        self.wake_sleepers();
    }

    /// Called by the bridge when the other processes' values have arrived.
    pub(crate) fn crossed(&self, operation: &Arc<Operation>, outcome: Result<()>) {
        match outcome {
            Ok(()) => {
                operation.state.store(SPREADING, Ordering::SeqCst);
                self.skip_empty(operation, 1, false);
                self.wake_sleepers();
            }
            Err(error) => {
                let origin = self.local_name(0);
                self.fail(operation, BRIDGING, &origin, error);
            }
        }
    }

    fn fail(&self, operation: &Operation, from: u32, origin: &str, error: Error) {
        lock(&operation.failure).get_or_insert_with(|| error.clone());
        if operation.advance(from, FAILED) {
            self.abort(origin, &error);
            self.wake_all();
        }
    }

    /// While ranks are missing: has the time come to give up on them?
    fn check_gathering(&self, local: usize, operation: &Operation) {
        let Some((call, deadline, started)) =
            lock(&operation.entries[local]).as_ref().map(|entry| (entry.call, entry.deadline, entry.started))
        else {
            return;
        };
        if self.interrupted.load(Ordering::Acquire) {
            let error = self.aborted(Some(call));
            self.fail(operation, GATHERING, "this rank", error);
            return;
        }
        let missing: Vec<usize> =
            (0..self.local_ranks).filter(|other| lock(&operation.entries[*other]).is_none()).collect();
        if let Some(gone) = missing.iter().find(|other| self.has_departed(**other)) {
            let error = Error::PeerLeft {
                name: self.local_name(local),
                peer: self.local_name(*gone),
                group: self.name.clone(),
                during: call.to_string(),
            };
            self.fail(operation, GATHERING, &self.local_name(local), error);
        } else if Instant::now() >= deadline && !missing.is_empty() {
            let names: Vec<String> = missing.iter().map(|other| self.local_name(*other)).collect();
            let error = Error::Deadline {
                call: Box::new(call),
                name: self.local_name(local),
                group: self.name.clone(),
                waited: started.elapsed(),
                missing: format!("{} (which made no such call)", names.join(", ")),
            };
            self.fail(operation, GATHERING, &self.local_name(local), error);
        }
    }

    /// Sleeps until the operation is no longer in the state that the caller saw.
    fn sleep(&self, operation: &Operation, before: u32) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let guard = lock(&self.nap);
        // A state that changes from here on is seen either by this look or by the waker, which counts sleepers after it.
        if operation.state.load(Ordering::SeqCst) == before && !(before == GATHERING && self.news()) {
            let nap = if before == GATHERING { self.nap_until(operation) } else { NAP };
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
            state: AtomicU32::new(GATHERING),
            arrived: AtomicUsize::new(0),
            entries: (0..ranks).map(|_| Mutex::new(None)).collect(),
            plan: std::sync::OnceLock::new(),
            failure: Mutex::new(None),
            progress: Default::default(),
        }
    }

    fn advance(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
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

impl Team {
    /// The rank of the group that a local rank is.
    pub(crate) fn rank(&self, local: usize) -> Rank {
        Rank::of(self.first_rank + local)
    }
}

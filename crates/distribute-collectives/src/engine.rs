//! The engine: it matches the calls of one process's ranks and executes them.
//!
//! Each call of a rank is deposited in the [`Operation`] of its sequence number. When the last local rank has arrived,
//! the operation is cut into chunks ([`plan`]), and every rank that waits for it takes chunks until none are left. The
//! last rank to arrive takes part too, so an asynchronous call needs no separate thread. If the group spans processes,
//! the chunks first reduce into the first rank's memory, the [`InterProcess`] stage exchanges that with the other
//! processes, and further chunks copy the result to all ranks. [`phases`] holds the states.
//!
//! Threads: every waiting thread works. Operations that no thread waits for are exchanged by the I/O thread
//! ([`io_thread`]), which also watches the deadlines of ranks that poll.
//!
//! Memory protocol: other threads may access a rank's buffers only in Reducing, Exchanging and Spreading.
//! [`Engine::wait`] and [`Engine::poll`] report an end only in Done and Failed, and an operation reaches these only
//! when no thread holds one of its chunks. A panic of a user's function (a reduction, cross-device operation, algorithm
//! or transport) is caught at its call: the operation is marked as failing, the chunks in hand are given back, and the
//! group ends with [`Error::Panicked`] on every rank.
//!
//! The engine does not depend on group handles, sub-groups or the formation of groups.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use self::blocks::Disagreement;
use self::context::GroupContext;
use self::dependents::Dependents;
use self::io_thread::IoThread;
use self::memory::Buffers;
use self::network::InterProcess;
use self::operation::{CallTimes, Entry};
use self::phases::{OperationState, Phase};
use self::plan::LocalPlan;
use crate::call::{Call, Kind};
use crate::recorder::{FlightHeader, Identity, Recorder};
use crate::sync::lock;
use crate::{Error, Result, SharedCrossDeviceOps};

mod blocks;
mod context;
mod dependents;
mod io_thread;
pub(crate) mod memory;
pub(crate) mod network;
mod operation;
pub(crate) mod phases;
mod plan;
mod timeouts;

pub(crate) use operation::Operation;

/// Maximum number of ranks in one process.
pub(crate) const MAX_LOCAL_RANKS: usize = 256;

/// Time that a waiting rank spins before it sleeps. Waking a sleeping thread takes 1 to 30 µs, so short waits must not
/// sleep.
const SPIN: Duration = Duration::from_micros(40);

/// Maximum sleep of a waiting rank between two checks for deadlines and aborts.
const MAX_SLEEP: Duration = Duration::from_millis(50);

/// Executes the collective calls of the ranks of this process in one group.
pub(crate) struct Engine {
    pub(crate) context: GroupContext,
    /// Combines the values of local ranks instead of the engine's own chunks, if set.
    cross_device_ops: Option<SharedCrossDeviceOps>,
    /// Whether there is a core for every rank of this process. Otherwise spinning would keep the awaited rank from its
    /// core.
    has_cores: bool,
    /// Ranks that have dropped their handles.
    left: Vec<AtomicBool>,
    /// Ranks that currently make no calls.
    idle: Vec<AtomicBool>,
    // The state that every call writes is on separate cache lines, since other ranks read the rest meanwhile.
    open: CachePadded<Mutex<OpenOperations>>,
    sleepers: CachePadded<AtomicUsize>,
    sleep: Mutex<()>,
    wake: Condvar,
    /// `None` if one process holds all ranks.
    inter_process: Option<InterProcess>,
    io_thread: IoThread,
    /// Operations in progress that ranks poll as futures, each with the local rank.
    polled: Mutex<Vec<(usize, Arc<Operation>)>>,
    /// Engines that end with this one.
    dependents: Dependents,
    /// The flight recorders of the local ranks.
    pub(crate) recorders: Vec<CachePadded<Recorder>>,
}

/// Operations that some rank has yet to join.
struct OpenOperations {
    /// Sequence number of the first operation.
    first: u64,
    /// Operations, each with the number of ranks that have joined it.
    operations: VecDeque<(usize, Arc<Operation>)>,
}

impl Engine {
    /// Creates the engine of `local_ranks` ranks, which are the group's ranks `first_rank ..`. `names` has one name per
    /// rank of the group.
    pub(crate) fn new(
        name: &str,
        names: Vec<String>,
        first_rank: usize,
        local_ranks: usize,
        cross_device_ops: Option<SharedCrossDeviceOps>,
        inter_process: Option<InterProcess>,
    ) -> Arc<Engine> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let engine = Arc::new_cyclic(|engine: &Weak<Engine>| {
            let engine = engine.clone();
            Engine {
                context: GroupContext::new(name.to_owned(), names, first_rank, local_ranks),
                cross_device_ops: cross_device_ops.filter(|_| local_ranks > 1),
                has_cores: local_ranks <= cores,
                left: (0..local_ranks).map(|_| AtomicBool::new(false)).collect(),
                idle: (0..local_ranks).map(|_| AtomicBool::new(false)).collect(),
                open: CachePadded::new(Mutex::new(OpenOperations { first: 0, operations: VecDeque::new() })),
                sleepers: CachePadded::new(AtomicUsize::new(0)),
                sleep: Mutex::new(()),
                wake: Condvar::new(),
                inter_process,
                io_thread: IoThread::new(move || engine.upgrade().map(|engine| engine.serve())),
                polled: Mutex::new(Vec::new()),
                dependents: Dependents::default(),
                recorders: (0..local_ranks).map(|_| CachePadded::new(Recorder::from_env())).collect(),
            }
        });
        crate::present::add(&engine);
        engine
    }

    /// Returns the stage that exchanges values with other processes, if there are any.
    pub(crate) fn inter_process(&self) -> Option<&InterProcess> {
        self.inter_process.as_ref()
    }

    /// Deposits one rank's part of a call. [`start`](Engine::start) must follow.
    ///
    /// The memory in `buffers` must stay valid and must not be accessed until the operation is over.
    pub(crate) fn deposit(
        &self,
        local: usize,
        call: Call,
        buffers: Buffers,
        started: Instant,
        timeout: Duration,
    ) -> Result<Arc<Operation>> {
        self.context.check_alive(call)?;
        let operation = self.join(call.sequence);
        operation.enter(local, Entry { call, buffers, started, deadline: started + timeout, waker: None });
        Ok(operation)
    }

    /// Counts this rank as arrived. The last rank starts the operation and does the work that is available for it.
    ///
    /// `may_block` states that the caller is going to wait for the operation anyway.
    pub(crate) fn start(&self, operation: &Arc<Operation>, may_block: bool) {
        if operation.phases.arrive(self.context.local_ranks) {
            self.begin(operation, may_block);
        }
        self.help(operation, may_block);
    }

    /// Waits until the operation is over, and works on it meanwhile.
    ///
    /// This is the only wait without its own deadline: while another thread holds a chunk, this rank's memory is in
    /// use. After the operation's deadline no further chunks are worked on, so that only the chunks in hand remain.
    /// They are bounded, unless a user's function does not return.
    pub(crate) fn wait(&self, local: usize, operation: &Arc<Operation>) -> Result<()> {
        let mut idle_since = None;
        loop {
            let state = operation.phases.state();
            if let Some(outcome) = self.outcome(operation, state) {
                return outcome;
            }
            if state != OperationState::Gathering && self.help(operation, true) {
                idle_since = None;
                continue;
            }
            let now = Instant::now();
            if now - *idle_since.get_or_insert(now) < SPIN {
                if self.has_cores { std::hint::spin_loop() } else { std::thread::yield_now() }
            } else {
                match state {
                    OperationState::Gathering => self.check_gathering(local, operation),
                    _ => self.check_under_way(local, operation, state),
                }
                self.sleep(operation, state);
            }
        }
    }

    /// Checks whether the operation is over, works on free chunks, and registers `waker` to be called at the end.
    ///
    /// Never blocks on other ranks. While the operation is pending, the I/O thread watches its deadline.
    pub(crate) fn poll(&self, local: usize, operation: &Arc<Operation>, waker: &Waker) -> Poll<Result<()>> {
        if !operation.is_over() && operation.register(local, waker) {
            self.watch(local, operation);
        }
        self.help(operation, false);
        self.outcome(operation, operation.phases.state()).map_or(Poll::Pending, Poll::Ready)
    }

    /// Works on free chunks and checks time limits like a rank that waits, and never blocks on other ranks. Returns
    /// whether the operation is over.
    pub(crate) fn test(&self, local: usize, operation: &Arc<Operation>) -> bool {
        if !operation.is_over() {
            self.attend(local, operation);
        }
        operation.is_over()
    }

    fn outcome(&self, operation: &Operation, state: OperationState) -> Option<Result<()>> {
        match state {
            OperationState::Done => Some(Ok(())),
            OperationState::Failed => Some(Err(operation.failure().unwrap_or_else(|| self.context.aborted(None)))),
            _ => None,
        }
    }

    /// Returns whether the next call, with this number, may take the fast path, and if so reserves the connections for
    /// it.
    ///
    /// The fast path is for a call in place of a process's only rank while no earlier call is in progress. It has no
    /// ranks to match and no phases, and a short message takes less than half the time.
    /// [`fast_path`](Engine::fast_path) must follow.
    pub(crate) fn reserve_fast_path(&self, sequence: u64) -> bool {
        let reserved = self.inter_process.as_ref().is_some_and(|stage| stage.reserve(sequence));
        if reserved {
            debug_assert_eq!(self.context.local_ranks, 1);
            // An engine of one rank completes operations as they are joined, so the list is empty.
            lock(&self.open).first = sequence + 1;
        }
        reserved
    }

    /// Exchanges a call in place with other processes, on the caller's thread and directly from its memory.
    pub(crate) fn fast_path(&self, call: Call, buffers: &Buffers, started: Instant, timeout: Duration) -> Result<()> {
        let Some(stage) = &self.inter_process else { return Ok(()) };
        let times = CallTimes { call, started, deadline: started + timeout };
        let (outcome, next_is_queued) =
            stage.exchange_alone(&self.context, times, buffers, &|error| self.abort_here(error));
        if next_is_queued {
            self.io_thread.wake();
        }
        outcome
    }

    /// Ends the group on all ranks, and the engines that depend on this one; the first cause is kept.
    pub(crate) fn abort(&self, origin: &str, error: &Error) {
        if !self.context.interrupt(origin, error) {
            return;
        }
        if let Some(stage) = &self.inter_process {
            stage.abort(&error.as_reason(origin));
        }
        self.wake_all();
        self.each_dependent(|dependent, _| dependent.abort(origin, error));
        for (local, recorder) in self.recorders.iter().enumerate() {
            recorder.fail(error, || self.flight_header(local));
        }
    }

    /// Ends the group because this process as a whole has failed; its first rank is named as the origin.
    fn abort_here(&self, error: &Error) {
        self.abort(&self.context.local_name(0), error);
    }

    /// Builds the header of a local rank's flight record.
    pub(crate) fn flight_header(&self, local: usize) -> FlightHeader {
        let context = &self.context;
        let rank = context.rank(local);
        let transport = self.inter_process.as_ref().map_or("local", InterProcess::transport);
        let (name, world_size) = (&context.names[rank.index()], context.world_size());
        Identity { group: &context.name, rank, name, world_size, transport }.into()
    }

    /// Marks a local rank as gone; ranks that wait for it are notified at once.
    pub(crate) fn leave(&self, local: usize) {
        self.left[local].store(true, Ordering::SeqCst);
        self.wake_all();
    }

    /// Returns whether a local rank has dropped its handle.
    pub(crate) fn has_left(&self, local: usize) -> bool {
        self.left[local].load(Ordering::SeqCst)
    }

    /// Marks a local rank as one that currently makes no calls, or as active again.
    pub(crate) fn set_idle(&self, local: usize, idle: bool) {
        self.idle[local].store(idle, Ordering::SeqCst);
        if idle {
            self.wake_sleepers();
            self.io_thread.wake_if_started();
        }
        self.each_dependent(|dependent, ranks| {
            let member = ranks.iter().position(|rank| *rank == local);
            member.into_iter().for_each(|member| dependent.set_idle(member, idle));
        });
    }

    /// Returns the operation of a sequence number. Each rank calls this once per number, in order.
    fn join(&self, sequence: u64) -> Arc<Operation> {
        let ranks = self.context.local_ranks;
        let mut open = lock(&self.open);
        let index = (sequence - open.first) as usize;
        while open.operations.len() <= index {
            open.operations.push_back((0, Arc::new(Operation::new(ranks))));
        }
        let (joined, operation) = &mut open.operations[index];
        *joined += 1;
        let (complete, operation) = (*joined == ranks, operation.clone());
        if complete {
            // Ranks join in order, so all earlier operations are complete and removed: this one is the first.
            open.operations.pop_front();
            open.first += 1;
        }
        operation
    }

    /// Compares the calls when the last rank has arrived, and starts the first phase.
    fn begin(&self, operation: &Arc<Operation>, may_block: bool) {
        let planned = catch_unwind(AssertUnwindSafe(|| self.plan(operation)));
        let planned = planned.unwrap_or_else(|panic| {
            let call = operation.leader_call().map(|times| times.call);
            Err((self.context.local_name(0), self.context.panicked(call, &*panic)))
        });
        let plan = match planned {
            Ok(plan) => plan,
            Err((origin, error)) => {
                self.fail(operation, OperationState::Gathering, &origin, error);
                return;
            }
        };
        let Some(plan) = plan else {
            self.complete(operation, OperationState::Gathering);
            return;
        };
        let chunks = plan.chunks(Phase::Reduce);
        if !operation.phases.advance(OperationState::Gathering, OperationState::Reducing) {
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

    /// Sets the plan for the ranks' calls and returns it, or `None` if the call is complete with the last arrival. If
    /// the calls do not match, returns the error and the rank that differs.
    fn plan<'a>(&self, operation: &'a Operation) -> Result<Option<&'a LocalPlan>, (String, Error)> {
        let context = &self.context;
        let entries = operation.entries();
        // Every rank has arrived, so every entry is set.
        let parts: Vec<&Entry> = entries.iter().filter_map(|entry| entry.as_ref()).collect();
        let call = parts[0].call;
        if let Some(other) = parts.iter().position(|part| part.call != call || !part.buffers.fit(&parts[0].buffers)) {
            let there_name = context.local_name(other);
            let error = Error::Mismatch {
                here: Box::new(call),
                here_name: context.local_name(0),
                there: Box::new(parts[other].call),
                there_name: there_name.clone(),
            };
            return Err((there_name, error));
        }
        if call.kind == Kind::Barrier && self.inter_process.is_none() {
            return Ok(None);
        }
        let buffers = parts.iter().map(|part| part.buffers.clone()).collect();
        match LocalPlan::new(context, self.cross_device_ops.as_ref(), call, buffers) {
            Ok(plan) => Ok(Some(operation.set_plan(plan))),
            Err(Disagreement { from, to, sent, expected }) => {
                let error = Error::Parts {
                    call: Box::new(call),
                    from: context.names[from].clone(),
                    to: context.names[to].clone(),
                    sent,
                    expected,
                };
                Err((context.local_name(to - context.first_rank), error))
            }
        }
    }

    /// Takes chunks of the current phase until none are left; returns whether any work was done.
    fn help(&self, operation: &Arc<Operation>, may_block: bool) -> bool {
        let mut worked = false;
        loop {
            let phase = match operation.phases.state() {
                OperationState::Reducing => Phase::Reduce,
                OperationState::Spreading => Phase::Spread,
                OperationState::Exchanging => {
                    // Only one thread may exchange at a time; a thread that waits anyway can do it.
                    let exchanged = may_block && self.exchange_next(network::SPIN);
                    return worked | exchanged;
                }
                _ => return worked,
            };
            let Some(plan) = operation.plan() else { return worked };
            let Some(chunk) = operation.phases.take(phase, plan.chunks(phase)) else { return worked };
            self.work_on(operation, plan, phase, chunk, may_block);
            worked = true;
        }
    }

    /// Works on a chunk, and ends the phase if it is the last one.
    fn work_on(&self, operation: &Arc<Operation>, plan: &LocalPlan, phase: Phase, chunk: usize, may_block: bool) {
        if !operation.phases.is_failing()
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| plan.run(phase, chunk)))
        {
            self.fail_when_idle(operation, self.context.panicked(Some(plan.call()), &*panic));
        }
        if operation.phases.give_back(phase, plan.chunks(phase)) {
            self.finish_phase(operation, phase, may_block);
        }
    }

    /// Continues with the next phase when all chunks of a phase have been given back.
    fn finish_phase(&self, operation: &Arc<Operation>, phase: Phase, may_block: bool) {
        let state = if phase == Phase::Reduce { OperationState::Reducing } else { OperationState::Spreading };
        if operation.phases.is_failing() {
            let error = operation.failure().unwrap_or_else(|| self.context.aborted(None));
            self.fail(operation, state, &self.context.local_name(0), error);
            return;
        }
        if phase == Phase::Reduce
            && let Some(stage) = &self.inter_process
        {
            operation.phases.advance(state, OperationState::Exchanging);
            stage.enqueue(operation.clone());
            // A thread that may block exchanges the operation itself.
            if !may_block {
                self.io_thread.wake();
            }
            self.wake_sleepers();
            return;
        }
        self.complete(operation, state);
    }

    /// Exchanges the next queued operation with other processes, if it is queued and no other thread exchanges. Returns
    /// whether it did.
    fn exchange_next(&self, spin: Duration) -> bool {
        let Some(stage) = &self.inter_process else { return false };
        let Some(exchanged) = stage.exchange_next(&self.context, spin, &|error| self.abort_here(error)) else {
            return false;
        };
        self.finish_exchange(&exchanged.operation, exchanged.outcome);
        if exchanged.next_is_queued {
            self.io_thread.wake();
        }
        true
    }

    /// Continues when the other processes' values have arrived.
    fn finish_exchange(&self, operation: &Arc<Operation>, outcome: Result<()>) {
        match outcome {
            Ok(()) => {
                operation.phases.advance(OperationState::Exchanging, OperationState::Spreading);
                if operation.plan().is_some_and(|plan| plan.chunks(Phase::Spread) == 0) {
                    self.finish_phase(operation, Phase::Spread, false);
                }
                self.wake_sleepers();
                // There may be no other thread to work on an operation that a rank polls.
                if operation.is_polled() {
                    self.help(operation, false);
                }
            }
            Err(error) => self.fail(operation, OperationState::Exchanging, &self.context.local_name(0), error),
        }
    }

    /// Does one round of the I/O thread. Returns how long it may sleep.
    fn serve(&self) -> Duration {
        while self.exchange_next(Duration::ZERO) {}
        self.serve_polled()
    }

    /// Completes an operation successfully, if it is still in the state `from`.
    fn complete(&self, operation: &Operation, from: OperationState) {
        if operation.phases.advance(from, OperationState::Done) {
            self.wake_sleepers();
            operation.wake_polling_ranks();
        }
    }

    /// Records why an operation in progress is to fail; the thread that ends the phase then fails it.
    fn fail_when_idle(&self, operation: &Operation, error: Error) {
        operation.set_failure(&error);
        operation.phases.set_failing();
    }

    /// Fails an operation and the group with it, if the operation is still in the state `from`.
    fn fail(&self, operation: &Operation, from: OperationState, origin: &str, error: Error) {
        operation.set_failure(&error);
        if operation.phases.advance(from, OperationState::Failed) {
            self.abort(origin, &error);
            self.wake_all();
            operation.wake_polling_ranks();
        }
    }

    /// Sleeps until the operation has left the state that the caller saw.
    fn sleep(&self, operation: &Operation, before: OperationState) {
        let gathering = before == OperationState::Gathering;
        // SeqCst: see `Phases::state`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let guard = lock(&self.sleep);
        // A later change of the state is seen either by this check or by the waking thread, which reads the count of
        // sleepers afterwards.
        if operation.phases.state() == before && !(gathering && self.context.interrupted.load(Ordering::SeqCst)) {
            let time = match operation.earliest_deadline().filter(|_| gathering) {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()).min(MAX_SLEEP),
                None => MAX_SLEEP,
            };
            drop(self.wake.wait_timeout(guard, time));
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes waiting ranks, if any sleeps.
    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.notify_sleepers();
        }
    }

    /// Wakes waiting ranks, and makes the I/O thread check on those that poll.
    fn wake_all(&self) {
        self.notify_sleepers();
        self.io_thread.wake_if_started();
    }

    fn notify_sleepers(&self) {
        // A rank between its check of the state and its sleep holds the lock.
        drop(lock(&self.sleep));
        self.wake.notify_all();
    }
}

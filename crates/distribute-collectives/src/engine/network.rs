//! The inter-process stage: exchanges the first rank's memory with other processes, one operation at a time, in the
//! order of calls.
#![expect(unsafe_code, reason = "the thread that exchanges works on the memory of ranks that wait")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use self::connections::{Connections, ExchangeContext, ExchangeError};
use self::schedules::Schedules;
use super::Operation;
use super::context::GroupContext;
use super::memory::{Buffers, ExchangedMemory};
use super::operation::CallTimes;
use super::plan::LocalPlan;

use crate::reduction::Combiner;
use crate::schedule::{Algorithm, Link, Step};
use crate::sync::lock;
use crate::transport::{AbortReason, Proofs, Transport, TransportKind};
use crate::{Error, ReduceOp, Result};

mod connections;
mod error;
mod receive;
mod schedules;

/// Time that a waiting exchange polls before it sleeps, on a thread whose caller waits for it.
pub(super) const SPIN: Duration = Duration::from_micros(50);

/// Exchanges operations with the other processes of a group.
pub(crate) struct InterProcess {
    connections: Mutex<Connections>,
    transport: &'static str,
    kind: Option<TransportKind>,
    local_host: Option<String>,
    proofs: Proofs,
    schedules: Schedules,
    queue: Mutex<ExchangeQueue>,
}

/// Operations that wait for their exchange.
struct ExchangeQueue {
    /// Sequence number of the next operation to exchange.
    next: u64,
    waiting: BTreeMap<u64, Arc<Operation>>,
    /// Whether a thread is exchanging.
    is_busy: bool,
}

/// An operation whose exchange has ended, successfully or not.
pub(super) struct Exchanged {
    pub(super) operation: Arc<Operation>,
    pub(super) outcome: Result<()>,
    /// Whether the next operation is queued already, so that a thread must exchange it.
    pub(super) next_is_queued: bool,
}

/// One call of this process that is being exchanged.
struct ProcessCall<'a> {
    times: CallTimes,
    /// `None` on the fast path.
    plan: Option<&'a LocalPlan>,
    combiner: &'a Combiner,
    /// Whether a mean is divided during the exchange and not afterwards.
    divides: bool,
    spin: Duration,
    /// Called on a failure while no other thread can use the connections.
    on_failure: &'a dyn Fn(&Error),
}

impl InterProcess {
    /// Connects process `process` of `processes`. `local_host` is the address by which peers reach it, if it is known.
    pub(crate) fn new(
        transport: Box<dyn Transport>,
        (process, processes): (usize, usize),
        algorithm: Algorithm,
        link: Option<Link>,
        local_host: Option<String>,
    ) -> InterProcess {
        let link = link.unwrap_or_else(|| transport.link());
        InterProcess {
            transport: transport.name(),
            kind: transport.kind(),
            local_host: local_host.or_else(|| transport.local_host()),
            proofs: Proofs { secret: transport.secret(), tls: transport.tls() },
            schedules: Schedules::new(algorithm, link, processes, transport.hosts()),
            connections: Mutex::new(Connections::new(transport, process, processes)),
            queue: Mutex::new(ExchangeQueue { next: 0, waiting: BTreeMap::new(), is_busy: false }),
        }
    }

    /// Returns the transport's name.
    pub(crate) fn transport(&self) -> &'static str {
        self.transport
    }

    /// Returns the kind that connects sub-groups, if the transport is one of this crate.
    pub(crate) fn kind(&self) -> Option<TransportKind> {
        self.kind
    }

    /// Returns the algorithm of an all-reduce, unless the hierarchy of hosts determines it.
    pub(crate) fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.schedules.algorithm_for(bytes)
    }

    /// Returns the address by which the other processes reach this one, if it is known.
    pub(crate) fn local_host(&self) -> Option<&str> {
        self.local_host.as_deref()
    }

    /// Returns by what new connections between these processes are recognised.
    pub(crate) fn proofs(&self) -> Proofs {
        self.proofs.clone()
    }

    /// Queues an operation whose local phase is complete.
    pub(super) fn enqueue(&self, operation: Arc<Operation>) {
        if let Some(CallTimes { call, .. }) = operation.leader_call() {
            lock(&self.queue).waiting.insert(call.sequence, operation);
        }
    }

    /// Removes an operation from the queue. Returns whether it was queued, so that no thread works on it.
    pub(super) fn dequeue(&self, sequence: u64) -> bool {
        lock(&self.queue).waiting.remove(&sequence).is_some()
    }

    /// Exchanges the next operation; `None` if it is not queued yet, or another thread is exchanging.
    pub(super) fn exchange_next(
        &self,
        context: &GroupContext,
        spin: Duration,
        on_failure: &dyn Fn(&Error),
    ) -> Option<Exchanged> {
        let operation = {
            let mut queue = lock(&self.queue);
            if queue.is_busy {
                return None;
            }
            let next = queue.next;
            let operation = queue.waiting.remove(&next)?;
            queue.is_busy = true;
            operation
        };
        let outcome = match (operation.leader_call(), operation.plan()) {
            (Some(times), Some(plan)) => {
                // SAFETY: the operation is in Exchanging: its owners wait, no chunk of it is handed out, and the queue
                // gave it to this thread alone, which releases the memory before the state changes.
                let mut memory = unsafe { ExchangedMemory::new(plan.exchanged(), plan.messages()) };
                let divides = plan.accumulator().is_none();
                let call =
                    ProcessCall { times, plan: Some(plan), combiner: plan.combiner(), divides, spin, on_failure };
                self.exchange(context, &call, |connections, exchange, schedule| match plan.exchanges_blocks() {
                    true => connections.swap(memory.messages(), exchange),
                    false => connections.run(schedule, &mut memory.slices(), exchange),
                })
            }
            _ => Ok(()),
        };
        let next_is_queued = self.end_exchange();
        Some(Exchanged { operation, outcome, next_is_queued })
    }

    /// Reserves the connections for the call with this number. Returns whether they are free, and all earlier calls
    /// have been exchanged.
    ///
    /// [`exchange_alone`](InterProcess::exchange_alone) must follow.
    pub(super) fn reserve(&self, sequence: u64) -> bool {
        let mut queue = lock(&self.queue);
        let free = !queue.is_busy && queue.next == sequence;
        queue.is_busy |= free;
        free
    }

    /// Exchanges a call in place of a process's only rank, for which the connections were
    /// [reserved](InterProcess::reserve). Also returns whether the next operation is queued.
    pub(super) fn exchange_alone(
        &self,
        context: &GroupContext,
        times: CallTimes,
        buffers: &Buffers,
        on_failure: &dyn Fn(&Error),
    ) -> (Result<()>, bool) {
        let built_in = Combiner::BuiltIn(times.call.built_in().unwrap_or(ReduceOp::Sum));
        let combiner = buffers.user.as_ref().unwrap_or(&built_in);
        // SAFETY: this process's only rank owns the memory, has lent it to this call, and waits until it returns.
        let mut memory = unsafe { ExchangedMemory::new(&buffers.outputs, &[]) };
        let call = ProcessCall { times, plan: None, combiner, divides: true, spin: SPIN, on_failure };
        let outcome = self.exchange(context, &call, |connections, exchange, schedule| {
            connections.run(schedule, &mut memory.slices(), exchange)
        });
        (outcome, self.end_exchange())
    }

    /// Frees the connections for the next operation. Returns whether it is queued already.
    fn end_exchange(&self) -> bool {
        let mut queue = lock(&self.queue);
        queue.is_busy = false;
        queue.next += 1;
        queue.waiting.contains_key(&queue.next)
    }

    fn exchange(
        &self,
        context: &GroupContext,
        process_call: &ProcessCall<'_>,
        work: impl FnOnce(&mut Connections, &ExchangeContext<'_>, &[Step]) -> Result<(), ExchangeError>,
    ) -> Result<()> {
        let ProcessCall { times: CallTimes { call, started, deadline }, plan, combiner, divides, spin, on_failure } =
            *process_call;
        context.check_alive(call)?;
        let mut connections = lock(&self.connections);
        let run = || {
            let wire = plan.map_or(call, LocalPlan::wire_call);
            let schedule = self.schedules.of(&wire, context, plan, combiner.is_ordered(), connections.rank());
            let exchange = ExchangeContext {
                call,
                schedule: schedule.id,
                dtype: wire.dtype,
                combiner,
                divisor: (divides && call.built_in() == Some(ReduceOp::Mean)).then_some(context.world_size() as u32),
                started,
                deadline,
                spin,
                interrupted: &context.interrupted,
            };
            work(&mut connections, &exchange, &schedule.steps)
        };
        // A user's reduction, algorithm or transport may panic. Its operation is then given up like after any other
        // failure: the peers are notified, and the connections are not used for anything else afterwards.
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let error = match outcome {
            Ok(Ok(())) => {
                self.release(context, connections);
                return Ok(());
            }
            Ok(Err(error)) => error::explain(error, context, &connections, call, started),
            Err(panic) => context.panicked(Some(call), &*panic),
        };
        connections.abort(&error.as_reason(&context.local_name(0)));
        // Called before the connections are free again: the streams may have ended in the middle of a message.
        on_failure(&error);
        Err(error)
    }

    /// Frees the connections after an exchange that has succeeded, and notifies the other processes if the group was
    /// aborted meanwhile by a thread that did not get the connections.
    fn release(&self, context: &GroupContext, connections: MutexGuard<'_, Connections>) {
        drop(connections);
        // The fences are here, between the unlocking and the look at the flag, and in `abort`, between the setting of
        // the flag and the attempt to lock: this thread sees the flag, or the other one finds the connections free.
        fence(Ordering::SeqCst);
        if let Some(reason) = context.abort_reason() {
            self.abort(&reason);
        }
    }

    /// Notifies the other processes that this one has failed. An exchange in progress does this itself, when it ends.
    pub(super) fn abort(&self, reason: &AbortReason) {
        // See `release`.
        fence(Ordering::SeqCst);
        if let Ok(mut connections) = self.connections.try_lock() {
            connections.abort(reason);
        }
    }

    /// Notifies the other processes that this one leaves, and closes the connections; nothing is exchanged afterwards.
    /// If the group has been aborted, its peers learn the reason, unless they were told it before.
    pub(crate) fn leave(&self, context: &GroupContext) {
        let mut connections = lock(&self.connections);
        if let Some(reason) = context.abort_reason() {
            connections.abort(&reason);
        }
        let transport = connections.close();
        drop(connections);
        // A user's transport may panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(transport)));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::Rank;
    use crate::transport::{Incoming, Outgoing, Timeout, TransportError};

    /// Records what peers would be told.
    struct Recorded(Arc<Mutex<Vec<String>>>);

    impl Transport for Recorded {
        fn name(&self) -> &'static str {
            "recorded"
        }

        fn exchange(
            &mut self,
            _: &mut [Outgoing<'_>],
            _: &mut [Incoming<'_>],
            _: &Timeout<'_>,
        ) -> Result<(), TransportError> {
            Ok(())
        }

        fn abort(&mut self, reason: &AbortReason) {
            self.0.lock().unwrap().push(reason.cause.clone());
        }

        fn last_heard(&self, _: usize) -> Option<Instant> {
            None
        }
    }

    impl Drop for Recorded {
        fn drop(&mut self) {
            self.0.lock().unwrap().push("left".to_owned());
        }
    }

    /// Returns the stage of process 0 of 2, what it tells its peer, and the group's context.
    fn stage() -> (InterProcess, Arc<Mutex<Vec<String>>>, GroupContext) {
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let transport = Box::new(Recorded(told.clone()));
        let stage = InterProcess::new(transport, (0, 2), Algorithm::Auto, None, None);
        let context = GroupContext::new("world".to_owned(), vec!["a".to_owned(), "b".to_owned()], 0, 1);
        (stage, told, context)
    }

    fn lost() -> Error {
        Error::PeerLost {
            name: "a".to_owned(),
            peer: "b".to_owned(),
            peer_rank: Rank(1),
            during: "all_reduce #1".to_owned(),
            how: "its process ended".to_owned(),
        }
    }

    #[test]
    fn peers_learn_the_reason_of_an_abort_that_found_the_connections_in_use() {
        let (stage, told, context) = stage();
        assert!(context.interrupt("a", &lost()));
        {
            let _in_use = lock(&stage.connections);
            stage.abort(&lost().as_reason("a"));
        }
        assert!(lock(&told).is_empty());
        stage.leave(&context);
        let told = lock(&told).clone();
        assert!(told.len() == 2 && told[0].contains("lost b") && told[1] == "left", "{told:?}");
    }

    #[test]
    fn an_abort_at_the_end_of_an_exchange_is_told_when_the_connections_are_free() {
        let (stage, told, context) = stage();
        let in_use = lock(&stage.connections);
        assert!(context.interrupt("a", &lost()));
        stage.abort(&lost().as_reason("a"));
        assert!(lock(&told).is_empty());
        stage.release(&context, in_use);
        let told = lock(&told).clone();
        assert!(matches!(&told[..], [cause] if cause.contains("lost b")), "{told:?}");
    }
}

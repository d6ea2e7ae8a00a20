//! From the first rank of this process to the other processes: one operation at a time, in the order of calls.
#![expect(unsafe_code, reason = "the thread that crosses works on the memory of ranks that wait")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use distribute_cluster::Coordination;

use crate::call::{Call, Kind, ScheduleId};
use crate::memory::{Buffers, exclusive};
use crate::mesh::{self, Mesh, MeshError};
use crate::reduction::Combiner;
use crate::schedule::{
    Algorithm, Link, Schedule, Step, binomial_broadcast, binomial_reduce, dissemination_all_gather,
    dissemination_barrier, hierarchical_all_reduce, ordered_reduce, ordered_reduce_scatter, ring_all_gather,
    ring_all_gather_v, ring_reduce_scatter, ring_reduce_scatter_v,
};
use crate::team::{Operation, Team, lock};
use crate::transport::{AbortReason, TransportError};
use crate::work_plan::Plan;
use crate::{Error, Rank, ReduceOp, Result};

/// How long a waiting exchange polls before it sleeps, on a thread whose caller waits for it.
const SPIN: Duration = Duration::from_micros(50);

/// The way to the other processes.
pub(crate) struct Bridge {
    mesh: Mutex<Mesh>,
    processes: usize,
    transport: &'static str,
    local_host: Option<String>,
    algorithm: Algorithm,
    link: Link,
    /// The host of each process, where several of them hold several.
    hosts: Option<Vec<usize>>,
    /// The schedule of the last call, without its number: training repeats its calls, and building a schedule costs more
    /// than a short message.
    last_schedule: Mutex<Option<(Repeated, Arc<Planned>)>>,
    queue: Mutex<Queue>,
    /// Carries operations over while their ranks do something else; started by the first that needs it.
    courier: OnceLock<SyncSender<()>>,
    team: OnceLock<Weak<Team>>,
}

/// The job that a group's processes belong to.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) coordination: Arc<Coordination>,
    /// The job's rank of each process of the group.
    pub(crate) processes: Vec<usize>,
    /// Tells groups of one name that were formed one after another from each other.
    pub(crate) generation: u64,
}

/// What tells one schedule from another: the call without its number, and whether ranks are combined in their order.
type Repeated = (Call, bool);

/// A schedule, and what makes it known to the other processes.
struct Planned {
    id: ScheduleId,
    steps: Schedule,
}

struct Queue {
    /// The sequence number that is next to cross.
    next: u64,
    waiting: BTreeMap<u64, Arc<Operation>>,
    crossing: bool,
}

impl Bridge {
    pub(crate) fn new(mesh: Mesh, algorithm: Algorithm, link: Option<Link>, local_host: Option<String>) -> Bridge {
        Bridge {
            processes: mesh.size(),
            transport: mesh.transport_name(),
            link: link.unwrap_or_else(|| mesh.link()),
            hosts: mesh.hosts().filter(|hosts| has_levels(hosts)).map(<[usize]>::to_vec),
            local_host: local_host.or_else(|| mesh.local_host()),
            mesh: Mutex::new(mesh),
            algorithm,
            last_schedule: Mutex::new(None),
            queue: Mutex::new(Queue { next: 0, waiting: BTreeMap::new(), crossing: false }),
            courier: OnceLock::new(),
            team: OnceLock::new(),
        }
    }

    /// Tells the bridge whose it is.
    pub(crate) fn attach(&self, team: Weak<Team>) {
        let _ = self.team.set(team);
    }

    pub(crate) fn processes(&self) -> usize {
        self.processes
    }

    pub(crate) fn transport(&self) -> &'static str {
        self.transport
    }

    /// Without regard to hosts, which [`schedule`](Bridge::schedule) may prefer to follow.
    pub(crate) fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.algorithm.choose(bytes, self.processes, &self.link)
    }

    /// The address by which the other processes reach this one, where it is known.
    pub(crate) fn local_host(&self) -> Option<&str> {
        self.local_host.as_deref()
    }

    /// Puts an operation in line; `by_courier` when nobody is going to [`cross`](Bridge::cross) for it.
    pub(crate) fn enqueue(&self, operation: Arc<Operation>, by_courier: bool) {
        if let Some((call, ..)) = operation.leader_call() {
            lock(&self.queue).waiting.insert(call.sequence, operation);
        }
        if by_courier {
            self.wake_courier();
        }
    }

    /// Takes an operation out of the line; returns whether it stood there, so that no thread works on it.
    pub(crate) fn withdraw(&self, sequence: u64) -> bool {
        lock(&self.queue).waiting.remove(&sequence).is_some()
    }

    /// Carries over the operation that is next, if it is there and nobody is doing so; whether it did.
    pub(crate) fn cross(&self, team: &Team) -> bool {
        self.cross_next(team, SPIN)
    }

    fn cross_next(&self, team: &Team, spin: Duration) -> bool {
        let operation = {
            let mut queue = lock(&self.queue);
            if queue.crossing {
                return false;
            }
            let next = queue.next;
            let Some(operation) = queue.waiting.remove(&next) else { return false };
            queue.crossing = true;
            operation
        };
        let outcome = match (operation.leader_call(), operation.plan()) {
            (Some((call, deadline, started)), Some(plan)) => {
                let divides = plan.carried().is_none();
                let load = Load { call, plan: Some(plan), combiner: plan.combiner(), divides, deadline, started, spin };
                self.carry(team, &load, |mesh, job, schedule| match plan.exchange() {
                    // SAFETY: as below, for the memory of all ranks of this process.
                    Some(exchange) => unsafe { mesh.swap(&exchange.messages, job) },
                    None => {
                        // SAFETY: the operation is in Bridging: its owners wait, no chunk of it is handed out, and the queue
                        // gave it to this thread alone, which returns before the state changes.
                        let mut slices = unsafe { exclusive(plan.bridged()) };
                        mesh.run(schedule, &mut slices, job)
                    }
                })
            }
            _ => Ok(()),
        };
        let more = self.end_crossing();
        team.crossed(&operation, outcome);
        if more {
            self.wake_courier();
        }
        true
    }

    /// Keeps the way over for the call of this number; whether it is free, and all earlier calls have crossed.
    ///
    /// For [`express`](Bridge::express), which has to follow.
    pub(crate) fn reserve(&self, sequence: u64) -> bool {
        let mut queue = lock(&self.queue);
        let free = !queue.crossing && queue.next == sequence;
        queue.crossing |= free;
        free
    }

    /// Carries over a call in place of a process's only rank, which has [reserved](Bridge::reserve) the way.
    pub(crate) fn express(
        &self,
        team: &Team,
        call: Call,
        buffers: &Buffers,
        started: Instant,
        timeout: Duration,
    ) -> Result<()> {
        let built_in = Combiner::BuiltIn(call.op.unwrap_or(ReduceOp::Sum));
        let combiner = buffers.user.as_ref().unwrap_or(&built_in);
        let load = Load { call, plan: None, combiner, divides: true, deadline: started + timeout, started, spin: SPIN };
        let outcome = self.carry(team, &load, |mesh, job, schedule| {
            // SAFETY: this process's only rank owns the memory, borrowed it to this call, and waits for it to return.
            let mut slices = unsafe { exclusive(&buffers.outputs) };
            mesh.run(schedule, &mut slices, job)
        });
        if self.end_crossing() {
            self.wake_courier();
        }
        outcome
    }

    /// Opens the way for the next call; whether that waits already.
    fn end_crossing(&self) -> bool {
        let mut queue = lock(&self.queue);
        queue.crossing = false;
        queue.next += 1;
        queue.waiting.contains_key(&queue.next)
    }

    fn carry(
        &self,
        team: &Team,
        load: &Load<'_>,
        work: impl FnOnce(&mut Mesh, &mesh::Job<'_>, &[Step]) -> Result<(), MeshError>,
    ) -> Result<()> {
        let Load { call, plan, combiner, divides, deadline, started, spin } = *load;
        team.check_alive(call)?;
        let mut mesh = lock(&self.mesh);
        let run = || {
            let wire = plan.map_or(call, Plan::wire_call);
            let planned = self.schedule(&wire, team, plan, combiner.is_ordered(), mesh.rank());
            let job = mesh::Job {
                call,
                schedule: planned.id,
                dtype: wire.dtype,
                combiner,
                divisor: (divides && call.op == Some(ReduceOp::Mean)).then_some(team.names.len() as u32),
                started,
                deadline,
                spin,
                interrupted: &team.interrupted,
            };
            work(&mut mesh, &job, &planned.steps)
        };
        // A reduction, algorithm or transport of the caller's may panic. What it worked on is then given up as after any
        // other failure: the peers are told, and nobody uses the mesh for anything else afterwards.
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let error = match outcome {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => explain(error, team, &mesh, call, started),
            Err(panic) => team.panicked(Some(call), &*panic),
        };
        // Also a transport's own `abort` may panic; the connections then end with the process.
        let _ = catch_unwind(AssertUnwindSafe(|| mesh.abort(&error.as_reason(&team.local_name(0)))));
        // Before the way is free again: the streams may have ended in the middle of a message.
        team.abort(&team.local_name(0), &error);
        Err(error)
    }

    /// The schedule of a call; `plan` is needed for those with a count per rank.
    fn schedule(&self, call: &Call, team: &Team, plan: Option<&Plan>, ordered: bool, rank: usize) -> Arc<Planned> {
        if matches!(call.kind, Kind::AllGatherV | Kind::ReduceScatterV) {
            // The call tells of counts per rank only a digest.
            return Arc::new(self.make_schedule(call, team, plan, ordered, rank));
        }
        let repeats = (Call { sequence: 0, op: None, ..*call }, ordered);
        if let Some((known, schedule)) = &*lock(&self.last_schedule)
            && *known == repeats
        {
            return schedule.clone();
        }
        // Without the lock, as an algorithm may be the caller's own.
        let schedule = Arc::new(self.make_schedule(call, team, plan, ordered, rank));
        *lock(&self.last_schedule) = Some((repeats, schedule.clone()));
        schedule
    }

    fn make_schedule(&self, call: &Call, team: &Team, plan: Option<&Plan>, ordered: bool, rank: usize) -> Planned {
        let ranks = self.processes;
        let count = call.count as usize;
        let root = call.root.map_or(0, |root| root.index() / team.local_ranks);
        let named = |name: &str, steps| Planned { id: ScheduleId::new(name, &[]), steps };
        let only = |steps| Planned { id: ScheduleId::ONLY, steps };
        let process_counts = || plan.map(Plan::process_counts).unwrap_or_default();
        match call.kind {
            Kind::AllReduce if ordered => named("ordered-tree", Algorithm::Tree.schedule(rank, ranks, count)),
            Kind::Reduce if ordered => named("ordered-tree", ordered_reduce(rank, ranks, root, count)),
            Kind::ReduceScatter if ordered => {
                named("ordered-tree", ordered_reduce_scatter(rank, &vec![count / ranks; ranks]))
            }
            Kind::ReduceScatterV if ordered => named("ordered-tree", ordered_reduce_scatter(rank, &process_counts())),
            Kind::AllReduce => {
                let bytes = count * call.dtype.size_bytes();
                match &self.hosts {
                    // Short messages take fewer steps in a flat schedule.
                    Some(hosts) if self.algorithm == Algorithm::Auto && bytes > LEVELS_BYTES => Planned {
                        id: ScheduleId::new("hierarchical", hosts),
                        steps: hierarchical_all_reduce(rank, hosts, count),
                    },
                    _ => {
                        let algorithm = self.algorithm_for(bytes);
                        let steps = algorithm.schedule(rank, ranks, count);
                        match &algorithm {
                            // Its name may be one of ours.
                            Algorithm::Custom(_) => named(&format!("custom {}", algorithm.name()), steps),
                            known => named(known.name(), steps),
                        }
                    }
                }
            }
            Kind::Broadcast => only(binomial_broadcast(rank, ranks, root, count)),
            Kind::Reduce => named("tree", binomial_reduce(rank, ranks, root, count)),
            Kind::AllGather => {
                let total = count * team.names.len();
                // The bytes are the same; the ring keeps each of them on one link, dissemination takes fewer steps.
                let step_s = (total * call.dtype.size_bytes()) as f64 / ranks as f64 * self.link.per_byte_s;
                match step_s < self.link.latency_s {
                    true => named("dissemination", dissemination_all_gather(rank, ranks, total)),
                    false => named("ring", ring_all_gather(rank, ranks, total)),
                }
            }
            Kind::ReduceScatter => named("ring", ring_reduce_scatter(rank, ranks, count)),
            Kind::AllGatherV => only(ring_all_gather_v(rank, &process_counts())),
            Kind::ReduceScatterV => named("ring", ring_reduce_scatter_v(rank, &process_counts())),
            Kind::Barrier => only(dissemination_barrier(rank, ranks)),
            // These are exchanges, which need no schedule.
            _ => only(Schedule::new()),
        }
    }

    /// Tells the other processes that this one has failed. An exchange that is under way notices by itself.
    pub(crate) fn abort(&self, reason: &AbortReason) {
        if let Ok(mut mesh) = self.mesh.try_lock() {
            // A transport of the caller's may panic.
            let _ = catch_unwind(AssertUnwindSafe(|| mesh.abort(reason)));
        }
    }

    /// Closes the connections, and says before that this process leaves; nothing crosses afterwards.
    pub(crate) fn leave(&self) {
        let connections = lock(&self.mesh).close();
        // A transport of the caller's may panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(connections)));
    }

    fn wake_courier(&self) {
        let sender = self.courier.get_or_init(|| {
            let (sender, receiver) = sync_channel(1);
            let team = self.team.get().cloned().unwrap_or_default();
            let name = "distribute-courier".to_owned();
            // Without the thread, operations still cross when somebody waits for them.
            let _ = std::thread::Builder::new().name(name).spawn(move || courier(&receiver, &team));
            sender
        });
        // A full channel means that the courier is already called for.
        let _ = sender.try_send(());
    }
}

/// Crosses whatever is next, until the team is gone.
fn courier(calls: &Receiver<()>, team: &Weak<Team>) {
    loop {
        match calls.recv_timeout(Duration::from_millis(500)) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let Some(team) = team.upgrade() else { return };
        if let Some(bridge) = team.bridge() {
            while bridge.cross_next(&team, Duration::ZERO) {}
        }
    }
}

/// One call on its way over.
struct Load<'a> {
    call: Call,
    plan: Option<&'a Plan>,
    combiner: &'a Combiner,
    /// Whether a mean divides on the way, rather than afterwards.
    divides: bool,
    started: Instant,
    deadline: Instant,
    spin: Duration,
}

/// Whether some host holds several processes, and there are several hosts.
fn has_levels(hosts: &[usize]) -> bool {
    let mut different = hosts.to_vec();
    different.sort_unstable();
    different.dedup();
    1 < different.len() && different.len() < hosts.len()
}

/// From here on bytes between hosts weigh more than steps inside them.
const LEVELS_BYTES: usize = 64 * 1024;

/// Says in this crate's words what went wrong between processes.
fn explain(error: MeshError, team: &Team, mesh: &Mesh, call: Call, started: Instant) -> Error {
    let name = |process: usize| team.names.get(process * team.local_ranks).cloned().unwrap_or_default();
    let here = team.local_name(0);
    match error {
        MeshError::Mismatch { peer, here: (call, mine), there: (other, theirs) } if call == other => Error::Schedules {
            call: Box::new(call),
            here_name: here,
            here: mine.name(),
            there_name: name(peer),
            there: theirs.name(),
        },
        MeshError::Mismatch { peer, here: (call, _), there: (there, _) } => {
            Error::Mismatch { here: Box::new(call), here_name: here, there: Box::new(there), there_name: name(peer) }
        }
        MeshError::Garbage { peer } => Error::PeerLost {
            name: here,
            peer: name(peer),
            peer_rank: Rank::of(peer * team.local_ranks),
            during: call.to_string(),
            how: "it sent bytes that are not a collective call; is another program using this port?".to_owned(),
        },
        MeshError::Deadline { missing } => {
            let heard = |process: &usize| match mesh.last_heard(*process) {
                Some(at) => format!("{} (last heard {:.1?} ago)", name(*process), at.elapsed()),
                None => format!("{} (never heard)", name(*process)),
            };
            Error::Deadline {
                call: Box::new(call),
                name: here,
                group: team.name.clone(),
                waited: started.elapsed(),
                missing: missing.iter().map(heard).collect::<Vec<_>>().join(", "),
            }
        }
        MeshError::Transport(TransportError::Lost { peer, how }) => Error::PeerLost {
            name: here,
            peer: name(peer),
            peer_rank: Rank::of(peer * team.local_ranks),
            during: call.to_string(),
            how,
        },
        MeshError::Transport(TransportError::Left { peer }) => {
            Error::PeerLeft { name: here, peer: name(peer), group: team.name.clone(), during: call.to_string() }
        }
        MeshError::Transport(TransportError::Aborted { peer, reason }) => {
            let AbortReason { origin, cause, kind } = *reason;
            // A transport of the caller's may say nothing of where it began.
            let origin = if origin.is_empty() { name(peer) } else { origin };
            Error::aborted(&team.name, &origin, &cause, kind)
        }
        // Interrupted, which only an abort does.
        MeshError::Transport(_) => team.aborted(Some(call)),
    }
}

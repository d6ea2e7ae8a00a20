//! Process groups: a rank's handle, and how its calls are handed to the engine.

mod asynchronous;
mod exchanges;
mod pairs;
mod reductions;
mod sparse;
mod split;
#[cfg(test)]
mod tests;

pub use sparse::SparseRows;

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, FailureKind};
use distribute_device::DType;

use crate::bridge::{Bridge, Job};
use crate::call::{Call, Kind};
use crate::kernel;
use crate::memory::{Borrowed, Buffers, OwnedBuffers};
use crate::mesh::Mesh;
use crate::recorder::{FlightRecord, Ticket};
use crate::team::{Handle, MAX_LOCAL_RANKS, Operation, Team, lock};
use crate::transport::Transport;
use crate::{Algorithm, DeviceImplementation, Error, Options, Rank, ReduceOp, Result, Work};

/// One rank's handle on an ordered group of ranks that call collective operations together.
///
/// Every rank of the group must issue the same operations in the same order; a difference is an error on all ranks, not
/// a wrong result. Blocking and asynchronous calls share that order. Dropping the handle leaves the group.
///
/// # Ordering
/// Every call returns when this rank's part is done. Only [`barrier`](ProcessGroup::barrier), and calls whose result needs
/// every rank, imply that others have arrived.
///
/// # Errors
/// All operations return [`Error::Mismatch`], [`Error::Deadline`], [`Error::PeerLost`], [`Error::PeerLeft`] or
/// [`Error::Aborted`] when the group fails. The group is then aborted on all ranks.
///
/// # Examples
/// ```
/// use distribute_collectives::{ProcessGroup, ReduceOp};
///
/// let ranks = ProcessGroup::local(2)?;                     // two ranks as threads of this process
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         scope.spawn(move || {
///             let mut gradients = vec![group.rank().0 as f32 + 1.0; 4];
///             group.all_reduce(&mut gradients, ReduceOp::Sum).expect("both ranks take part");
///             assert_eq!(gradients, [3.0; 4]);
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
///
/// # Source
/// The operations of the MPI standard (4.1, chapter 6) and of NCCL, under their names.
pub struct ProcessGroup {
    team: Arc<Handle>,
    local: usize,
    options: Arc<Options>,
    /// Sequence number of the next call; held while a call is deposited, so that calls of several threads do not mix.
    next: Mutex<u64>,
    /// How many times this rank has split the group.
    splits: AtomicU64,
    /// The two-member groups in which this rank sends and receives, by sender and receiver.
    pairs: Mutex<HashMap<(usize, usize), Arc<ProcessGroup>>>,
}

impl ProcessGroup {
    /// `ranks` ranks as threads of this process, which reduce straight in each other's memory.
    ///
    /// # Errors
    /// [`Error::GroupSize`] unless `ranks` is between 1 and 256.
    pub fn local(ranks: usize) -> Result<Vec<ProcessGroup>> {
        ProcessGroup::local_with(ranks, &Options::default())
    }

    /// As [`local`](ProcessGroup::local), with options.
    ///
    /// # Errors
    /// [`Error::GroupSize`] unless `ranks` is between 1 and 256.
    pub fn local_with(ranks: usize, options: &Options) -> Result<Vec<ProcessGroup>> {
        check_local(ranks)?;
        Ok(ProcessGroup::local_named((0..ranks).map(|rank| format!("rank {rank}")).collect(), options))
    }

    /// One rank of this process per name.
    fn local_named(names: Vec<String>, options: &Options) -> Vec<ProcessGroup> {
        let ranks = names.len();
        handles(Handle::new(Team::new(options, names, 0, ranks, None), None), options)
    }

    /// The `local_ranks` ranks of this process in a group of several processes that a transport connects.
    ///
    /// Process p holds ranks `p * local_ranks ..`; `names` has one name per rank, as errors print it.
    ///
    /// # Errors
    /// [`Error::GroupSize`] and [`Error::RankOutside`] where the numbers do not fit together.
    pub fn with_transport(
        transport: Box<dyn Transport>,
        process: usize,
        local_ranks: usize,
        names: Vec<String>,
        options: &Options,
    ) -> Result<Vec<ProcessGroup>> {
        ProcessGroup::bridged(transport, process, local_ranks, names, options, None)
    }

    pub(crate) fn bridged(
        transport: Box<dyn Transport>,
        process: usize,
        local_ranks: usize,
        names: Vec<String>,
        options: &Options,
        job: Option<Job>,
    ) -> Result<Vec<ProcessGroup>> {
        check_local(local_ranks)?;
        let processes = names.len() / local_ranks;
        if process >= processes || !names.len().is_multiple_of(local_ranks) {
            let given = u32::try_from(process).unwrap_or(u32::MAX);
            return Err(Error::RankOutside { what: "process", given, world_size: processes });
        }
        let mesh = Mesh::new(transport, process, processes);
        let local_host = job.as_ref().map(|job| job.coordination.local_host());
        let bridge = Bridge::new(mesh, options.algorithm.clone(), options.link, local_host);
        let team = Team::new(options, names, process * local_ranks, local_ranks, Some(bridge));
        if let Some(job) = job.clone() {
            job.watch(&team);
        }
        Ok(handles(Handle::new(team, job), options))
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> Rank {
        self.team.rank(self.local)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.team.names.len()
    }

    /// The number of ranks that live in this process.
    pub fn local_world_size(&self) -> usize {
        self.team.local_ranks
    }

    /// This process's place among the group's processes.
    pub fn process(&self) -> usize {
        self.team.process()
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.team.name
    }

    /// The name of a rank as errors print it, such as `worker:1`; empty for a rank outside the group.
    pub fn rank_name(&self, rank: Rank) -> &str {
        self.team.names.get(rank.index()).map_or("", String::as_str)
    }

    /// What connects the processes of the group: `local` where there is only one.
    pub fn transport_name(&self) -> &'static str {
        self.team.bridge().map_or("local", Bridge::transport)
    }

    /// The algorithm that moves an all-reduce of so many bytes between the processes of the group.
    pub fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.team.bridge().map_or(Algorithm::Auto, |bridge| bridge.algorithm_for(bytes))
    }

    /// How many bytes of values that come one after another to reduce together, of `total`.
    pub fn bytes_per_pack(&self, total: usize) -> usize {
        let chosen = self.options.cross_device_ops.as_ref().and_then(|ops| ops.bytes_per_pack(total));
        match chosen.unwrap_or(self.options.bytes_per_pack) {
            0 => usize::MAX,
            bytes => bytes,
        }
    }

    /// The coordination service behind the group, where it has one.
    pub fn coordination(&self) -> Option<&Arc<Coordination>> {
        self.job().map(|job| &job.coordination)
    }

    fn job(&self) -> Option<&Job> {
        self.team.job()
    }

    /// How long one operation may take.
    pub fn timeout(&self) -> Duration {
        self.options.timeout
    }

    /// What collectives on devices of these ranks are asked to use.
    pub fn device_implementation(&self) -> DeviceImplementation {
        self.options.device_implementation
    }

    /// Ends the group on every rank: operations under way and later ones return [`Error::Aborted`] with `reason`.
    ///
    /// For a rank that fails outside a collective by an error of its own, against which a restart does not help, so that its peers
    /// do not wait for it.
    pub fn abort(&self, reason: &str) {
        self.abort_as(reason, FailureKind::Permanent);
    }

    /// As [`abort`](ProcessGroup::abort), for a failure against which a restart helps or not: the errors of all ranks say so, and
    /// with them the exit codes of their processes.
    pub fn abort_as(&self, reason: &str, kind: FailureKind) {
        let origin = self.team.local_name(self.local);
        let error = Error::aborted(&self.team.name, &origin, reason, kind);
        self.team.abort(&origin, &error);
    }

    /// Ends the group by an error of this rank.
    pub(crate) fn abort_by(&self, error: &Error) {
        self.team.abort(&self.team.local_name(self.local), error);
    }

    /// Says whether this rank makes no calls for now, although it keeps its handle. A rank of the same process that waits for a
    /// call of it then gets [`Error::Absent`] at once, where it would else wait until its deadline.
    pub fn rest(&self, resting: bool) {
        self.team.rest(self.local, resting);
    }

    /// Why the group has ended, if it has.
    pub fn failure(&self) -> Option<Error> {
        self.team.failure()
    }

    /// What the ranks of this process share besides: made by the first that asks.
    #[cfg(feature = "cuda")]
    pub(crate) fn commons<T: Send + Sync + 'static>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut commons = lock(&self.team.commons);
        let known = commons.clone().and_then(|commons| commons.downcast::<T>().ok());
        known.unwrap_or_else(|| {
            let made = Arc::new(make());
            *commons = Some(made.clone());
            made
        })
    }

    /// Does a call on borrowed memory.
    fn blocking(&self, request: Request, borrowed: Borrowed<'_>) -> Result<()> {
        let _span = self.span(&request).entered();
        if let Some(outcome) = self.express(request, &borrowed.buffers) {
            return outcome;
        }
        let (operation, ticket) = self.deposit(request, borrowed.buffers)?;
        // The borrow of the caller's memory lasts until nobody touches it any more, whatever happens in between.
        let _hold = Hold { team: &self.team, local: self.local, operation: &operation };
        self.team.start(&operation, true);
        let outcome = self.team.wait(self.local, &operation);
        self.finish(ticket, &outcome);
        outcome
    }

    /// Begins a call on memory that the returned work owns.
    fn begin<B: OwnedBuffers>(&self, request: Request, buffers: Buffers, owned: B) -> Result<Work<B>> {
        let _span = self.span(&request).entered();
        let (operation, ticket) = self.deposit(request, buffers)?;
        // From here on dropping the work waits for the operation.
        let work = Work::new(self.team.clone(), self.local, operation.clone(), ticket, owned);
        self.team.start(&operation, false);
        Ok(work)
    }

    fn span(&self, request: &Request) -> tracing::Span {
        let Request { kind, dtype, count, .. } = request;
        let (group, rank) = (self.team.name.as_str(), self.rank().0);
        tracing::trace_span!("collective", kind = kind.name(), count, dtype = dtype.name(), group, rank)
    }

    /// Takes a call in place straight to the other processes, where this rank is alone in its process and nothing is under
    /// way: no ranks to meet, no phases, and less than half of the time of a short message.
    fn express(&self, request: Request, buffers: &Buffers) -> Option<Result<()>> {
        let bridge = self.team.bridge().filter(|_| self.team.local_ranks == 1)?;
        if !matches!(request.kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce | Kind::Barrier) {
            return None;
        }
        // These means are added up in memory of the operation's own.
        if request.op == Some(ReduceOp::Mean) && kernel::carried(request.dtype).is_some() {
            return None;
        }
        if let Err(error) = self.check(&request, buffers) {
            return Some(Err(error));
        }
        let (call, ticket, started) = {
            let mut next = lock(&self.next);
            if !bridge.reserve(*next) {
                return None;
            }
            let call = request.numbered(*next);
            self.team.pass(*next);
            *next += 1;
            let started = Instant::now();
            (call, self.team.recorders[self.local].issue(call, started), started)
        };
        let outcome = bridge.express(&self.team, call, buffers, started, self.options.timeout);
        if let Err(error) = &outcome {
            self.team.abort(&self.team.local_name(self.local), error);
        }
        self.finish(ticket, &outcome);
        Some(outcome)
    }

    fn check(&self, request: &Request, buffers: &Buffers) -> Result<()> {
        if let Some(root) = request.root {
            self.check_rank("root", root)?;
        }
        match request.op {
            Some(ReduceOp::User) if buffers.user.is_none() => Err(Error::NoReduction { kind: request.kind }),
            op => op.map_or(Ok(()), |op| op.check(request.dtype)),
        }
    }

    /// Gives a call its number and lends its memory to the engine: from here on the rank must wait for the operation.
    fn deposit(&self, request: Request, buffers: Buffers) -> Result<(Arc<Operation>, Ticket)> {
        self.check(&request, &buffers)?;
        let mut next = lock(&self.next);
        let call = request.numbered(*next);
        let started = Instant::now();
        let ticket = self.team.recorders[self.local].issue(call, started);
        let operation = self.team.deposit(self.local, call, buffers, started, self.options.timeout);
        let operation = operation.inspect_err(|error| self.finish(ticket, &Err(error.clone())))?;
        *next += 1;
        Ok((operation, ticket))
    }

    fn finish(&self, ticket: Ticket, outcome: &Result<()>) {
        let outcome = outcome.as_ref().copied();
        self.team.recorders[self.local].finish(ticket, outcome, || self.team.flight_header(self.local));
    }

    /// The last operations of this rank, newest last: the flight recorder.
    ///
    /// Every rank of a failing group writes it to the folder that `DISTRIBUTE_FLIGHT_DIR` names; with `DISTRIBUTE_TRACE`, a
    /// trace of all operations is written when the group ends.
    pub fn flight_record(&self) -> FlightRecord {
        self.team.recorders[self.local].record(self.team.flight_header(self.local))
    }

    pub(crate) fn check_rank(&self, what: &'static str, rank: Rank) -> Result<()> {
        if rank.index() < self.world_size() {
            return Ok(());
        }
        Err(Error::RankOutside { what, given: rank.0, world_size: self.world_size() })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.team.recorders[self.local].close(|| self.team.flight_header(self.local));
        // First, so that whoever makes a handle for this rank from now on sees that it is gone.
        self.team.depart(self.local);
        // Handles that were made for this rank, and that it has not come for: their peers must not wait for it.
        let rank = self.rank().index();
        let unclaimed: Vec<_> = lock(&self.team.offspring).extract_if(|offspring, _| offspring.is_for(rank)).collect();
        drop(unclaimed);
    }
}

impl std::fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("transport", &self.transport_name())
            .finish_non_exhaustive()
    }
}

/// Waits for an operation when the thread unwinds while the engine has its memory.
struct Hold<'a> {
    team: &'a Team,
    local: usize,
    operation: &'a Arc<Operation>,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.team.wait(self.local, self.operation);
        }
    }
}

/// A call before it has its sequence number.
#[derive(Clone, Copy)]
struct Request {
    kind: Kind,
    dtype: DType,
    count: usize,
    layout: u32,
    op: Option<ReduceOp>,
    root: Option<Rank>,
}

impl Request {
    fn new(kind: Kind, dtype: DType, count: usize) -> Request {
        Request { kind, dtype, count, layout: 0, op: None, root: None }
    }

    fn numbered(self, sequence: u64) -> Call {
        let Request { kind, dtype, count, layout, op, root } = self;
        Call { kind, sequence, dtype, count: count as u64, layout, op, root }
    }
}

fn check_local(ranks: usize) -> Result<()> {
    match ranks {
        1..=MAX_LOCAL_RANKS => Ok(()),
        given => Err(Error::GroupSize { given, max: MAX_LOCAL_RANKS }),
    }
}

fn handles(team: Handle, options: &Options) -> Vec<ProcessGroup> {
    let team = Arc::new(team);
    let options = Arc::new(options.clone());
    let handle = |local| ProcessGroup {
        team: team.clone(),
        local,
        options: options.clone(),
        next: Mutex::new(0),
        splits: AtomicU64::new(0),
        pairs: Mutex::new(HashMap::new()),
    };
    (0..team.local_ranks).map(handle).collect()
}

/// The only rank of a process that holds one.
pub(crate) fn first(ranks: Vec<ProcessGroup>) -> Result<ProcessGroup> {
    ranks.into_iter().next().ok_or(Error::GroupSize { given: 0, max: 1 })
}

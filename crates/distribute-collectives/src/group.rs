//! Process groups: the handle of a rank, which passes its calls to the engine.

mod agreement;
mod children;
mod exchanges;
mod handle;
mod job;
mod join;
mod local_ranks;
mod pairs;
mod parts;
mod reductions;
mod sparse;
mod split;
mod start;
#[cfg(test)]
mod tests;
mod work;

pub use agreement::{Difference, first_difference};
pub use local_ranks::{on_each_local_rank, on_local_ranks};
pub use parts::{Parts, StartParts};
pub use sparse::SparseRows;
pub use start::Start;
pub use work::Work;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use distribute_arithmetic as arithmetic;
use distribute_cluster::FailureKind;
use distribute_device::DType;

use self::children::Children;
use self::handle::EngineHandle;
use self::job::JobMembership;
use self::pairs::Pairs;
use crate::call::{Call, Kind, Reducing};
use crate::engine::memory::{Borrowed, Buffers, OwnedBuffers};
use crate::engine::network::InterProcess;
use crate::engine::{Engine, MAX_LOCAL_RANKS, Operation};
use crate::recorder::{FlightRecord, RecordToken};
use crate::sync::lock;
use crate::transport::Transport;
use crate::{Algorithm, Error, Options, Rank, ReduceOp, Result};

/// Default of [`Options::bytes_per_pack`] in host memory.
const BYTES_PER_PACK: usize = 1 << 20;

/// Maximum of [`Options::timeout`]: a year, so that a deadline is a time that the clock can represent.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// One rank's handle on an ordered group of ranks that call collective operations together.
///
/// Every rank of the group must issue the same operations in the same order; a difference is an error on all ranks, and
/// values of different calls are never combined. Blocking and asynchronous calls share that order. Dropping the handle
/// leaves the group.
///
/// # Ordering
/// Every call returns when this rank's part is done. Only [`barrier`](ProcessGroup::barrier), and calls whose result
/// needs every rank, imply that others have arrived.
///
/// Processes compare their calls where they receive values. A call that only sends to other processes, such as the
/// root's [`broadcast`](ProcessGroup::broadcast) or [`scatter`](ProcessGroup::scatter), may therefore return before a
/// difference is found, for example if two processes each name a rank of their own as the root. The group then fails in
/// the next call in which a process receives from one whose call differed: in the next barrier at the latest.
///
/// # Errors
/// Every operation can fail together with the group, which is then aborted on all ranks:
/// - [`Error::Mismatch`], [`Error::Schedules`] or [`Error::Parts`] if ranks call different operations, execute one by
///   different algorithms, or pass counts that do not match;
/// - [`Error::Deadline`] if it takes longer than [`Options::timeout`];
/// - [`Error::PeerLost`], [`Error::PeerLeft`] or [`Error::Absent`] if a rank that it needs has died, has dropped its
///   handle, or is marked as making no calls;
/// - [`Error::Panicked`] if a user's function panics;
/// - [`Error::Aborted`] if another rank or an earlier failure has aborted the group.
///
/// Invalid arguments are errors of this rank alone, before anything is sent; each operation names them.
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
/// The operations and their names are those of the MPI standard (4.1, chapter 6) and of NCCL.
pub struct ProcessGroup {
    engine: Arc<EngineHandle>,
    /// Groups created from this one, which the local rank that created them holds for the other ranks.
    children: Arc<Children>,
    /// State that the ranks of this process share for another module.
    #[cfg(feature = "cuda")]
    shared_state: Arc<Mutex<Option<Arc<dyn std::any::Any + Send + Sync>>>>,
    local: usize,
    options: Arc<Options>,
    /// Sequence number of the next call; locked while a call is deposited, so that calls of several threads stay in
    /// order.
    next: Mutex<u64>,
    /// Number of times this rank has split the group.
    splits: AtomicU64,
    /// The two-member groups in which this rank sends and receives, by sender and receiver.
    pairs: Pairs,
}

impl ProcessGroup {
    /// Creates a group of `ranks` ranks as threads of this process, which reduce directly in each other's memory.
    ///
    /// # Errors
    /// [`Error::GroupSize`] unless `ranks` is between 1 and 256.
    pub fn local(ranks: usize) -> Result<Vec<ProcessGroup>> {
        ProcessGroup::local_with(ranks, &Options::default())
    }

    /// Creates a group like [`local`](ProcessGroup::local), with options.
    ///
    /// # Errors
    /// [`Error::GroupSize`] unless `ranks` is between 1 and 256.
    pub fn local_with(ranks: usize, options: &Options) -> Result<Vec<ProcessGroup>> {
        check_local(ranks)?;
        Ok(ProcessGroup::local_named((0..ranks).map(|rank| format!("rank {rank}")).collect(), options))
    }

    /// Creates one rank of this process per name.
    fn local_named(names: Vec<String>, options: &Options) -> Vec<ProcessGroup> {
        let ranks = names.len();
        handles(EngineHandle::new(new_engine(names, 0, ranks, options, None), None), options)
    }

    /// Creates the `local_ranks` ranks of this process in a group of several processes that a transport connects.
    ///
    /// Process p holds the ranks from `p * local_ranks` on; `names` has one name per rank, as errors print it. If there
    /// is one process only, its ranks form a local group and the transport is dropped.
    ///
    /// # Errors
    /// [`Error::GroupSize`] unless `local_ranks` is between 1 and 256; [`Error::RankOutside`] if the number of `names`
    /// is not a multiple of it, or is too small for `process`.
    pub fn with_transport(
        transport: Box<dyn Transport>,
        process: usize,
        local_ranks: usize,
        names: Vec<String>,
        options: &Options,
    ) -> Result<Vec<ProcessGroup>> {
        ProcessGroup::connected(transport, process, local_ranks, names, options, None)
    }

    /// Creates ranks like [`with_transport`](ProcessGroup::with_transport), for processes of a job.
    fn connected(
        transport: Box<dyn Transport>,
        process: usize,
        local_ranks: usize,
        names: Vec<String>,
        options: &Options,
        job: Option<JobMembership>,
    ) -> Result<Vec<ProcessGroup>> {
        check_local(local_ranks)?;
        let processes = names.len() / local_ranks;
        if process >= processes || !names.len().is_multiple_of(local_ranks) {
            let given = u32::try_from(process).unwrap_or(u32::MAX);
            return Err(Error::RankOutside { what: "process", given, world_size: processes });
        }
        let local_host = job.as_ref().map(|job| job.rendezvous.local_host());
        let (algorithm, place) = (options.algorithm.clone(), (process, processes));
        // A stage is made for several processes only: plans of one process divide means before the exchange.
        let stage = (processes > 1).then(|| InterProcess::new(transport, place, algorithm, options.link, local_host));
        let engine = new_engine(names, process * local_ranks, local_ranks, options, stage);
        if let Some(job) = job.clone() {
            job.watch(&engine);
        }
        Ok(handles(EngineHandle::new(engine, job), options))
    }

    /// Returns this rank's place in the group.
    pub fn rank(&self) -> Rank {
        self.engine.context.rank(self.local)
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.engine.context.world_size()
    }

    /// Returns the number of ranks in this process.
    pub fn local_world_size(&self) -> usize {
        self.engine.context.local_ranks
    }

    /// Returns this process's index among the group's processes.
    pub fn process(&self) -> usize {
        self.engine.context.process()
    }

    /// Returns the group's name.
    pub fn name(&self) -> &str {
        &self.engine.context.name
    }

    /// Returns the name of a rank as errors print it, such as `worker:1`; empty for a rank outside the group.
    pub fn rank_name(&self, rank: Rank) -> &str {
        self.engine.context.names.get(rank.index()).map_or("", String::as_str)
    }

    /// Returns the transport's name: `local` if one process holds all ranks.
    pub fn transport_name(&self) -> &'static str {
        self.engine.inter_process().map_or("local", InterProcess::transport)
    }

    /// Returns the algorithm of an all-reduce of `bytes` bytes between the processes of the group.
    pub fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.engine.inter_process().map_or(Algorithm::Auto, |stage| stage.algorithm_for(bytes))
    }

    /// Returns how many bytes to reduce together, of `total` bytes of values in host memory that become ready one after
    /// another: 1 MiB unless something else was chosen.
    pub fn bytes_per_pack(&self, total: usize) -> usize {
        self.bytes_per_pack_or(total, BYTES_PER_PACK)
    }

    /// Returns how many bytes to reduce together, like [`bytes_per_pack`](ProcessGroup::bytes_per_pack), and `default`
    /// bytes if nothing was chosen; for values in the memory of devices.
    pub fn bytes_per_pack_or(&self, total: usize, default: usize) -> usize {
        let by_ops = self.options.cross_device_ops.as_ref().and_then(|ops| ops.bytes_per_pack(total));
        match by_ops.or(self.options.bytes_per_pack).unwrap_or(default) {
            0 => usize::MAX,
            bytes => bytes,
        }
    }

    fn job(&self) -> Option<&JobMembership> {
        self.engine.job()
    }

    /// Returns the options that the group was created with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Aborts the group on every rank: operations in progress and later ones return [`Error::Aborted`] with `reason`,
    /// and so do messages between two ranks. `kind` tells whether a restart helps; all ranks' errors have it, and it
    /// determines the exit codes of their processes.
    ///
    /// Call it on a rank that fails outside a collective, so that its peers do not wait for it.
    pub fn abort(&self, reason: &str, kind: FailureKind) {
        let origin = self.engine.context.local_name(self.local);
        let error = Error::aborted(&self.engine.context.name, &origin, reason, kind);
        self.engine.abort(&origin, &error);
    }

    /// Aborts the group with an error of this rank.
    pub(crate) fn abort_by(&self, error: &Error) {
        self.engine.abort(&self.engine.context.local_name(self.local), error);
    }

    /// Marks this rank as one that makes no calls for now, although it keeps its handle, or as active again. A rank of
    /// the same process that waits for a call or a message of an idle rank gets [`Error::Absent`] at once, and not at
    /// its deadline.
    pub fn set_idle(&self, idle: bool) {
        self.engine.set_idle(self.local, idle);
    }

    /// Returns the error with which the group has ended, if it has.
    pub fn failure(&self) -> Option<Error> {
        self.engine.context.failure()
    }

    /// Returns the state that the ranks of this process share, created by the first caller.
    #[cfg(feature = "cuda")]
    pub(crate) fn shared_state<T: Send + Sync + 'static>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut shared = lock(&self.shared_state);
        let known = shared.clone().and_then(|state| state.downcast::<T>().ok());
        known.unwrap_or_else(|| {
            let made = Arc::new(make());
            *shared = Some(made.clone());
            made
        })
    }

    /// Executes a call on borrowed memory.
    fn blocking(&self, request: Request, borrowed: Borrowed<'_>) -> Result<()> {
        let _span = self.span(&request).entered();
        if let Some(outcome) = self.fast_path(request, &borrowed.buffers) {
            return outcome;
        }
        let (operation, token) = self.deposit(request, borrowed.buffers, true)?;
        // The caller's memory stays borrowed until no other thread accesses it, whatever happens in between.
        let _hold = Hold { engine: &self.engine, local: self.local, operation: &operation };
        let began = Instant::now();
        self.engine.start(&operation, true);
        let outcome = self.engine.wait(self.local, &operation);
        self.finish(token, &outcome, Some(began));
        outcome
    }

    /// Starts a call on memory that the returned work owns.
    fn begin<B: OwnedBuffers>(&self, request: Request, buffers: Buffers, owned: B) -> Result<Work<B>> {
        let _span = self.span(&request).entered();
        let (operation, token) = self.deposit(request, buffers, false)?;
        // From here on dropping the work waits for the operation.
        let work = Work::new(self.engine.clone(), self.local, operation.clone(), token, owned);
        self.engine.start(&operation, false);
        Ok(work)
    }

    fn span(&self, request: &Request) -> tracing::Span {
        let Request { kind, dtype, count, .. } = request;
        let (group, rank) = (self.engine.context.name.as_str(), self.rank().0);
        tracing::trace_span!("collective", kind = kind.name(), count, dtype = dtype.name(), group, rank)
    }

    /// Exchanges a call in place directly with the other processes, if this is the only rank of its process and no
    /// earlier call is in progress.
    fn fast_path(&self, request: Request, buffers: &Buffers) -> Option<Result<()>> {
        if self.engine.context.local_ranks != 1
            || !matches!(request.kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce | Kind::Barrier)
        {
            return None;
        }
        // These means need an accumulator in the operation's own memory.
        if request.op == Some(ReduceOp::Mean.into()) && arithmetic::mean_accumulator(request.dtype).is_some() {
            return None;
        }
        if let Err(error) = self.check(&request) {
            return Some(Err(error));
        }
        let (call, token, started) = {
            let mut next = lock(&self.next);
            if !self.engine.reserve_fast_path(*next) {
                return None;
            }
            let call = request.numbered(*next);
            *next += 1;
            let started = Instant::now();
            (call, self.engine.recorders[self.local].issue(call, started, true), started)
        };
        let outcome = self.engine.fast_path(call, buffers, started, self.options.timeout);
        if let Err(error) = &outcome {
            self.engine.abort(&self.engine.context.local_name(self.local), error);
        }
        self.finish(token, &outcome, Some(started));
        Some(outcome)
    }

    fn check(&self, request: &Request) -> Result<()> {
        if let Some(root) = request.root {
            self.check_rank("root", root)?;
        }
        match request.op {
            Some(Reducing::BuiltIn(op)) => op.check(request.dtype),
            Some(Reducing::User) | None => Ok(()),
        }
    }

    /// Numbers a call and lends its memory to the engine; `blocks` tells whether the caller waits for it at once. From
    /// here on the rank must wait for the operation.
    fn deposit(&self, request: Request, buffers: Buffers, blocks: bool) -> Result<(Arc<Operation>, RecordToken)> {
        self.check(&request)?;
        let mut next = lock(&self.next);
        let call = request.numbered(*next);
        let started = Instant::now();
        let token = self.engine.recorders[self.local].issue(call, started, blocks);
        let operation = self.engine.deposit(self.local, call, buffers, started, self.options.timeout);
        let operation = operation.inspect_err(|error| self.finish(token, &Err(error.clone()), None))?;
        *next += 1;
        Ok((operation, token))
    }

    fn finish(&self, token: RecordToken, outcome: &Result<()>, blocked_since: Option<Instant>) {
        let (outcome, recorder) = (outcome.as_ref().copied(), &self.engine.recorders[self.local]);
        recorder.finish(token, outcome, blocked_since, || self.engine.flight_header(self.local));
    }

    /// Returns the total time for which this rank's threads were blocked in operations of the group: waiting for peers
    /// and exchanging values. An operation that runs while its caller computes counts only from
    /// [`Work::wait`](crate::Work::wait) on; one that is awaited as a future does not count.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use distribute_collectives::ProcessGroup;
    /// let ranks = ProcessGroup::local(2)?;
    /// assert_eq!(ranks[0].waited(), Duration::ZERO);
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| ranks[0].barrier());
    ///     std::thread::sleep(Duration::from_millis(20));               // a late rank
    ///     ranks[1].barrier()
    /// })?;
    /// assert!(ranks[0].waited() > ranks[1].waited());
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn waited(&self) -> Duration {
        self.engine.recorders[self.local].waited()
    }

    /// Returns the last operations of this rank, newest last (its flight record).
    ///
    /// Every rank of a failing group writes its record to the folder named by `DISTRIBUTE_FLIGHT_DIR`. It holds the
    /// last 2,000 operations. With `DISTRIBUTE_TRACE` the last 200,000 are kept, and a trace of them is written when
    /// the group ends.
    pub fn flight_record(&self) -> FlightRecord {
        self.engine.recorders[self.local].record(self.engine.flight_header(self.local))
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
        self.engine.recorders[self.local].close(|| self.engine.flight_header(self.local));
        // Done before the children are dropped: a rank that creates a handle for this one from now on sees that it has
        // left.
        self.engine.leave(self.local);
        self.children.drop_unclaimed(self.rank().index());
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

/// A guard that waits for an operation if the thread unwinds while the engine uses its memory.
struct Hold<'a> {
    engine: &'a Engine,
    local: usize,
    operation: &'a Arc<Operation>,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.engine.wait(self.local, self.operation);
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
    op: Option<Reducing>,
    root: Option<Rank>,
}

impl Request {
    fn new(kind: Kind, dtype: DType, count: usize) -> Request {
        Request { kind, dtype, count, layout: 0, op: None, root: None }
    }

    /// Adds a tag to the fingerprint of the call.
    fn tagged(self, tag: u32) -> Request {
        Request { layout: self.layout ^ tag, ..self }
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

fn new_engine(
    names: Vec<String>,
    first_rank: usize,
    local_ranks: usize,
    options: &Options,
    stage: Option<InterProcess>,
) -> Arc<Engine> {
    Engine::new(&options.name, names, first_rank, local_ranks, options.cross_device_ops.clone(), stage)
}

/// Creates the handles of all ranks of this process.
fn handles(engine: EngineHandle, options: &Options) -> Vec<ProcessGroup> {
    let (engine, children) = (Arc::new(engine), Arc::new(Children::default()));
    #[cfg(feature = "cuda")]
    let shared_state = Arc::default();
    let options = Arc::new(Options { timeout: options.timeout.min(MAX_TIMEOUT), ..options.clone() });
    let handle = |local| ProcessGroup {
        engine: engine.clone(),
        children: children.clone(),
        #[cfg(feature = "cuda")]
        shared_state: Arc::clone(&shared_state),
        local,
        options: options.clone(),
        next: Mutex::new(0),
        splits: AtomicU64::new(0),
        pairs: Pairs::default(),
    };
    (0..engine.context.local_ranks).map(handle).collect()
}

/// Returns the only rank of a process that has one.
fn first(ranks: Vec<ProcessGroup>) -> Result<ProcessGroup> {
    ranks.into_iter().next().ok_or(Error::GroupSize { given: 0, max: 1 })
}

/// The information that members exchange before they connect, for fuzzers.
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz {
    pub(crate) use super::join::endpoint;
    #[cfg(test)]
    pub(crate) use super::join::sample;
}

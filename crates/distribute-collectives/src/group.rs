//! Process groups: the calls a rank makes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use distribute_cluster::Coordination;
use distribute_device::{BufferMut, BufferRef, DType, Element};

use crate::bridge::Bridge;
use crate::call::{Call, Kind};
use crate::memory::{Borrowed, Buffers, OwnedBuffers, RawSlice};
use crate::mesh::Mesh;
use crate::team::{MAX_LOCAL_RANKS, Operation, Team, lock};
use crate::transport::Transport;
use crate::{Error, Options, Rank, ReduceOp, Result, Work};

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
    team: Arc<Team>,
    local: usize,
    timeout: Duration,
    /// Sequence number of the next call; held while a call is deposited, so that calls of several threads do not mix.
    next: Mutex<u64>,
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
        let names = (0..ranks).map(|rank| format!("rank {rank}")).collect();
        Ok(handles(&Team::new(options.name.clone(), names, 0, ranks, None), options))
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
        coordination: Option<Arc<Coordination>>,
    ) -> Result<Vec<ProcessGroup>> {
        check_local(local_ranks)?;
        let processes = names.len() / local_ranks;
        if process >= processes || !names.len().is_multiple_of(local_ranks) {
            let given = u32::try_from(process).unwrap_or(u32::MAX);
            return Err(Error::RankOutside { what: "process", given, world_size: processes });
        }
        let mesh = Mesh::new(transport, process, processes);
        let bridge = Bridge::new(mesh, options.algorithm, coordination);
        let team = Team::new(options.name.clone(), names, process * local_ranks, local_ranks, Some(bridge));
        Ok(handles(&team, options))
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

    /// The coordination service behind the group, where it has one.
    pub fn coordination(&self) -> Option<&Arc<Coordination>> {
        self.team.bridge().and_then(Bridge::coordination)
    }

    /// How long one operation may take.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Ends the group on every rank: operations under way and later ones return [`Error::Aborted`] with `reason`.
    ///
    /// For a rank that fails outside a collective, so that its peers do not wait for it.
    pub fn abort(&self, reason: &str) {
        let origin = self.team.local_name(self.local);
        let error = Error::Aborted { group: self.team.name.clone(), origin: origin.clone(), cause: reason.to_owned() };
        self.team.abort(&origin, &error);
    }

    /// Replaces every rank's values by their reduction over ranks, in place.
    ///
    /// # Shapes
    /// Equal lengths on all ranks.
    ///
    /// # Cost
    /// Ranks of one process read and write each element once per rank. Between processes: see
    /// [`schedule`](crate::schedule).
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        self.all_reduce_list(&mut [BufferMut::from(values)], op)
    }

    /// As [`all_reduce`](ProcessGroup::all_reduce), for several slices of one data type in one operation.
    ///
    /// The slices are never copied into a common buffer. All ranks must pass slices of the same lengths in the same order.
    ///
    /// # Errors
    /// [`Error::MixedTypes`], and see [`ProcessGroup`].
    pub fn all_reduce_list(&self, slices: &mut [BufferMut<'_>], op: ReduceOp) -> Result<()> {
        self.in_place(Kind::AllReduce, slices, Some(op), None)
    }

    /// Replaces every rank's values by the root's, in place.
    ///
    /// # Shapes
    /// Equal lengths on all ranks.
    ///
    /// # Errors
    /// [`Error::RankOutside`], and see [`ProcessGroup`].
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: Rank) -> Result<()> {
        self.broadcast_list(&mut [BufferMut::from(values)], root)
    }

    /// As [`broadcast`](ProcessGroup::broadcast), for several slices of one data type in one operation.
    ///
    /// # Errors
    /// [`Error::MixedTypes`], [`Error::RankOutside`], and see [`ProcessGroup`].
    pub fn broadcast_list(&self, slices: &mut [BufferMut<'_>], root: Rank) -> Result<()> {
        self.in_place(Kind::Broadcast, slices, None, Some(root))
    }

    /// Replaces the root's values by the reduction over ranks; what other ranks' values are afterwards is unspecified.
    ///
    /// # Shapes
    /// Equal lengths on all ranks.
    ///
    /// # Errors
    /// [`Error::RankOutside`], and see [`ProcessGroup`].
    pub fn reduce<T: Element>(&self, values: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        self.in_place(Kind::Reduce, &mut [BufferMut::from(values)], Some(op), Some(root))
    }

    /// Collects every rank's values, in rank order.
    ///
    /// # Shapes
    /// `input` has the same length on all ranks, `output` that length times the world size.
    ///
    /// # Errors
    /// [`Error::Length`], and see [`ProcessGroup`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.check_gathered(input.len(), output.len())?;
        let call = (Kind::AllGather, T::DTYPE, input.len(), 0, None, None);
        let borrowed = Borrowed::apart(BufferRef::from(input), BufferMut::from(output));
        self.blocking(call, borrowed)
    }

    /// Reduces every rank's input and leaves part r of the result with rank r.
    ///
    /// # Shapes
    /// `output` has the same length on all ranks, `input` that length times the world size.
    ///
    /// # Errors
    /// [`Error::Length`], and see [`ProcessGroup`].
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.check_scattered(input.len(), output.len())?;
        let call = (Kind::ReduceScatter, T::DTYPE, input.len(), 0, Some(op), None);
        let borrowed = Borrowed::apart(BufferRef::from(input), BufferMut::from(output));
        self.blocking(call, borrowed)
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn barrier(&self) -> Result<()> {
        self.in_place(Kind::Barrier, &mut [], None, None)
    }

    /// Begins an [`all_reduce`](ProcessGroup::all_reduce) and returns at once; the result comes from [`Work::wait`].
    ///
    /// # Errors
    /// [`Error::Aborted`] where the group is; other errors come from [`Work::wait`].
    pub fn all_reduce_async<B: OwnedBuffers>(&self, buffers: B, op: ReduceOp) -> Result<Work<B>> {
        self.begin_in_place(Kind::AllReduce, buffers, Some(op), None)
    }

    /// Begins a [`broadcast`](ProcessGroup::broadcast) and returns at once.
    ///
    /// # Errors
    /// [`Error::RankOutside`], [`Error::Aborted`]; other errors come from [`Work::wait`].
    pub fn broadcast_async<B: OwnedBuffers>(&self, buffers: B, root: Rank) -> Result<Work<B>> {
        self.begin_in_place(Kind::Broadcast, buffers, None, Some(root))
    }

    /// Begins a [`reduce`](ProcessGroup::reduce) and returns at once.
    ///
    /// # Errors
    /// [`Error::RankOutside`], [`Error::Aborted`]; other errors come from [`Work::wait`].
    pub fn reduce_async<B: OwnedBuffers>(&self, buffers: B, op: ReduceOp, root: Rank) -> Result<Work<B>> {
        self.begin_in_place(Kind::Reduce, buffers, Some(op), Some(root))
    }

    /// Begins an [`all_gather`](ProcessGroup::all_gather) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Aborted`]; other errors come from [`Work::wait`].
    pub fn all_gather_async<T: Element>(&self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        self.check_gathered(input.len(), output.len())?;
        self.begin_apart((Kind::AllGather, T::DTYPE, input.len(), 0, None, None), [input, output])
    }

    /// Begins a [`reduce_scatter`](ProcessGroup::reduce_scatter) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Aborted`]; other errors come from [`Work::wait`].
    pub fn reduce_scatter_async<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        op: ReduceOp,
    ) -> Result<Work<[Vec<T>; 2]>> {
        self.check_scattered(input.len(), output.len())?;
        self.begin_apart((Kind::ReduceScatter, T::DTYPE, input.len(), 0, Some(op), None), [input, output])
    }

    /// Begins a [`barrier`](ProcessGroup::barrier) and returns at once.
    ///
    /// # Errors
    /// [`Error::Aborted`]; other errors come from [`Work::wait`].
    pub fn barrier_async(&self) -> Result<Work<Vec<u8>>> {
        self.begin_in_place(Kind::Barrier, Vec::new(), None, None)
    }

    pub(crate) fn weak_team(&self) -> std::sync::Weak<Team> {
        Arc::downgrade(&self.team)
    }

    fn in_place(
        &self,
        kind: Kind,
        slices: &mut [BufferMut<'_>],
        op: Option<ReduceOp>,
        root: Option<Rank>,
    ) -> Result<()> {
        let dtype = slices.first().map_or(DType::U8, |slice| slice.dtype());
        if let Some(index) = slices.iter().position(|slice| slice.dtype() != dtype) {
            return Err(Error::MixedTypes { index, got: slices[index].dtype(), expected: dtype });
        }
        self.check_root(root)?;
        let count = slices.iter().map(|slice| slice.len()).sum();
        let layout = Call::layout_of(slices.iter().map(|slice| slice.len()));
        let borrowed = Borrowed::in_place(slices.iter_mut().map(BufferMut::reborrow));
        self.blocking((kind, dtype, count, layout, op, root), borrowed)
    }

    fn blocking(&self, call: Unnumbered, borrowed: Borrowed<'_>) -> Result<()> {
        let operation = self.submit(call, borrowed.buffers, true)?;
        // The borrow of the caller's memory lasts until here, and nobody touches it after `wait`.
        self.team.wait(self.local, &operation)
    }

    fn begin_in_place<B: OwnedBuffers>(
        &self,
        kind: Kind,
        mut owned: B,
        op: Option<ReduceOp>,
        root: Option<Rank>,
    ) -> Result<Work<B>> {
        self.check_root(root)?;
        let dtype = owned.dtype().unwrap_or(DType::U8);
        let mut outputs = Vec::new();
        owned.visit(&mut |bytes| outputs.push(RawSlice::of_mut(bytes)));
        let elements = |slice: &RawSlice| slice.len_bytes() / dtype.size_bytes();
        let count = outputs.iter().map(elements).sum();
        let layout = Call::layout_of(outputs.iter().map(elements));
        let buffers = Buffers { inputs: Vec::new(), outputs };
        let operation = self.submit((kind, dtype, count, layout, op, root), buffers, false)?;
        Ok(Work::new(self.team.clone(), self.local, operation, owned))
    }

    fn begin_apart<T: Element>(&self, call: Unnumbered, mut owned: [Vec<T>; 2]) -> Result<Work<[Vec<T>; 2]>> {
        let [input, output] = &mut owned;
        let buffers = Buffers {
            inputs: vec![RawSlice::of_mut(bytemuck::cast_slice_mut(input))],
            outputs: vec![RawSlice::of_mut(bytemuck::cast_slice_mut(output))],
        };
        let operation = self.submit(call, buffers, false)?;
        Ok(Work::new(self.team.clone(), self.local, operation, owned))
    }

    fn submit(&self, call: Unnumbered, buffers: Buffers, may_block: bool) -> Result<Arc<Operation>> {
        let (kind, dtype, count, layout, op, root) = call;
        let operation = {
            let mut next = lock(&self.next);
            let call = Call { kind, sequence: *next, dtype, count: count as u64, layout, op, root };
            let operation = self.team.deposit(self.local, call, buffers, self.timeout)?;
            *next += 1;
            operation
        };
        self.team.start(&operation, may_block);
        Ok(operation)
    }

    fn check_root(&self, root: Option<Rank>) -> Result<()> {
        match root {
            Some(root) if root.index() >= self.world_size() => {
                Err(Error::RankOutside { what: "root", given: root.0, world_size: self.world_size() })
            }
            _ => Ok(()),
        }
    }

    fn check_gathered(&self, input: usize, output: usize) -> Result<()> {
        let expected = input * self.world_size();
        if output == expected {
            return Ok(());
        }
        let remedy = "the output of all_gather holds the input's length times the world size";
        Err(Error::Length { what: "output of all_gather", got: output, expected, remedy })
    }

    fn check_scattered(&self, input: usize, output: usize) -> Result<()> {
        let expected = output * self.world_size();
        if input == expected {
            return Ok(());
        }
        let remedy = "the input of reduce_scatter holds the output's length times the world size";
        Err(Error::Length { what: "input of reduce_scatter", got: input, expected, remedy })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.team.depart(self.local);
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

/// A call before it has its sequence number: kind, dtype, count, layout, op, root.
type Unnumbered = (Kind, DType, usize, u32, Option<ReduceOp>, Option<Rank>);

fn check_local(ranks: usize) -> Result<()> {
    match ranks {
        1..=MAX_LOCAL_RANKS => Ok(()),
        given => Err(Error::GroupSize { given, max: MAX_LOCAL_RANKS }),
    }
}

fn handles(team: &Arc<Team>, options: &Options) -> Vec<ProcessGroup> {
    (0..team.local_ranks)
        .map(|local| ProcessGroup { team: team.clone(), local, timeout: options.timeout, next: Mutex::new(0) })
        .collect()
}

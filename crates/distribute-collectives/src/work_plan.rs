//! What the ranks of one process do with each other's memory in one operation, cut into chunks.
#![expect(unsafe_code, reason = "ranks of one process reduce straight in each other's memory")]

use std::ops::Range;

use distribute_device::DType;

use crate::call::{Call, Kind};
use crate::exchange::{Disagreement, Exchange, starts};
use crate::kernel::{self, Keep};
use crate::memory::{Buffers, Counts, RawSlice, locate};
use crate::phases::Phase;
use crate::reduction::Combiner;
use crate::team::Team;
use crate::{Rank, ReduceOp, SharedCrossDeviceOps};

/// Smallest and largest chunk. A chunk that stays in a core's L2 cache costs little to hand out; one below 16 KiB is
/// not worth another core.
const MIN_CHUNK_BYTES: usize = 16 * 1024;
const MAX_CHUNK_BYTES: usize = 256 * 1024;

/// One operation of all ranks of this process.
#[derive(Debug)]
pub(crate) struct Plan {
    call: Call,
    combiner: Combiner,
    /// What combines the ranks' values in place instead, all in one chunk.
    cross_device_ops: Option<SharedCrossDeviceOps>,
    /// What a mean divides by within this process; with several processes the bridge divides, or the second phase does.
    divisor: Option<u32>,
    ranks: Vec<Buffers>,
    first_rank: usize,
    processes: usize,
    /// Elements that the phases go over, and of one chunk.
    elements: [usize; 2],
    chunk: [usize; 2],
    /// Where each rank's part begins, for calls in which ranks have parts.
    starts: Vec<usize>,
    /// The blocks of calls that move values without combining them.
    exchange: Option<Exchange>,
    /// Where values are collected for other processes, where that is not the first rank's memory.
    staging: Option<Staging>,
}

/// The reduction of this process's whole inputs, for a reduce-scatter or a mean that spans processes.
#[derive(Debug)]
struct Staging {
    slice: RawSlice,
    /// Keeps the memory that `slice` names; in u64 for alignment.
    _memory: Box<[u64]>,
    /// For means whose sums may not be of the data type: what they are added up in, and how many of that for each element.
    carried: Option<(DType, usize)>,
}

impl Staging {
    fn new(elements: usize, dtype: DType, carried: Option<(DType, usize)>) -> Staging {
        let (stored, per_element) = carried.unwrap_or((dtype, 1));
        let len_bytes = elements * per_element * stored.size_bytes();
        let mut memory = vec![0u64; len_bytes.div_ceil(8)].into_boxed_slice();
        let slice = RawSlice::of_mut(&mut bytemuck::cast_slice_mut(&mut memory)[..len_bytes]);
        Staging { slice, _memory: memory, carried }
    }

    /// The bytes of some elements, which have `size` bytes in the data type.
    fn bytes(&self, elements: &Range<usize>, size: usize) -> Range<usize> {
        let size = self.carried.map_or(size, |(dtype, per_element)| per_element * dtype.size_bytes());
        elements.start * size..elements.end * size
    }
}

impl Plan {
    /// Fails where ranks of this process do not agree on what they send each other.
    pub(crate) fn new<'a>(
        team: &Team,
        call: Call,
        buffers: impl Iterator<Item = &'a Buffers>,
    ) -> Result<Plan, Disagreement> {
        let ranks: Vec<Buffers> = buffers.cloned().collect();
        let processes = team.processes();
        let world_size = team.names.len();
        let (local, count) = (ranks.len(), call.count as usize);
        let across = processes > 1;
        let mine = team.first_rank..team.first_rank + local;
        let root = call.root.and_then(|root| root.index().checked_sub(team.first_rank)).filter(|root| *root < local);
        let starts = match (call.kind, &ranks[0].counts) {
            (_, Counts::PerRank(counts)) => starts(counts),
            (Kind::AllGather, _) => (0..=world_size).map(|rank| rank * count).collect(),
            (Kind::ReduceScatter, _) => (0..=world_size).map(|rank| rank * (count / world_size)).collect(),
            _ => Vec::new(),
        };
        let scatters = matches!(call.kind, Kind::ReduceScatter | Kind::ReduceScatterV);
        let carried = kernel::carried(call.dtype).filter(|_| across && call.op == Some(ReduceOp::Mean));
        let exchange = match call.kind {
            Kind::AllToAll
            | Kind::Gather
            | Kind::Scatter
            | Kind::AllToAllV
            | Kind::GatherV
            | Kind::ScatterV
            | Kind::Send => Some(Exchange::new(&ranks, call, team.first_rank, world_size, MAX_CHUNK_BYTES)?),
            _ => None,
        };
        let elements = match call.kind {
            // These go through the staging memory.
            Kind::AllReduce if carried.is_some() => [count, count],
            Kind::Reduce if carried.is_some() => [count, if root.is_some() { count } else { 0 }],
            Kind::AllReduce => [if local > 1 { count } else { 0 }, if across && local > 1 { count } else { 0 }],
            Kind::Reduce => [
                if local > 1 { count } else { 0 },
                if across && root.is_some_and(|root| root != 0) { count } else { 0 },
            ],
            Kind::Broadcast if across => {
                [if root.is_some_and(|root| root != 0) { count } else { 0 }, if local > 1 { count } else { 0 }]
            }
            Kind::Broadcast => [if local > 1 { count } else { 0 }, 0],
            Kind::AllGather | Kind::AllGatherV => {
                let longest = mine.clone().map(|rank| starts[rank + 1] - starts[rank]).max().unwrap_or(0);
                [longest, if across && local > 1 { starts[world_size] } else { 0 }]
            }
            Kind::ReduceScatter | Kind::ReduceScatterV => {
                [count, if across { starts[mine.end] - starts[mine.start] } else { 0 }]
            }
            Kind::Barrier => [0, 0],
            // One chunk is one copy.
            _ => [exchange.as_ref().map_or(0, |exchange| exchange.copies.len()), 0],
        };
        let size = call.dtype.size_bytes();
        let staging = (across && scatters || carried.is_some()).then(|| Staging::new(count, call.dtype, carried));
        let op = call.op.unwrap_or(ReduceOp::Sum);
        let mut chunk = match exchange {
            Some(_) => [1, 1],
            None => elements.map(|elements| chunk_elements(elements, local, size)),
        };
        let in_place = matches!(call.kind, Kind::AllReduce | Kind::Reduce) && ranks[0].user.is_none();
        let cross_device_ops = team.cross_device_ops.clone().filter(|_| in_place);
        if cross_device_ops.is_some() {
            chunk[0] = count.max(1);
        }
        Ok(Plan {
            call,
            cross_device_ops,
            combiner: ranks[0].user.clone().unwrap_or(Combiner::BuiltIn(op)),
            divisor: (op == ReduceOp::Mean && !across).then_some(world_size as u32),
            first_rank: team.first_rank,
            processes,
            elements,
            chunk,
            ranks,
            starts,
            exchange,
            staging,
        })
    }

    pub(crate) fn call(&self) -> Call {
        self.call
    }

    pub(crate) fn combiner(&self) -> &Combiner {
        &self.combiner
    }

    /// What other processes are sent, and send, where nothing is combined.
    pub(crate) fn exchange(&self) -> Option<&Exchange> {
        self.exchange.as_ref()
    }

    /// The call as its schedule sees it: elements of the type that travels, and as many as there are.
    pub(crate) fn wire_call(&self) -> Call {
        match self.carried() {
            Some((dtype, per_element)) => Call { dtype, count: self.call.count * per_element as u64, ..self.call },
            None => self.call,
        }
    }

    /// What a mean is added up in between processes, where that is not its data type.
    pub(crate) fn carried(&self) -> Option<(DType, usize)> {
        self.staging.as_ref()?.carried
    }

    /// Elements that travel of each process's part, for calls with a count per rank.
    pub(crate) fn process_counts(&self) -> Vec<usize> {
        let local = self.ranks.len();
        let per_element = self.carried().map_or(1, |(_, per_element)| per_element);
        let part = |process: usize| self.starts[(process + 1) * local] - self.starts[process * local];
        (0..self.processes).map(|process| part(process) * per_element).collect()
    }

    /// Chunks of a phase.
    pub(crate) fn chunks(&self, phase: Phase) -> usize {
        let index = phase as usize;
        self.elements[index].div_ceil(self.chunk[index])
    }

    /// What the bridge exchanges with other processes: the first rank's memory, or the staging memory.
    pub(crate) fn bridged(&self) -> &[RawSlice] {
        match &self.staging {
            Some(staging) => std::slice::from_ref(&staging.slice),
            None => &self.ranks[0].outputs,
        }
    }

    /// Does one chunk of a phase. The operation hands out each chunk once.
    pub(crate) fn run(&self, phase: Phase, chunk: usize) {
        let index = phase as usize;
        let start = chunk * self.chunk[index];
        let range = start..(start + self.chunk[index]).min(self.elements[index]);
        match (phase, self.call.kind) {
            (_, Kind::Barrier) => {}
            (Phase::Reduce, Kind::AllReduce | Kind::Reduce) if self.carried().is_some() => self.carry_in_place(&range),
            (Phase::Reduce, Kind::AllReduce | Kind::Reduce) => self.reduce_in_place(&range),
            (Phase::Reduce, Kind::Broadcast) => match self.local(self.call.root) {
                Some(root) if self.processes > 1 => self.copy_between(root, &[0], &range),
                Some(root) => self.copy_between(root, &self.all_but(root), &range),
                None => {}
            },
            (Phase::Reduce, Kind::AllGather | Kind::AllGatherV) => self.collect(&range),
            (Phase::Reduce, Kind::ReduceScatter | Kind::ReduceScatterV) => self.reduce_apart(&range),
            (Phase::Spread, Kind::AllReduce) if self.carried().is_some() => {
                self.ranks.iter().for_each(|rank| self.finish_mean(rank, &range));
            }
            (Phase::Spread, Kind::Reduce) if self.carried().is_some() => {
                self.local(self.call.root).into_iter().for_each(|root| self.finish_mean(&self.ranks[root], &range));
            }
            (Phase::Spread, Kind::AllReduce | Kind::Broadcast | Kind::AllGather | Kind::AllGatherV) => {
                self.copy_between(0, &self.all_but(0), &range);
            }
            (Phase::Spread, Kind::Reduce) => {
                if let Some(root) = self.local(self.call.root) {
                    self.copy_between(0, &[root], &range);
                }
            }
            (Phase::Spread, Kind::ReduceScatter | Kind::ReduceScatterV) => self.scatter(&range),
            (Phase::Reduce, _) => self.copy_block(chunk),
            (Phase::Spread, _) => {}
        }
    }

    fn local(&self, rank: Option<Rank>) -> Option<usize> {
        rank?.index().checked_sub(self.first_rank).filter(|local| *local < self.ranks.len())
    }

    fn all_but(&self, one: usize) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| *rank != one).collect()
    }

    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        let size = self.call.dtype.size_bytes();
        range.start * size..range.end * size
    }

    fn reduce_in_place(&self, range: &Range<usize>) {
        let keep = match self.call.kind {
            Kind::Reduce if self.processes == 1 => Keep::One(self.local(self.call.root).unwrap_or(0)),
            Kind::AllReduce if self.processes == 1 => Keep::All,
            _ => Keep::One(0),
        };
        for (slice, bytes) in locate(&self.ranks[0].outputs, self.bytes(range)) {
            let mut buffers: Vec<&mut [u8]> = self
                .ranks
                .iter()
                // SAFETY: all ranks have the same layout (compared in their calls), their buffers are distinct, and this
                // thread alone was handed this chunk while every owner waits (protocol of `team`).
                .map(|rank| unsafe { rank.outputs[slice].bytes_mut(bytes.clone()) })
                .collect();
            match (&self.cross_device_ops, self.call.op) {
                (Some(ops), Some(op)) => match self.divisor {
                    Some(n) => ops.mean(self.call.dtype, n, &mut buffers),
                    None => ops.reduce(self.call.dtype, op, &mut buffers),
                },
                _ => self.combiner.reduce_in_place(self.call.dtype, self.divisor, keep, &mut buffers),
            }
        }
    }

    /// Adds up the ranks' values in the staging memory, as what a mean is carried in.
    fn carry_in_place(&self, range: &Range<usize>) {
        let Some(staging) = &self.staging else { return };
        let size = self.call.dtype.size_bytes();
        let mut start = range.start;
        for (slice, bytes) in locate(&self.ranks[0].outputs, self.bytes(range)) {
            let end = start + bytes.len() / size;
            let sources: Vec<&[u8]> = self
                .ranks
                .iter()
                // SAFETY: all ranks have the same layout (compared), nobody writes to outputs in this phase, and their
                // owners wait.
                .map(|rank| unsafe { rank.outputs[slice].bytes(bytes.clone()) })
                .collect();
            self.carry(staging, &sources, &(start..end));
            start = end;
        }
    }

    /// Adds up values of all ranks in the elements `range` of the staging memory.
    fn carry(&self, staging: &Staging, sources: &[&[u8]], range: &Range<usize>) {
        let bytes = staging.bytes(range, self.call.dtype.size_bytes());
        // SAFETY: this thread alone was handed this chunk of the staging memory, which lives in the plan.
        let target = unsafe { staging.slice.bytes_mut(bytes) };
        match (staging.carried, &self.cross_device_ops) {
            (Some(_), Some(ops)) => ops.carry(self.call.dtype, self.world_size(), sources, target),
            (Some(_), None) => kernel::carry(self.call.dtype, self.world_size(), sources, target),
            (None, _) => self.combiner.reduce_to_one(self.call.dtype, self.divisor, sources, target),
        }
    }

    /// Writes the mean of what all processes have added up to a rank's memory.
    fn finish_mean(&self, rank: &Buffers, range: &Range<usize>) {
        let Some(staging) = &self.staging else { return };
        let size = self.call.dtype.size_bytes();
        let mut start = range.start;
        for (slice, bytes) in locate(&rank.outputs, self.bytes(range)) {
            let end = start + bytes.len() / size;
            // SAFETY: the bridge has finished with the staging memory, which now is only read.
            let carried = unsafe { staging.slice.bytes(staging.bytes(&(start..end), size)) };
            // SAFETY: equal layouts, distinct buffers, and this thread alone was handed this chunk.
            let target = unsafe { rank.outputs[slice].bytes_mut(bytes) };
            kernel::mean_of_carried(self.call.dtype, self.world_size(), carried, target);
            start = end;
        }
    }

    fn world_size(&self) -> u32 {
        (self.processes * self.ranks.len()) as u32
    }

    fn copy_between(&self, from: usize, to: &[usize], range: &Range<usize>) {
        for (slice, bytes) in locate(&self.ranks[from].outputs, self.bytes(range)) {
            // SAFETY: nobody writes to the source in this phase; its owner waits.
            let source = unsafe { self.ranks[from].outputs[slice].bytes(bytes.clone()) };
            for rank in to {
                // SAFETY: equal layouts, distinct buffers, and this thread alone was handed this chunk.
                let target = unsafe { self.ranks[*rank].outputs[slice].bytes_mut(bytes.clone()) };
                target.copy_from_slice(source);
            }
        }
    }

    /// All-gather: every local rank's values go to their place in the output of every rank that is filled here.
    fn collect(&self, range: &Range<usize>) {
        let targets = if self.processes > 1 { &self.ranks[..1] } else { &self.ranks[..] };
        for (local, rank) in self.ranks.iter().enumerate() {
            let part = self.starts[self.first_rank + local]..self.starts[self.first_rank + local + 1];
            let range = range.start.min(part.len())..range.end.min(part.len());
            let source = rank.inputs[0].part(self.bytes(&range));
            for target in targets {
                let target = target.outputs[0].part(self.bytes(&(part.start + range.start..part.start + range.end)));
                self.copy(source, target);
            }
        }
    }

    /// All-to-all, gather, scatter: one block, or a part of it, between two ranks of this process.
    fn copy_block(&self, index: usize) {
        if let Some(block) = self.exchange.as_ref().and_then(|exchange| exchange.copies.get(index)) {
            self.copy(block.from, block.to);
        }
    }

    /// Copies what one chunk owns.
    fn copy(&self, from: RawSlice, to: RawSlice) {
        // Values that are in their place already.
        if from.is(&to) {
            return;
        }
        // SAFETY: inputs are only read, and their owner waits.
        let source = unsafe { from.bytes(0..from.len_bytes()) };
        // SAFETY: lengths were checked by the caller, chunks do not overlap, and this thread alone was handed this one.
        let target = unsafe { to.bytes_mut(0..to.len_bytes()) };
        target.copy_from_slice(source);
    }

    /// Reduce-scatter: combines inputs into the part of the rank that owns it, or into the staging memory.
    fn reduce_apart(&self, range: &Range<usize>) {
        let mut start = range.start;
        while start < range.end {
            let owner = self.owner(start);
            let end = if self.staging.is_some() { range.end } else { range.end.min(self.starts[owner + 1]) };
            let bytes = self.bytes(&(start..end));
            let sources: Vec<&[u8]> = self
                .ranks
                .iter()
                // SAFETY: inputs are only read, and their owner waits.
                .map(|rank| unsafe { rank.inputs[0].bytes(bytes.clone()) })
                .collect();
            match &self.staging {
                Some(staging) => self.carry(staging, &sources, &(start..end)),
                None => {
                    let bytes = self.bytes(&(start - self.starts[owner]..end - self.starts[owner]));
                    // SAFETY: outputs hold one part (checked by the caller) and this thread alone was handed this chunk.
                    let target = unsafe { self.ranks[owner].outputs[0].bytes_mut(bytes) };
                    self.combiner.reduce_to_one(self.call.dtype, self.divisor, &sources, target);
                }
            }
            start = end;
        }
    }

    /// Reduce-scatter across processes: each local rank takes its part of the staging memory.
    fn scatter(&self, range: &Range<usize>) {
        let Some(staging) = &self.staging else { return };
        let offset = self.starts[self.first_rank];
        let (mut start, last) = (offset + range.start, offset + range.end);
        while start < last {
            let owner = self.owner(start);
            let end = last.min(self.starts[owner + 1]);
            // SAFETY: the bridge has finished with the staging memory, which now is only read.
            let source = unsafe { staging.slice.bytes(staging.bytes(&(start..end), self.call.dtype.size_bytes())) };
            let bytes = self.bytes(&(start - self.starts[owner]..end - self.starts[owner]));
            // SAFETY: this thread alone was handed this chunk, and the owner of the output waits.
            let target = unsafe { self.ranks[owner - self.first_rank].outputs[0].bytes_mut(bytes) };
            match staging.carried {
                Some(_) => kernel::mean_of_carried(self.call.dtype, self.world_size(), source, target),
                None => target.copy_from_slice(source),
            }
            start = end;
        }
    }

    /// The rank whose part holds an element; ranks with empty parts own none.
    fn owner(&self, element: usize) -> usize {
        self.starts.partition_point(|start| *start <= element) - 1
    }
}

/// Elements of one chunk: an equal share per rank within the bounds, in whole cache lines.
fn chunk_elements(elements: usize, ranks: usize, size: usize) -> usize {
    let share = elements.div_ceil(ranks).clamp(MIN_CHUNK_BYTES / size, MAX_CHUNK_BYTES / size);
    share.next_multiple_of(64 / size)
}

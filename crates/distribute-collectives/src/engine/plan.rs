//! The plan of one operation between the ranks of one process: its phases, cut into chunks.
//!
//! This is the layout only. The work on a chunk, which accesses the memory, is in `memory/chunks.rs`.

use distribute_arithmetic as arithmetic;
use distribute_device::DType;

use super::blocks::{Blocks, Disagreement, Messages, starts};
use super::context::GroupContext;
use super::memory::{Buffers, Counts, RawSlice, Staging, UseOfInputs};
use super::phases::Phase;
use crate::call::{Call, Kind};
use crate::reduction::Combiner;
use crate::{Rank, ReduceOp, SharedCrossDeviceOps};

/// Minimum and maximum size of a chunk. A chunk that fits a core's L2 cache costs little to hand out; one below 16 KiB
/// is not worth another core.
const MIN_CHUNK_BYTES: usize = 16 * 1024;
const MAX_CHUNK_BYTES: usize = 256 * 1024;

/// One operation of all ranks of this process.
#[derive(Debug)]
pub(super) struct LocalPlan {
    pub(super) call: Call,
    pub(super) combiner: Combiner,
    /// Combines the ranks' values in place instead, in one chunk.
    pub(super) cross_device_ops: Option<SharedCrossDeviceOps>,
    /// The divisor of a mean within this process. With several processes the exchange, or the second phase, divides.
    pub(super) divisor: Option<u32>,
    pub(super) ranks: Vec<Buffers>,
    pub(super) first_rank: usize,
    pub(super) processes: usize,
    /// The number of elements of each phase, and of one of its chunks.
    pub(super) elements: [usize; 2],
    pub(super) chunk: [usize; 2],
    /// The offset of each rank's part, for calls in which ranks have parts.
    pub(super) starts: Vec<usize>,
    /// The blocks of calls that move values without combining them.
    pub(super) blocks: Option<Blocks>,
    /// The memory in which values for other processes are collected, if that is not the first rank's memory.
    pub(super) staging: Option<Staging>,
}

impl LocalPlan {
    /// Plans a call. Fails if ranks of this process disagree on the counts that they exchange.
    pub(super) fn new(
        context: &GroupContext,
        cross_device_ops: Option<&SharedCrossDeviceOps>,
        call: Call,
        ranks: Vec<Buffers>,
    ) -> Result<LocalPlan, Disagreement> {
        let (processes, world_size) = (context.processes(), context.world_size());
        let across = processes > 1;
        let starts = part_starts(&call, &ranks[0].counts, world_size);
        let accumulator =
            arithmetic::mean_accumulator(call.dtype).filter(|_| across && call.built_in() == Some(ReduceOp::Mean));
        let blocks = match call.kind {
            Kind::AllToAll
            | Kind::Gather
            | Kind::Scatter
            | Kind::AllToAllV
            | Kind::GatherV
            | Kind::ScatterV
            | Kind::Send => Some(Blocks::new(&ranks, call, context.first_rank, world_size, MAX_CHUNK_BYTES)?),
            _ => None,
        };
        let mut elements = match &blocks {
            // One chunk is one copy.
            Some(blocks) => [blocks.copies.len(), 0],
            None => phase_elements(&call, context, ranks.len(), &starts, accumulator.is_some()),
        };
        let count = call.count as usize;
        let scatters = matches!(call.kind, Kind::ReduceScatter | Kind::ReduceScatterV);
        let staging = match &ranks[..] {
            [only] if across && scatters && accumulator.is_none() && only.use_of_inputs != UseOfInputs::Read => {
                elements[Phase::Reduce as usize] = 0;
                if only.use_of_inputs == UseOfInputs::Result {
                    elements[Phase::Spread as usize] = 0;
                }
                Some(Staging::of_input(only.inputs[0]))
            }
            _ => (across && scatters || accumulator.is_some()).then(|| Staging::new(count, call.dtype, accumulator)),
        };
        let op = call.built_in().unwrap_or(ReduceOp::Sum);
        let mut chunk = match blocks {
            Some(_) => [1, 1],
            None => elements.map(|elements| chunk_elements(elements, ranks.len(), call.dtype.size_bytes())),
        };
        let in_place = matches!(call.kind, Kind::AllReduce | Kind::Reduce) && ranks[0].user.is_none();
        let cross_device_ops = cross_device_ops.filter(|_| in_place).cloned();
        if cross_device_ops.is_some() {
            chunk[0] = count.max(1);
        }
        Ok(LocalPlan {
            call,
            cross_device_ops,
            combiner: ranks[0].user.clone().unwrap_or(Combiner::BuiltIn(op)),
            divisor: (op == ReduceOp::Mean && !across).then_some(world_size as u32),
            first_rank: context.first_rank,
            processes,
            elements,
            chunk,
            ranks,
            starts,
            blocks,
            staging,
        })
    }

    pub(super) fn call(&self) -> Call {
        self.call
    }

    pub(super) fn combiner(&self) -> &Combiner {
        &self.combiner
    }

    /// Returns the number of chunks of a phase.
    pub(super) fn chunks(&self, phase: Phase) -> usize {
        let index = phase as usize;
        self.elements[index].div_ceil(self.chunk[index])
    }

    /// Returns the call as its schedule sees it: with the type and the number of the elements on the wire.
    pub(super) fn wire_call(&self) -> Call {
        match self.accumulator() {
            Some((dtype, per_element)) => Call { dtype, count: self.call.count * per_element as u64, ..self.call },
            None => self.call,
        }
    }

    /// Returns the accumulator of a mean between processes, if it is not the data type.
    pub(super) fn accumulator(&self) -> Option<(DType, usize)> {
        self.staging.as_ref()?.accumulator
    }

    /// Returns the number of wire elements of each process's part, for calls with a count per rank.
    pub(super) fn process_counts(&self) -> Vec<usize> {
        let local = self.ranks.len();
        let per_element = self.accumulator().map_or(1, |(_, per_element)| per_element);
        let part = |process: usize| self.starts[(process + 1) * local] - self.starts[process * local];
        (0..self.processes).map(|process| part(process) * per_element).collect()
    }

    /// Returns whether the call moves blocks between ranks instead of following a schedule.
    pub(super) fn exchanges_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    /// Returns the blocks that are exchanged with other processes.
    pub(super) fn messages(&self) -> &[Messages] {
        self.blocks.as_ref().map_or(&[], |blocks| &blocks.messages)
    }

    /// Returns the memory that a schedule exchanges with other processes: the first rank's, or the staging memory.
    pub(super) fn exchanged(&self) -> &[RawSlice] {
        match &self.staging {
            Some(staging) => std::slice::from_ref(&staging.slice),
            None => &self.ranks[0].outputs,
        }
    }

    /// Returns the local index of a group rank, if it belongs to this process.
    pub(super) fn local(&self, rank: Option<Rank>) -> Option<usize> {
        rank?.index().checked_sub(self.first_rank).filter(|local| *local < self.ranks.len())
    }

    pub(super) fn world_size(&self) -> u32 {
        (self.processes * self.ranks.len()) as u32
    }

    /// Returns the rank whose part contains an element; ranks with empty parts own none.
    pub(super) fn owner(&self, element: usize) -> usize {
        self.starts.partition_point(|start| *start <= element) - 1
    }
}

/// Returns the offset of each rank's part, for calls in which ranks have parts.
fn part_starts(call: &Call, counts: &Counts, world_size: usize) -> Vec<usize> {
    let count = call.count as usize;
    match (call.kind, counts) {
        (_, Counts::PerRank(counts)) => starts(counts),
        (Kind::AllGather, _) => (0..=world_size).map(|rank| rank * count).collect(),
        (Kind::ReduceScatter, _) => (0..=world_size).map(|rank| rank * (count / world_size)).collect(),
        _ => Vec::new(),
    }
}

/// Returns the number of elements of each of the two local phases. `accumulates` states that a mean uses the staging
/// memory.
fn phase_elements(
    call: &Call,
    context: &GroupContext,
    local: usize,
    starts: &[usize],
    accumulates: bool,
) -> [usize; 2] {
    let (count, across) = (call.count as usize, context.processes() > 1);
    let mine = context.first_rank..context.first_rank + local;
    let root = call.root.and_then(|root| root.index().checked_sub(context.first_rank)).filter(|root| *root < local);
    let if_any = |needed: bool| if needed { count } else { 0 };
    match call.kind {
        Kind::AllReduce if accumulates => [count, count],
        Kind::Reduce if accumulates => [count, if_any(root.is_some())],
        Kind::AllReduce => [if_any(local > 1), if_any(across && local > 1)],
        Kind::Reduce => [if_any(local > 1), if_any(across && root.is_some_and(|root| root != 0))],
        Kind::Broadcast if across => [if_any(root.is_some_and(|root| root != 0)), if_any(local > 1)],
        Kind::Broadcast => [if_any(local > 1), 0],
        Kind::AllGather | Kind::AllGatherV => {
            let longest = mine.map(|rank| starts[rank + 1] - starts[rank]).max().unwrap_or(0);
            [longest, if across && local > 1 { starts[context.world_size()] } else { 0 }]
        }
        Kind::ReduceScatter | Kind::ReduceScatterV => {
            [count, if across { starts[mine.end] - starts[mine.start] } else { 0 }]
        }
        _ => [0, 0],
    }
}

/// Returns the number of elements of one chunk: an equal share per rank within the bounds, in whole cache lines.
fn chunk_elements(elements: usize, ranks: usize, size: usize) -> usize {
    let share = elements.div_ceil(ranks).clamp(MIN_CHUNK_BYTES / size, MAX_CHUNK_BYTES / size);
    share.next_multiple_of(64 / size)
}

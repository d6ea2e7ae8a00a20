//! The work on one chunk of an operation, directly in the memory of all ranks of this process.
#![expect(unsafe_code, reason = "ranks of one process reduce straight in each other's memory")]

use std::ops::Range;

use distribute_arithmetic::{self as arithmetic, Keep};

use super::{Buffers, RawSlice, Staging, UseOfInputs, locate};
use crate::call::Kind;
use crate::engine::phases::Phase;
use crate::engine::plan::LocalPlan;

impl LocalPlan {
    /// Works on one chunk of a phase. The operation hands out each chunk once.
    pub(in crate::engine) fn run(&self, phase: Phase, chunk: usize) {
        let index = phase as usize;
        let start = chunk * self.chunk[index];
        let range = start..(start + self.chunk[index]).min(self.elements[index]);
        match (phase, self.call.kind) {
            (_, Kind::Barrier) => {}
            (Phase::Reduce, Kind::AllReduce | Kind::Reduce) if self.accumulator().is_some() => {
                self.accumulate_in_place(&range)
            }
            (Phase::Reduce, Kind::AllReduce | Kind::Reduce) => self.reduce_in_place(&range),
            (Phase::Reduce, Kind::Broadcast) => match self.local(self.call.root) {
                Some(root) if self.processes > 1 => self.copy_between(root, &[0], &range),
                Some(root) => self.copy_between(root, &self.all_but(root), &range),
                None => {}
            },
            (Phase::Reduce, Kind::AllGather | Kind::AllGatherV) => self.collect(&range),
            (Phase::Reduce, Kind::ReduceScatter | Kind::ReduceScatterV) => self.reduce_apart(&range),
            (Phase::Spread, Kind::AllReduce) if self.accumulator().is_some() => {
                self.ranks.iter().for_each(|rank| self.finish_mean(rank, &range));
            }
            (Phase::Spread, Kind::Reduce) if self.accumulator().is_some() => {
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
                // SAFETY: all ranks have the same layout (compared in their calls), their buffers are distinct, and
                // this chunk was handed out to this thread alone while every owner waits (protocol of `engine`).
                .map(|rank| unsafe { rank.outputs[slice].bytes_mut(bytes.clone()) })
                .collect();
            match (&self.cross_device_ops, self.call.built_in()) {
                (Some(ops), Some(op)) => match self.divisor {
                    Some(n) => ops.mean(self.call.dtype, n, &mut buffers),
                    None => ops.reduce(self.call.dtype, op, &mut buffers),
                },
                _ => self.combiner.reduce_in_place(self.call.dtype, self.divisor, keep, &mut buffers),
            }
        }
    }

    /// Sums the ranks' values in the staging memory, in the accumulator of a mean.
    fn accumulate_in_place(&self, range: &Range<usize>) {
        let Some(staging) = &self.staging else { return };
        let size = self.call.dtype.size_bytes();
        let mut start = range.start;
        for (slice, bytes) in locate(&self.ranks[0].outputs, self.bytes(range)) {
            let end = start + bytes.len() / size;
            let sources: Vec<&[u8]> = self
                .ranks
                .iter()
                // SAFETY: all ranks have the same layout (compared), no thread writes to outputs in this phase, and
                // their owners wait.
                .map(|rank| unsafe { rank.outputs[slice].bytes(bytes.clone()) })
                .collect();
            self.accumulate(staging, &sources, &(start..end));
            start = end;
        }
    }

    /// Sums the values of all ranks in the elements `range` of the staging memory.
    fn accumulate(&self, staging: &Staging, sources: &[&[u8]], range: &Range<usize>) {
        let bytes = staging.bytes(range, self.call.dtype.size_bytes());
        // SAFETY: this chunk of the staging memory, which lives in the plan, was handed out to this thread alone.
        let target = unsafe { staging.slice.bytes_mut(bytes) };
        match (staging.accumulator, &self.cross_device_ops) {
            (Some(_), Some(ops)) => ops.accumulate_mean(self.call.dtype, self.world_size(), sources, target),
            (Some(_), None) => arithmetic::accumulate_mean(self.call.dtype, self.world_size(), sources, target),
            (None, _) => self.combiner.reduce_to_one(self.call.dtype, self.divisor, sources, target),
        }
    }

    /// Writes the mean, computed from the sum over all processes, to a rank's memory.
    fn finish_mean(&self, rank: &Buffers, range: &Range<usize>) {
        let Some(staging) = &self.staging else { return };
        let size = self.call.dtype.size_bytes();
        let mut start = range.start;
        for (slice, bytes) in locate(&rank.outputs, self.bytes(range)) {
            let end = start + bytes.len() / size;
            // SAFETY: the exchange has finished with the staging memory, which is only read now.
            let accumulated = unsafe { staging.slice.bytes(staging.bytes(&(start..end), size)) };
            // SAFETY: equal layouts, distinct buffers, and this chunk was handed out to this thread alone.
            let target = unsafe { rank.outputs[slice].bytes_mut(bytes) };
            arithmetic::finish_mean(self.call.dtype, self.world_size(), accumulated, target);
            start = end;
        }
    }

    fn copy_between(&self, from: usize, to: &[usize], range: &Range<usize>) {
        for (slice, bytes) in locate(&self.ranks[from].outputs, self.bytes(range)) {
            // SAFETY: no thread writes to the source in this phase; its owner waits.
            let source = unsafe { self.ranks[from].outputs[slice].bytes(bytes.clone()) };
            for rank in to {
                // SAFETY: equal layouts, distinct buffers, and this chunk was handed out to this thread alone.
                let target = unsafe { self.ranks[*rank].outputs[slice].bytes_mut(bytes.clone()) };
                target.copy_from_slice(source);
            }
        }
    }

    /// All-gather: copies every local rank's values to their position in the output of every rank that is filled here.
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

    /// All-to-all, gather, scatter: copies one block, or a part of it, between two ranks of this process.
    fn copy_block(&self, index: usize) {
        if let Some(block) = self.blocks.as_ref().and_then(|blocks| blocks.copies.get(index)) {
            self.copy(block.from, block.to);
        }
    }

    /// Copies one chunk from its source to its target.
    fn copy(&self, from: RawSlice, to: RawSlice) {
        // In an all-gather in place the values are in position already.
        if from.is(&to) {
            return;
        }
        // SAFETY: inputs are only read, and their owner waits.
        let source = unsafe { from.bytes(0..from.len_bytes()) };
        // SAFETY: lengths were checked by the caller, chunks do not overlap, and this one was handed out to this thread
        // alone.
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
            match &self.staging {
                Some(staging) => self.accumulate(staging, &self.sources(&bytes), &(start..end)),
                None if self.ranks[0].use_of_inputs == UseOfInputs::Result => {
                    let mut buffers: Vec<&mut [u8]> = self
                        .ranks
                        .iter()
                        // SAFETY: all ranks allow their inputs to be overwritten (compared in their calls), these are
                        // distinct, and this chunk was handed out to this thread alone while every owner waits.
                        .map(|rank| unsafe { rank.inputs[0].bytes_mut(bytes.clone()) })
                        .collect();
                    self.combiner.reduce_in_place(self.call.dtype, self.divisor, Keep::One(owner), &mut buffers);
                }
                None => {
                    let sources = self.sources(&bytes);
                    let bytes = self.bytes(&(start - self.starts[owner]..end - self.starts[owner]));
                    // SAFETY: outputs hold one part (checked by the caller) and this chunk was handed out to this
                    // thread alone.
                    let target = unsafe { self.ranks[owner].outputs[0].bytes_mut(bytes) };
                    self.combiner.reduce_to_one(self.call.dtype, self.divisor, &sources, target);
                }
            }
            start = end;
        }
    }

    /// Returns some bytes of every local rank's input.
    fn sources(&self, bytes: &Range<usize>) -> Vec<&[u8]> {
        // SAFETY: inputs are only read in this phase, and their owner waits.
        self.ranks.iter().map(|rank| unsafe { rank.inputs[0].bytes(bytes.clone()) }).collect()
    }

    /// Reduce-scatter across processes: copies each local rank's part out of the staging memory.
    fn scatter(&self, range: &Range<usize>) {
        let Some(staging) = &self.staging else { return };
        let offset = self.starts[self.first_rank];
        let (mut start, last) = (offset + range.start, offset + range.end);
        while start < last {
            let owner = self.owner(start);
            let end = last.min(self.starts[owner + 1]);
            // SAFETY: the exchange has finished with the staging memory, which is only read now.
            let source = unsafe { staging.slice.bytes(staging.bytes(&(start..end), self.call.dtype.size_bytes())) };
            let bytes = self.bytes(&(start - self.starts[owner]..end - self.starts[owner]));
            // SAFETY: this chunk was handed out to this thread alone, and the owner of the output waits.
            let target = unsafe { self.ranks[owner - self.first_rank].outputs[0].bytes_mut(bytes) };
            match staging.accumulator {
                Some(_) => arithmetic::finish_mean(self.call.dtype, self.world_size(), source, target),
                None => target.copy_from_slice(source),
            }
            start = end;
        }
    }
}

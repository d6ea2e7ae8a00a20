//! The blocks of all-to-all, gather, scatter and send: the bytes that move between each pair of ranks, directly from
//! and to the callers' memory.

use std::ops::Range;

use crate::call::{Call, Kind};
use crate::engine::memory::{Buffers, Counts, RawSlice};

/// The blocks of one call, as seen by the ranks of one process.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    /// Copies between ranks of this process.
    pub(crate) copies: Vec<LocalCopy>,
    /// Messages from and to other processes.
    pub(crate) messages: Vec<Messages>,
}

/// Bytes that stay in the process, at most one chunk.
#[derive(Debug)]
pub(crate) struct LocalCopy {
    pub(crate) from: RawSlice,
    pub(crate) to: RawSlice,
}

/// The messages between this process and another one.
#[derive(Debug)]
pub(crate) struct Messages {
    pub(crate) process: usize,
    pub(crate) send: Option<Message>,
    pub(crate) receive: Option<Message>,
}

/// The blocks between two processes in one direction: those of the first sender to all receivers, then those of the
/// second, and so on.
#[derive(Debug)]
pub(crate) struct Message {
    /// Describes the number of elements, their blocks and the tag; both sides must pass the same.
    pub(crate) call: Call,
    pub(crate) slices: Vec<RawSlice>,
}

/// Two ranks of this process whose counts do not match.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Disagreement {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) sent: usize,
    pub(crate) expected: usize,
}

impl Blocks {
    /// Lays out the blocks of `ranks`, which are the ranks `first_rank ..` of `world_size`.
    ///
    /// Every process holds the same number of ranks. `chunk_bytes` is the maximum size of one copy.
    pub(crate) fn new(
        ranks: &[Buffers],
        call: Call,
        first_rank: usize,
        world_size: usize,
        chunk_bytes: usize,
    ) -> Result<Blocks, Disagreement> {
        let size = call.dtype.size_bytes();
        let offsets: Vec<BlockOffsets> = ranks.iter().map(|buffers| BlockOffsets::new(buffers, world_size)).collect();
        let local = ranks.len();
        let block = |slices: &[RawSlice], elements: Range<usize>| match slices {
            [slice, ..] => slice.part(elements.start * size..elements.end * size),
            [] => RawSlice::of_mut(&mut []),
        };
        let mut blocks = Blocks::default();
        for (from, sender) in offsets.iter().enumerate() {
            for (to, receiver) in offsets.iter().enumerate() {
                let (source, target) = (sender.sent_to(first_rank + to), receiver.received_from(first_rank + from));
                if source.len() != target.len() {
                    let (sent, expected) = (source.len(), target.len());
                    return Err(Disagreement { from: first_rank + from, to: first_rank + to, sent, expected });
                }
                let (source, target) = (block(&ranks[from].inputs, source), block(&ranks[to].outputs, target));
                for start in (0..source.len_bytes()).step_by(chunk_bytes) {
                    let range = start..start + chunk_bytes;
                    blocks.copies.push(LocalCopy { from: source.part(range.clone()), to: target.part(range) });
                }
            }
        }
        let own = first_rank / local;
        let message = |blocks: Vec<(RawSlice, usize)>| {
            let count = blocks.iter().map(|(_, len)| *len as u64).sum();
            // The call's own layout has its tag, and the counts of all ranks where these must be equal.
            let layout = Call::layout_of(blocks.iter().map(|(_, len)| *len)) ^ call.layout;
            let slices = blocks.into_iter().map(|(slice, _)| slice).collect();
            Message { call: Call { count, layout, ..call }, slices }
        };
        // Starts with the next process, so that the processes do not all send to the first one at the same time.
        for distance in 1..world_size / local {
            let process = (own + distance) % (world_size / local);
            let theirs = process * local..(process + 1) * local;
            let pairs = || (0..local).flat_map(|mine| theirs.clone().map(move |other| (mine, other)));
            let send = || {
                message(
                    pairs()
                        .map(|(mine, other)| (offsets[mine].sent_to(other), &ranks[mine].inputs))
                        .map(|(elements, slices)| (block(slices, elements.clone()), elements.len()))
                        .collect(),
                )
            };
            let receive = || {
                let blocks = theirs.clone().flat_map(|other| (0..local).map(move |mine| (mine, other)));
                message(
                    blocks
                        .map(|(mine, other)| (offsets[mine].received_from(other), &ranks[mine].outputs))
                        .map(|(elements, slices)| (block(slices, elements.clone()), elements.len()))
                        .collect(),
                )
            };
            // With a root, only its process sends or receives; otherwise all do.
            let root = call.root.map(|root| root.index() / local);
            let scatters = matches!(call.kind, Kind::Scatter | Kind::ScatterV | Kind::Send);
            let (source, sink) = if scatters { (root, None) } else { (None, root) };
            let moves = |from: usize, to: usize| source.is_none_or(|it| it == from) && sink.is_none_or(|it| it == to);
            let messages =
                Messages { process, send: moves(own, process).then(send), receive: moves(process, own).then(receive) };
            if messages.send.is_some() || messages.receive.is_some() {
                blocks.messages.push(messages);
            }
        }
        Ok(blocks)
    }
}

/// The offsets of one rank's blocks, by the other rank: prefix sums of its counts.
struct BlockOffsets {
    send: Vec<usize>,
    receive: Vec<usize>,
}

impl BlockOffsets {
    fn new(buffers: &Buffers, world_size: usize) -> BlockOffsets {
        match &buffers.counts {
            Counts::Exchange { send, receive } => BlockOffsets { send: starts(send), receive: starts(receive) },
            Counts::Even | Counts::PerRank(_) => {
                BlockOffsets { send: vec![0; world_size + 1], receive: vec![0; world_size + 1] }
            }
        }
    }

    fn sent_to(&self, rank: usize) -> Range<usize> {
        self.send[rank]..self.send[rank + 1]
    }

    fn received_from(&self, rank: usize) -> Range<usize> {
        self.receive[rank]..self.receive[rank + 1]
    }
}

/// Returns the offset at which each part begins, and the end of the last one: prefix sums.
pub(crate) fn starts(counts: &[usize]) -> Vec<usize> {
    let mut sum = 0;
    std::iter::once(0).chain(counts.iter().map(|count| (sum += count, sum).1)).collect()
}

#[cfg(test)]
mod tests {
    use distribute_device::DType;
    use smallvec::smallvec;

    use super::*;
    use crate::Rank;

    fn call(kind: Kind, root: Option<Rank>) -> Call {
        Call { kind, sequence: 0, dtype: DType::U8, count: 0, layout: 0, op: None, root }
    }

    fn buffers(input: &mut [u8], output: &mut [u8], send: &[usize], receive: &[usize]) -> Buffers {
        Buffers {
            inputs: vec![RawSlice::of_mut(input)],
            outputs: smallvec![RawSlice::of_mut(output)],
            counts: Counts::Exchange { send: send.to_vec(), receive: receive.to_vec() },
            ..Buffers::default()
        }
    }

    #[test]
    fn both_sides_of_a_message_say_the_same() {
        // Two processes of two ranks; rank r sends r + s elements to rank s.
        let world = 4;
        let mut memory: Vec<_> = (0..world).map(|_| (vec![0; 100], vec![0; 100])).collect();
        let mut ranks: Vec<Buffers> = Vec::new();
        for (rank, (input, output)) in memory.iter_mut().enumerate() {
            let counts: Vec<usize> = (0..world).map(|other| rank + other).collect();
            ranks.push(buffers(input, output, &counts, &counts));
        }
        let plan =
            |first: usize| Blocks::new(&ranks[first..first + 2], call(Kind::AllToAllV, None), first, world, 3).unwrap();
        let (a, b) = (plan(0), plan(2));
        assert_eq!((a.messages.len(), a.messages[0].process, b.messages[0].process), (1, 1, 0));
        let [a, b] = [&a.messages[0], &b.messages[0]];
        let calls = |message: &Option<Message>| message.as_ref().map(|message| message.call);
        assert!(a.send.is_some() && calls(&a.send) == calls(&b.receive) && calls(&b.send) == calls(&a.receive));
        let lengths = |message: &Option<Message>| {
            message.as_ref().map(|m| m.slices.iter().map(RawSlice::len_bytes).collect::<Vec<_>>())
        };
        assert_eq!(lengths(&a.send), Some(vec![2, 3, 3, 4]));
        assert_eq!(lengths(&a.send), lengths(&b.receive));
    }

    #[test]
    fn with_a_root_only_its_process_takes_part() {
        let (mut input, mut output) = (vec![0; 30], vec![0; 30]);
        let rank = |send: &[usize], receive: &[usize]| buffers(&mut input.clone(), &mut output.clone(), send, receive);
        let gather = |own, buffers| Blocks::new(&[buffers], call(Kind::Gather, Some(Rank(2))), own, 3, 8).unwrap();
        let outer = gather(0, rank(&[0, 0, 5], &[0; 3]));
        assert!(outer.messages.len() == 1 && outer.messages[0].process == 2 && outer.messages[0].receive.is_none());
        let root = gather(2, rank(&[0, 0, 5], &[5; 3]));
        assert_eq!(root.messages.len(), 2);
        assert!(root.messages.iter().all(|messages| messages.send.is_none() && messages.receive.is_some()));
        assert_eq!(root.copies.len(), 1);
        (input[0], output[0]) = (1, 1);
    }

    #[test]
    fn ranks_of_one_process_that_disagree_are_found() {
        let (mut a, mut b) = (vec![0; 30], vec![0; 30]);
        let ranks = [buffers(&mut a, &mut [], &[1, 2], &[1, 4]), buffers(&mut b, &mut [], &[4, 5], &[3, 5])];
        let error = Blocks::new(&ranks, call(Kind::AllToAllV, None), 0, 2, 8).unwrap_err();
        assert_eq!(error, Disagreement { from: 0, to: 1, sent: 2, expected: 3 });
    }
}

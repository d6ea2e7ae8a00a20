//! The connections of this process to the others: executes schedules over a transport.

use std::io::IoSlice;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use distribute_arithmetic as arithmetic;
use distribute_device::DType;
use smallvec::{SmallVec, smallvec};

use super::receive::ReceiveBuffer;
use crate::call::{Call, ScheduleId};
use crate::engine::memory::{Received, Sent};
use crate::reduction::{Combiner, Side};
use crate::schedule::{Action, Step, Transfer};
use crate::transport::{AbortReason, Closed, Incoming, Outgoing, Timeout, Transport, TransportError};

/// Number of bytes received before they are combined: small enough to be still in the cache then.
const SCRATCH_BYTES: usize = 256 * 1024;

/// This process's index among the processes of a group, and its streams to them.
pub(super) struct Connections {
    transport: Box<dyn Transport>,
    rank: usize,
    size: usize,
    /// Holds received bytes until they are combined; in u64 so that it is aligned for every data type.
    scratch: Vec<u64>,
}

/// The call that an exchange belongs to, and its time limits.
pub(super) struct ExchangeContext<'a> {
    pub(super) call: Call,
    pub(super) schedule: ScheduleId,
    /// The type of the elements on the wire.
    pub(super) dtype: DType,
    pub(super) combiner: &'a Combiner,
    /// The divisor of a mean, unless the division follows later.
    pub(super) divisor: Option<u32>,
    pub(super) started: Instant,
    pub(super) deadline: Instant,
    pub(super) spin: Duration,
    pub(super) interrupted: &'a AtomicBool,
}

/// The cause of a failed exchange.
#[derive(Debug)]
pub(super) enum ExchangeError {
    Transport(TransportError),
    /// A peer is in another call.
    Mismatch {
        peer: usize,
        here: (Call, ScheduleId),
        there: (Call, ScheduleId),
    },
    /// A peer sent bytes that do not encode a call.
    Garbage {
        peer: usize,
    },
    /// The deadline passed while these peers had not sent, or were not ready to receive.
    Deadline {
        missing: Vec<usize>,
    },
}

impl Connections {
    pub(super) fn new(transport: Box<dyn Transport>, rank: usize, size: usize) -> Connections {
        Connections { transport, rank, size, scratch: Vec::new() }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn last_heard(&self, peer: usize) -> Option<Instant> {
        self.transport.last_heard(peer)
    }

    /// Notifies the other processes of an abort. A user's transport may panic; the connections then end with the
    /// process.
    pub(super) fn abort(&mut self, reason: &AbortReason) {
        let _ = catch_unwind(AssertUnwindSafe(|| self.transport.abort(reason)));
    }

    /// Takes the transport out; its drop notifies the peers that this process leaves.
    pub(super) fn close(&mut self) -> Box<dyn Transport> {
        std::mem::replace(&mut self.transport, Box::new(Closed))
    }

    /// Executes a schedule over the elements of the concatenated `slices`.
    pub(super) fn run(
        &mut self,
        schedule: &[Step],
        slices: &mut [&mut [u8]],
        exchange: &ExchangeContext<'_>,
    ) -> Result<(), ExchangeError> {
        let header = exchange.call.encode(exchange.schedule);
        for step in schedule {
            let overlap =
                step.receives.iter().any(|receive| step.sends.iter().any(|send| overlaps(&send.range, &receive.range)));
            if overlap {
                self.buffered_step(step, slices, &header, exchange)?;
            } else {
                self.direct_step(step, slices, &header, exchange)?;
            }
            if let (Some(range), Some(n)) = (&step.complete, exchange.divisor) {
                for piece in pieces(slices, &in_bytes(range, exchange.dtype)) {
                    arithmetic::divide(exchange.dtype, piece, n);
                }
            }
        }
        Ok(())
    }

    /// Sends directly from the slices and receives into them.
    fn direct_step(
        &mut self,
        step: &Step,
        slices: &mut [&mut [u8]],
        header: &[u8; Call::ENCODED_LEN],
        exchange: &ExchangeContext<'_>,
    ) -> Result<(), ExchangeError> {
        let size = exchange.dtype.size_bytes();
        let scratch_len = (SCRATCH_BYTES / 8).min(
            step.receives
                .iter()
                .filter(|receive| receive.action == Action::Combine)
                .map(|receive| (receive.range.len() * size).div_ceil(8))
                .max()
                .unwrap_or(0),
        );
        self.reserve(scratch_len * step.receives.len());
        let mut scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
        let (shared, targets) = carve(slices, &step.sends, &step.receives, exchange.dtype);
        let mut buffers: SmallVec<[_; 1]> = SmallVec::with_capacity(step.receives.len());
        for (receive, targets) in step.receives.iter().zip(targets) {
            let combine = match receive.action {
                Action::Copy => None,
                Action::Combine => {
                    let (mine, rest) = std::mem::take(&mut scratch).split_at_mut(scratch_len * 8);
                    scratch = rest;
                    Some((mine, exchange.dtype, exchange.combiner, side(receive.peer, self.rank)))
                }
            };
            let expected = (exchange.call, exchange.schedule);
            buffers.push(ReceiveBuffer::new(expected, receive.peer, receive.range.len() * size, targets, combine));
        }
        let mut outgoing = outgoing(step, &shared, header);
        transfer(self.transport.as_mut(), &mut outgoing, &mut buffers, exchange, (self.rank, self.size))
    }

    /// Receives into scratch memory first, because a received range overlaps one that is sent.
    fn buffered_step(
        &mut self,
        step: &Step,
        slices: &mut [&mut [u8]],
        header: &[u8; Call::ENCODED_LEN],
        exchange: &ExchangeContext<'_>,
    ) -> Result<(), ExchangeError> {
        let size = exchange.dtype.size_bytes();
        let words = step.receives.iter().map(|receive| (receive.range.len() * size).div_ceil(8));
        let words: SmallVec<[usize; 1]> = words.collect();
        self.reserve(words.iter().sum());
        {
            let mut scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
            let (shared, _) = carve(slices, &step.sends, &[], exchange.dtype);
            let mut buffers: SmallVec<[_; 1]> = SmallVec::with_capacity(step.receives.len());
            for (receive, words) in step.receives.iter().zip(&words) {
                let (mine, rest) = std::mem::take(&mut scratch).split_at_mut(words * 8);
                scratch = rest;
                let target = &mut mine[..receive.range.len() * size];
                let expected = (exchange.call, exchange.schedule);
                buffers.push(ReceiveBuffer::new(expected, receive.peer, target.len(), smallvec![target], None));
            }
            let mut outgoing = outgoing(step, &shared, header);
            transfer(self.transport.as_mut(), &mut outgoing, &mut buffers, exchange, (self.rank, self.size))?;
        }
        let mut scratch: &[u8] = bytemuck::cast_slice(&self.scratch);
        for (receive, words) in step.receives.iter().zip(&words) {
            let (mut mine, rest) = scratch.split_at(words * 8);
            scratch = rest;
            for piece in pieces(slices, &in_bytes(&receive.range, exchange.dtype)) {
                let (source, later) = mine.split_at(piece.len());
                mine = later;
                match receive.action {
                    Action::Copy => piece.copy_from_slice(source),
                    Action::Combine => {
                        exchange.combiner.combine(exchange.dtype, piece, source, side(receive.peer, self.rank));
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends and receives messages whose values are not combined, all at the same time and without intermediate copies.
    pub(super) fn swap(
        &mut self,
        (sent, received): (Vec<Sent<'_>>, Vec<Received<'_>>),
        exchange: &ExchangeContext<'_>,
    ) -> Result<(), ExchangeError> {
        let headers: Vec<_> = sent.iter().map(|message| message.call.encode(ScheduleId::ONLY)).collect();
        let mut outgoing: Vec<_> = sent
            .iter()
            .zip(&headers)
            .map(|(message, header)| {
                let slices = message.slices.iter().filter(|slice| !slice.is_empty());
                let parts = std::iter::once(IoSlice::new(header)).chain(slices.map(|slice| IoSlice::new(slice)));
                Outgoing { to: message.to, parts: parts.collect() }
            })
            .collect();
        let mut buffers: Vec<_> = received
            .into_iter()
            .map(|Received { from, call, slices }| {
                let len_bytes = slices.iter().map(|slice| slice.len()).sum();
                ReceiveBuffer::new((call, ScheduleId::ONLY), from, len_bytes, slices.into(), None)
            })
            .collect();
        transfer(self.transport.as_mut(), &mut outgoing, &mut buffers, exchange, (self.rank, self.size))
    }

    fn reserve(&mut self, words: usize) {
        if self.scratch.len() < words {
            self.scratch.resize(words, 0);
        }
    }
}

/// Sends and receives the bytes of one step. If time runs out, finds out which peers are missing.
fn transfer(
    transport: &mut dyn Transport,
    outgoing: &mut [Outgoing<'_>],
    buffers: &mut [ReceiveBuffer<'_>],
    exchange: &ExchangeContext<'_>,
    (me, members): (usize, usize),
) -> Result<(), ExchangeError> {
    let mut incoming: SmallVec<[Incoming<'_>; 1]> =
        buffers.iter_mut().map(|buffer| Incoming { from: buffer.from, sink: buffer }).collect();
    let halfway = exchange.started + exchange.deadline.saturating_duration_since(exchange.started) / 2;
    let timeout = |deadline| Timeout { deadline, spin: exchange.spin, interrupted: exchange.interrupted };
    let mut outcome = transport.exchange(outgoing, &mut incoming, &timeout(halfway));
    if outcome == Err(TransportError::Deadline) {
        tracing::warn!("{} has not ended, and half of its time is over", exchange.call);
        transport.announce(exchange.call.sequence);
        outcome = transport.exchange(outgoing, &mut incoming, &timeout(exchange.deadline));
    }
    drop(incoming);
    match outcome {
        Ok(()) => Ok(()),
        Err(TransportError::Refused { peer }) => {
            match buffers.iter().find_map(|buffer| Some((buffer.expected, buffer.unexpected?))) {
                Some((here, Some(there))) => Err(ExchangeError::Mismatch { peer, here, there }),
                _ => Err(ExchangeError::Garbage { peer }),
            }
        }
        Err(TransportError::Deadline) => {
            let incomplete = buffers.iter().filter(|buffer| !buffer.is_complete());
            let mut missing: Vec<usize> = incomplete.map(|buffer| buffer.from).collect();
            missing.extend(outgoing.iter().filter(|out| !out.parts.is_empty()).map(|out| out.to));
            missing.sort_unstable();
            missing.dedup();
            // A peer that waits as well is not the cause; one that has not made the call is.
            let absent: Vec<usize> = (0..members)
                .filter(|peer| *peer != me && transport.announced(*peer) != Some(exchange.call.sequence))
                .collect();
            Err(ExchangeError::Deadline { missing: if absent.is_empty() { missing } else { absent } })
        }
        Err(other) => Err(ExchangeError::Transport(other)),
    }
}

fn outgoing<'a>(step: &Step, shared: &Shared<'a>, header: &'a [u8; Call::ENCODED_LEN]) -> SmallVec<[Outgoing<'a>; 1]> {
    step.sends
        .iter()
        .zip(shared)
        .map(|(send, pieces)| {
            let mut parts = Vec::with_capacity(1 + pieces.len());
            parts.push(IoSlice::new(header));
            parts.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
            Outgoing { to: send.peer, parts }
        })
        .collect()
}

/// Returns on which side a peer's values are combined, by the order of ranks.
fn side(peer: usize, rank: usize) -> Side {
    if peer < rank { Side::Before } else { Side::After }
}

fn overlaps(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

fn in_bytes(range: &Range<usize>, dtype: DType) -> Range<usize> {
    range.start * dtype.size_bytes()..range.end * dtype.size_bytes()
}

/// Returns the parts of the concatenated `slices` that lie in `range`.
fn pieces<'a>(slices: &'a mut [&mut [u8]], range: &Range<usize>) -> SmallVec<[&'a mut [u8]; 1]> {
    let mut start = 0;
    let mut found = SmallVec::new();
    for slice in slices {
        let end = start + slice.len();
        let (from, to) = (range.start.max(start), range.end.min(end));
        if from < to {
            found.push(&mut slice[from - start..to - start]);
        }
        start = end;
    }
    found
}

/// The pieces that each send of a step reads.
type Shared<'a> = SmallVec<[SmallVec<[&'a [u8]; 1]>; 1]>;

/// The pieces that each receive of a step writes.
type Exclusive<'a> = SmallVec<[SmallVec<[&'a mut [u8]; 1]>; 1]>;

/// Divides `slices` so that each send gets shared, and each receive exclusive, access to its range.
///
/// No receive of the step may overlap a send or another receive.
fn carve<'a>(
    slices: &'a mut [&mut [u8]],
    sends: &[Transfer],
    receives: &[Transfer],
    dtype: DType,
) -> (Shared<'a>, Exclusive<'a>) {
    if slices.len() == 1
        && let ([send], []) = (sends, receives)
    {
        // The common short message: a part of one slice.
        return (smallvec![smallvec![&slices[0][in_bytes(&send.range, dtype)]]], SmallVec::new());
    }
    let sends: Vec<Range<usize>> = sends.iter().map(|send| in_bytes(&send.range, dtype)).collect();
    let receives: Vec<Range<usize>> = receives.iter().map(|receive| in_bytes(&receive.range, dtype)).collect();
    let mut cuts: Vec<usize> = sends.iter().chain(&receives).flat_map(|range| [range.start, range.end]).collect();
    cuts.sort_unstable();
    let mut shared: Shared<'a> = smallvec![SmallVec::new(); sends.len()];
    let mut exclusive: Exclusive<'a> = receives.iter().map(|_| SmallVec::new()).collect();
    let mut start = 0;
    for slice in slices {
        let end = start + slice.len();
        let mut rest: &'a mut [u8] = slice;
        let inside = cuts.iter().copied().filter(|cut| start < *cut && *cut < end).chain([end]).collect::<Vec<_>>();
        for cut in inside {
            let (piece, later) = rest.split_at_mut(cut - start);
            rest = later;
            let range = start..cut;
            start = cut;
            if range.is_empty() {
                continue;
            }
            if let Some(index) = receives.iter().position(|receive| overlaps(receive, &range)) {
                exclusive[index].push(piece);
            } else {
                let piece: &'a [u8] = piece;
                for (index, send) in sends.iter().enumerate() {
                    if overlaps(send, &range) {
                        shared[index].push(piece);
                    }
                }
            }
        }
    }
    (shared, exclusive)
}

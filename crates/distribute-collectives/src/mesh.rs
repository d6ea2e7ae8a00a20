//! Carries out schedules between processes: the place where algorithms meet a transport.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use distribute_device::DType;

use crate::call::{Call, ScheduleId};
use crate::exchange::Messages;
use crate::kernel;
use crate::memory::{exclusive, shared};
use crate::reduction::{Combiner, Side};
use crate::schedule::{Action, Link, Step, Transfer};
use crate::transport::{AbortReason, Closed, Incoming, Outgoing, Patience, Refusal, Sink, Transport, TransportError};

/// Bytes received before they are combined: small enough to be still in the cache then.
const SCRATCH_BYTES: usize = 256 * 1024;

/// This process's place among the processes of a group, and its streams to them.
pub(crate) struct Mesh {
    transport: Box<dyn Transport>,
    rank: usize,
    size: usize,
    /// Where bytes wait to be combined; in u64 so that it is aligned for every data type.
    scratch: Vec<u64>,
}

/// What a schedule works on.
pub(crate) struct Job<'a> {
    pub(crate) call: Call,
    pub(crate) schedule: ScheduleId,
    /// The type of what travels.
    pub(crate) dtype: DType,
    pub(crate) combiner: &'a Combiner,
    /// What a mean divides by, unless that follows later.
    pub(crate) divisor: Option<u32>,
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    pub(crate) spin: Duration,
    pub(crate) interrupted: &'a AtomicBool,
}

/// Why a schedule was not carried out.
#[derive(Debug)]
pub(crate) enum MeshError {
    Transport(TransportError),
    /// A peer is in another call.
    Mismatch {
        peer: usize,
        here: (Call, ScheduleId),
        there: (Call, ScheduleId),
    },
    /// A peer sent what is not a call at all.
    Garbage {
        peer: usize,
    },
    /// The deadline passed; these peers' bytes, or their readiness to take ours, were missing.
    Deadline {
        missing: Vec<usize>,
    },
}

impl Mesh {
    pub(crate) fn new(transport: Box<dyn Transport>, rank: usize, size: usize) -> Mesh {
        Mesh { transport, rank, size, scratch: Vec::new() }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn transport_name(&self) -> &'static str {
        self.transport.name()
    }

    pub(crate) fn link(&self) -> Link {
        self.transport.link()
    }

    pub(crate) fn hosts(&self) -> Option<&[usize]> {
        self.transport.hosts()
    }

    pub(crate) fn local_host(&self) -> Option<String> {
        self.transport.local_host()
    }

    pub(crate) fn last_heard(&self, peer: usize) -> Option<Instant> {
        self.transport.last_heard(peer)
    }

    pub(crate) fn abort(&mut self, reason: &AbortReason) {
        self.transport.abort(reason);
    }

    /// Takes the connections out, for their drop to say goodbye.
    pub(crate) fn close(&mut self) -> Box<dyn Transport> {
        std::mem::replace(&mut self.transport, Box::new(Closed))
    }

    /// Runs a schedule over the elements of `slices`, taken one after another.
    pub(crate) fn run(&mut self, schedule: &[Step], slices: &mut [&mut [u8]], job: &Job<'_>) -> Result<(), MeshError> {
        let header = job.call.encode(job.schedule);
        for step in schedule {
            let overlap =
                step.receives.iter().any(|receive| step.sends.iter().any(|send| overlaps(&send.range, &receive.range)));
            if overlap {
                self.buffered_step(step, slices, &header, job)?;
            } else {
                self.direct_step(step, slices, &header, job)?;
            }
            if let (Some(range), Some(n)) = (&step.complete, job.divisor) {
                for piece in pieces(slices, &in_bytes(range, job.dtype)) {
                    kernel::divide(job.dtype, piece, n);
                }
            }
        }
        Ok(())
    }

    /// Sends and receives straight from and to the slices.
    fn direct_step(
        &mut self,
        step: &Step,
        slices: &mut [&mut [u8]],
        header: &[u8; Call::ENCODED_LEN],
        job: &Job<'_>,
    ) -> Result<(), MeshError> {
        let size = job.dtype.size_bytes();
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
        let (shared, targets) = carve(slices, &step.sends, &step.receives, job.dtype);
        let mut landings = Vec::with_capacity(step.receives.len());
        for (receive, targets) in step.receives.iter().zip(targets) {
            let combine = match receive.action {
                Action::Copy => None,
                Action::Combine => {
                    let (mine, rest) = std::mem::take(&mut scratch).split_at_mut(scratch_len * 8);
                    scratch = rest;
                    Some((mine, job.dtype, job.combiner, side(receive.peer, self.rank)))
                }
            };
            let expected = (job.call, job.schedule);
            landings.push(Landing::new(expected, receive.peer, receive.range.len() * size, targets, combine));
        }
        let mut outgoing = outgoing(step, &shared, header);
        exchange(self.transport.as_mut(), &mut outgoing, &mut landings, job, (self.rank, self.size))
    }

    /// Receives into scratch memory first, because what arrives belongs where something is being sent from.
    fn buffered_step(
        &mut self,
        step: &Step,
        slices: &mut [&mut [u8]],
        header: &[u8; Call::ENCODED_LEN],
        job: &Job<'_>,
    ) -> Result<(), MeshError> {
        let size = job.dtype.size_bytes();
        let words: Vec<usize> = step.receives.iter().map(|receive| (receive.range.len() * size).div_ceil(8)).collect();
        self.reserve(words.iter().sum());
        {
            let mut scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
            let (shared, _) = carve(slices, &step.sends, &[], job.dtype);
            let mut landings = Vec::with_capacity(step.receives.len());
            for (receive, words) in step.receives.iter().zip(&words) {
                let (mine, rest) = std::mem::take(&mut scratch).split_at_mut(words * 8);
                scratch = rest;
                let target = &mut mine[..receive.range.len() * size];
                let expected = (job.call, job.schedule);
                landings.push(Landing::new(expected, receive.peer, target.len(), vec![target], None));
            }
            let mut outgoing = outgoing(step, &shared, header);
            exchange(self.transport.as_mut(), &mut outgoing, &mut landings, job, (self.rank, self.size))?;
        }
        let mut scratch: &[u8] = bytemuck::cast_slice(&self.scratch);
        for (receive, words) in step.receives.iter().zip(&words) {
            let (mut mine, rest) = scratch.split_at(words * 8);
            scratch = rest;
            for piece in pieces(slices, &in_bytes(&receive.range, job.dtype)) {
                let (source, later) = mine.split_at(piece.len());
                mine = later;
                match receive.action {
                    Action::Copy => piece.copy_from_slice(source),
                    Action::Combine => {
                        job.combiner.combine(job.dtype, piece, source, side(receive.peer, self.rank));
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends and receives messages that nothing is combined with, all at once and without a copy in between.
    ///
    /// # Safety
    /// The slices of all messages are alive until this returns, and this thread alone works on them.
    #[expect(unsafe_code, reason = "messages name the memory of ranks that wait, by address")]
    pub(crate) unsafe fn swap(&mut self, messages: &[Messages], job: &Job<'_>) -> Result<(), MeshError> {
        let sends: Vec<_> = messages
            .iter()
            .filter_map(|messages| {
                let send = messages.send.as_ref()?;
                // SAFETY: the caller promises life, and that nobody writes to them.
                Some((messages.process, send.call.encode(ScheduleId::ONLY), unsafe { shared(&send.slices) }))
            })
            .collect();
        let mut outgoing: Vec<_> = sends
            .iter()
            .map(|(to, header, slices)| {
                let slices = slices.iter().filter(|slice| !slice.is_empty());
                let parts = std::iter::once(IoSlice::new(header)).chain(slices.map(|slice| IoSlice::new(slice)));
                Outgoing { to: *to, parts: parts.collect() }
            })
            .collect();
        let mut landings: Vec<_> = messages
            .iter()
            .filter_map(|messages| {
                let receive = messages.receive.as_ref()?;
                // SAFETY: the caller promises life and exclusive access. Blocks that are received lie in outputs, apart
                // from each other and from the inputs that are sent.
                let targets = unsafe { exclusive(&receive.slices) };
                let len_bytes = targets.iter().map(|target| target.len()).sum();
                let expected = (receive.call, ScheduleId::ONLY);
                Some(Landing::new(expected, messages.process, len_bytes, targets, None))
            })
            .collect();
        exchange(self.transport.as_mut(), &mut outgoing, &mut landings, job, (self.rank, self.size))
    }

    fn reserve(&mut self, words: usize) {
        if self.scratch.len() < words {
            self.scratch.resize(words, 0);
        }
    }
}

fn exchange(
    transport: &mut dyn Transport,
    outgoing: &mut [Outgoing<'_>],
    landings: &mut [Landing<'_>],
    job: &Job<'_>,
    (me, members): (usize, usize),
) -> Result<(), MeshError> {
    let mut incoming: Vec<Incoming<'_>> =
        landings.iter_mut().map(|landing| Incoming { from: landing.from, sink: landing }).collect();
    let halfway = job.started + job.deadline.saturating_duration_since(job.started) / 2;
    let patience = |deadline| Patience { deadline, spin: job.spin, interrupted: job.interrupted };
    let mut outcome = transport.exchange(outgoing, &mut incoming, &patience(halfway));
    if outcome == Err(TransportError::Deadline) {
        tracing::warn!("{} is still waiting for other members, half of its time is over", job.call);
        transport.announce(job.call.sequence);
        outcome = transport.exchange(outgoing, &mut incoming, &patience(job.deadline));
    }
    drop(incoming);
    match outcome {
        Ok(()) => Ok(()),
        Err(TransportError::Refused { peer }) => {
            match landings.iter().find_map(|landing| Some((landing.expected, landing.refused?))) {
                Some((here, Some(there))) => Err(MeshError::Mismatch { peer, here, there }),
                _ => Err(MeshError::Garbage { peer }),
            }
        }
        Err(TransportError::Deadline) => {
            let incomplete = landings.iter().filter(|landing| !landing.is_complete());
            let mut missing: Vec<usize> = incomplete.map(|landing| landing.from).collect();
            missing.extend(outgoing.iter().filter(|out| !out.parts.is_empty()).map(|out| out.to));
            missing.sort_unstable();
            missing.dedup();
            // Whoever waits as well is a victim; the cause is whoever has not even come.
            let absent: Vec<usize> = (0..members)
                .filter(|peer| *peer != me && transport.announced(*peer) != Some(job.call.sequence))
                .collect();
            Err(MeshError::Deadline { missing: if absent.is_empty() { missing } else { absent } })
        }
        Err(other) => Err(MeshError::Transport(other)),
    }
}

fn outgoing<'a>(step: &Step, shared: &[Vec<&'a [u8]>], header: &'a [u8; Call::ENCODED_LEN]) -> Vec<Outgoing<'a>> {
    step.sends
        .iter()
        .zip(shared)
        .map(|(send, pieces)| {
            let mut parts = vec![IoSlice::new(header)];
            parts.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
            Outgoing { to: send.peer, parts }
        })
        .collect()
}

/// Takes the bytes of one transfer: first the header that says what the peer is calling, then the elements.
struct Landing<'a> {
    from: usize,
    expected: (Call, ScheduleId),
    header: [u8; Call::ENCODED_LEN],
    header_len: usize,
    targets: Vec<&'a mut [u8]>,
    /// Index into `targets` and bytes of it that are done.
    at: (usize, usize),
    combine: Option<Combine<'a>>,
    /// Bytes in the scratch memory that are not combined yet.
    filled: usize,
    /// Bytes still to arrive.
    remaining: usize,
    /// The other side's call, where it differs; `Some(None)` where it is not a call.
    refused: Option<Option<(Call, ScheduleId)>>,
}

/// Scratch memory, and how what is in it is combined.
type Combine<'a> = (&'a mut [u8], DType, &'a Combiner, Side);

impl<'a> Landing<'a> {
    fn new(
        expected: (Call, ScheduleId),
        from: usize,
        len_bytes: usize,
        mut targets: Vec<&'a mut [u8]>,
        combine: Option<Combine<'a>>,
    ) -> Landing<'a> {
        targets.retain(|target| !target.is_empty());
        Landing {
            from,
            expected,
            header: [0; Call::ENCODED_LEN],
            header_len: 0,
            targets,
            at: (0, 0),
            combine,
            filled: 0,
            remaining: len_bytes,
            refused: None,
        }
    }

    fn is_complete(&self) -> bool {
        self.header_len == Call::ENCODED_LEN && self.remaining == 0
    }

    /// Combines what is in the scratch memory with the targets it belongs to.
    fn flush(&mut self) {
        let Some((scratch, dtype, combiner, side)) = &mut self.combine else { return };
        let mut source: &[u8] = &scratch[..self.filled];
        while !source.is_empty() {
            let (index, done) = self.at;
            let target = &mut self.targets[index][done..];
            let len = target.len().min(source.len());
            combiner.combine(*dtype, &mut target[..len], &source[..len], *side);
            source = &source[len..];
            self.at = if len == target.len() { (index + 1, 0) } else { (index, done + len) };
        }
        self.filled = 0;
    }
}

impl Sink for Landing<'_> {
    fn space(&mut self) -> &mut [u8] {
        if self.header_len < Call::ENCODED_LEN {
            return &mut self.header[self.header_len..];
        }
        if self.remaining == 0 {
            return &mut [];
        }
        match &mut self.combine {
            Some((scratch, ..)) => {
                let end = scratch.len().min(self.filled + self.remaining);
                &mut scratch[self.filled..end]
            }
            None => &mut self.targets[self.at.0][self.at.1..],
        }
    }

    fn advance(&mut self, len: usize) -> Result<(), Refusal> {
        if self.header_len < Call::ENCODED_LEN {
            self.header_len += len;
            if self.header_len == Call::ENCODED_LEN {
                match Call::decode(&self.header) {
                    Some(call) if call == self.expected => {}
                    other => {
                        self.refused = Some(other);
                        return Err(Refusal);
                    }
                }
            }
            return Ok(());
        }
        self.remaining -= len;
        if let Some((scratch, ..)) = &self.combine {
            self.filled += len;
            if self.filled == scratch.len() || self.remaining == 0 {
                self.flush();
            }
        } else {
            let (index, done) = self.at;
            let whole = done + len == self.targets[index].len();
            self.at = if whole { (index + 1, 0) } else { (index, done + len) };
        }
        Ok(())
    }
}

/// Where values of a peer stand in the order of ranks.
fn side(peer: usize, rank: usize) -> Side {
    if peer < rank { Side::Before } else { Side::After }
}

fn overlaps(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

fn in_bytes(range: &Range<usize>, dtype: DType) -> Range<usize> {
    range.start * dtype.size_bytes()..range.end * dtype.size_bytes()
}

/// The parts of `slices`, taken as one long slice, that lie in `range`.
fn pieces<'a>(slices: &'a mut [&mut [u8]], range: &Range<usize>) -> Vec<&'a mut [u8]> {
    let mut start = 0;
    let mut found = Vec::new();
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
type Shared<'a> = Vec<Vec<&'a [u8]>>;

/// The pieces that each receive of a step writes.
type Exclusive<'a> = Vec<Vec<&'a mut [u8]>>;

/// Cuts `slices` so that each send gets shared, and each receive exclusive, access to its range.
///
/// No receive of the step overlaps a send or another receive.
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
        return (vec![vec![&slices[0][in_bytes(&send.range, dtype)]]], Vec::new());
    }
    let sends: Vec<Range<usize>> = sends.iter().map(|send| in_bytes(&send.range, dtype)).collect();
    let receives: Vec<Range<usize>> = receives.iter().map(|receive| in_bytes(&receive.range, dtype)).collect();
    let mut cuts: Vec<usize> = sends.iter().chain(&receives).flat_map(|range| [range.start, range.end]).collect();
    cuts.sort_unstable();
    let mut shared: Vec<Vec<&'a [u8]>> = vec![Vec::new(); sends.len()];
    let mut exclusive: Vec<Vec<&'a mut [u8]>> = receives.iter().map(|_| Vec::new()).collect();
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

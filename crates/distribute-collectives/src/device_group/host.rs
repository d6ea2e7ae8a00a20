//! Collectives through the host: chunks are copied to pinned memory, reduced there and copied back, all in a pipeline.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use distribute_cluster::FailureKind;
use distribute_device::{BufferMut, DType, Device, DeviceBuffer, HostBuffer, Stream, Transfer};

use super::{Backend, Work, device_error};
use crate::call::Kind;
use crate::sync::lock;
use crate::{ProcessGroup, Rank, ReduceOp, Result};

/// Size of a chunk: large enough for the full rate of PCI Express and of a network, small enough that the first chunk
/// out and the last one back cost little.
const CHUNK_BYTES: usize = 4 << 20;

/// Chunks in flight: one being copied out, one being reduced, one being copied back, and one more so that none waits.
const CHUNKS: usize = 4;

/// The host backend of one rank.
pub(super) struct HostBackend {
    group: Arc<ProcessGroup>,
    device: Arc<dyn Device>,
    out: Arc<dyn Stream>,
    back: Arc<dyn Stream>,
    /// Chunks of memory that are not in use.
    idle: Mutex<Vec<HostBuffer>>,
}

/// The operation on a chunk in host memory.
type OnHost<'a> = &'a dyn Fn(&mut [BufferMut<'_>]) -> Result<()>;

impl HostBackend {
    pub(super) fn new(group: &Arc<ProcessGroup>, device: &Arc<dyn Device>) -> Result<HostBackend> {
        let stream = || device.create_stream().map_err(|error| device_error(group, error));
        let (out, back) = (stream()?, stream()?);
        Ok(HostBackend { group: Arc::clone(group), device: Arc::clone(device), out, back, idle: Mutex::default() })
    }

    /// Reduces buffers of all ranks in place.
    pub(super) fn all_reduce(
        &self,
        values: &DeviceBuffer,
        dtype: DType,
        op: ReduceOp,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.each_chunk(values, values, dtype, stream, &|chunk| self.group.all_reduce_list(chunk, op))
    }

    /// Replaces all ranks' values by the root's.
    pub(super) fn broadcast(&self, values: &DeviceBuffer, dtype: DType, root: Rank, stream: &dyn Stream) -> Result<()> {
        self.each_chunk(values, values, dtype, stream, &|chunk| self.group.broadcast_list(chunk, root))
    }

    /// Copies chunks of `from` to the host, lets `action` change them, and copies them to `to`.
    fn each_chunk(
        &self,
        from: &DeviceBuffer,
        to: &DeviceBuffer,
        dtype: DType,
        stream: &dyn Stream,
        action: OnHost<'_>,
    ) -> Result<()> {
        let failed = |error| device_error(&self.group, error);
        self.hold(stream, &*self.out)?;
        let ranges: Vec<Range<usize>> = chunks(from.len_bytes()).collect();
        let mut next = ranges.iter();
        let mut going: VecDeque<(Range<usize>, Transfer)> = VecDeque::new();
        let mut coming: VecDeque<Transfer> = VecDeque::new();
        loop {
            while going.len() < CHUNKS - 1 {
                let Some(range) = next.next() else { break };
                let memory = self.memory(&mut coming)?;
                let part = from.slice(range.clone()).map_err(failed)?;
                going.push_back((range.clone(), self.out.copy_to_host(&part, memory, 0).map_err(failed)?));
            }
            let Some((range, mut transfer)) = going.pop_front() else { break };
            let mut memory = transfer.wait(self.deadline()).map_err(failed)?;
            let view = BufferMut::from_bytes(dtype, &mut memory.as_bytes_mut()[..range.len()]).map_err(failed)?;
            action(&mut [view])?;
            let part = to.slice(range).map_err(failed)?;
            coming.push_back(self.back.copy_from_host(memory, 0, &part).map_err(failed)?);
        }
        self.hold(&*self.back, stream)?;
        for mut transfer in coming {
            // The last copies finish on their own; their memory is reused if they have finished already.
            if transfer.is_ready().map_err(failed)? {
                lock(&self.idle).push(transfer.wait(self.deadline()).map_err(failed)?);
            }
        }
        Ok(())
    }

    /// Returns memory for one chunk: idle, new, or that of the next copy to finish.
    fn memory(&self, coming: &mut VecDeque<Transfer>) -> Result<HostBuffer> {
        let failed = |error| device_error(&self.group, error);
        if let Some(memory) = lock(&self.idle).pop() {
            return Ok(memory);
        }
        match coming.pop_front() {
            Some(mut transfer) if coming.len() + 1 >= CHUNKS - 1 => transfer.wait(self.deadline()).map_err(failed),
            transfer => {
                transfer.into_iter().for_each(|transfer| coming.push_front(transfer));
                self.device.allocate_host(CHUNK_BYTES).map_err(failed)
            }
        }
    }

    /// Collects every rank's values on all ranks.
    pub(super) fn all_gather(&self, input: &DeviceBuffer, output: &DeviceBuffer, stream: &dyn Stream) -> Result<()> {
        let mine = self.to_host(input, stream)?;
        let memory = self.device.allocate_host(output.len_bytes());
        let mut all = memory.map_err(|error| device_error(&self.group, error))?;
        self.group.all_gather(mine.as_bytes(), all.as_bytes_mut())?;
        self.to_device(all, output, stream)
    }

    fn scattered(&self, work: &Work<'_>, op: ReduceOp) -> Result<()> {
        let failed = |error| device_error(&self.group, error);
        let mut values = self.to_host(work.input, work.stream)?;
        let view = values.view_mut(work.call.dtype).map_err(failed)?;
        self.group.all_reduce_list(&mut [view], op)?;
        let start = self.group.rank().index() * work.output.len_bytes();
        let mut part = HostBuffer::zeroed(work.output.len_bytes()).map_err(failed)?;
        part.as_bytes_mut().copy_from_slice(&values.as_bytes()[start..start + work.output.len_bytes()]);
        self.to_device(part, work.output, work.stream)
    }

    fn to_host(&self, values: &DeviceBuffer, stream: &dyn Stream) -> Result<HostBuffer> {
        let failed = |error| device_error(&self.group, error);
        let memory = self.device.allocate_host(values.len_bytes()).map_err(failed)?;
        let mut transfer = stream.copy_to_host(values, memory, 0).map_err(failed)?;
        transfer.wait(self.deadline()).map_err(failed)
    }

    fn to_device(&self, memory: HostBuffer, values: &DeviceBuffer, stream: &dyn Stream) -> Result<()> {
        stream.copy_from_host(memory, 0, values).map(drop).map_err(|error| device_error(&self.group, error))
    }

    /// Makes `later` wait for the work that `earlier` has so far.
    fn hold(&self, earlier: &dyn Stream, later: &dyn Stream) -> Result<()> {
        let order = || {
            let event = self.device.create_event()?;
            earlier.record(&*event)?;
            later.wait(&*event)
        };
        order().map_err(|error| device_error(&self.group, error))
    }

    /// Waits until this backend's streams have no copies any more. A failure of theirs ends the wait, too.
    pub(super) fn drain(&self) {
        let deadline = self.deadline();
        [&self.out, &self.back].into_iter().for_each(|stream| drop(stream.synchronize(deadline)));
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.group.options().timeout
    }
}

impl Backend for HostBackend {
    fn abort(&self, reason: &str) {
        self.group.abort(reason, FailureKind::Permanent);
    }

    fn offer(&self, _: &Work<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&self, work: &Work<'_>) -> Result<()> {
        let (dtype, op) = (work.call.dtype, work.call.built_in().unwrap_or(ReduceOp::Sum));
        match work.call.kind {
            Kind::Broadcast => self.broadcast(work.input, dtype, work.call.root.unwrap_or(Rank(0)), work.stream),
            Kind::ReduceScatter => self.scattered(work, op),
            Kind::AllGather => self.all_gather(work.input, work.output, work.stream),
            _ => self.all_reduce(work.input, dtype, op, work.stream),
        }
    }

    fn withdraw(&self) {
        self.drain();
    }
}

/// Chunks hold whole elements of every type, since their size is a multiple of all element sizes.
fn chunks(len_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len_bytes).step_by(CHUNK_BYTES).map(move |start| start..(start + CHUNK_BYTES).min(len_bytes))
}

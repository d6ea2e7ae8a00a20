//! Collectives by kernels that read and write the memory of all GPUs of a process.
//!
//! Each physical GPU reduces its part of the values, reading and writing the memory of all ranks. If it cannot access
//! another GPU's memory, the part is copied to it and back. Between processes, the first rank of each exchanges the
//! reduced values of its process through the host, and the other ranks then copy the result.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use distribute_cluster::FailureKind;
use distribute_device::cuda::{Combine, CudaDevice, CudaStream, MAX_BUFFERS};
use distribute_device::{DType, Device, DeviceBuffer, Event, Stream};

use super::super::host::HostBackend;
use super::super::{Backend, Work, device_error, missing};
use super::buffer_exchange::{BufferExchange, Offer};
use super::{cuda, own_stream};
use crate::call::Kind;
use crate::sync::lock;
use crate::{Error, ProcessGroup, Rank, ReduceOp, Result};

/// Parts begin at multiples of this, so that kernels load and store whole vectors.
const PART_ALIGN_BYTES: usize = 512;

/// One rank's part of collectives by kernels.
pub(super) struct KernelBackend {
    world: Arc<ProcessGroup>,
    /// The ranks of this process.
    here: ProcessGroup,
    /// The first ranks of all processes, on each of these ranks if there are several processes.
    leaders: Option<HostBackend>,
    device: Arc<dyn Device>,
    stream: Arc<CudaStream>,
    exchange: Arc<BufferExchange>,
    /// For each local rank, whether this rank's GPU can access its memory.
    reaches: Vec<bool>,
    /// The index and the number of the parts into which the process's GPUs divide the values; `None` if another rank on
    /// the same GPU does the work.
    part: Option<(usize, usize)>,
    /// Memory for values that are copied to this GPU.
    scratch: Mutex<Option<DeviceBuffer>>,
}

/// The reduction of a kernel.
#[derive(Clone, Copy)]
struct Reduction {
    dtype: DType,
    combine: Combine,
    divisor: u32,
}

impl KernelBackend {
    pub(super) fn new(world: &Arc<ProcessGroup>, device: &Arc<dyn Device>) -> Result<KernelBackend> {
        let process = u32::try_from(world.process()).unwrap_or(u32::MAX);
        let here = world.split(Some(process), 0)?.ok_or_else(|| missing(world))?;
        let several = world.world_size() > here.world_size();
        let leads = here.rank() == Rank(0);
        let leaders = if several { world.split(leads.then_some(0), 0)? } else { None };
        let leaders = leaders.map(Arc::new);
        let stream = Arc::new(own_stream(world, &**device)?);
        let exchange = BufferExchange::of(&here);
        leaders.iter().for_each(|leaders| exchange.introduce_leader(leaders));
        let leaders = leaders.map(|leaders| HostBackend::new(&leaders, device)).transpose()?;
        exchange.introduce(here.rank().index(), device, &stream);
        here.barrier()?;
        let devices = exchange.devices();
        let reaches = devices.iter().map(|other| device.enable_peer_access(&**other).is_ok()).collect();
        let part = part(&devices, here.rank().index());
        let (world, device, scratch) = (Arc::clone(world), Arc::clone(device), Mutex::default());
        Ok(KernelBackend { world, here, leaders, device, stream, exchange, reaches, part, scratch })
    }

    fn me(&self) -> usize {
        self.here.rank().index()
    }

    /// Does this rank's share of a call, on its own stream.
    fn work(&self, work: &Work<'_>, offers: &[Offer]) -> distribute_device::Result<()> {
        let inputs: Vec<&DeviceBuffer> = offers.iter().map(|offer| &offer.input).collect();
        let outputs: Vec<&DeviceBuffer> = offers.iter().map(|offer| &offer.output).collect();
        let reduction = self.reduction(work)?;
        let whole = 0..work.input.len_bytes();
        match work.call.kind {
            Kind::Broadcast => match self.local(work.call.root) {
                Some(root) if root == self.me() => {
                    let others: Vec<&DeviceBuffer> = others(&outputs, root).collect();
                    self.spread(&whole, inputs[root], &others, work.call.dtype)
                }
                _ => Ok(()),
            },
            Kind::AllGather => inputs.iter().enumerate().try_for_each(|(rank, input)| {
                let place = work.output.slice(rank * input.len_bytes()..(rank + 1) * input.len_bytes())?;
                self.stream.copy_peer(input, &place)
            }),
            Kind::ReduceScatter => {
                let len = work.output.len_bytes();
                let mine = self.me() * len..(self.me() + 1) * len;
                let sources = inputs.iter().map(|input| input.slice(mine.clone()));
                let sources = sources.collect::<distribute_device::Result<Vec<DeviceBuffer>>>()?;
                self.reduce_here(&sources, work.output, reduction)
            }
            _ => match self.part {
                Some((part, parts)) => self.reduce_part(&part_range(whole.end, part, parts), &outputs, reduction),
                None => Ok(()),
            },
        }
    }

    fn reduction(&self, work: &Work<'_>) -> distribute_device::Result<Reduction> {
        let combine = match work.call.built_in() {
            // Kernels sum integers in their own type, in which the sum wraps.
            Some(ReduceOp::Mean) if !work.call.dtype.is_float() => {
                let problem =
                    format!("there is no kernel for the mean of {}; use DeviceImplementation::Host", work.call.dtype);
                return Err(distribute_device::Error::Operands { operation: "reducing buffers", problem });
            }
            None | Some(ReduceOp::Sum | ReduceOp::Mean) => Combine::Sum,
            Some(ReduceOp::Product) => Combine::Product,
            Some(ReduceOp::Min) => Combine::Min,
            Some(ReduceOp::Max) => Combine::Max,
            Some(other) => {
                let problem = format!("there is no kernel for {other}; use DeviceImplementation::Host");
                return Err(distribute_device::Error::Operands { operation: "reducing buffers", problem });
            }
        };
        let divisor = match work.call.built_in() {
            Some(ReduceOp::Mean) => u32::try_from(self.world.world_size()).unwrap_or(u32::MAX),
            _ => 1,
        };
        Ok(Reduction { dtype: work.call.dtype, combine, divisor })
    }

    /// Reduces one part of all ranks' values, in place.
    fn reduce_part(
        &self,
        range: &Range<usize>,
        buffers: &[&DeviceBuffer],
        reduction: Reduction,
    ) -> distribute_device::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let mine = buffers[self.me()].slice(range.clone())?;
        let sources = buffers.iter().map(|buffer| buffer.slice(range.clone()));
        let sources = sources.collect::<distribute_device::Result<Vec<DeviceBuffer>>>()?;
        if self.reaches.iter().all(|reaches| *reaches) && buffers.len() <= MAX_BUFFERS {
            let all: Vec<&DeviceBuffer> = sources.iter().collect();
            let Reduction { dtype, combine, divisor } = reduction;
            return self.stream.reduce(combine, dtype, &all, &all, divisor);
        }
        self.reduce_here(&sources, &mine, reduction)?;
        let others: Vec<&DeviceBuffer> = others(buffers, self.me()).collect();
        self.spread(range, buffers[self.me()], &others, reduction.dtype)
    }

    /// Reduces the ranks' buffers into one of this rank's, which may be a source itself.
    fn reduce_here(
        &self,
        sources: &[DeviceBuffer],
        target: &DeviceBuffer,
        Reduction { dtype, combine, divisor }: Reduction,
    ) -> distribute_device::Result<()> {
        let len = target.len_bytes();
        let (far, slot) =
            (self.reaches.iter().filter(|reaches| !**reaches).count(), len.next_multiple_of(PART_ALIGN_BYTES));
        let in_rounds = sources.len() > MAX_BUFFERS;
        let scratch = self.scratch((far + usize::from(in_rounds)) * slot)?;
        let mut places = (0..).map(|place| scratch.slice(place * slot..place * slot + len));
        let mut near = Vec::with_capacity(sources.len());
        for (source, reaches) in sources.iter().zip(&self.reaches) {
            let copy = if *reaches { None } else { places.next().transpose()? };
            if let Some(copy) = &copy {
                self.stream.copy_peer(source, copy)?;
            }
            near.push(copy.unwrap_or_else(|| source.clone()));
        }
        let so_far = if in_rounds { places.next().transpose()? } else { None };
        let Some(so_far) = so_far else {
            let all: Vec<&DeviceBuffer> = near.iter().collect();
            return self.stream.reduce(combine, dtype, &all, &[target], divisor);
        };
        // This takes several launches. The target may be a source, so only the last launch writes it.
        let (first, rest) = near.split_at(MAX_BUFFERS);
        self.stream.reduce(combine, dtype, &first.iter().collect::<Vec<_>>(), &[&so_far], 1)?;
        let mut rounds = rest.chunks(MAX_BUFFERS - 1).peekable();
        while let Some(round) = rounds.next() {
            let all: Vec<&DeviceBuffer> = [&so_far].into_iter().chain(round).collect();
            let (to, divisor) = if rounds.peek().is_none() { (target, divisor) } else { (&so_far, 1) };
            self.stream.reduce(combine, dtype, &all, &[to], divisor)?;
        }
        Ok(())
    }

    /// Copies a range of one rank's buffer into the same range of others.
    fn spread(
        &self,
        range: &Range<usize>,
        from: &DeviceBuffer,
        to: &[&DeviceBuffer],
        dtype: DType,
    ) -> distribute_device::Result<()> {
        let from = from.slice(range.clone())?;
        let to = to.iter().map(|buffer| buffer.slice(range.clone()));
        let to = to.collect::<distribute_device::Result<Vec<DeviceBuffer>>>()?;
        if self.reaches.iter().all(|reaches| *reaches) {
            // One launch reads the values once for several ranks.
            let all: Vec<&DeviceBuffer> = to.iter().collect();
            return all
                .chunks(MAX_BUFFERS)
                .try_for_each(|some| self.stream.reduce(Combine::Sum, dtype, &[&from], some, 1));
        }
        to.iter().try_for_each(|buffer| self.stream.copy_peer(&from, buffer))
    }

    fn scratch(&self, len_bytes: usize) -> distribute_device::Result<DeviceBuffer> {
        let mut scratch = lock(&self.scratch);
        match &*scratch {
            Some(scratch) if scratch.len_bytes() >= len_bytes => Ok(scratch.clone()),
            _ => Ok(scratch.insert(self.device.allocate(len_bytes)?).clone()),
        }
    }

    /// Enqueues this rank's share of a call on its own stream, and returns the event after it.
    fn enqueue(&self, work: &Work<'_>) -> Result<Arc<dyn Event>> {
        let failed = |error| device_error(&self.world, error);
        let offers = self.exchange.offers(work.call.sequence);
        offers.iter().try_for_each(|offer| self.stream.wait(&*offer.ready)).map_err(failed)?;
        match &self.leaders {
            Some(leaders) => self.across(leaders, work, &offers)?,
            None if self.world.world_size() > self.here.world_size() => {}
            None => self.work(work, &offers).map_err(failed)?,
        }
        let done = self.device.create_event().map_err(failed)?;
        self.stream.record(&*done).map_err(failed)?;
        Ok(done)
    }

    /// Returns the error of a rank whose call was made when one of another rank of the process had failed.
    fn refusal(&self) -> Error {
        let cause = "a call of another rank of this process has failed";
        let aborted = || {
            Error::aborted(self.world.name(), self.world.rank_name(self.world.rank()), cause, FailureKind::Permanent)
        };
        self.world.failure().unwrap_or_else(aborted)
    }

    /// Returns the local index of a rank of the group.
    fn local(&self, rank: Option<Rank>) -> Option<usize> {
        let first = self.world.process() * self.here.world_size();
        rank?.index().checked_sub(first).filter(|local| *local < self.here.world_size())
    }

    /// Does the leader's share of a call between processes; the other ranks of its process only offer their buffers.
    fn across(&self, leaders: &HostBackend, work: &Work<'_>, offers: &[Offer]) -> Result<()> {
        let failed = |error| device_error(&self.world, error);
        // The mean of the processes' means, since each has the same number of ranks; sums might overflow the data type.
        let whole = self.reduction(work).map_err(failed)?;
        let divisor = if whole.divisor == 1 { 1 } else { u32::try_from(offers.len()).unwrap_or(u32::MAX) };
        let reduction = Reduction { divisor, ..whole };
        let inputs: Vec<DeviceBuffer> = offers.iter().map(|offer| offer.input.clone()).collect();
        let outputs: Vec<&DeviceBuffer> = offers.iter().map(|offer| &offer.output).collect();
        let dtype = work.call.dtype;
        match work.call.kind {
            Kind::Broadcast => {
                let root = work.call.root.unwrap_or(Rank(0));
                if let Some(root) = self.local(Some(root)).filter(|root| *root != 0) {
                    self.stream.copy_peer(&inputs[root], work.output).map_err(failed)?;
                }
                let process = Rank::of(root.index() / self.here.world_size());
                leaders.broadcast(work.output, dtype, process, &*self.stream)?;
                self.spread(&(0..work.output.len_bytes()), work.output, &outputs[1..], dtype).map_err(failed)
            }
            Kind::AllGather => {
                let len = work.input.len_bytes();
                let all = self.device.allocate(inputs.len() * len).map_err(failed)?;
                for (local, input) in inputs.iter().enumerate() {
                    let place = all.slice(local * len..(local + 1) * len).map_err(failed)?;
                    self.stream.copy_peer(input, &place).map_err(failed)?;
                }
                leaders.all_gather(&all, work.output, &*self.stream)?;
                self.spread(&(0..work.output.len_bytes()), work.output, &outputs[1..], dtype).map_err(failed)
            }
            Kind::ReduceScatter => {
                let sum = self.device.allocate(work.input.len_bytes()).map_err(failed)?;
                self.reduce_here(&inputs, &sum, reduction).map_err(failed)?;
                leaders.all_reduce(&sum, dtype, work.call.built_in().unwrap_or(ReduceOp::Sum), &*self.stream)?;
                let (len, first) = (work.output.len_bytes(), self.world.process() * outputs.len());
                outputs.iter().enumerate().try_for_each(|(local, output)| {
                    let part = sum.slice((first + local) * len..(first + local + 1) * len).map_err(failed)?;
                    self.stream.copy_peer(&part, output).map_err(failed)
                })
            }
            _ => {
                self.reduce_here(&inputs, work.output, reduction).map_err(failed)?;
                leaders.all_reduce(work.output, dtype, work.call.built_in().unwrap_or(ReduceOp::Sum), &*self.stream)?;
                self.spread(&(0..work.output.len_bytes()), work.output, &outputs[1..], dtype).map_err(failed)
            }
        }
    }
}

impl Backend for KernelBackend {
    fn abort(&self, reason: &str) {
        self.here.abort(reason, FailureKind::Permanent);
        // Also if this rank does not lead: its process's leader may be waiting for those of other processes.
        self.exchange.leader().iter().for_each(|leader| leader.abort(reason, FailureKind::Permanent));
    }

    fn offer(&self, work: &Work<'_>) -> Result<()> {
        let ready = || {
            let ready = self.device.create_event()?;
            work.stream.record(&*ready)?;
            Ok(ready)
        };
        let ready = ready().map_err(|error| device_error(&self.world, error))?;
        let (input, output) = (work.input.clone(), work.output.clone());
        self.exchange.offer(work.call.sequence, self.me(), Offer { input, output, ready });
        Ok(())
    }

    fn run(&self, work: &Work<'_>) -> Result<()> {
        let failed = |error| device_error(&self.world, error);
        let call = work.call.sequence;
        let done = self.exchange.enqueuing(|| self.enqueue(work)).unwrap_or_else(|| Err(self.refusal()))?;
        self.exchange.finish(call, self.me(), done);
        self.here.barrier()?;
        self.exchange.ends(call, self.me()).iter().try_for_each(|end| work.stream.wait(&**end)).map_err(failed)
    }

    /// The other ranks of the process may have work on this rank's memory, too.
    fn withdraw(&self) {
        let timeout = self.world.options().timeout;
        let streams = self.exchange.close(timeout);
        // Waiting for the other ranks may have taken as long as it may.
        let deadline = Instant::now() + timeout;
        for stream in streams {
            // A failure of the stream ends the wait, too.
            let _ = stream.synchronize(deadline);
        }
        self.leaders.iter().for_each(HostBackend::drain);
        // The streams of other GPUs have made their contexts current.
        let _ = cuda(&*self.device).map(CudaDevice::make_current);
    }
}

fn others<'a>(buffers: &[&'a DeviceBuffer], own: usize) -> impl Iterator<Item = &'a DeviceBuffer> {
    buffers.iter().enumerate().filter(move |(rank, _)| *rank != own).map(|(_, buffer)| *buffer)
}

/// Returns the part that a rank works on: the first rank on each physical GPU does the work of that GPU.
fn part(devices: &[Arc<dyn Device>], rank: usize) -> Option<(usize, usize)> {
    let on = |device: &Arc<dyn Device>| device.logical().physical().index;
    let mut gpus: Vec<(u32, usize)> = Vec::new();
    for (rank, device) in devices.iter().enumerate() {
        if !gpus.iter().any(|(gpu, _)| *gpu == on(device)) {
            gpus.push((on(device), rank));
        }
    }
    gpus.iter().position(|(_, first)| *first == rank).map(|part| (part, gpus.len()))
}

/// Returns the byte range of a part.
fn part_range(len_bytes: usize, part: usize, parts: usize) -> Range<usize> {
    let each = len_bytes.div_ceil(parts).next_multiple_of(PART_ALIGN_BYTES);
    (part * each).min(len_bytes)..((part + 1) * each).min(len_bytes)
}

//! Streams of logical CPUs: a thread that takes operations from a bounded queue.
//!
//! Waits cannot form a cycle: an operation waits only for recordings that were enqueued before it, on any stream.

use std::any::Any;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};

use super::CpuOptions;
use super::event::{Completion, CpuEvent, Failure, Finisher, Outcome};
use super::memory::Region;
use crate::host_buffer::byte_range;
use crate::host_fn;
use crate::{DeviceBuffer, DeviceSpec, Error, Event, HostBuffer, HostFn, HostSlot, Result, Stream, Transfer};

/// How long dropping a stream waits for its operations; after that they continue in the background.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct CpuStream {
    device: DeviceSpec,
    name: Arc<str>,
    options: CpuOptions,
    /// `Some` until drop.
    queue: Option<Sender<Operation>>,
    /// `Some` until drop.
    worker: Option<JoinHandle<()>>,
    /// Disconnected when the worker is about to end.
    ended: Receiver<()>,
}

enum Operation {
    FromHost { source: HostSlot, offset_bytes: usize, destination: Region, finisher: Finisher },
    ToHost { source: Region, destination: HostSlot, offset_bytes: usize, finisher: Finisher },
    Copy { source: Region, destination: Region },
    Fill { destination: Region, byte: u8 },
    Host(HostFn),
    Record(Finisher),
    Wait { completion: Arc<Completion>, owner: String },
}

impl CpuStream {
    pub(super) fn start(device: DeviceSpec, number: u32, options: CpuOptions) -> Result<CpuStream> {
        let name: Arc<str> = format!("stream {number} of {}", device.short()).into();
        let (queue, operations) = bounded(options.queue_len.max(1));
        let (alive, ended) = bounded::<()>(0);
        let mut worker = Worker { name: Arc::clone(&name), timeout: options.timeout, failure: None };
        let worker = thread::Builder::new()
            // Linux shows the first 15 characters of it.
            .name(format!("{}/stream{number}", device.short()))
            .spawn(move || {
                let _alive = alive;
                operations.iter().for_each(|operation| worker.run(operation));
            })
            .map_err(|source| Error::Thread { stream: name.to_string(), source })?;
        Ok(CpuStream { device, name, options, queue: Some(queue), worker: Some(worker), ended })
    }

    fn enqueue(&self, operation: Operation) -> Result<()> {
        self.enqueue_until(operation, deadline_after(self.options.timeout))
    }

    fn enqueue_until(&self, operation: Operation, deadline: Instant) -> Result<()> {
        let started = Instant::now();
        let what = operation.name();
        let queue = self.queue.as_ref().ok_or(Error::Dropped)?;
        queue.send_deadline(operation, deadline).map_err(|error| match error {
            SendTimeoutError::Timeout(_) => self.late(format!("enqueuing {what} on {}", self.name), started),
            SendTimeoutError::Disconnected(_) => Error::Dropped,
        })
    }

    fn late(&self, operation: String, started: Instant) -> Error {
        let queued = self.queue.as_ref().map_or(0, Sender::len);
        let state = format!("{queued} operations are queued behind the running one");
        Error::Deadline { operation, waited: started.elapsed(), state }
    }

    /// Returns the region of a buffer, which must belong to this device.
    fn own(&self, buffer: &DeviceBuffer) -> Result<Region> {
        let region = Region::of(buffer, &self.name)?;
        if buffer.device() == &self.device {
            return Ok(region);
        }
        Err(self.foreign("buffer", buffer.device(), "use copy_peer, or a stream of its device"))
    }

    fn event<'a>(&self, event: &'a dyn Event) -> Result<&'a CpuEvent> {
        let any: &dyn Any = event;
        any.downcast_ref().ok_or_else(|| {
            self.foreign("event", event.device(), "wait for it on the host, or use an event of this device")
        })
    }

    fn foreign(&self, what: &'static str, owner: &DeviceSpec, remedy: &'static str) -> Error {
        Error::Foreign { what, owner: owner.to_string(), user: self.name.to_string(), remedy }
    }

    fn transfer(&self, buffer: HostBuffer, operation: &'static str) -> (Finisher, HostSlot, Transfer) {
        let (finisher, completion) = Finisher::new(Arc::clone(&self.name), operation);
        let slot = HostSlot::new(buffer);
        let ended = Arc::new(CpuEvent::recorded(self.device.clone(), completion));
        (finisher, slot.clone(), Transfer::new(ended, slot))
    }
}

impl Stream for CpuStream {
    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn copy_from_host(&self, source: HostBuffer, offset_bytes: usize, destination: &DeviceBuffer) -> Result<Transfer> {
        let destination = self.own(destination)?;
        byte_range("host buffer (the source)", offset_bytes, destination.len_bytes(), source.len_bytes())?;
        let (finisher, source, transfer) = self.transfer(source, FROM_HOST);
        self.enqueue(Operation::FromHost { source, offset_bytes, destination, finisher })?;
        Ok(transfer)
    }

    fn copy_to_host(&self, source: &DeviceBuffer, destination: HostBuffer, offset_bytes: usize) -> Result<Transfer> {
        let source = self.own(source)?;
        byte_range("host buffer (the destination)", offset_bytes, source.len_bytes(), destination.len_bytes())?;
        let (finisher, destination, transfer) = self.transfer(destination, TO_HOST);
        self.enqueue(Operation::ToHost { source, destination, offset_bytes, finisher })?;
        Ok(transfer)
    }

    fn copy(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()> {
        let (source, destination) = (self.own(source)?, self.own(destination)?);
        check_lengths(&source, &destination)?;
        self.enqueue(Operation::Copy { source, destination })
    }

    fn copy_peer(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()> {
        let regions = (Region::of(source, &self.name)?, Region::of(destination, &self.name)?);
        if source.device() != &self.device && destination.device() != &self.device {
            return Err(self.foreign("buffer", source.device(), "use a stream of one of the two devices"));
        }
        let (source, destination) = regions;
        check_lengths(&source, &destination)?;
        self.enqueue(Operation::Copy { source, destination })
    }

    fn fill(&self, destination: &DeviceBuffer, byte: u8) -> Result<()> {
        let destination = self.own(destination)?;
        self.enqueue(Operation::Fill { destination, byte })
    }

    fn launch_host(&self, function: HostFn) -> Result<()> {
        self.enqueue(Operation::Host(function))
    }

    fn record(&self, event: &dyn Event) -> Result<()> {
        let event = self.event(event)?;
        let (finisher, completion) = Finisher::new(Arc::clone(&self.name), RECORD);
        self.enqueue(Operation::Record(finisher))?;
        event.replace(completion);
        Ok(())
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        let owner = event.device().short();
        match self.event(event)?.current() {
            Some(completion) => self.enqueue(Operation::Wait { completion, owner }),
            None => Ok(()),
        }
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        let started = Instant::now();
        let (finisher, completion) = Finisher::new(Arc::clone(&self.name), RECORD);
        self.enqueue_until(Operation::Record(finisher), deadline)?;
        let outcome =
            completion.wait(deadline).ok_or_else(|| self.late(format!("synchronizing {}", self.name), started))?;
        Ok(outcome?)
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        drop(self.queue.take());
        let Some(worker) = self.worker.take() else {
            return;
        };
        // A host function may drop the last handle to its own stream.
        let own_thread = worker.thread().id() == thread::current().id();
        if !own_thread && self.ended.recv_timeout(DROP_TIMEOUT) == Err(RecvTimeoutError::Disconnected) {
            // The worker does not panic, since host functions are caught, and a drop could not report it.
            let _ = worker.join();
        }
    }
}

impl Operation {
    fn name(&self) -> &'static str {
        match self {
            Operation::FromHost { .. } => FROM_HOST,
            Operation::ToHost { .. } => TO_HOST,
            Operation::Copy { .. } => "a copy between device buffers",
            Operation::Fill { .. } => "a fill",
            Operation::Host(_) => "a host function",
            Operation::Record(_) => RECORD,
            Operation::Wait { .. } => "a wait for an event",
        }
    }
}

const FROM_HOST: &str = "a copy from the host";
const TO_HOST: &str = "a copy to the host";
const RECORD: &str = "the record of an event";

/// The thread's side of a stream.
struct Worker {
    name: Arc<str>,
    timeout: Duration,
    failure: Option<Failure>,
}

impl Worker {
    fn run(&mut self, operation: Operation) {
        let name = operation.name();
        if self.failure.is_none() {
            if let Err(error) = self.attempt(operation) {
                self.failure =
                    Some(Failure { stream: Arc::clone(&self.name), operation: name, source: Arc::new(error) });
            }
            return;
        }
        if let Operation::FromHost { finisher, .. } | Operation::ToHost { finisher, .. } | Operation::Record(finisher) =
            operation
        {
            finisher.finish(self.outcome());
        }
    }

    fn attempt(&self, operation: Operation) -> Result<()> {
        match operation {
            Operation::FromHost { source, offset_bytes, destination, finisher } => {
                let len_bytes = destination.len_bytes();
                // The slot is full: the transfer empties it only after the finisher.
                source.with(|host| {
                    let bytes = &host.as_bytes()[offset_bytes..][..len_bytes];
                    destination.with(|device| device.copy_from_slice(bytes));
                });
                drop(destination);
                finisher.finish(Ok(()));
            }
            Operation::ToHost { source, destination, offset_bytes, finisher } => {
                let len_bytes = source.len_bytes();
                destination.with(|host| {
                    let bytes = &mut host.as_bytes_mut()[offset_bytes..][..len_bytes];
                    source.with(|device| bytes.copy_from_slice(device));
                });
                drop(source);
                finisher.finish(Ok(()));
            }
            Operation::Copy { source, destination } => source.copy_to(&destination),
            Operation::Fill { destination, byte } => destination.with(|device| device.fill(byte)),
            Operation::Host(function) => return host_fn::call(function),
            Operation::Record(finisher) => finisher.finish(Ok(())),
            Operation::Wait { completion, owner } => {
                let outcome = completion.wait(deadline_after(self.timeout)).ok_or_else(|| Error::Deadline {
                    operation: format!("{}: waiting for an event of {owner}", self.name),
                    waited: self.timeout,
                    state: "the stream that recorded it has not come to it".to_owned(),
                })?;
                outcome?;
            }
        }
        Ok(())
    }

    fn outcome(&self) -> Outcome {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

/// Returns the instant after `timeout`, or a distant one if the clock cannot represent it.
fn deadline_after(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + Duration::from_secs(u64::from(u32::MAX)))
}

fn check_lengths(source: &Region, destination: &Region) -> Result<()> {
    let (source_bytes, destination_bytes) = (source.len_bytes(), destination.len_bytes());
    if source_bytes == destination_bytes { Ok(()) } else { Err(Error::CopyLength { source_bytes, destination_bytes }) }
}

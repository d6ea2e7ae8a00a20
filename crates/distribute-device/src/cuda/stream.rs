//! Streams of GPUs.

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{DriverError, result, sys};

use super::event::{CudaEvent, Mark, Recorded};
use super::failure::Failures;
use super::gpu::Gpu;
use super::memory::{CudaMemory, Pool};
use super::raw_stream::RawStream;
use crate::device::DeviceMemory as _;
use crate::host_buffer::byte_range;
use crate::host_fn;
use crate::mutex::Mutex;
use crate::{DeviceBuffer, DeviceSpec, Error, Event, HostBuffer, HostFn, HostSlot, Result, Stream, Transfer};

/// How long dropping a stream waits for the copies that still use host buffers.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

/// A stream of a GPU: [`Stream`], and arithmetic on device memory in its order.
///
/// Enqueuing does not block, except that the driver blocks callers once about a thousand operations are queued. After a
/// host function fails, later host functions do not run, as [`Stream`] documents; other operations enqueued after it do
/// run, but events and waits after it return the failure.
#[derive(Debug)]
pub struct CudaStream {
    device: DeviceSpec,
    name: Arc<str>,
    raw: Arc<RawStream>,
    pool: Arc<Pool>,
    failures: Arc<Failures>,
    /// Host buffers of copies in flight, in the order in which the copies end.
    in_flight: Mutex<VecDeque<(Mark, HostSlot)>>,
}

/// Device memory that an operation uses.
pub(super) struct MemoryRange<'a> {
    pub(super) memory: &'a CudaMemory,
    pub(super) pointer: sys::CUdeviceptr,
    pub(super) len_bytes: usize,
}

impl<'a> MemoryRange<'a> {
    /// Returns a whole allocation.
    pub(super) fn whole(memory: &'a CudaMemory) -> MemoryRange<'a> {
        MemoryRange { memory, pointer: memory.pointer, len_bytes: memory.len_bytes() }
    }
}

struct HostCall {
    function: HostFn,
    number: u64,
    failures: Arc<Failures>,
}

impl CudaStream {
    pub(super) fn new(device: DeviceSpec, name: String, raw: RawStream, pool: Arc<Pool>) -> CudaStream {
        let name: Arc<str> = name.into();
        let failures = Failures::new(Arc::clone(&name));
        CudaStream { device, name, raw: Arc::new(raw), pool, failures, in_flight: Mutex::default() }
    }

    /// Returns the driver's handle (`CUstream`, `cudaStream_t`), for libraries that enqueue operations themselves.
    pub fn handle(&self) -> *mut c_void {
        self.raw.handle().cast()
    }

    /// Returns the address of a buffer on which code outside of this crate has enqueued work in this stream, and
    /// records that use, so that the memory is not freed before the work has ended.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the memory is not on a GPU.
    pub fn address_for_use(&self, buffer: &DeviceBuffer) -> Result<u64> {
        let place = self.any(buffer)?;
        self.failures.number();
        place.memory.used_by(&self.raw);
        Ok(place.pointer)
    }

    /// Records a timestamp after all operations enqueued so far.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a driver call fails.
    ///
    /// # Source
    /// `cuEventRecord` of an event with timing.
    pub fn time(&self) -> Result<Timestamp> {
        self.gpu().bind()?;
        Ok(Timestamp(Mark::timed(self.gpu(), &self.raw)?))
    }

    /// Marks an event as failed, for work that code outside of this crate did in this stream: waiting for the event, or
    /// for anything after it, returns [`Error::Stream`]. An event of another stream is ignored.
    pub fn fail(&self, event: &dyn Event, operation: &'static str, cause: &str) {
        let any: &dyn Any = event;
        if let Some(Recorded { place, .. }) = any.downcast_ref::<CudaEvent>().and_then(CudaEvent::current) {
            let (device, cause) = (self.device.short(), cause.to_owned());
            self.failures.fail_at(&place, operation, Error::Cuda { operation, device, cause });
        }
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        self.raw.gpu()
    }

    /// Returns the memory of a buffer on any GPU.
    pub(super) fn any<'a>(&self, buffer: &'a DeviceBuffer) -> Result<MemoryRange<'a>> {
        let memory: &dyn Any = buffer.memory();
        let Some(memory) = memory.downcast_ref::<CudaMemory>() else {
            let remedy = "copy through host memory with a stream of the buffer's device";
            return Err(self.foreign("buffer", buffer.device(), remedy));
        };
        Ok(MemoryRange { memory, pointer: memory.pointer + buffer.range().start as u64, len_bytes: buffer.len_bytes() })
    }

    /// Returns the memory of a buffer on this stream's logical device.
    pub(super) fn own<'a>(&self, buffer: &'a DeviceBuffer) -> Result<MemoryRange<'a>> {
        let place = self.any(buffer)?;
        if buffer.device() == &self.device {
            return Ok(place);
        }
        Err(self.foreign("buffer", buffer.device(), "use copy_peer, or a stream of its device"))
    }

    /// Allocates memory for intermediate results of operations in this stream.
    pub(super) fn scratch(&self, len_bytes: usize) -> Result<CudaMemory> {
        self.pool.allocate(self.device.clone(), len_bytes)
    }

    pub(super) fn foreign(&self, what: &'static str, owner: &DeviceSpec, remedy: &'static str) -> Error {
        Error::Foreign { what, owner: owner.to_string(), user: self.name.to_string(), remedy }
    }

    /// Enqueues an operation that uses the given memory.
    pub(super) fn enqueue(
        &self,
        operation: &'static str,
        places: &[&MemoryRange<'_>],
        call: impl FnOnce(sys::CUstream) -> Result<(), DriverError>,
    ) -> Result<()> {
        self.gpu().bind()?;
        self.failures.number();
        call(self.raw.handle()).map_err(|error| self.gpu().failed(operation, error))?;
        places.iter().for_each(|place| place.memory.used_by(&self.raw));
        Ok(())
    }

    fn recorded(&self) -> Result<Recorded> {
        self.gpu().bind()?;
        let place = self.failures.here();
        Ok(Recorded { mark: Mark::record(self.gpu(), &self.raw)?, place })
    }

    /// Releases the host buffers of copies that have ended.
    fn release_finished(&self, in_flight: &mut VecDeque<(Mark, HostSlot)>) {
        while in_flight.front().is_some_and(|(mark, _)| mark.is_reached().unwrap_or(true)) {
            in_flight.pop_front();
        }
    }

    /// Keeps a host buffer until the copy that was just enqueued has ended; for good if the driver cannot say when.
    fn transfer(&self, slot: HostSlot) -> Result<Transfer> {
        let recorded = match self.recorded() {
            Ok(recorded) => recorded,
            Err(error) => {
                // The copy may still use the buffer, so it is leaked.
                std::mem::forget(slot);
                return Err(error);
            }
        };
        let mut in_flight = self.in_flight.lock();
        self.release_finished(&mut in_flight);
        in_flight.push_back((recorded.mark.clone(), slot.clone()));
        Ok(Transfer::new(Arc::new(CudaEvent::recorded(self.device.clone(), recorded)), slot))
    }
}

/// The time at which a GPU reached a point in a stream.
#[derive(Clone, Debug)]
pub struct Timestamp(Mark);

impl Timestamp {
    /// Returns the time from this timestamp to a later one.
    ///
    /// # Errors
    /// [`Error::Deadline`] if the later timestamp is not reached before `deadline`, [`Error::Cuda`] if a driver call
    /// fails.
    ///
    /// # Source
    /// `cuEventElapsedTime`, with a resolution of about half a microsecond.
    pub fn until(&self, later: &Timestamp, deadline: Instant) -> Result<Duration> {
        later.0.wait(deadline, || "timing operations of a GPU".to_owned())?;
        self.0.until(&later.0)
    }
}

impl Stream for CudaStream {
    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn copy_from_host(&self, source: HostBuffer, offset_bytes: usize, destination: &DeviceBuffer) -> Result<Transfer> {
        let to = self.own(destination)?;
        let range = byte_range("host buffer (the source)", offset_bytes, to.len_bytes, source.len_bytes())?;
        let slot = HostSlot::new(source);
        let copied = slot.with(|source| {
            self.enqueue("a copy from the host", &[&to], |stream| {
                let bytes = &source.as_bytes()[range];
                if bytes.is_empty() {
                    return Ok(());
                }
                // SAFETY: both ends have the same length and live until the copy has ended: the slot, which `transfer`
                // keeps in every case, holds the source, and `enqueue` the destination.
                unsafe { result::memcpy_htod_async(to.pointer, bytes, stream) }
            })
        });
        copied.unwrap_or(Err(Error::TransferTaken))?;
        self.transfer(slot)
    }

    fn copy_to_host(&self, source: &DeviceBuffer, destination: HostBuffer, offset_bytes: usize) -> Result<Transfer> {
        let from = self.own(source)?;
        let range = byte_range("host buffer (the destination)", offset_bytes, from.len_bytes, destination.len_bytes())?;
        let slot = HostSlot::new(destination);
        let copied = slot.with(|destination| {
            self.enqueue("a copy to the host", &[&from], |stream| {
                let bytes = &mut destination.as_bytes_mut()[range];
                if bytes.is_empty() {
                    return Ok(());
                }
                // SAFETY: both ends have the same length and live until the copy has ended: `enqueue` holds the source,
                // and the slot, which `transfer` keeps in every case, the destination. Nothing reads its buffer before.
                unsafe { result::memcpy_dtoh_async(bytes, from.pointer, stream) }
            })
        });
        copied.unwrap_or(Err(Error::TransferTaken))?;
        self.transfer(slot)
    }

    fn copy(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()> {
        let (from, to) = (self.own(source)?, self.own(destination)?);
        same_length(&from, &to)?;
        let bytes = from.len_bytes;
        if bytes == 0 || from.pointer == to.pointer {
            return Ok(());
        }
        let copy = |to: u64, from: u64| {
            // SAFETY: both ranges are inside allocations that live until the copy has ended.
            move |stream| unsafe { result::memcpy_dtod_async(to, from, bytes, stream) }
        };
        if from.pointer.abs_diff(to.pointer) >= bytes as u64 {
            return self.enqueue("a copy", &[&from, &to], copy(to.pointer, from.pointer));
        }
        // The driver does not define overlapping copies.
        let between = self.pool.allocate(self.device.clone(), bytes)?;
        self.enqueue("a copy", &[&from], copy(between.pointer, from.pointer))?;
        between.used_by(&self.raw);
        self.enqueue("a copy", &[&to], copy(to.pointer, between.pointer))
    }

    fn copy_peer(&self, source: &DeviceBuffer, destination: &DeviceBuffer) -> Result<()> {
        let (from, to) = (self.any(source)?, self.any(destination)?);
        if source.device() != &self.device && destination.device() != &self.device {
            return Err(self.foreign("buffer", source.device(), "use a stream of one of the two devices"));
        }
        if source.device() == destination.device() {
            return self.copy(source, destination);
        }
        same_length(&from, &to)?;
        let bytes = from.len_bytes;
        if bytes == 0 {
            return Ok(());
        }
        let contexts = (from.memory.gpu.context.cu_ctx(), to.memory.gpu.context.cu_ctx());
        let within_one_gpu = Arc::ptr_eq(&from.memory.gpu, &to.memory.gpu);
        self.enqueue("a copy between devices", &[&from, &to], |stream| {
            if within_one_gpu {
                // SAFETY: two allocations of one context, of the same length, which live until the copy has ended.
                return unsafe { result::memcpy_dtod_async(to.pointer, from.pointer, bytes, stream) };
            }
            // SAFETY: two allocations, each of its own context, of the same length, which live until the copy has
            // ended.
            unsafe { result::memcpy_peer_async(contexts.1, to.pointer, contexts.0, from.pointer, bytes, stream) }
        })
    }

    fn fill(&self, destination: &DeviceBuffer, byte: u8) -> Result<()> {
        let to = self.own(destination)?;
        if to.len_bytes == 0 {
            return Ok(());
        }
        self.enqueue("a fill", &[&to], |stream| {
            // SAFETY: the range is inside an allocation that lives until the fill has ended.
            unsafe { result::memset_d8_async(to.pointer, byte, to.len_bytes, stream) }
        })
    }

    fn launch_host(&self, function: HostFn) -> Result<()> {
        self.gpu().bind()?;
        let number = self.failures.number();
        let call = Box::into_raw(Box::new(HostCall { function, number, failures: Arc::clone(&self.failures) }));
        // SAFETY: `run_host` takes the box back, once; if it is not enqueued, it is taken back here.
        let launched = unsafe { result::stream::launch_host_function(self.raw.handle(), run_host, call.cast()) };
        launched.map_err(|error| {
            // SAFETY: the driver refused it, so this is the only owner of the box.
            drop(unsafe { Box::from_raw(call) });
            self.gpu().failed("a host function", error)
        })
    }

    fn record(&self, event: &dyn Event) -> Result<()> {
        let any: &dyn Any = event;
        match any.downcast_ref::<CudaEvent>() {
            Some(event) if Arc::ptr_eq(event.gpu(), self.gpu()) => {
                event.replace(self.recorded()?);
                Ok(())
            }
            _ => Err(self.foreign("event", event.device(), "record an event of this stream's GPU")),
        }
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        let any: &dyn Any = event;
        let Some(event) = any.downcast_ref::<CudaEvent>() else {
            return Err(self.foreign("event", event.device(), "wait for it on the host, or use an event of a GPU"));
        };
        let Some(Recorded { mark, place }) = event.current() else { return Ok(()) };
        mark.hold(&self.raw)?;
        self.failures.awaits(place);
        Ok(())
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        let recorded = self.recorded()?;
        let place = recorded.place.clone();
        let event = CudaEvent::recorded(self.device.clone(), recorded);
        event.wait(deadline).map_err(|error| match error {
            Error::Deadline { waited, .. } => Error::Deadline {
                operation: format!("synchronizing {}", self.name),
                waited,
                state: "the GPU has not come to its end".to_owned(),
            },
            error => error,
        })?;
        Failures::settle(&place);
        self.release_finished(&mut self.in_flight.lock());
        Ok(())
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_TIMEOUT;
        let in_flight = std::mem::take(&mut *self.in_flight.lock());
        for (mark, slot) in in_flight {
            let slot_is_empty = slot.with(|_| ()).is_none();
            if !slot_is_empty && matches!(mark.wait(deadline, String::new), Err(Error::Deadline { .. })) {
                // The GPU may still write to the buffer, so it is leaked.
                std::mem::forget(slot);
            }
        }
    }
}

/// Runs a host function; the driver calls it in the stream's order.
unsafe extern "C" fn run_host(call: *mut c_void) {
    // SAFETY: `launch_host` made the box and gave up its ownership.
    let call = unsafe { Box::from_raw(call.cast::<HostCall>()) };
    let HostCall { function, number, failures } = *call;
    if Failures::before(&failures.place(number)).is_some() {
        return;
    }
    if let Err(error) = host_fn::call(function) {
        failures.fail(number, "a host function", error);
    }
}

pub(super) fn same_length(source: &MemoryRange<'_>, destination: &MemoryRange<'_>) -> Result<()> {
    let (source_bytes, destination_bytes) = (source.len_bytes, destination.len_bytes);
    if source_bytes == destination_bytes {
        return Ok(());
    }
    Err(Error::CopyLength { source_bytes, destination_bytes })
}

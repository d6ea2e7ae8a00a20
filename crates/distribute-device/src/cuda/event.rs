//! Events of GPUs.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent as RawEvent, sys};

use super::failure::{Failures, StreamPosition};
use super::gpu::Gpu;
use super::raw_stream::RawStream;
use crate::mutex::Mutex;
use crate::{DeviceSpec, Error, Event, Result};

/// How long a wait polls without sleeping: most waits are shorter than a sleep.
const SPIN: Duration = Duration::from_micros(50);

/// The longest sleep between two polls.
const NAP: Duration = Duration::from_micros(200);

/// The driver version that introduced the function by which the bindings read times; they panic without it.
const TIMING_SINCE: (u32, u32) = (12, 8);

/// An event of a GPU.
#[derive(Debug)]
pub(super) struct CudaEvent {
    device: DeviceSpec,
    gpu: Arc<Gpu>,
    current: Mutex<Option<Recorded>>,
}

/// The state that an event was recorded with.
#[derive(Clone, Debug)]
pub(super) struct Recorded {
    pub(super) mark: Mark,
    pub(super) place: StreamPosition,
}

/// A point in a stream, as a driver event.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    gpu: Arc<Gpu>,
    event: Arc<RawEvent>,
}

impl Mark {
    /// Records a mark after all operations enqueued so far.
    pub(super) fn record(gpu: &Arc<Gpu>, stream: &RawStream) -> Result<Mark> {
        Mark::with_flags(gpu, stream, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Records a mark that also stores the time at which it is reached.
    pub(super) fn timed(gpu: &Arc<Gpu>, stream: &RawStream) -> Result<Mark> {
        Mark::with_flags(gpu, stream, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(gpu: &Arc<Gpu>, stream: &RawStream, flags: sys::CUevent_flags) -> Result<Mark> {
        let event = gpu.context.new_event(Some(flags)).map_err(|error| gpu.failed("making an event", error))?;
        let mark = Mark { gpu: Arc::clone(gpu), event: Arc::new(event) };
        // SAFETY: event and stream live, and belong to this context.
        let recorded = unsafe { cudarc::driver::result::event::record(mark.event.cu_event(), stream.handle()) };
        recorded.map_err(|error| gpu.failed("recording an event", error))?;
        Ok(mark)
    }

    /// Makes operations enqueued from now on wait for this mark.
    pub(super) fn hold(&self, stream: &RawStream) -> Result<()> {
        stream.gpu().bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream live.
        let held = unsafe { cudarc::driver::result::stream::wait_event(stream.handle(), self.event.cu_event(), flags) };
        held.map_err(|error| self.gpu.failed("making a stream wait for an event", error))
    }

    pub(super) fn is_reached(&self) -> Result<bool> {
        self.gpu.bind()?;
        self.event.try_is_complete().map_err(|error| self.gpu.failed("running what was enqueued", error))
    }

    /// Waits on the host.
    pub(super) fn wait(&self, deadline: Instant, operation: impl FnOnce() -> String) -> Result<()> {
        let started = Instant::now();
        let mut nap = Duration::from_micros(5);
        while !self.is_reached()? {
            let now = Instant::now();
            if now >= deadline {
                let state = "the GPU has not come to it".to_owned();
                return Err(Error::Deadline { operation: operation(), waited: started.elapsed(), state });
            }
            if now - started < SPIN {
                std::hint::spin_loop();
            } else {
                thread::sleep(nap.min(deadline - now));
                nap = (nap * 2).min(NAP);
            }
        }
        Ok(())
    }

    /// Returns the time from this mark to a later one.
    pub(super) fn until(&self, later: &Mark) -> Result<Duration> {
        let (major, minor) = self.gpu.info.driver_cuda;
        if (major, minor) < TIMING_SINCE {
            return Err(Error::Cuda {
                operation: "asking for the time between two events",
                device: self.gpu.info.name.clone(),
                cause: format!("the driver is for CUDA {major}.{minor}; update it to one for 12.8 or newer"),
            });
        }
        let ms = self.event.elapsed_ms(&later.event);
        let ms = ms.map_err(|error| self.gpu.failed("asking for the time between two events", error))?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl CudaEvent {
    pub(super) fn unrecorded(device: DeviceSpec, gpu: Arc<Gpu>) -> CudaEvent {
        CudaEvent { device, gpu, current: Mutex::new(None) }
    }

    pub(super) fn recorded(device: DeviceSpec, recorded: Recorded) -> CudaEvent {
        let gpu = Arc::clone(&recorded.mark.gpu);
        CudaEvent { device, gpu, current: Mutex::new(Some(recorded)) }
    }

    /// Returns the GPU of the mark. The driver accepts events of any GPU, but not of another backend.
    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(super) fn replace(&self, recorded: Recorded) {
        *self.current.lock() = Some(recorded);
    }

    pub(super) fn current(&self) -> Option<Recorded> {
        self.current.lock().clone()
    }
}

impl Recorded {
    fn outcome(&self) -> Result<()> {
        Failures::before(&self.place).map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Converts a driver failure to an error of the stream.
    fn failed(&self, error: Error) -> Error {
        match error {
            late @ Error::Deadline { .. } => late,
            error => self.place.stream_error(error),
        }
    }
}

impl Event for CudaEvent {
    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn is_ready(&self) -> Result<bool> {
        let Some(recorded) = self.current() else { return Ok(true) };
        if !recorded.mark.is_reached().map_err(|error| recorded.failed(error))? {
            return Ok(false);
        }
        recorded.outcome().map(|()| true)
    }

    fn wait(&self, deadline: Instant) -> Result<()> {
        let Some(recorded) = self.current() else { return Ok(()) };
        let what = || format!("waiting for an event of {}", self.device.short());
        recorded.mark.wait(deadline, what).map_err(|error| recorded.failed(error))?;
        recorded.outcome()
    }
}

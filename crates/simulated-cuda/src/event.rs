//! Events: marks in streams.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::error::{Code, Result};
use crate::graph::{Capture, Clock};
use crate::mark::Mark;
use crate::registry::{Registry, locked};
use crate::settings::settings;
use crate::stream::Stream;
use crate::work::Work;

/// An event: the last mark that was recorded for it in a stream.
pub(crate) struct Event {
    /// Handle of its context.
    pub(crate) context: usize,
    has_time: bool,
    state: Mutex<State>,
}

/// All events, by handle.
pub(crate) static EVENTS: Registry<Event> = Registry::new();

enum State {
    NeverRecorded,
    Recorded(Arc<Mark>),
    Captured(Arc<Capture>, Clock),
}

impl Event {
    pub(crate) fn new(context: usize, has_time: bool) -> Self {
        Self { context, has_time, state: Mutex::new(State::NeverRecorded) }
    }

    pub(crate) fn record(&self, stream: &Arc<Stream>) -> Result {
        if stream.context.handle != self.context {
            return Err(Code::INVALID_HANDLE);
        }
        stream.context.check()?;
        let mut state = locked(&self.state);
        if let Some(capture) = stream.capture() {
            let clock = capture.clock(stream)?;
            *state = State::Captured(capture, clock);
            return Ok(());
        }
        let mark = Arc::new(Mark::new());
        stream.enqueue(Work::Reach(mark.clone()))?;
        *state = State::Recorded(mark);
        Ok(())
    }

    /// Makes later work of `stream` wait for the last mark.
    pub(crate) fn hold(&self, stream: &Arc<Stream>) -> Result {
        match &*locked(&self.state) {
            State::NeverRecorded => stream.context.check(),
            State::Recorded(_) if stream.capture().is_some() => {
                stream.invalidate_capture();
                Err(Code::STREAM_CAPTURE_ISOLATION)
            }
            State::Recorded(mark) => stream.enqueue(Work::Await(mark.clone())),
            State::Captured(capture, clock) => capture.join(stream, clock),
        }
    }

    pub(crate) fn query(&self) -> Result {
        match self.mark()? {
            Some(mark) if mark.reached().is_none() => Err(Code::NOT_READY),
            _ => Ok(()),
        }
    }

    pub(crate) fn synchronize(&self) -> Result {
        let Some(mark) = self.mark()? else { return Ok(()) };
        if mark.wait(settings().deadline) { Ok(()) } else { Err(Code::LAUNCH_TIMEOUT) }
    }

    /// Returns the time from the mark of `start` to this one's.
    pub(crate) fn since(&self, start: &Self) -> Result<Duration> {
        if self.context != start.context || !self.has_time || !start.has_time {
            return Err(Code::INVALID_HANDLE);
        }
        let (first, last) = (start.mark()?.ok_or(Code::INVALID_HANDLE)?, self.mark()?.ok_or(Code::INVALID_HANDLE)?);
        let first = first.reached().ok_or(Code::NOT_READY)?;
        let last = last.reached().ok_or(Code::NOT_READY)?;
        Ok(last.saturating_duration_since(first))
    }

    fn mark(&self) -> Result<Option<Arc<Mark>>> {
        match &*locked(&self.state) {
            State::NeverRecorded => Ok(None),
            State::Recorded(mark) => Ok(Some(mark.clone())),
            State::Captured(..) => Err(Code::CAPTURED_EVENT),
        }
    }
}

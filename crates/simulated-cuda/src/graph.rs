//! Captured work: graphs, stored as one sequence in the order of the calls.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use crate::error::{Code, Result};
use crate::registry::{Registry, locked};
use crate::stream::{STREAMS, Stream};
use crate::work::Work;

/// The captured work of each stream that is known to come before: counts by stream handle.
pub(crate) type Clock = BTreeMap<usize, usize>;

/// A capture that began in one stream and may have spread to others by events.
pub(crate) struct Capture {
    origin: usize,
    mode: u32,
    /// The thread that began it.
    thread: ThreadId,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    work: Vec<Work>,
    /// The clock of each participating stream.
    clocks: BTreeMap<usize, Clock>,
    is_invalid: bool,
}

/// A captured graph.
pub(crate) struct Graph {
    pub(crate) handle: usize,
    pub(crate) work: Arc<Vec<Work>>,
}

/// A graph that can be launched.
pub(crate) struct Executable {
    pub(crate) handle: usize,
    pub(crate) work: Arc<Vec<Work>>,
}

/// All graphs, by handle.
pub(crate) static GRAPHS: Registry<Graph> = Registry::new();

/// All graphs that can be launched, by handle.
pub(crate) static EXECUTABLES: Registry<Executable> = Registry::new();

impl Capture {
    /// `cuStreamBeginCapture`.
    pub(crate) fn begin(stream: &Arc<Stream>, mode: u32) -> Result {
        if mode > MODE_RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        stream.context.check()?;
        if stream.capture().is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let state = State { clocks: BTreeMap::from([(stream.handle, Clock::new())]), ..State::default() };
        let thread = thread::current().id();
        stream.set_capture(Some(Arc::new(Self { origin: stream.handle, mode, thread, state: Mutex::new(state) })));
        Ok(())
    }

    /// `cuStreamEndCapture`: returns the captured graph.
    pub(crate) fn end(stream: &Arc<Stream>) -> Result<Arc<Graph>> {
        let capture = stream.capture().ok_or(Code::ILLEGAL_STATE)?;
        if capture.origin != stream.handle {
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != MODE_RELAXED && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let mut state = locked(&capture.state);
        for &handle in state.clocks.keys() {
            if let Some(member) = STREAMS.get(handle) {
                member.set_capture(None);
            }
        }
        if state.is_invalid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let known = &state.clocks[&capture.origin];
        let count = |clock: &Clock, stream: usize| clock.get(&stream).copied().unwrap_or(0);
        if state.clocks.iter().any(|(&member, clock)| count(known, member) < count(clock, member)) {
            return Err(Code::STREAM_CAPTURE_UNJOINED);
        }
        let work = Arc::new(std::mem::take(&mut state.work));
        Ok(GRAPHS.insert(|handle| Graph { handle, work }))
    }

    pub(crate) fn add(&self, stream: &Stream, work: Work) -> Result {
        let mut state = self.valid()?;
        *state.clocks.entry(stream.handle).or_default().entry(stream.handle).or_default() += 1;
        state.work.push(work);
        Ok(())
    }

    /// Returns what comes before an event that is recorded now.
    pub(crate) fn clock(&self, stream: &Stream) -> Result<Clock> {
        Ok(self.valid()?.clocks.get(&stream.handle).cloned().unwrap_or_default())
    }

    /// Makes later work of `stream` come after `clock`, as part of this capture.
    pub(crate) fn join(self: &Arc<Self>, stream: &Arc<Stream>, clock: &Clock) -> Result {
        stream.context.check()?;
        let mut state = self.valid()?;
        match stream.capture() {
            Some(other) if !Arc::ptr_eq(&other, self) => {
                state.is_invalid = true;
                drop(state);
                other.invalidate();
                return Err(Code::STREAM_CAPTURE_MERGE);
            }
            Some(_) => {}
            None => stream.set_capture(Some(self.clone())),
        }
        let own = state.clocks.entry(stream.handle).or_default();
        for (&member, &count) in clock {
            let known = own.entry(member).or_default();
            *known = count.max(*known);
        }
        Ok(())
    }

    pub(crate) fn invalidate(&self) {
        locked(&self.state).is_invalid = true;
    }

    pub(crate) fn is_invalid(&self) -> bool {
        locked(&self.state).is_invalid
    }

    fn valid(&self) -> Result<std::sync::MutexGuard<'_, State>> {
        let state = locked(&self.state);
        if state.is_invalid { Err(Code::STREAM_CAPTURE_INVALIDATED) } else { Ok(state) }
    }
}

/// Refuses a call that may wait for other work, as active captures require; the call invalidates them.
pub(crate) fn refuse_unsafe_call() -> Result {
    let mut refused = Ok(());
    for capture in STREAMS.all().iter().filter_map(|stream| stream.capture()) {
        if capture.mode == MODE_GLOBAL || (capture.mode != MODE_RELAXED && capture.thread == thread::current().id()) {
            capture.invalidate();
            refused = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    refused
}

const MODE_GLOBAL: u32 = 0;
const MODE_RELAXED: u32 = 2;

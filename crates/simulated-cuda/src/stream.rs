//! Streams: queues of work, each with a thread that runs it in order.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::context::{self, Context};
use crate::error::{Code, Result};
use crate::ffi::report;
use crate::graph::Capture;
use crate::random::random;
use crate::registry::{Registry, locked, new_handle};
use crate::settings::settings;
use crate::work::Work;

/// A stream.
pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) context: Arc<Context>,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The capture that records the work instead of the queue, if any.
    capture: Mutex<Option<Arc<Capture>>>,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    queued: u64,
    done: u64,
    has_worker: bool,
    is_closed: bool,
}

/// The streams that callers have created, by handle.
pub(crate) static STREAMS: Registry<Stream> = Registry::new();

/// All streams but the default ones, of all contexts: also those that a caller has destroyed and that still have work.
static WORKING: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());

/// The default stream of each context, by the context's handle.
static DEFAULTS: Mutex<BTreeMap<usize, Arc<Stream>>> = Mutex::new(BTreeMap::new());

impl Stream {
    /// Creates a stream with a handle.
    pub(crate) fn create(context: &Arc<Context>, flags: u32, priority: i32) -> Arc<Self> {
        let stream = STREAMS.insert(|handle| Self::new(handle, context.clone(), flags, priority));
        let mut working = locked(&WORKING);
        working.retain(|stream| stream.strong_count() > 0);
        working.push(Arc::downgrade(&stream));
        stream
    }

    fn new(handle: usize, context: Arc<Context>, flags: u32, priority: i32) -> Self {
        Self {
            handle,
            context,
            flags,
            priority,
            queue: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::new(None),
        }
    }

    /// Adds work after all earlier work, or to the graph that is being captured.
    pub(crate) fn enqueue(self: &Arc<Self>, work: Work) -> Result {
        self.context.check()?;
        if let Some(capture) = self.capture() {
            return capture.add(self, work);
        }
        let mut queue = locked(&self.queue);
        if queue.is_closed {
            return Err(Code::INVALID_HANDLE);
        }
        if !queue.has_worker {
            self.start_worker()?;
            queue.has_worker = true;
        }
        queue.work.push_back(work);
        queue.queued += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the work queued so far.
    pub(crate) fn synchronize(&self) -> Result {
        self.refuse_in_capture()?;
        self.drain()?;
        self.context.check()
    }

    /// Waits for the work queued so far, ignoring its result; captured work does not count.
    pub(crate) fn drain(&self) -> Result {
        let queue = locked(&self.queue);
        let last = queue.queued;
        let waited = self.changed.wait_timeout_while(queue, settings().deadline, |queue| queue.done < last);
        let queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        if queue.done < last {
            report(format_args!("stream of device {}: still busy at the deadline", self.context.device));
            return Err(Code::LAUNCH_TIMEOUT);
        }
        Ok(())
    }

    /// Checks that the stream has no work.
    ///
    /// # Errors
    /// `NOT_READY` while there is work.
    pub(crate) fn query(&self) -> Result {
        self.refuse_in_capture()?;
        self.context.check()?;
        let queue = locked(&self.queue);
        if queue.done < queue.queued { Err(Code::NOT_READY) } else { Ok(()) }
    }

    /// Stops accepting work; the stream ends after the queued work.
    pub(crate) fn close(&self) {
        locked(&self.queue).is_closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        locked(&self.capture).clone()
    }

    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        *locked(&self.capture) = capture;
    }

    /// Invalidates the capture, if any, because an operation cannot be captured.
    pub(crate) fn invalidate_capture(&self) {
        if let Some(capture) = self.capture() {
            capture.invalidate();
        }
    }

    fn refuse_in_capture(&self) -> Result {
        match self.capture() {
            Some(capture) => {
                capture.invalidate();
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    fn start_worker(self: &Arc<Self>) -> Result {
        let stream = self.clone();
        let name = format!("cuda{}-{:x}", self.context.device, (self.handle >> 4) & 0xFFFF);
        // Detached: as in CUDA, a destroyed stream finishes its work by itself.
        let spawned = thread::Builder::new().name(name).spawn(move || stream.work());
        spawned.map(drop).map_err(|_| Code::OPERATING_SYSTEM)
    }

    /// The loop of the stream's thread.
    fn work(&self) {
        let mut pauses = Pauses::new(self.handle as u64);
        while let Some(work) = self.next_work() {
            pauses.pause();
            let result = catch_unwind(AssertUnwindSafe(|| work.run(&self.context))).unwrap_or(Err(Code::UNKNOWN));
            if let Err(code) = result {
                self.context.fail(code);
            }
            locked(&self.queue).done += 1;
            self.changed.notify_all();
        }
    }

    fn next_work(&self) -> Option<Work> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(work) = queue.work.pop_front() {
                return Some(work);
            }
            if queue.is_closed {
                return None;
            }
            queue = self.wait_for_work(queue);
        }
    }

    /// Waits without a deadline, since a stream may be idle for any time.
    fn wait_for_work<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the stream with a handle from a caller; 0, 1 and 2 denote the current context's default stream.
pub(crate) fn stream(handle: usize) -> Result<Arc<Stream>> {
    match handle {
        0..=2 => Ok(default_stream(&context::current()?)),
        handle => STREAMS.get(handle).ok_or(Code::INVALID_HANDLE),
    }
}

/// Returns a context's default stream.
pub(crate) fn default_stream(context: &Arc<Context>) -> Arc<Stream> {
    let mut defaults = locked(&DEFAULTS);
    let stream = defaults.entry(context.handle);
    stream.or_insert_with(|| Arc::new(Stream::new(new_handle(), context.clone(), 0, 0))).clone()
}

/// Returns every stream of a context that has, or may get, work.
fn streams_of(context: &Context) -> Vec<Arc<Stream>> {
    let default = locked(&DEFAULTS).get(&context.handle).cloned();
    let mut streams: Vec<Arc<Stream>> = locked(&WORKING).iter().filter_map(Weak::upgrade).collect();
    streams.retain(|stream| stream.context.handle == context.handle);
    streams.into_iter().chain(default).collect()
}

/// Waits for the work that all streams of a context have so far.
pub(crate) fn synchronize(context: &Context) -> Result {
    streams_of(context).iter().try_for_each(|stream| stream.synchronize())
}

/// Waits for the work that all streams of a context have so far, even in a failed context.
pub(crate) fn drain(context: &Context) -> Result {
    streams_of(context).iter().try_for_each(|stream| stream.drain())
}

/// Closes all streams of a context, whose handles become invalid.
pub(crate) fn close_streams(context: &Context) {
    STREAMS.retain(|stream| stream.context.handle != context.handle);
    for stream in streams_of(context) {
        stream.close();
    }
    let is_of_another = |stream: Arc<Stream>| stream.context.handle != context.handle;
    locked(&WORKING).retain(|stream| stream.upgrade().is_some_and(is_of_another));
    let default = locked(&DEFAULTS).remove(&context.handle);
    drop(default);
}

/// Random pauses before operations, so that a missing event is detected sooner.
struct Pauses {
    state: u64,
    longest: Duration,
}

impl Pauses {
    fn new(stream: u64) -> Self {
        let settings = settings();
        Self { state: settings.seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15), longest: settings.delay }
    }

    fn pause(&mut self) {
        if self.longest.is_zero() {
            return;
        }
        let pause = self.longest.mul_f64(random(&mut self.state) as f64 / u64::MAX as f64);
        let start = Instant::now();
        // Sleeping is too coarse for a few microseconds.
        if pause > Duration::from_micros(100) {
            thread::sleep(pause);
        }
        while start.elapsed() < pause {
            thread::yield_now();
        }
    }
}

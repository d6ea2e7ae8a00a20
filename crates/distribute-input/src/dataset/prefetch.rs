//! Reading ahead on a thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::budget::Limit;
use super::limited::is_counted;
use super::{Dataset, Items, Opener, background};
use crate::{Error, Result};

/// A prefetch depth that begins at 2 and doubles, up to 16, whenever the reader takes the last element of a buffer that
/// was full. Later passes begin with the last depth of earlier ones.
pub const AUTOTUNE: usize = usize::MAX;

impl<T: Send + 'static> Dataset<T> {
    /// Reads up to `depth` elements ahead on a thread, one for each pass. [`AUTOTUNE`] adapts the depth; 0 disables
    /// reading ahead.
    ///
    /// The thread ends with the pass: when it has read all elements, when it meets an error (which is yielded in its
    /// place), or when the iterator is dropped, which waits for it up to 5 s. A reader that receives no element for 30
    /// minutes gets an error.
    ///
    /// # Source
    /// `tf.data.Dataset.prefetch`.
    pub fn prefetch(self, depth: usize) -> Dataset<T> {
        if depth == 0 {
            return self;
        }
        let mut dataset = Dataset::new(prefetched(self.open, Depth::new(depth)), self.facts);
        dataset.facts.prefetch = dataset.facts.prefetch.max(depth);
        dataset.facts.buffers += usize::from(is_counted::<T>());
        // The row numbers remain available to a distribution, which reads ahead itself.
        dataset.picks = self.picks;
        dataset
    }
}

/// How far a stage reads ahead; its passes share it.
#[derive(Clone, Debug)]
pub(crate) struct Depth {
    now: Arc<AtomicUsize>,
    most: usize,
}

impl Depth {
    pub(crate) fn new(depth: usize) -> Depth {
        let (first, most) = if depth == AUTOTUNE { (2, MAX_AUTOTUNED) } else { (depth, depth) };
        Depth { now: Arc::new(AtomicUsize::new(first)), most }
    }

    /// Returns the number of elements that are read ahead.
    fn get(&self) -> usize {
        // Relaxed: a number by itself.
        self.now.load(Ordering::Relaxed)
    }

    fn double(&self) {
        self.now.fetch_max(self.get().saturating_mul(2).min(self.most), Ordering::Relaxed);
    }
}

/// Returns an opener that reads ahead.
fn prefetched<T: Send + 'static>(open: Opener<T>, depth: Depth) -> Opener<T> {
    Arc::new(move |pass| {
        let open = Arc::clone(&open);
        match pass.limit("prefetch") {
            Ok(limit) => prefetched_within(move || open(pass), &depth, limit),
            Err(error) => Box::new(std::iter::once(Err(error))),
        }
    })
}

/// Returns the items of one sequence, read ahead; a depth of 0 disables it.
pub(crate) fn prefetched_items<T: Send + 'static>(
    open: impl FnOnce() -> Items<T> + Send + 'static,
    depth: &Depth,
) -> Items<T> {
    if depth.most == 0 { open() } else { prefetched_within(open, depth, Limit::none()) }
}

fn prefetched_within<T: Send + 'static>(
    open: impl FnOnce() -> Items<T> + Send + 'static,
    depth: &Depth,
    bytes: Limit<T>,
) -> Items<T> {
    match Prefetched::start(open, depth, bytes, READ_DEADLINE) {
        Ok(items) => Box::new(items) as Items<T>,
        Err(error) => Box::new(std::iter::once(Err(error))),
    }
}

/// The reader's side. Dropping it ends the thread.
struct Prefetched<T> {
    shared: Arc<Shared<T>>,
    thread: Option<JoinHandle<()>>,
    deadline: Duration,
}

struct Shared<T> {
    buffer: Mutex<Buffer<T>>,
    /// Signalled when the thread has put an item or ends.
    filled: Condvar,
    /// Signalled when the reader has taken an item or ends.
    drained: Condvar,
}

struct Buffer<T> {
    items: VecDeque<Result<T>>,
    /// The bytes of the items.
    held: usize,
    bytes: Limit<T>,
    /// The most items that are read ahead.
    depth: Depth,
    was_full: bool,
    /// The time at which the reader last took an item, and its average time between items.
    taken: Instant,
    pace: Duration,
    reader_left: bool,
    thread_left: bool,
}

impl<T: Send + 'static> Prefetched<T> {
    fn start(
        open: impl FnOnce() -> Items<T> + Send + 'static,
        depth: &Depth,
        bytes: Limit<T>,
        deadline: Duration,
    ) -> Result<Prefetched<T>> {
        let buffer = Buffer {
            items: VecDeque::new(),
            held: 0,
            bytes,
            depth: depth.clone(),
            was_full: false,
            taken: Instant::now(),
            pace: Duration::ZERO,
            reader_left: false,
            thread_left: false,
        };
        let shared = Arc::new(Shared { buffer: Mutex::new(buffer), filled: Condvar::new(), drained: Condvar::new() });
        let end_signal = EndSignal(Arc::clone(&shared));
        let thread = thread::Builder::new()
            .name("input-prefetch".to_owned())
            .spawn(move || {
                // Declared first and therefore dropped last: when the reader is notified, the source is closed.
                let end_signal = end_signal;
                background::begin();
                for item in open() {
                    if !end_signal.0.put(item) {
                        break;
                    }
                }
            })
            .map_err(|source| Error::Thread { source: Arc::new(source) })?;
        Ok(Prefetched { shared, thread: Some(thread), deadline })
    }
}

impl<T> Iterator for Prefetched<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        let started = Instant::now();
        let mut buffer = self.shared.lock();
        loop {
            if let Some(item) = buffer.items.pop_front() {
                buffer.held = buffer.held.saturating_sub(buffer.size(&item));
                buffer.note_pace();
                // Waking the thread costs the reader up to 30 µs. While there are items, the thread wakes up by itself
                // in time.
                if buffer.items.is_empty() {
                    if buffer.was_full {
                        buffer.depth.double();
                        buffer.was_full = false;
                    }
                    self.shared.drained.notify_one();
                }
                return Some(item);
            }
            if buffer.thread_left {
                break;
            }
            let Some(left) = self.deadline.checked_sub(started.elapsed()) else {
                return Some(Err(Error::Stalled { waited: self.deadline }));
            };
            self.shared.filled.wait_for(&mut buffer, left);
        }
        drop(buffer);
        match self.thread.take()?.join() {
            Ok(()) => None,
            Err(_) => Some(Err(Error::Panicked)),
        }
    }
}

impl<T> Drop for Prefetched<T> {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        let mut buffer = self.shared.lock();
        buffer.reader_left = true;
        self.shared.drained.notify_all();
        self.shared.filled.wait_while_for(&mut buffer, |buffer| !buffer.thread_left, JOIN_DEADLINE);
        let left = buffer.thread_left;
        drop(buffer);
        if !left {
            tracing::warn!(
                waited_s = JOIN_DEADLINE.as_secs(),
                "a prefetching thread is still inside its source and was left to end by itself"
            );
        } else if thread.join().is_err() {
            tracing::debug!("a pipeline panicked while its reader was leaving");
        }
    }
}

impl<T> Buffer<T> {
    /// Returns whether an item of a size has to wait. An empty buffer takes items of any size.
    fn is_full(&self, size: usize) -> bool {
        let fits = self.items.is_empty() || self.bytes.has_room(self.held, size);
        self.items.len() >= self.depth.get() || !fits
    }

    fn size(&self, item: &Result<T>) -> usize {
        item.as_ref().map_or(0, |item| self.bytes.size(item))
    }

    fn note_pace(&mut self) {
        let now = Instant::now();
        let since = now - self.taken;
        // A moving average that adapts within a few items and bounds the effect of a single slow one.
        self.pace = (self.pace * 3 + since.min(self.pace * 4 + MIN_NAP)) / 4;
        self.taken = now;
    }

    /// Returns the time in which the reader takes half of the items at its current pace.
    fn until_half_empty(&self) -> Duration {
        let half = u32::try_from(self.depth.get() / 2).unwrap_or(u32::MAX).max(1);
        self.pace.saturating_mul(half).clamp(MIN_NAP, RECHECK)
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Buffer<T>> {
        self.buffer.lock()
    }

    /// Puts an item when there is room, and returns whether more are wanted.
    fn put(&self, item: Result<T>) -> bool {
        let failed = item.is_err();
        let mut buffer = self.lock();
        // No deadline: a reader may spend any time on a step, and its drop signals that it is gone.
        let size = buffer.size(&item);
        while buffer.is_full(size) && !buffer.reader_left {
            let nap = buffer.until_half_empty();
            self.drained.wait_for(&mut buffer, nap);
        }
        if buffer.reader_left {
            return false;
        }
        buffer.held = buffer.held.saturating_add(size);
        buffer.items.push_back(item);
        buffer.was_full |= buffer.items.len() >= buffer.depth.get();
        self.filled.notify_one();
        !failed
    }
}

/// Tells the reader on drop that the thread ends, including by a panic.
struct EndSignal<T>(Arc<Shared<T>>);

impl<T> Drop for EndSignal<T> {
    fn drop(&mut self) {
        self.0.lock().thread_left = true;
        self.0.filled.notify_all();
    }
}

const MAX_AUTOTUNED: usize = 16;
/// Deadline of a read. Filling a large shuffle buffer takes minutes; a source that is silent for longer than this is
/// considered dead.
pub(super) const READ_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// How long a reader waits for its threads on drop.
pub(super) const JOIN_DEADLINE: Duration = Duration::from_secs(5);
/// Shortest and longest time between two checks of a full buffer.
const MIN_NAP: Duration = Duration::from_micros(50);
const RECHECK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;

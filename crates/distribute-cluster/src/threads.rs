//! Threads with an event loop, and waiting for futures on any other thread. Cargo feature `grpc`.
//!
//! tokio's `block_on` and `shutdown_timeout`, and the drop of its `Runtime`, panic on a thread that runs an event loop
//! already, such as that of `#[tokio::main]`. The functions and types here do not, so that a program's `main` may be
//! either.

use std::cell::Cell;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Handle, Runtime};

mod event_loop;

pub use event_loop::EventLoop;

/// Threads that run tasks, such as those of a service and of its connections. All tasks end when it is dropped, on any
/// thread; the drop waits at most 100 ms for the threads, including those that have not begun yet. A thread for
/// blocking work that is added and has not begun is not waited for: it ends at once when it begins.
///
/// # Examples
/// ```
/// use distribute_cluster::threads::Threads;
///
/// let threads = Threads::start("adder", 1)?;
/// let task = threads.handle().spawn(async { 3 + 4 });
/// assert_eq!(threads.block_on(task)?, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Threads {
    handle: Handle,
    /// `None` only while it is shut down.
    runtime: Option<Runtime>,
    running: Arc<Running>,
}

/// The threads that have not ended.
#[derive(Debug)]
struct Running {
    count: Mutex<Count>,
    changed: Condvar,
}

#[derive(Debug)]
struct Count {
    /// Threads that were started and have not begun. One that was added for blocking work may begin before them, and
    /// then takes their place here: the sum is right when all have begun.
    awaited: usize,
    /// Threads that have begun and have not ended.
    begun: usize,
}

impl Threads {
    /// Starts `count` threads of this name, at least one. Threads for blocking work are added when it is spawned.
    ///
    /// # Errors
    /// An error of the system if it gives no threads.
    pub fn start(name: impl Into<String>, count: usize) -> io::Result<Threads> {
        let count = count.max(1);
        let running = Arc::new(Running::of(count));
        let (begun, ended) = (Arc::clone(&running), Arc::clone(&running));
        let runtime = Builder::new_multi_thread()
            .worker_threads(count)
            .thread_name(name)
            .on_thread_start(move || begun.begin())
            .on_thread_stop(move || ended.end())
            .enable_all()
            .build()?;
        Ok(Threads { handle: runtime.handle().clone(), runtime: Some(runtime), running })
    }

    /// Returns the handle by which tasks are spawned.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs a future on the calling thread, see [`block_on`].
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(&self.handle, future)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
            self.running.wait_for_end(Instant::now() + SHUTDOWN);
        }
    }
}

impl Running {
    /// Returns the state of threads that were started, and of which none has begun.
    fn of(started: usize) -> Running {
        Running { count: Mutex::new(Count { awaited: started, begun: 0 }), changed: Condvar::new() }
    }

    fn begin(&self) {
        let mut count = self.count.lock();
        count.awaited = count.awaited.saturating_sub(1);
        count.begun += 1;
    }

    fn end(&self) {
        let mut count = self.count.lock();
        count.begun = count.begun.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Waits until all threads have ended, and returns whether they have. One that hangs, such as in the lookup of a
    /// name, is abandoned at the deadline.
    fn wait_for_end(&self, deadline: Instant) -> bool {
        let mut count = self.count.lock();
        while !count.is_over() {
            if self.changed.wait_until(&mut count, deadline).timed_out() {
                return count.is_over();
            }
        }
        true
    }
}

impl Count {
    fn is_over(&self) -> bool {
        self.awaited + self.begun == 0
    }
}

thread_local! {
    /// Whether this thread polls the future of [`block_on`].
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Runs a future on the calling thread until it ends, however long that takes. Timers, connections and spawned tasks of
/// the future are those of the runtime of `handle`, which must have threads of its own, as [`Threads`] do.
///
/// The calling thread may run an event loop, which stands still meanwhile, but not that of `handle`: what the future
/// spawns could wait for the very thread that waits for it. The future must not call tokio's
/// `yield_now`, which would wait for that event loop, nor its `block_in_place`: [`block_in_place`] works.
pub fn block_on<F: Future>(handle: &Handle, future: F) -> F::Output {
    let _entered = handle.enter();
    let _waits = Waits(WAITS.replace(true));
    // The budget of a task of the calling thread would never be renewed.
    let mut future = pin!(tokio::task::unconstrained(future));
    let sleeper = Arc::new(Sleeper { thread: thread::current(), is_woken: AtomicBool::new(false) });
    let waker = Waker::from(Arc::clone(&sleeper));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        // Sees all that was written before the wake-up.
        while !sleeper.is_woken.swap(false, Ordering::Acquire) {
            thread::park();
        }
    }
}

/// Does work that blocks the thread, such as reading a file, within a future of [`block_on`] or a task of [`Threads`],
/// whose other tasks continue on other threads.
///
/// # Panics
/// In a task of a runtime without threads of its own.
pub fn block_in_place<T>(work: impl FnOnce() -> T) -> T {
    // On a thread that waits for the future there are no other tasks.
    if WAITS.get() { work() } else { tokio::task::block_in_place(work) }
}

/// Restores what was so before.
struct Waits(bool);

impl Drop for Waits {
    fn drop(&mut self) {
        WAITS.set(self.0);
    }
}

/// A thread that waits for a future.
struct Sleeper {
    thread: Thread,
    /// Whether the future is to be polled: others may also unpark the thread.
    is_woken: AtomicBool,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_woken.swap(true, Ordering::Release) {
            self.thread.unpark();
        }
    }
}

/// Limit for the end of the threads.
const SHUTDOWN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// Does everything that uses the runtime.
    fn use_threads() {
        let threads = Threads::start("tested", 1).unwrap();
        assert_eq!(threads.block_on(async { tokio::spawn(async { 7 }).await.unwrap() }), 7);
        // A timer, of the thread's own runtime.
        threads.block_on(async {
            let never = tokio::time::timeout(Duration::from_millis(10), std::future::pending::<()>());
            assert!(never.await.is_err());
        });
        // More than the budget of a task, and what is not shared between threads.
        let (sender, mut receiver) = mpsc::unbounded_channel();
        (0..1000).for_each(|number| sender.send(number).unwrap());
        let mut sum = std::rc::Rc::new(0);
        threads.block_on(async {
            for _ in 0..1000 {
                *std::rc::Rc::get_mut(&mut sum).unwrap() += receiver.recv().await.unwrap();
            }
        });
        assert_eq!(*sum, 499_500);
        // Within each other, with work that blocks, which is done in a task too.
        let of_task = threads.block_on(async {
            let here = block_in_place(|| threads.block_on(async { 1 }));
            here + tokio::spawn(async { block_in_place(|| 2) }).await.unwrap()
        });
        assert_eq!(of_task, 3);
        // A wake-up from another thread, before which others unpark this one.
        let (tell, told) = oneshot::channel();
        let waiting = thread::current();
        let other = thread::spawn(move || {
            waiting.unpark();
            thread::sleep(Duration::from_millis(10));
            tell.send(8).unwrap();
        });
        assert_eq!(threads.block_on(told), Ok(8));
        other.join().unwrap();
        let running = Arc::clone(&threads.running);
        drop(threads);
        // The drop does not wait as long for a thread of a busy machine.
        assert!(running.wait_for_end(Instant::now() + Duration::from_secs(20)));
        assert!(!WAITS.get());
    }

    #[test]
    fn threads_that_have_not_begun_have_not_ended() {
        let running = Running::of(2);
        let is_over = || running.wait_for_end(Instant::now() + Duration::from_millis(5));
        assert!(!is_over());
        running.begin();
        running.end();
        assert!(!is_over());
        // One for blocking work, which begins before the second.
        running.begin();
        running.begin();
        running.end();
        assert!(!is_over());
        running.end();
        assert!(is_over());
    }

    #[test]
    fn threads_can_be_used_and_dropped_on_a_thread_without_an_event_loop() {
        use_threads();
    }

    #[test]
    fn threads_can_be_used_and_dropped_within_an_event_loop() {
        Builder::new_current_thread().build().unwrap().block_on(async { use_threads() });
        let outer = Threads::start("outer", 1).unwrap();
        outer.block_on(outer.handle().spawn(async { use_threads() })).unwrap();
    }

    #[test]
    fn a_panic_of_the_future_leaves_the_thread_as_it_was() {
        let threads = Threads::start("tested", 1).unwrap();
        let panics = std::panic::AssertUnwindSafe(|| threads.block_on(async { panic!("of the future") }));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(!WAITS.get() && Handle::try_current().is_err());
        assert_eq!(threads.block_on(async { 7 }), 7);
    }

    #[test]
    fn a_thread_that_hangs_is_abandoned() {
        let threads = Threads::start("tested", 1).unwrap();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        threads.handle().spawn_blocking(move || {
            begun.send(()).unwrap();
            let _ = ended.recv();
        });
        has_begun.recv_timeout(Duration::from_secs(20)).unwrap();
        let dropped = Instant::now();
        drop(threads);
        assert!((SHUTDOWN..Duration::from_secs(20)).contains(&dropped.elapsed()));
        drop(end);
    }
}

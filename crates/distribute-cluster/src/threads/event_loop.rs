//! An event loop that runs on the thread that waits for it.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;

use super::{Running, SHUTDOWN, WAITS, block_on};

/// An event loop that runs on the thread that waits for one of its futures, and on a thread of its own when no other
/// has run it for 2 ms.
///
/// A thread that calls [`drive`](EventLoop::drive) again and again reads and writes its sockets itself: a message takes
/// no wake-up of another thread on either side, which costs more than a short message does.
///
/// All tasks end when it is dropped, on any thread; the drop waits at most 100 ms for its threads.
///
/// # Examples
/// ```
/// use distribute_cluster::threads::EventLoop;
///
/// let event_loop = EventLoop::start("adder")?;
/// let task = event_loop.handle().spawn(async { 3 + 4 });
/// assert_eq!(event_loop.drive(task)?, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct EventLoop {
    handle: Handle,
    /// `None` only while it is shut down.
    runtime: Option<Arc<Runtime>>,
    turns: Arc<Turns>,
    running: Arc<Running>,
}

/// How long the loop's own thread lets it rest after another thread has run it: that one may come back.
const LEASE: Duration = Duration::from_millis(2);

impl EventLoop {
    /// Starts the loop and its own thread, of this name.
    ///
    /// # Errors
    /// An error of the system if it gives no thread or no event queue.
    pub fn start(name: impl Into<String>) -> io::Result<EventLoop> {
        let name = name.into();
        let running = Arc::new(Running::of(1));
        let (begun, ended) = (Arc::clone(&running), Arc::clone(&running));
        let runtime = Builder::new_current_thread()
            .thread_name(name.clone())
            .on_thread_start(move || begun.begin())
            .on_thread_stop(move || ended.end())
            .enable_all()
            .build()?;
        let (handle, runtime, turns) = (runtime.handle().clone(), Arc::new(runtime), Arc::new(Turns::new()));
        let (kept, own_turns, own_running) = (Arc::clone(&runtime), Arc::clone(&turns), Arc::clone(&running));
        let own_thread = thread::Builder::new().name(name).spawn(move || {
            own_running.begin();
            let _ended = Ended(own_running);
            while own_turns.wait() {
                kept.block_on(own_turns.give.notified());
            }
            shut_down(kept);
        });
        if let Err(error) = own_thread {
            shut_down(runtime);
            return Err(error);
        }
        Ok(EventLoop { handle, runtime: Some(runtime), turns, running })
    }

    /// Returns the handle by which tasks are spawned.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs a future on the calling thread until it ends, however long that takes, and the tasks of the loop meanwhile.
    /// If the thread runs another event loop already, this one's own thread runs the tasks: see [`block_on`], whose
    /// rules hold here too.
    ///
    /// # Panics
    /// If the future calls this, or a task of the loop does: it would wait for the very thread that waits for it.
    pub fn drive<F: Future>(&self, future: F) -> F::Output {
        match (&self.runtime, Handle::try_current()) {
            (Some(runtime), Err(_)) => {
                let _turn = self.turns.begin(Driver::Here);
                runtime.block_on(future)
            }
            (_, current) => {
                assert!(
                    current.is_ok_and(|current| current.id() != self.handle.id()),
                    "an event loop is to wait for itself: a function that it calls, such as a tensor's, has called an \
                     operation that needs the loop; call it after that function has returned"
                );
                let _turn = self.turns.begin(Driver::OwnThread);
                block_on(&self.handle, future)
            }
        }
    }

    /// Lets the loop's tasks run until each waits, within a future of [`drive`](EventLoop::drive).
    pub async fn pause() {
        match WAITS.get() {
            true => thread::yield_now(),
            false => tokio::task::yield_now().await,
        }
    }

    /// Has the loop's own thread run it from now on, until another thread does: what is left to do must not wait until
    /// the next call of [`drive`](EventLoop::drive).
    pub fn hand_over(&self) {
        self.turns.hand_over();
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        // The own thread shuts the runtime down, as the last that has it.
        drop(self.runtime.take());
        self.turns.end();
        self.running.wait_for_end(Instant::now() + SHUTDOWN);
    }
}

/// Ends the tasks if this was the last that has the runtime, whose own drop would panic within another event loop.
fn shut_down(runtime: Arc<Runtime>) {
    if let Some(runtime) = Arc::into_inner(runtime) {
        runtime.shutdown_background();
    }
}

/// Tells that a thread has ended, however it does.
struct Ended(Arc<Running>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Which thread runs the tasks for one that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driver {
    Here,
    OwnThread,
}

/// Who runs the loop.
#[derive(Debug)]
struct Turns {
    state: Mutex<State>,
    /// Wakes the own thread while it does not run the loop.
    changed: Condvar,
    /// Ends the turn of the own thread.
    give: Notify,
}

#[derive(Debug)]
struct State {
    /// Threads that run the loop, or would if no other did.
    here: usize,
    /// Threads that wait for what the own thread runs.
    elsewhere: usize,
    /// When another thread ran the loop last.
    last: Instant,
    /// Whether something is left to do.
    is_needed: bool,
    /// Whether the own thread runs the loop.
    is_kept: bool,
    is_over: bool,
}

impl Turns {
    fn new() -> Turns {
        let state =
            State { here: 0, elsewhere: 0, last: Instant::now(), is_needed: true, is_kept: false, is_over: false };
        Turns { state: Mutex::new(state), changed: Condvar::new(), give: Notify::new() }
    }

    /// Waits for the turn of the own thread; returns false when the loop has ended.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        state.is_kept = false;
        loop {
            if state.is_over {
                return false;
            }
            let rested = state.last.elapsed();
            let is_free = state.here == 0 && (state.is_needed || rested >= LEASE);
            if is_free || state.elsewhere > 0 {
                (state.is_kept, state.is_needed) = (true, false);
                return true;
            }
            // Looks again now and then: to be woken after each turn would cost others what this is to save.
            let time = if state.here == 0 { LEASE.saturating_sub(rested) } else { LEASE };
            self.changed.wait_for(&mut state, time);
        }
    }

    /// Begins a turn, which lasts until what is returned is dropped.
    fn begin(&self, driver: Driver) -> Turn<'_> {
        let mut state = self.state.lock();
        match driver {
            Driver::Here => {
                state.here += 1;
                if state.is_kept && state.elsewhere == 0 {
                    // Told once: what is told twice would end its next turn as well.
                    state.is_kept = false;
                    self.give.notify_one();
                }
            }
            Driver::OwnThread => {
                state.elsewhere += 1;
                if !state.is_kept {
                    self.changed.notify_one();
                }
            }
        }
        Turn { turns: self, driver }
    }

    fn hand_over(&self) {
        let mut state = self.state.lock();
        state.is_needed |= !state.is_kept;
        if state.is_needed && state.here == 0 {
            self.changed.notify_one();
        }
    }

    fn end(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_one();
        self.give.notify_one();
    }
}

struct Turn<'a> {
    turns: &'a Turns,
    driver: Driver,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        match self.driver {
            Driver::Here => {
                state.here -= 1;
                state.last = Instant::now();
                if state.is_needed && state.here == 0 {
                    self.turns.changed.notify_one();
                }
            }
            Driver::OwnThread => state.elsewhere -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The deadline of what ends by itself.
    const SOON: Duration = Duration::from_secs(20);

    /// Does everything that uses the loop.
    fn use_loop() {
        let event_loop = EventLoop::start("tested").unwrap();
        assert_eq!(event_loop.drive(async { tokio::spawn(async { 7 }).await.unwrap() }), 7);
        let timer = async { tokio::time::timeout(Duration::from_millis(5), std::future::pending::<()>()).await };
        assert!(event_loop.drive(timer).is_err());
        // What is left behind is done, by the loop's own thread.
        let (tell, told) = mpsc::channel();
        let tell_later = |tell: mpsc::Sender<()>| async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            tell.send(()).unwrap();
        };
        event_loop.drive(async { drop(tokio::spawn(tell_later(tell.clone()))) });
        told.recv_timeout(SOON).unwrap();
        event_loop.handle().spawn(tell_later(tell));
        event_loop.hand_over();
        told.recv_timeout(SOON).unwrap();
        // What is ready is done during a pause.
        let paused = event_loop.drive(async {
            let task = tokio::spawn(async {});
            let started = Instant::now();
            while !task.is_finished() && started.elapsed() < SOON {
                EventLoop::pause().await;
            }
            task.is_finished()
        });
        assert!(paused);
        let running = Arc::clone(&event_loop.running);
        let (held, ended) = mpsc::channel::<()>();
        event_loop.handle().spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        drop(event_loop);
        assert!(running.wait_for_end(Instant::now() + SOON));
        assert_eq!(ended.recv_timeout(SOON), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn a_loop_can_be_used_and_dropped_on_a_thread_without_an_event_loop() {
        use_loop();
    }

    #[test]
    fn a_loop_can_be_used_and_dropped_within_another() {
        Builder::new_current_thread().build().unwrap().block_on(async { use_loop() });
        let outer = EventLoop::start("outer").unwrap();
        outer.drive(outer.handle().spawn(async { use_loop() })).unwrap();
    }

    #[test]
    #[should_panic(expected = "an event loop is to wait for itself")]
    fn a_loop_that_is_to_wait_for_itself_panics() {
        let event_loop = EventLoop::start("tested").unwrap();
        event_loop.drive(async { event_loop.drive(async {}) });
    }

    #[test]
    fn a_thread_that_waits_again_and_again_runs_the_tasks_itself() {
        let event_loop = EventLoop::start("tested").unwrap();
        let started = Instant::now();
        let mut own = 0;
        while own < 100 {
            assert!(started.elapsed() < SOON);
            let ran_on = event_loop.drive(async { tokio::spawn(async { thread::current().id() }).await.unwrap() });
            own = if ran_on == thread::current().id() { own + 1 } else { 0 };
        }
    }

    #[test]
    fn threads_that_drive_at_once_all_get_their_results() {
        let event_loop = EventLoop::start("tested").unwrap();
        thread::scope(|scope| {
            for number in 0..4 {
                let event_loop = &event_loop;
                scope.spawn(move || {
                    for round in 0..200 {
                        let sum = async move { tokio::spawn(async move { number + round }).await.unwrap() };
                        let outer = Builder::new_current_thread().build().unwrap();
                        let got = if number == 3 {
                            outer.block_on(async { event_loop.drive(sum) })
                        } else {
                            event_loop.drive(sum)
                        };
                        assert_eq!(got, number + round);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_of_the_future_leaves_the_loop_as_it_was() {
        let event_loop = EventLoop::start("tested").unwrap();
        let panics = std::panic::AssertUnwindSafe(|| event_loop.drive(async { panic!("of the future") }));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(event_loop.drive(async { tokio::spawn(async { 7 }).await.unwrap() }), 7);
        assert_eq!(event_loop.turns.state.lock().here, 0);
    }
}

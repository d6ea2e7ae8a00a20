//! The thread between the training loop and a slow destination.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::protocol::Event;
use super::render::Renderer;

/// A renderer shared by the writer thread and the threads that print log lines above the bar. Its lock is held while
/// one line is written.
pub(crate) type Screen = Arc<Surface>;

pub(crate) type Surface = Mutex<Box<dyn Renderer>>;

/// Passes events to a writer thread without waiting for it.
pub(crate) struct Reporter {
    queue: Arc<Queue>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    /// Starts the thread that draws on `screen`.
    pub(crate) fn start(screen: Screen) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let (finished, done) = mpsc::channel();
        let events = Arc::clone(&queue);
        let thread = std::thread::Builder::new().name("progress".into()).spawn(move || {
            write(&events, &screen);
            // This fails only if no thread waits any more.
            let _ = finished.send(());
        })?;
        Ok(Self { queue, done, thread: Some(thread) })
    }

    /// Queues an event. A waiting step is replaced by a newer one, so the queue holds at most one step besides the few
    /// events that must not be lost.
    pub(crate) fn post(&self, event: Event) {
        self.queue.push(event);
    }

    /// Lets the thread write queued events, and waits for it until the deadline; a thread that is then still stuck is
    /// abandoned.
    pub(crate) fn close(&mut self, deadline: Duration) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.queue.close();
        if self.done.recv_timeout(deadline) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::debug!("progress output is stuck; its last lines are given up");
        } else if thread.join().is_err() {
            tracing::debug!("the progress thread panicked");
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.close(Duration::from_millis(500));
    }
}

fn write(queue: &Queue, screen: &Screen) {
    let mut broken = false;
    while let Some(event) = queue.next() {
        // A closed pipe stays closed, so the remaining events are dropped.
        if !broken && let Err(error) = screen.lock().render(&event) {
            tracing::debug!(%error, "progress output failed; the rest of it is dropped");
            broken = true;
        }
    }
    if !broken && let Err(error) = screen.lock().close() {
        tracing::debug!(%error, "progress output failed at the end");
    }
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    closed: bool,
}

impl Queue {
    fn push(&self, event: Event) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        if matches!(state.events.back(), Some(Event::Step(_))) {
            // The newer event supersedes the waiting step.
            state.events.pop_back();
        }
        state.events.push_back(event);
        drop(state);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.state().closed = true;
        self.changed.notify_one();
    }

    /// Returns the next event; `None` once the queue is closed and empty.
    fn next(&self) -> Option<Event> {
        let mut state = self.state();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            if state.closed {
                return None;
            }
            self.changed.wait_for(&mut state, Duration::from_secs(1));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Status;

    fn step(step: u64) -> Event {
        Event::Step(Status { step, ..Status::default() })
    }

    /// Blocks at the first event until it is released.
    struct Stalled {
        entered: mpsc::Sender<()>,
        go: Receiver<()>,
        seen: Arc<Mutex<Vec<Event>>>,
    }

    impl Renderer for Stalled {
        fn render(&mut self, event: &Event) -> io::Result<()> {
            if self.seen.lock().is_empty() {
                self.entered.send(()).unwrap();
                self.go.recv_timeout(DEADLINE).unwrap();
            }
            self.seen.lock().push(event.clone());
            Ok(())
        }
    }

    const DEADLINE: Duration = Duration::from_secs(10);

    type Seen = Arc<Mutex<Vec<Event>>>;

    fn stalled() -> (Reporter, Receiver<()>, mpsc::Sender<()>, Seen) {
        let (entered, has_entered) = mpsc::channel();
        let (let_go, go) = mpsc::channel();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let renderer: Box<dyn Renderer> = Box::new(Stalled { entered, go, seen: Arc::clone(&seen) });
        let reporter = Reporter::start(Arc::new(Mutex::new(renderer))).unwrap();
        (reporter, has_entered, let_go, seen)
    }

    #[test]
    fn a_stalled_destination_loses_steps_and_nothing_else() {
        let (mut reporter, entered, let_go, seen) = stalled();
        let epoch = |epoch| Event::Epoch(Status { epoch, ..Status::default() });
        let end = Event::End { summary: "done".into() };
        reporter.post(step(0));
        entered.recv_timeout(DEADLINE).unwrap();
        for e in 1..=3 {
            for s in 1..=10_000 {
                reporter.post(step(s));
            }
            reporter.post(epoch(e));
        }
        reporter.post(step(7));
        reporter.post(step(8));
        let waiting = reporter.queue.state().events.len();
        assert_eq!(waiting, 4, "the queue stays short");
        reporter.post(end.clone());
        let_go.send(()).unwrap();
        reporter.close(DEADLINE);
        assert_eq!(*seen.lock(), [step(0), epoch(1), epoch(2), epoch(3), end]);
    }

    #[test]
    fn closing_does_not_wait_for_a_stalled_destination_beyond_the_deadline() {
        let (mut reporter, entered, let_go, seen) = stalled();
        reporter.post(step(0));
        entered.recv_timeout(DEADLINE).unwrap();
        reporter.close(Duration::from_millis(10));
        assert!(seen.lock().is_empty());
        let_go.send(()).unwrap();
    }

    #[test]
    fn a_broken_destination_is_drained() {
        struct Broken;
        impl Renderer for Broken {
            fn render(&mut self, _event: &Event) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let mut reporter = Reporter::start(Arc::new(Mutex::new(Box::new(Broken)))).unwrap();
        for at in 0..100 {
            reporter.post(Event::Epoch(Status { step: at, ..Status::default() }));
        }
        reporter.close(DEADLINE);
        assert!(reporter.queue.state().events.is_empty());
    }
}

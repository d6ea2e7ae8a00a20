//! The thread that reports a task's vital signs about once a second.
//!
//! Steps are recorded in memory; only this thread touches the network, so a page never delays training.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::calls::CallSource;
use super::launcher::connect;
use super::protocol::{Event, Message, Status};
use super::vitals::{Activity, Meter, Vitals, WaitSource, host};

/// A destination of reports.
pub(crate) trait Link: Send {
    /// Sends the messages of one beat. An error is the destination's own matter: the next beat is sent all the same.
    fn send(&mut self, messages: &[Message]);

    /// Returns whether the destination asks for a report at once. Never blocks.
    fn is_asked(&mut self) -> bool {
        false
    }
}

/// The sources of the vital signs, besides the steps.
#[derive(Clone, Default)]
pub(crate) struct Sources {
    pub(crate) waits: WaitSource,
    pub(crate) calls: CallSource,
}

/// Measures the steps of this task and reports them until it is dropped, which waits at most half a second.
pub(crate) struct Pulse {
    shared: Arc<Shared>,
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    begun: Instant,
    sources: Sources,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    meter: Meter,
    activity: Activity,
    /// The run as the chief describes it.
    title: Option<String>,
    /// The newest progress of the chief, as a step or an epoch.
    progress: Option<Event>,
    summary: Option<String>,
}

impl Pulse {
    /// Starts the thread, which reports for `task`. `title` describes the run; only the chief has one.
    pub(crate) fn start(
        task: &str,
        title: Option<String>,
        sources: Sources,
        links: Vec<Box<dyn Link>>,
    ) -> io::Result<Pulse> {
        let state = Mutex::new(State { title, ..State::default() });
        let shared = Arc::new(Shared { begun: Instant::now(), sources, state });
        let (stop, stopped) = mpsc::channel();
        let (finished, done) = mpsc::channel();
        let mut beat = Beat { task: task.to_owned(), host: host(), shared: shared.clone(), links, count: 0 };
        let thread = std::thread::Builder::new().name("pulse".into()).spawn(move || {
            beat.until_stopped(&stopped);
            // This fails only if no thread waits any more.
            let _ = finished.send(());
        })?;
        Ok(Pulse { shared, stop: Some(stop), done, thread: Some(thread) })
    }

    /// Starts the first step of an epoch.
    pub(crate) fn epoch(&self) {
        let (now, waits) = self.shared.now();
        let mut state = self.shared.state.lock();
        state.meter.resume(now, waits);
        if !state.meter.is_empty() {
            state.activity = Activity::Training;
        }
    }

    /// Records the end of `count` steps.
    pub(crate) fn step(&self, count: u64) {
        let (now, waits) = self.shared.now();
        let mut state = self.shared.state.lock();
        state.meter.step(count, now, waits);
        state.activity = Activity::Training;
    }

    /// Sets the activity until the next step or epoch.
    pub(crate) fn activity(&self, activity: Activity) {
        self.shared.state.lock().activity = activity;
    }

    /// Sets the chief's progress.
    pub(crate) fn progress(&self, status: &Status, is_epoch: bool) {
        let status = status.clone();
        let event = if is_epoch { Event::Epoch(status) } else { Event::Step(status) };
        self.shared.state.lock().progress = Some(event);
    }

    /// Ends the training; the chief gives its summary.
    pub(crate) fn finish(&self, summary: Option<String>) {
        let mut state = self.shared.state.lock();
        (state.activity, state.summary) = (Activity::Finished, summary);
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        // Not overwritten: a run that ends by an error has no summary, but has ended as well.
        self.activity(Activity::Finished);
        drop(self.stop.take());
        match self.done.recv_timeout(CLOSE_DEADLINE) {
            Err(RecvTimeoutError::Timeout) => tracing::debug!("a report of vital signs is stuck, and is given up"),
            _ => {
                if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
                    tracing::debug!("the thread of vital signs panicked");
                }
            }
        }
    }
}

impl std::fmt::Debug for Pulse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pulse").finish_non_exhaustive()
    }
}

impl Shared {
    fn now(&self) -> (Duration, Option<distribute_types::Waits>) {
        (self.begun.elapsed(), self.sources.waits.read())
    }
}

/// The side of the thread.
struct Beat {
    task: String,
    host: String,
    shared: Arc<Shared>,
    links: Vec<Box<dyn Link>>,
    /// The number of reports.
    count: u64,
}

impl Beat {
    fn until_stopped(&mut self, stopped: &Receiver<()>) {
        loop {
            let messages = self.messages();
            self.links.iter_mut().for_each(|link| link.send(&messages));
            let reported = Instant::now();
            while reported.elapsed() < INTERVAL {
                if stopped.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout) {
                    // The end, with the last steps.
                    let messages = self.messages();
                    self.links.iter_mut().for_each(|link| link.send(&messages));
                    return;
                }
                if self.links.iter_mut().any(|link| link.is_asked()) {
                    break;
                }
            }
        }
    }

    fn messages(&mut self) -> Vec<Message> {
        self.count += 1;
        let now = self.shared.begun.elapsed();
        let calls = self.shared.sources.calls.read();
        let state = self.shared.state.lock();
        let begin = state.title.clone().map(|title| Event::Begin { title });
        let vitals = state.meter.vitals(now, state.activity, &self.host);
        let vitals = Vitals { report: self.count, calls, ..vitals };
        let end = state.summary.clone().map(|summary| Event::End { summary });
        let events = [begin, state.progress.clone(), Some(Event::Vitals(vitals)), end];
        drop(state);
        events.into_iter().flatten().map(|event| Message { task: self.task.clone(), event }).collect()
    }
}

/// A connection to a launcher, made again when it is lost.
pub(crate) struct TcpLink {
    addr: String,
    stream: Option<TcpStream>,
    /// When the last attempt to connect was made.
    tried: Option<Instant>,
}

impl TcpLink {
    pub(crate) fn new(addr: String) -> TcpLink {
        TcpLink { addr, stream: None, tried: None }
    }

    fn write(&mut self, messages: &[Message]) -> io::Result<()> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None if self.tried.is_some_and(|tried| tried.elapsed() < RETRY) => return Ok(()),
            None => {
                self.tried = Some(Instant::now());
                connect(&self.addr)?
            }
        };
        let mut lines = Vec::new();
        for message in messages {
            serde_json::to_writer(&mut lines, message)?;
            lines.push(b'\n');
        }
        stream.write_all(&lines)?;
        self.stream = Some(stream);
        Ok(())
    }
}

impl Link for TcpLink {
    fn send(&mut self, messages: &[Message]) {
        if let Err(error) = self.write(messages) {
            tracing::debug!(addr = %self.addr, %error, "the vital signs cannot be sent");
        }
    }

    /// The destination asks by sending anything.
    fn is_asked(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let mut sent = [0; 64];
        let read = stream.set_nonblocking(true).and_then(|()| stream.read(&mut sent));
        match (read, stream.set_nonblocking(false)) {
            (Ok(1..), Ok(())) => true,
            (Err(error), Ok(())) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => false,
            // The launcher has closed the connection, which is made again with the next report.
            _ => {
                self.stream = None;
                false
            }
        }
    }
}

/// The time between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long a destination that asks for a report waits at most until this is noticed.
const LOOK: Duration = Duration::from_millis(100);

/// The time between two attempts to connect.
const RETRY: Duration = Duration::from_secs(5);

/// The last report is small; a destination that does not take it in this time does without.
const CLOSE_DEADLINE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;

    use super::*;
    use crate::progress::GroupCall;

    /// Reads the next message whose event satisfies `wanted`.
    fn next(lines: &mut impl Iterator<Item = io::Result<String>>, wanted: impl Fn(&Event) -> bool) -> Message {
        lines
            .map(|line| serde_json::from_str::<Message>(&line.unwrap()).unwrap())
            .find(|message| wanted(&message.event))
            .unwrap()
    }

    #[test]
    fn a_task_reports_its_steps_and_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = TcpLink::new(listener.local_addr().unwrap().to_string());
        let pulse = Pulse::start("worker:1", None, Sources::default(), vec![Box::new(link)]).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut lines = BufReader::new(stream).lines();
        let first = next(&mut lines, |event| matches!(event, Event::Vitals(_)));
        assert_eq!(first.task, "worker:1");
        assert!(matches!(first.event, Event::Vitals(vitals) if vitals.activity == Activity::Starting));
        pulse.epoch();
        pulse.step(3);
        drop(pulse);
        let last =
            next(&mut lines, |event| matches!(event, Event::Vitals(vitals) if vitals.activity == Activity::Finished));
        assert!(matches!(last.event, Event::Vitals(vitals) if vitals.steps == 3));
        assert!(lines.next().is_none(), "the connection ends with the task");
    }

    #[test]
    fn a_task_that_is_asked_reports_at_once_what_it_waits_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = TcpLink::new(listener.local_addr().unwrap().to_string());
        let count = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let read = count.clone();
        let calls = CallSource::new(move || {
            let calls = read.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            vec![GroupCall { group: "world".into(), calls, ..GroupCall::default() }]
        });
        let sources = Sources { calls, ..Sources::default() };
        let pulse = Pulse::start("worker:1", None, sources, vec![Box::new(link)]).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut asking = stream.try_clone().unwrap();
        let mut lines = BufReader::new(stream).lines();
        let vitals = |event: &Event| matches!(event, Event::Vitals(_));
        next(&mut lines, vitals);
        let began = Instant::now();
        for asked in 1..=10 {
            asking.write_all(b"?\n").unwrap();
            let Event::Vitals(vitals) = next(&mut lines, vitals).event else { panic!() };
            assert_eq!((vitals.report, vitals.calls[0].calls), (asked + 1, asked));
        }
        // Without being asked, it would have taken ten times the interval.
        assert!(began.elapsed() < 5 * INTERVAL, "{:?}", began.elapsed());
        drop(pulse);
    }

    #[test]
    fn a_chief_reports_the_progress_of_the_run_too() {
        struct Kept(Sender<Vec<Message>>);
        impl Link for Kept {
            fn send(&mut self, messages: &[Message]) {
                let _ = self.0.send(messages.to_vec());
            }
        }
        let (kept, sent) = mpsc::channel();
        let links: Vec<Box<dyn Link>> = vec![Box::new(Kept(kept))];
        let pulse = Pulse::start("chief:0", Some("mnist".into()), Sources::default(), links).unwrap();
        let status = Status { epoch: 1, epochs: 1, step: 7, ..Status::default() };
        pulse.progress(&status, false);
        pulse.finish(Some("done".into()));
        drop(pulse);
        let last = sent.iter().last().unwrap();
        let events: Vec<_> = last.into_iter().map(|message| message.event).collect();
        assert_eq!(events[0], Event::Begin { title: "mnist".into() });
        assert_eq!(events[1], Event::Step(status));
        assert_eq!(events[3], Event::End { summary: "done".into() });
    }

    #[test]
    fn a_destination_that_hangs_does_not_hold_the_end_up() {
        struct Hung(Receiver<()>);
        impl Link for Hung {
            fn send(&mut self, _: &[Message]) {
                let _ = self.0.recv_timeout(Duration::from_secs(60));
            }
        }
        let (release, hung) = mpsc::channel();
        let pulse = Pulse::start("worker:0", None, Sources::default(), vec![Box::new(Hung(hung))]).unwrap();
        let began = Instant::now();
        pulse.step(1);
        drop(pulse);
        assert!(began.elapsed() < Duration::from_secs(30));
        drop(release);
    }
}

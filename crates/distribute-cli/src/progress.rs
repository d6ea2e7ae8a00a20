//! Receives progress from the tasks: one JSON message per line over TCP.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use distribute_train::progress::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::job::Task;
use crate::output::{Output, ends_within};

/// The thread that listens for progress.
#[derive(Debug)]
pub(crate) struct Progress {
    address: SocketAddr,
    /// Closing it wakes the thread and asks it to end.
    wake: UnixStream,
    done: Receiver<()>,
}

impl Progress {
    /// Listens on a loopback port chosen by the kernel.
    pub(crate) fn start(tasks: &[Task], output: Sender<Output>, notes: Sender<String>) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (wake, woken) = UnixStream::pair()?;
        let (finished, done) = bounded(0);
        let others = tasks.iter().skip(1).map(|task| format!("{}:{}", task.job, task.index)).collect();
        let mut hub = Hub { output, notes, others, connections: Vec::new() };
        let run = move || {
            // The job works without progress.
            let _ = hub.run(&listener, &woken);
            drop(finished);
        };
        thread::Builder::new().name("progress".into()).spawn(run)?;
        Ok(Self { address, wake, done })
    }

    /// Returns the address for `DISTRIBUTE_PROGRESS_ADDR`.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reads what the tasks have sent before they ended, and ends the thread.
    pub(crate) fn finish(self) {
        drop(self.wake);
        ends_within(&self.done, 2 * DRAIN);
    }
}

struct Hub {
    output: Sender<Output>,
    notes: Sender<String>,
    /// Tasks other than rank 0, whose reports are part of those of rank 0.
    others: Vec<String>,
    connections: Vec<Connection>,
}

struct Connection {
    stream: TcpStream,
    pending: Vec<u8>,
}

impl Hub {
    fn run(&mut self, listener: &TcpListener, woken: &UnixStream) -> io::Result<()> {
        let mut end: Option<Instant> = None;
        loop {
            let mut fds: Vec<_> = self.connections.iter().map(|it| PollFd::new(&it.stream, PollFlags::IN)).collect();
            fds.push(PollFd::new(listener, PollFlags::IN));
            if end.is_none() {
                fds.push(PollFd::new(woken, PollFlags::IN));
            }
            // Once the tasks have ended, all their messages have arrived.
            let wait = if end.is_some() { Duration::from_millis(20) } else { WAIT };
            let ready = match poll(&mut fds, Some(&timespec(wait))) {
                Err(rustix::io::Errno::INTR) => continue,
                ready => ready?,
            };
            let idle = ready == 0;
            let is_ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            let count = self.connections.len();
            self.read(&is_ready[..count]);
            if is_ready[count] {
                self.accept(listener);
            }
            if is_ready.get(count + 1) == Some(&true) {
                end = Some(Instant::now() + DRAIN);
            }
            if end.is_some_and(|end| idle || Instant::now() >= end) {
                return Ok(());
            }
        }
    }

    fn accept(&mut self, listener: &TcpListener) {
        while let Ok((stream, _)) = listener.accept() {
            if self.connections.len() < MOST && stream.set_nonblocking(true).is_ok() {
                self.connections.push(Connection { stream, pending: Vec::new() });
            }
        }
    }

    fn read(&mut self, is_ready: &[bool]) {
        let mut ready = is_ready.iter().copied();
        let mut connections = std::mem::take(&mut self.connections);
        connections.retain_mut(|connection| !ready.next().unwrap_or(false) || self.read_one(connection));
        self.connections = connections;
    }

    /// Returns `false` when the connection has ended or sent an invalid message.
    fn read_one(&self, connection: &mut Connection) -> bool {
        let mut buffer = [0; 16 * 1024];
        let count = match connection.stream.read(&mut buffer) {
            Ok(0) => return false,
            Ok(count) => count,
            Err(error) => return matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        };
        connection.pending.extend_from_slice(&buffer[..count]);
        while let Some(at) = connection.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<_> = connection.pending.drain(..=at).collect();
            match serde_json::from_slice::<Message>(&line) {
                Ok(message) if self.others.contains(&message.task) => {}
                Ok(message) => {
                    // Blocks while the terminal is slow; so does the task's own queue, which drops steps.
                    let _ = self.output.send(Output::Progress(message.event));
                }
                Err(error) => return self.refuse(&error.to_string()),
            }
        }
        connection.pending.len() <= LONGEST || self.refuse("a line of more than 1 MiB")
    }

    fn refuse(&self, problem: &str) -> bool {
        let note = format!("progress from a task is not understood and left out from here on: {problem}");
        let _ = self.notes.send(note);
        false
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

/// Uncritical: the thread is woken when it has something to do.
const WAIT: Duration = Duration::from_secs(5);

/// Time limit of reading the rest after the tasks have ended.
const DRAIN: Duration = Duration::from_secs(1);

/// Maximum number of connections; each task has one.
const MOST: usize = 2048;

const LONGEST: usize = 1024 * 1024;

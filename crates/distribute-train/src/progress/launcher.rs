//! Sends progress to the launcher; without one, the lines go to the log instead.

use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::lines::PlainRenderer;
use super::protocol::{Event, Message};
use super::render::Renderer;

/// A connection to the launcher, with a plain log as the fallback.
pub(crate) struct Launcher<W> {
    addr: String,
    task: String,
    link: Link,
    log: PlainRenderer<W>,
    summary_taken: Arc<AtomicBool>,
}

enum Link {
    Untried,
    Up(TcpStream),
    /// Given up for good: a restarted launcher would not know the run.
    Down,
}

impl<W: Write + Send> Launcher<W> {
    /// Creates a renderer that connects at the first event. `summary_taken` turns true once the launcher has been sent
    /// the summary, which it then prints.
    pub(crate) fn new(
        addr: String,
        task: String,
        log: W,
        clock: impl Clock + 'static,
        summary_taken: Arc<AtomicBool>,
    ) -> Self {
        let log = PlainRenderer::new(log, clock);
        Self { addr, task, link: Link::Untried, log, summary_taken }
    }

    fn send(&mut self, event: &Event) -> io::Result<()> {
        let Link::Up(stream) = &mut self.link else {
            return Ok(());
        };
        let message = Message { task: self.task.clone(), event: event.clone() };
        let mut line = serde_json::to_vec(&message)?;
        line.push(b'\n');
        stream.write_all(&line)
    }

    fn fall_back(&mut self, what: &str, error: &io::Error) -> io::Result<()> {
        self.link = Link::Down;
        tracing::debug!(addr = %self.addr, %error, "progress falls back to plain lines");
        self.log.warn(&format!(
            "progress: {what} the launcher at {} ({error}); progress continues as plain lines",
            self.addr
        ))
    }
}

impl<W: Write + Send> Renderer for Launcher<W> {
    fn render(&mut self, event: &Event) -> io::Result<()> {
        if matches!(self.link, Link::Untried) {
            match connect(&self.addr) {
                Ok(stream) => self.link = Link::Up(stream),
                Err(error) => self.fall_back("cannot reach", &error)?,
            }
        }
        if matches!(self.link, Link::Up(_)) {
            match self.send(event) {
                Ok(()) => {
                    if matches!(event, Event::End { .. }) {
                        self.summary_taken.store(true, Ordering::Release);
                    }
                    return Ok(());
                }
                Err(error) => self.fall_back("lost", &error)?,
            }
        }
        self.log.render(event)
    }
}

pub(super) fn connect(addr: &str) -> io::Result<TcpStream> {
    let deadline = Instant::now() + CONNECT_DEADLINE;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for addr in addr.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer within 1 s"));
        }
        match TcpStream::connect_timeout(&addr, left) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(WRITE_DEADLINE))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The launcher runs on this machine or next to it.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);

/// A launcher that reads nothing for this long, with the socket's buffers full, is considered dead.
const WRITE_DEADLINE: Duration = Duration::from_secs(5);

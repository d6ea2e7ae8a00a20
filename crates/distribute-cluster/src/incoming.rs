//! Incoming connections of a server, within limits.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::net::{self, TcpStream};
use crate::tls::socket::Socket;

mod door;

pub use door::Door;

use door::Entry;

/// A source of accepted connections.
///
/// A connection that is not identified by its deadline is closed, whether it is silent, slow, or makes calls that are
/// refused. The number of unidentified connections is bounded; the oldest is closed to admit a new one. If the process
/// is out of file descriptors, accepting pauses instead of failing repeatedly.
///
/// Behind a [`Door`], a caller that begins a TLS handshake or the exchange of secrets is let through once it has shown
/// a certificate and proved the secret, as far as the door asks for them. One that does not is let through too, but its
/// [`Acquaintance`] has proved nothing: the service refuses it in its own protocol.
///
/// A method of a gRPC service finds the connection in a request's extensions as [`Acquaintance`].
pub struct Incoming {
    listener: net::TcpListener,
    door: Option<Arc<Door>>,
    deadline: Duration,
    max_unknown: usize,
    unknown: VecDeque<Weak<State>>,
    pause: Option<Pin<Box<Sleep>>>,
    complained: Option<Instant>,
}

impl Incoming {
    /// Creates the source of a listener's connections. A connection has `deadline` to be identified, and at most
    /// `max_unknown` unidentified ones are open at a time.
    pub fn new(listener: tokio::net::TcpListener, deadline: Duration, max_unknown: usize) -> Incoming {
        Incoming::from_listener(net::listening(listener), deadline, max_unknown)
    }

    pub(crate) fn from_listener(listener: net::TcpListener, deadline: Duration, max_unknown: usize) -> Incoming {
        let (unknown, pause) = (VecDeque::new(), None);
        let max_unknown = max_unknown.max(1);
        Incoming { listener, door: None, deadline, max_unknown, unknown, pause, complained: None }
    }

    /// Lets callers prove the secret of a job before anything else is read.
    #[must_use]
    pub fn behind(self, door: Arc<Door>) -> Incoming {
        Incoming { door: Some(door), ..self }
    }

    fn begin(&mut self, stream: TcpStream) -> Connection {
        // Disables Nagle's algorithm for small messages; the connection works without this, so an error is ignored.
        let _ = stream.set_nodelay(true);
        let state = Arc::new(State {
            phase: AtomicU8::new(UNKNOWN),
            waker: Mutex::new(None),
            is_encrypted: AtomicBool::new(false),
            claim: OnceLock::new(),
        });
        self.unknown.retain(|known| known.upgrade().is_some_and(|state| state.phase() == UNKNOWN));
        while self.unknown.len() >= self.max_unknown {
            if let Some(oldest) = self.unknown.pop_front().and_then(|oldest| oldest.upgrade()) {
                oldest.evict();
            }
        }
        self.unknown.push_back(Arc::downgrade(&state));
        let deadline = Some(Box::pin(tokio::time::sleep(self.deadline)));
        let peer = stream.peer_addr().ok();
        let entry = self.door.as_ref().map(|door| Entry::new(door.clone(), peer));
        Connection { peer, stream: stream.into(), state, deadline, entry, replay: Vec::new() }
    }

    /// Logs that accepting has failed, at most once a minute.
    fn complain(&mut self, error: &IoError) {
        if self.complained.is_none_or(|last| last.elapsed() >= SILENCE) {
            self.complained = Some(Instant::now());
            let address =
                self.listener.local_addr().map_or_else(|_| "a socket".to_owned(), |address| address.to_string());
            tracing::warn!(
                "cannot accept connections at {address}: {error}; it is tried again every {} ms; raise the limit of \
                 open files (ulimit -n), or look for what holds them",
                PAUSE.as_millis()
            );
        }
    }
}

impl Incoming {
    /// Returns the next connection. Cancel safe.
    pub async fn accept(&mut self) -> Connection {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// Returns the next connection when there is one.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Connection> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok((stream, _)) => return Poll::Ready(self.begin(stream)),
                // The peer disconnected before the connection was accepted.
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    self.complain(&error);
                    self.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
                }
            }
        }
    }
}

/// Returns whether an error concerns a single connection, so that the next can be accepted at once.
fn is_of_one_connection(error: &IoError) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}

/// An accepted connection.
pub struct Connection {
    stream: Socket,
    peer: Option<SocketAddr>,
    state: Arc<State>,
    /// `None` once the connection is identified.
    deadline: Option<Pin<Box<Sleep>>>,
    /// The handshake and the exchange of secrets; `None` once they are over.
    entry: Option<Entry>,
    /// First bytes of a caller that does not exchange secrets, to be read again.
    replay: Vec<u8>,
}

struct State {
    phase: AtomicU8,
    /// The waker of the task that reads the connection.
    waker: Mutex<Option<Waker>>,
    /// Whether the caller has shown a certificate.
    is_encrypted: AtomicBool,
    /// The claim that the caller has proved.
    claim: OnceLock<Vec<u8>>,
}

const UNKNOWN: u8 = 0;
const KNOWN: u8 = 1;
const EVICTED: u8 = 2;

impl State {
    fn phase(&self) -> u8 {
        // Relaxed: no other data is published with the phase.
        self.phase.load(Ordering::Relaxed)
    }

    fn evict(&self) {
        if self.phase.compare_exchange(UNKNOWN, EVICTED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            && let Some(waker) = self.waker.lock().take()
        {
            waker.wake();
        }
    }
}

/// The peer of a call's connection.
#[derive(Clone)]
pub struct Acquaintance {
    peer: Option<SocketAddr>,
    state: Arc<State>,
}

impl Acquaintance {
    /// Marks the connection as identified, so that it is kept open.
    pub fn known(&self) {
        let _ = self.state.phase.compare_exchange(UNKNOWN, KNOWN, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the peer's address.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Returns whether the caller has shown a certificate of the job's authority.
    pub fn is_encrypted(&self) -> bool {
        // Relaxed: no other data is published with it.
        self.state.is_encrypted.load(Ordering::Relaxed)
    }

    /// Returns what the caller said of itself when it proved the secret; `None` if it has proved none.
    pub fn claim(&self) -> Option<&[u8]> {
        self.state.claim.get().map(Vec::as_slice)
    }
}

impl Connection {
    /// Returns the handle by which a service identifies the peer.
    pub fn acquaintance(&self) -> Acquaintance {
        Acquaintance { peer: self.peer, state: self.state.clone() }
    }

    /// Waits until the caller has shown its certificate and proved the secret, or has begun with something else.
    ///
    /// # Errors
    /// If the caller is refused, does not finish in time or is gone.
    pub async fn entered(&mut self) -> IoResult<()> {
        poll_fn(|cx| self.poll_entered(cx)).await
    }

    fn poll_entered(&mut self, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        if let Some(deadline) = &mut self.deadline {
            // The waker is stored first: an eviction after it wakes this task, one before it is visible here.
            *self.state.waker.lock() = Some(cx.waker().clone());
            match self.state.phase() {
                KNOWN => self.deadline = None,
                EVICTED => return Poll::Ready(Err(ErrorKind::ConnectionAborted.into())),
                _ if deadline.as_mut().poll(cx).is_ready() => return Poll::Ready(Err(ErrorKind::TimedOut.into())),
                _ => {}
            }
        }
        if let Some(entry) = &mut self.entry {
            let entered = ready!(entry.poll(cx, &mut self.stream))?;
            self.state.is_encrypted.store(entry.is_encrypted(), Ordering::Relaxed);
            match entered {
                Ok(claim) => drop(self.state.claim.set(claim)),
                Err(first) => self.replay = first,
            }
            self.entry = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
        let this = &mut *self;
        if this.deadline.is_some() || this.entry.is_some() {
            ready!(this.poll_entered(cx))?;
        }
        if !this.replay.is_empty() {
            let len = this.replay.len().min(buffer.remaining());
            buffer.put_slice(&this.replay[..len]);
            this.replay.drain(..len);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<IoResult<usize>> {
        // A server may speak first.
        if self.entry.is_some() {
            ready!(self.poll_entered(cx))?;
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<IoResult<usize>> {
        if self.entry.is_some() {
            ready!(self.poll_entered(cx))?;
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Pause after the system fails to accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Shortest interval between two warnings about such failures.
const SILENCE: Duration = Duration::from_secs(60);

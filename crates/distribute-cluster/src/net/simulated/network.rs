//! A network in memory, in virtual time: bytes take a while, wait where a link is cut, and are lost with a connection.
//!
//! Connections are those of TCP: bytes of one direction arrive in their order, or not before the link is there again,
//! and bytes of different connections overtake each other.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A network that is shared by its processes.
#[derive(Clone)]
pub(crate) struct Network(Arc<Mutex<State>>);

/// How long a piece of bytes that is sent now takes, in microseconds, given what tells it from all others: not a state
/// that pieces of different connections change, whose order within a moment may be any.
type Delays = Box<dyn Fn(u64, [u64; 3]) -> u64 + Send>;

/// Returns whether bytes get over a link at a time.
type Cuts = Box<dyn Fn(&Link, u64) -> bool + Send>;

/// The way from one machine to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Link {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
}

/// A process of the network, at the address of its machine.
#[derive(Clone)]
pub(crate) struct Place {
    network: Network,
    process: usize,
    host: IpAddr,
}

struct State {
    /// In microseconds.
    now: u64,
    delays: Delays,
    /// Whether bytes get over a link now.
    is_open: Cuts,
    connections: BTreeMap<u64, Connection>,
    connecting: BTreeMap<u64, Connecting>,
    listeners: BTreeMap<SocketAddr, Listening>,
    /// Processes whose machines are gone: nothing that they do is seen any more.
    vanished: Vec<usize>,
    next: u64,
    /// All bytes that were sent to a listener, by connection, for those who listen in.
    recorded: BTreeMap<u64, Vec<u8>>,
}

struct Connection {
    /// The caller and the listener.
    ends: [End; 2],
}

/// One end of a connection, and what is on its way to it.
struct End {
    process: usize,
    address: SocketAddr,
    in_flight: VecDeque<(u64, Piece)>,
    arrived: VecDeque<u8>,
    /// The other end sends nothing more.
    ended: bool,
    /// The connection is broken.
    reset: bool,
    waker: Option<Waker>,
    /// How many pieces were sent from here.
    sent: u64,
    /// Which halves are open here.
    reads: bool,
    writes: bool,
}

enum Piece {
    Bytes(Vec<u8>),
    End,
    Reset,
}

struct Connecting {
    link: Link,
    process: usize,
    to: SocketAddr,
    at: u64,
    outcome: Option<IoResult<u64>>,
    waker: Option<Waker>,
}

struct Listening {
    process: usize,
    waiting: VecDeque<u64>,
    waker: Option<Waker>,
}

thread_local! {
    static ACTING: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// Makes this thread act as a process of a network, or as itself.
pub(crate) fn act_as(place: Option<&Place>) {
    ACTING.set(place.cloned());
}

pub(super) fn acting() -> Option<Place> {
    ACTING.with_borrow(Clone::clone)
}

impl Network {
    pub(crate) fn new(delays: Delays, is_open: Cuts) -> Network {
        Network(Arc::new(Mutex::new(State {
            now: 0,
            delays,
            is_open,
            connections: BTreeMap::new(),
            connecting: BTreeMap::new(),
            listeners: BTreeMap::new(),
            vanished: Vec::new(),
            next: 1,
            recorded: BTreeMap::new(),
        })))
    }

    pub(crate) fn place(&self, process: usize, host: IpAddr) -> Place {
        Place { network: self.clone(), process, host }
    }

    /// Delivers what has arrived by now.
    pub(crate) fn advance(&self, now: u64) {
        let wakers = self.0.lock().advance(now);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Breaks the connections over which a drawn number falls; returns whether there was one between these processes.
    pub(crate) fn break_one(&self, draw: u64, is_of: impl Fn(usize, usize) -> bool) -> bool {
        let wakers = {
            let mut state = self.0.lock();
            let of: Vec<u64> = state
                .connections
                .iter()
                .filter(|(_, connection)| is_of(connection.ends[0].process, connection.ends[1].process))
                .map(|(id, _)| *id)
                .collect();
            if of.is_empty() {
                return false;
            }
            let id = of[(draw % of.len() as u64) as usize];
            let mut wakers = Vec::new();
            if let Some(connection) = state.connections.get_mut(&id) {
                for end in &mut connection.ends {
                    end.reset = true;
                    end.in_flight.clear();
                    wakers.extend(end.waker.take());
                }
            }
            wakers
        };
        wakers.into_iter().for_each(Waker::wake);
        true
    }

    /// Takes a machine off the network: nothing that the process sent or sends from now on arrives.
    pub(crate) fn vanish(&self, process: usize) {
        self.0.lock().vanished.push(process);
    }

    /// Returns what was sent to a listener on each connection so far.
    pub(crate) fn recorded(&self) -> Vec<Vec<u8>> {
        self.0.lock().recorded.values().cloned().collect()
    }

    pub(super) fn begin(&self, place: &Place, to: SocketAddr) -> u64 {
        let mut state = self.0.lock();
        let link = Link { from: place.host, to: to.ip() };
        let id = state.number();
        let at = state.now + (state.delays)(state.now, [id, 0, 0]) + (state.delays)(state.now, [id, 1, 0]);
        let (process, outcome, waker) = (place.process, None, None);
        state.connecting.insert(id, Connecting { link, process, to, at, outcome, waker });
        id
    }

    pub(super) fn poll_connect(&self, id: u64, place: &Place, cx: &mut Context<'_>) -> Poll<IoResult<Stream>> {
        let mut state = self.0.lock();
        let Some(connecting) = state.connecting.get_mut(&id) else {
            return Poll::Ready(Err(ErrorKind::ConnectionAborted.into()));
        };
        match connecting.outcome.take() {
            Some(outcome) => Poll::Ready(outcome.map(|connection| Stream::new(place.network.clone(), connection, 0))),
            None => {
                connecting.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    pub(super) fn abandon(&self, id: u64) {
        let mut state = self.0.lock();
        if let Some(Connecting { outcome: Some(Ok(connection)), .. }) = state.connecting.remove(&id) {
            state.close(connection, 0);
        }
    }
}

impl Place {
    pub(super) fn network(&self) -> &Network {
        &self.network
    }

    /// Listens at a port of this machine.
    pub(crate) fn listen(&self, port: u16) -> IoResult<super::TcpListener> {
        let address = SocketAddr::new(self.host, port);
        let mut state = self.network.0.lock();
        if state.listeners.contains_key(&address) {
            return Err(ErrorKind::AddrInUse.into());
        }
        state.listeners.insert(address, Listening { process: self.process, waiting: VecDeque::new(), waker: None });
        Ok(super::TcpListener::Simulated(Listener { network: self.network.clone(), address }))
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn is_open(&self, link: &Link) -> bool {
        (self.is_open)(link, self.now)
    }

    fn has_vanished(&self, process: usize) -> bool {
        self.vanished.contains(&process)
    }

    fn advance(&mut self, now: u64) -> Vec<Waker> {
        self.now = now;
        let mut wakers = Vec::new();
        self.connect(&mut wakers);
        let State { connections, is_open, vanished, recorded, .. } = self;
        for (id, connection) in connections.iter_mut() {
            let hosts = [connection.ends[0].address.ip(), connection.ends[1].address.ip()];
            let processes = [connection.ends[0].process, connection.ends[1].process];
            for (place, end) in connection.ends.iter_mut().enumerate() {
                let link = Link { from: hosts[1 - place], to: hosts[place] };
                if !is_open(&link, now) || processes.iter().any(|process| vanished.contains(process)) {
                    continue;
                }
                let before = end.arrived.len();
                let (ended, reset) = (end.ended, end.reset);
                while end.in_flight.front().is_some_and(|(at, _)| *at <= now) {
                    match end.in_flight.pop_front() {
                        Some((_, Piece::Bytes(bytes))) => {
                            if place == 1 {
                                recorded.entry(*id).or_default().extend_from_slice(&bytes);
                            }
                            end.arrived.extend(bytes);
                        }
                        Some((_, Piece::End)) => end.ended = true,
                        Some((_, Piece::Reset)) => end.reset = true,
                        None => {}
                    }
                }
                if (before, ended, reset) != (end.arrived.len(), end.ended, end.reset) {
                    wakers.extend(end.waker.take());
                }
            }
        }
        self.connections.retain(|_, connection| connection.ends.iter().any(|end| end.reads || end.writes));
        wakers
    }

    /// Makes connections that are due.
    fn connect(&mut self, wakers: &mut Vec<Waker>) {
        let due = |connecting: &Connecting| connecting.outcome.is_none() && connecting.at <= self.now;
        let due: Vec<u64> = self.connecting.iter().filter(|(_, one)| due(one)).map(|(id, _)| *id).collect();
        for id in due {
            let Connecting { link, process, to, .. } = self.connecting[&id];
            let back = Link { from: link.to, to: link.from };
            let lost = !self.is_open(&link) || !self.is_open(&back) || self.has_vanished(process);
            let listens = self.listeners.get(&to).map(|listening| listening.process);
            // What asks a machine that is gone, or behind a cut, gets no answer.
            if lost || listens.is_some_and(|process| self.has_vanished(process)) {
                continue;
            }
            let outcome = match listens {
                None => Err(IoError::from(ErrorKind::ConnectionRefused)),
                Some(listener) => {
                    let number = self.number();
                    let from = SocketAddr::new(link.from, 40_000 + (number % 20_000) as u16);
                    let ends = [End::new(process, from), End::new(listener, to)];
                    self.connections.insert(number, Connection { ends });
                    if let Some(listening) = self.listeners.get_mut(&to) {
                        listening.waiting.push_back(number);
                        wakers.extend(listening.waker.take());
                    }
                    Ok(number)
                }
            };
            if let Some(connecting) = self.connecting.get_mut(&id) {
                connecting.outcome = Some(outcome);
                wakers.extend(connecting.waker.take());
            }
        }
    }

    /// Sends something to the other end of a connection.
    fn send(&mut self, id: u64, end: usize, piece: Piece) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if self.vanished.contains(&connection.ends[end].process) {
            return;
        }
        connection.ends[end].sent += 1;
        let at = self.now + (self.delays)(self.now, [id, end as u64, connection.ends[end].sent]);
        let other = &mut connection.ends[1 - end];
        let after = other.in_flight.back().map_or(0, |(at, _)| *at);
        other.in_flight.push_back((at.max(after), piece));
    }

    /// Closes an end: what has not been read takes back what was sent, as the system's sockets do it.
    fn close(&mut self, id: u64, end: usize) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let this = &mut connection.ends[end];
        let unread = !this.arrived.is_empty();
        (this.reads, this.writes, this.waker) = (false, false, None);
        let piece = if unread { Piece::Reset } else { Piece::End };
        self.send(id, end, piece);
    }
}

impl End {
    fn new(process: usize, address: SocketAddr) -> End {
        End {
            process,
            address,
            in_flight: VecDeque::new(),
            arrived: VecDeque::new(),
            ended: false,
            reset: false,
            waker: None,
            sent: 0,
            reads: true,
            writes: true,
        }
    }
}

/// A listener at an address of the network.
pub(crate) struct Listener {
    network: Network,
    address: SocketAddr,
}

impl Listener {
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<Stream> {
        let mut state = self.network.0.lock();
        let Some(listening) = state.listeners.get_mut(&self.address) else { return Poll::Pending };
        match listening.waiting.pop_front() {
            Some(connection) => Poll::Ready(Stream::new(self.network.clone(), connection, 1)),
            None => {
                listening.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.network.0.lock();
        let listening = state.listeners.remove(&self.address);
        for connection in listening.into_iter().flat_map(|listening| listening.waiting) {
            state.close(connection, 1);
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a listener at {}", self.address)
    }
}

/// One end of a connection.
pub(crate) struct Stream {
    half: Half,
}

/// One end, until it is dropped.
struct Half {
    network: Network,
    connection: u64,
    end: usize,
    writes: bool,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "connection {}", self.half.connection)
    }
}

impl Stream {
    fn new(network: Network, connection: u64, end: usize) -> Stream {
        Stream { half: Half { network, connection, end, writes: true } }
    }

    pub(super) fn peer(&self) -> SocketAddr {
        let state = self.half.network.0.lock();
        let none = SocketAddr::from(([0, 0, 0, 0], 0));
        state.connections.get(&self.half.connection).map_or(none, |one| one.ends[1 - self.half.end].address)
    }

    /// Looks at what has arrived, without taking it.
    pub(super) fn poll_peek(&self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<usize>> {
        self.half.poll_arrived(cx, |arrived| {
            let count = arrived.len().min(buffer.remaining());
            buffer.put_slice(&arrived.iter().copied().take(count).collect::<Vec<u8>>());
            count
        })
    }

    /// Takes what has arrived, or fails with [`ErrorKind::WouldBlock`].
    pub(super) fn try_read(&self, bytes: &mut [u8]) -> IoResult<usize> {
        let mut buffer = ReadBuf::new(bytes);
        match self.half.poll_read(&mut Context::from_waker(std::task::Waker::noop()), &mut buffer) {
            Poll::Ready(outcome) => outcome.map(|()| buffer.filled().len()),
            Poll::Pending => Err(ErrorKind::WouldBlock.into()),
        }
    }
}

impl Half {
    fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
        self.poll_arrived(cx, |arrived| {
            let count = arrived.len().min(buffer.remaining());
            buffer.put_slice(&arrived.drain(..count).collect::<Vec<u8>>());
        })
    }

    /// Applies `take` to what has arrived, which is empty once the other end has ended.
    fn poll_arrived<R>(&self, cx: &mut Context<'_>, take: impl FnOnce(&mut VecDeque<u8>) -> R) -> Poll<IoResult<R>> {
        let mut state = self.network.0.lock();
        let Some(connection) = state.connections.get_mut(&self.connection) else {
            return Poll::Ready(Ok(take(&mut VecDeque::new())));
        };
        let end = &mut connection.ends[self.end];
        if end.reset {
            return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
        }
        if !end.arrived.is_empty() || end.ended {
            return Poll::Ready(Ok(take(&mut end.arrived)));
        }
        end.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn poll_write(&self, bytes: &[u8]) -> Poll<IoResult<usize>> {
        let mut state = self.network.0.lock();
        let Some(connection) = state.connections.get(&self.connection) else {
            return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
        };
        if connection.ends[self.end].reset {
            return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
        }
        // A peer that has closed its end answers with a reset.
        if !connection.ends[1 - self.end].reads {
            return Poll::Ready(Ok(bytes.len()));
        }
        state.send(self.connection, self.end, Piece::Bytes(bytes.to_vec()));
        Poll::Ready(Ok(bytes.len()))
    }

    fn shut_down(&mut self) {
        if !std::mem::replace(&mut self.writes, false) {
            return;
        }
        let mut state = self.network.0.lock();
        let Some(connection) = state.connections.get_mut(&self.connection) else { return };
        let end = &mut connection.ends[self.end];
        end.writes = false;
        state.send(self.connection, self.end, Piece::End);
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        let mut state = self.network.0.lock();
        if self.writes {
            return state.close(self.connection, self.end);
        }
        // Its end was sent already.
        let Some(connection) = state.connections.get_mut(&self.connection) else { return };
        let end = &mut connection.ends[self.end];
        (end.reads, end.waker) = (false, None);
        if !end.arrived.is_empty() {
            state.send(self.connection, self.end, Piece::Reset);
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
        self.half.poll_read(cx, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<IoResult<usize>> {
        self.half.poll_write(bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<IoResult<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<IoResult<()>> {
        self.get_mut().half.shut_down();
        Poll::Ready(Ok(()))
    }
}

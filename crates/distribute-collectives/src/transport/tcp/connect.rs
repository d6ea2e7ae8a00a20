//! Connection setup: each member connects to those before it and accepts those after it.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use distribute_cluster::look_up;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::AsFd;

use super::super::listen::LOOK_UP;
use super::super::poll::poll;
use super::super::shm::{self, Lane, Obstacle};
use super::super::{ConnectError, Nonce, Sharing};

/// How long a caller may take to send its hello. Port scanners never do.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// Most callers that have not yet sent their hello, in addition to those that are expected; beyond this the oldest is
/// turned away.
const MAX_STRANGERS: usize = 256;

/// A socket for data and one for control messages, for each member but this one.
pub(super) type Sockets = Vec<[Option<TcpStream>; 2]>;

pub(super) fn connect(
    rank: usize,
    addresses: &[String],
    listener: &TcpListener,
    group: Nonce,
    deadline: Instant,
) -> Result<Sockets, ConnectError> {
    let mut sockets: Sockets = addresses.iter().map(|_| [None, None]).collect();
    for (peer, address) in addresses.iter().enumerate().take(rank) {
        for (channel, socket) in sockets[peer].iter_mut().enumerate() {
            *socket = Some(dial(address, Hello { group, rank, channel }, deadline)?);
        }
    }
    let expected = 2 * (addresses.len() - rank - 1);
    let mut accepted = 0;
    let mut reception = Reception { listener, callers: Vec::new(), most: expected + MAX_STRANGERS };
    while accepted < expected {
        let (stream, hello) = reception.next(deadline)?;
        // A connection of another group: not ours to answer.
        if hello.group != group || hello.rank <= rank {
            continue;
        }
        if let Some(place @ None) = sockets.get_mut(hello.rank).and_then(|pair| pair.get_mut(hello.channel)) {
            let mut stream = stream;
            // A caller that has hung up is not a member: a member waits for this.
            if stream.write_all(&Welcome { group, rank }.encode()).is_ok() {
                *place = Some(stream);
                accepted += 1;
            }
        }
    }
    for (peer, pair) in sockets.iter_mut().enumerate().take(rank) {
        for stream in pair.iter_mut().flatten() {
            read_welcome(stream, Welcome { group, rank: peer }, left(deadline)).map_err(|source| ConnectError {
                action: "be welcomed as a member of the group by",
                address: addresses[peer].clone(),
                source,
            })?;
        }
    }
    Ok(sockets)
}

/// Checks that the listener is the member that was meant.
fn read_welcome(stream: &mut TcpStream, expected: Welcome, left: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(left))?;
    let mut bytes = [0; Welcome::LEN];
    stream.read_exact(&mut bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            io::Error::new(error.kind(), "it hung up: another job or group listens at this address")
        }
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(error.kind(), "it took the call and said nothing before the deadline")
        }
        _ => error,
    })?;
    if bytes == expected.encode() {
        Ok(())
    } else {
        Err(io::Error::other("it answered as no member of this group does: another job listens at this address"))
    }
}

/// All open connections, of members or not; a silent one keeps no other waiting.
struct Reception<'a> {
    listener: &'a TcpListener,
    callers: Vec<Caller>,
    /// The largest number of callers.
    most: usize,
}

/// A connection whose first bytes are still to come.
struct Caller {
    stream: TcpStream,
    bytes: [u8; Hello::LEN],
    len: usize,
    since: Instant,
}

impl Reception<'_> {
    /// Returns the next caller that has sent a hello.
    fn next(&mut self, deadline: Instant) -> Result<(TcpStream, Hello), ConnectError> {
        let listener = self.listener;
        let failed = |source| ConnectError {
            action: "accept peers at",
            address: listener.local_addr().map_or_else(|_| "a closed socket".to_owned(), |address| address.to_string()),
            source,
        };
        listener.set_nonblocking(true).map_err(failed)?;
        loop {
            self.accept().map_err(failed)?;
            if let Some(known) = self.listen() {
                // The handshake over shared memory blocks.
                known.0.set_nonblocking(false).map_err(failed)?;
                return Ok(known);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(io::Error::other("not all peers connected before the deadline")));
            }
            let left = if self.callers.is_empty() { left } else { left.min(MAX_SILENCE) };
            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            fds.extend(
                self.callers.iter().map(|caller| PollFd::from_borrowed_fd(caller.stream.as_fd(), PollFlags::IN)),
            );
            poll(&mut fds, left);
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    if self.callers.len() >= self.most {
                        self.callers.remove(0);
                    }
                    let caller = Caller { stream, bytes: [0; Hello::LEN], len: 0, since: Instant::now() };
                    self.callers.push(caller);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // A caller that hung up at once was not a member: a member calls again.
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads hellos, and drops callers that hang up, send anything else or stay silent.
    fn listen(&mut self) -> Option<(TcpStream, Hello)> {
        let mut index = 0;
        while index < self.callers.len() {
            let caller = &mut self.callers[index];
            match caller.stream.read(&mut caller.bytes[caller.len..]) {
                Ok(read) if read > 0 => {
                    caller.len += read;
                    if caller.len == Hello::LEN {
                        let caller = self.callers.remove(index);
                        if let Some(hello) = Hello::decode(&caller.bytes) {
                            return Some((caller.stream, hello));
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && caller.since.elapsed() < MAX_SILENCE => {
                    index += 1;
                }
                _ => drop(self.callers.remove(index)),
            }
        }
        None
    }
}

/// For each peer the lane of shared memory, or the reason why there is none, and its host.
pub(super) type Shared = (Vec<Result<Lane, Obstacle>>, Vec<usize>);

/// Negotiates shared memory with each peer.
pub(super) fn share(
    rank: usize,
    sockets: &mut [[Option<TcpStream>; 2]],
    sharing: Sharing,
    deadline: Instant,
) -> Result<Shared, ConnectError> {
    let mut lanes: Vec<Result<Lane, Obstacle>> = sockets.iter().map(|_| Err(Obstacle::OtherHost)).collect();
    if sharing == Sharing::Never {
        return Ok((lanes, (0..sockets.len()).collect()));
    }
    // Every message fits into the sockets' buffers, so the order of steps cannot block anybody.
    let failed = |source| ConnectError { action: "agree on shared memory with", address: "a peer".to_owned(), source };
    let limit = |stream: &TcpStream| stream.set_read_timeout(Some(left(deadline))).map_err(setup);
    let mut data: Vec<Option<&mut TcpStream>> = sockets.iter_mut().map(|[data, _]| data.as_mut()).collect();
    for stream in data.iter().flatten() {
        stream.set_nodelay(true).map_err(setup)?;
    }
    let mut offers = Vec::new();
    for (peer, stream) in data.iter_mut().enumerate().skip(rank + 1) {
        if let Some(stream) = stream {
            offers.push((peer, shm::offer(stream).map_err(failed)?));
        }
    }
    let mut answers = Vec::new();
    for (peer, stream) in data.iter_mut().enumerate().take(rank) {
        if let Some(stream) = stream {
            limit(stream)?;
            answers.push((peer, shm::answer(stream).map_err(failed)?));
        }
    }
    for (peer, offer) in offers {
        if let Some(stream) = &mut data[peer] {
            limit(stream)?;
            lanes[peer] = shm::accept(stream, offer).map_err(failed)?;
        }
    }
    for (peer, answer) in answers {
        if let Some(stream) = &mut data[peer] {
            limit(stream)?;
            lanes[peer] = answer.finish(stream).map_err(failed)?;
        }
    }
    // All members must choose the same algorithms, so all must know which pairs share memory.
    let first = lanes.iter().position(Result::is_ok).map_or(rank, |peer| peer.min(rank));
    for stream in data.iter_mut().flatten() {
        stream.write_all(&(first as u64).to_le_bytes()).map_err(failed)?;
    }
    let mut hosts = vec![first; data.len()];
    for (peer, stream) in data.iter_mut().enumerate() {
        let mut theirs = [0; 8];
        if let Some(stream) = stream {
            limit(stream)?;
            stream.read_exact(&mut theirs).map_err(failed)?;
            hosts[peer] = usize::try_from(u64::from_le_bytes(theirs)).unwrap_or(usize::MAX);
            if hosts[peer] > peer {
                return Err(failed(io::Error::other("it names a first member of its host that comes after itself")));
            }
        }
    }
    Ok((lanes, hosts))
}

pub(super) fn setup(source: io::Error) -> ConnectError {
    ConnectError { action: "set options of a socket to", address: "a peer".to_owned(), source }
}

/// The first bytes on every connection: who is calling.
pub(super) struct Hello {
    pub(super) group: Nonce,
    pub(super) rank: usize,
    pub(super) channel: usize,
}

impl Hello {
    pub(super) const LEN: usize = 8 + Nonce::LEN + 4 + 4;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(HELLO);
        bytes[8..24].copy_from_slice(&self.group.to_bytes());
        bytes[24..28].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes[28..32].copy_from_slice(&(self.channel as u32).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Option<Hello> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let group = Nonce::from_bytes(bytes[8..24].try_into().ok()?);
        bytes.starts_with(HELLO).then(|| Hello { group, rank: word(24) as usize, channel: word(28) as usize })
    }
}

/// The answer to a hello: who accepted.
struct Welcome {
    group: Nonce,
    rank: usize,
}

impl Welcome {
    const LEN: usize = 8 + Nonce::LEN + 4;

    fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(WELCOME);
        bytes[8..24].copy_from_slice(&self.group.to_bytes());
        bytes[24..28].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes
    }
}

const HELLO: &[u8; 8] = b"dst-tcp2";
const WELCOME: &[u8; 8] = b"dst-wlc2";

fn dial(address: &str, hello: Hello, deadline: Instant) -> Result<TcpStream, ConnectError> {
    let mut pause = Duration::from_millis(5);
    loop {
        let attempt = look_up(address, LOOK_UP.min(left(deadline))).and_then(|resolved| {
            let resolved = resolved.first().ok_or(io::ErrorKind::NotFound)?;
            let mut stream = TcpStream::connect_timeout(resolved, left(deadline))?;
            stream.write_all(&hello.encode())?;
            Ok(stream)
        });
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(source) if Instant::now() + pause >= deadline => {
                return Err(ConnectError { action: "connect to", address: address.to_owned(), source });
            }
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// The time until a deadline in whole milliseconds, at least one: sockets take no limit of zero.
fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    Duration::from_millis((left.as_millis() as u64).max(1))
}

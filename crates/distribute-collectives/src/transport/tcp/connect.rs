//! Connection setup: each member connects to those before it and accepts those after it. If the job has a secret, both
//! sides of a connection prove it before anything else is read.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use distribute_cluster::secret::{Calling, Event, Problem, Refusals, Terms};
use distribute_cluster::{JobSecret, look_up};

use super::super::listen::LOOK_UP;
use super::super::shm::{self, Lane, Obstacle};
use super::super::{ConnectError, Nonce, Sharing, Unproved};
use super::hello::{Hello, Welcome, claim};
use super::reception::{Door, Known, MAX_STRANGERS, Reception};

/// A socket for data and one for control messages, for each member but this one.
pub(super) type Sockets = Vec<[Option<TcpStream>; 2]>;

pub(super) fn connect(
    rank: usize,
    addresses: &[String],
    listener: &TcpListener,
    group: Nonce,
    secret: Option<&JobSecret>,
    deadline: Instant,
) -> Result<Sockets, ConnectError> {
    let mut sockets: Sockets = addresses.iter().map(|_| [None, None]).collect();
    let terms = Terms::new("collectives over tcp 2", group.to_string());
    let mut dialled = Vec::new();
    for (peer, address) in addresses.iter().enumerate().take(rank) {
        for channel in 0..2 {
            let hello = Hello { group, rank, channel };
            let (calling, first) = match secret {
                None => (None, hello.encode().to_vec()),
                Some(secret) => {
                    let (calling, first) = Calling::new(secret, &terms, &claim(&hello, peer)).map_err(random)?;
                    (Some(calling), first)
                }
            };
            let stream = dial(address, &first, deadline)?;
            if calling.is_some() {
                stream.set_nonblocking(true).map_err(setup)?;
            }
            dialled.push(Dialled { peer, address, channel, stream, calling });
        }
    }
    let expected = 2 * (addresses.len() - rank - 1);
    let mut accepted = 0;
    let most = expected + MAX_STRANGERS;
    let door = Door { rank, secret, terms: &terms, refusals: Refusals::default() };
    let mut reception = Reception::new(listener, most, door);
    // Members prove the secret on both of their connections at the same time as their own callers do: were one after
    // the other, each member would wait for those of higher ranks.
    while accepted < expected || dialled.iter().any(|dialled| dialled.calling.is_some()) {
        let Some(Known { mut stream, hello, proved }) = reception.next(&mut dialled, accepted < expected, deadline)?
        else {
            continue;
        };
        // A connection of another group: not ours to answer.
        if hello.group != group || hello.rank <= rank {
            continue;
        }
        if secret.is_some() && !proved {
            reception.door.log(&stream, &Problem::MissingThere);
            // A caller that has hung up needs no answer.
            let _ = stream.write_all(&Problem::MissingThere.to_bytes());
            continue;
        }
        if let Some(place @ None) = sockets.get_mut(hello.rank).and_then(|pair| pair.get_mut(hello.channel)) {
            // A caller that has hung up is not a member: a member waits for this.
            if stream.write_all(&Welcome { group, rank }.encode()).is_ok() {
                *place = Some(stream);
                accepted += 1;
            }
        }
    }
    for Dialled { peer, address, channel, mut stream, .. } in dialled {
        read_welcome(&mut stream, Welcome { group, rank: peer }, left(deadline)).map_err(|source| ConnectError {
            action: "be welcomed as a member of the group by",
            address: address.to_owned(),
            source,
        })?;
        sockets[peer][channel] = Some(stream);
    }
    Ok(sockets)
}

/// A connection that this member has opened.
pub(super) struct Dialled<'a> {
    peer: usize,
    address: &'a str,
    channel: usize,
    pub(super) stream: TcpStream,
    /// The proof of the secret; `None` once both sides have proved it, or if there is none.
    pub(super) calling: Option<Calling>,
}

impl Dialled<'_> {
    /// Continues the proof with what has arrived.
    pub(super) fn prove(&mut self) -> Result<(), ConnectError> {
        let address = self.address.to_owned();
        let failed = |source| ConnectError { action: "prove the job's secret to", address, source };
        let proved = self.try_prove();
        proved.map_err(failed)
    }

    fn try_prove(&mut self) -> io::Result<()> {
        let mut bytes = [0; PIECE_BYTES];
        while let Some(calling) = &mut self.calling {
            let wanted = calling.wants().min(PIECE_BYTES);
            let read = match self.stream.read(&mut bytes[..wanted]) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, HUNG_UP)),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            match calling.receive(&mut &bytes[..read]) {
                Event::More => {}
                Event::Send(bytes) => self.stream.write_all(&bytes)?,
                Event::Proved { .. } => {
                    self.calling = None;
                    self.stream.set_nonblocking(false)?;
                }
                Event::Failed { problem, .. } => return Err(Unproved::error(&problem)),
                Event::Plain(_) => return Err(Unproved::error(&Problem::Garbled)),
            }
        }
        Ok(())
    }
}

fn random(error: distribute_cluster::Error) -> ConnectError {
    let (action, address) = ("draw a random number from", "the system".to_owned());
    ConnectError { action, address, source: io::Error::other(error.to_string()) }
}

const HUNG_UP: &str = "it hung up: another job or group listens at this address";

/// Bytes that are read of a proof at a time.
const PIECE_BYTES: usize = 512;

/// Checks that the listener is the member that was meant.
fn read_welcome(stream: &mut TcpStream, expected: Welcome, left: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(left))?;
    let (mut bytes, mut len) = ([0; Welcome::LEN], 0);
    while len < bytes.len() {
        match stream.read(&mut bytes[len..]) {
            Ok(0) if bytes[..len] == Problem::MissingThere.to_bytes() => {
                return Err(Unproved::error(&Problem::MissingHere));
            }
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, HUNG_UP)),
            Ok(read) => len += read,
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::ConnectionReset => return Err(io::Error::new(error.kind(), HUNG_UP)),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    let silent = "it took the call and said nothing before the deadline";
                    return Err(io::Error::new(error.kind(), silent));
                }
                _ => return Err(error),
            },
        }
    }
    if bytes == expected.encode() {
        Ok(())
    } else {
        Err(io::Error::other("it answered as no member of this group does: another job listens at this address"))
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

fn dial(address: &str, first: &[u8], deadline: Instant) -> Result<TcpStream, ConnectError> {
    let mut pause = Duration::from_millis(5);
    loop {
        let attempt = look_up(address, LOOK_UP.min(left(deadline))).and_then(|resolved| {
            let resolved = resolved.first().ok_or(io::ErrorKind::NotFound)?;
            let mut stream = TcpStream::connect_timeout(resolved, left(deadline))?;
            stream.write_all(first)?;
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

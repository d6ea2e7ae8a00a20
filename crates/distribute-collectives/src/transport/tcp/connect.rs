//! Connection setup: each member connects to those before it and accepts those after it. If the job uses TLS or has a
//! secret, both sides of a connection show their certificates and prove the secret before anything else is read.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use distribute_cluster::look_up;
use distribute_cluster::secret::{Calling, Event, Problem, Refusals, Terms};
use distribute_cluster::tls::{Session, TlsProblem};

use super::super::listen::LOOK_UP;
use super::super::shm::{self, Lane, Obstacle};
use super::super::{ConnectError, Nonce, Proofs, Sharing, Unproved};
use super::hello::{Hello, Welcome, claim};
use super::reception::{Door, Known, MAX_STRANGERS, Reception};
use super::stream::Stream;

/// A socket for data and one for control messages, for each member but this one.
pub(super) type Sockets = Vec<[Option<Stream>; 2]>;

pub(super) fn connect(
    rank: usize,
    addresses: &[String],
    listener: &TcpListener,
    group: Nonce,
    proofs: &Proofs,
    deadline: Instant,
) -> Result<Sockets, ConnectError> {
    let mut sockets: Sockets = addresses.iter().map(|_| [None, None]).collect();
    let terms = Terms::new("collectives over tcp 2", group.to_string());
    let mut dialled = Vec::new();
    for (peer, address) in addresses.iter().enumerate().take(rank) {
        for channel in 0..2 {
            let hello = Hello { group, rank, channel };
            let mut dialled_now = match &proofs.tls {
                None => {
                    let (opening, first) = greeting(proofs, &terms, &hello, peer)?;
                    let stream = dial(address, &first, deadline)?;
                    Dialled { peer, address, channel, stream: stream.into(), hello, opening }
                }
                Some(tls) => {
                    let mut stream = Stream::from(dial(address, &[], deadline)?);
                    let failed = |problem| Unproved::error(&Problem::Tls(problem));
                    let session = Session::calling(tls).map_err(|problem| own(address, failed(problem)))?;
                    stream.encrypt(session);
                    Dialled { peer, address, channel, stream, hello, opening: Opening::Handshake }
                }
            };
            if dialled_now.is_opening() {
                dialled_now.stream.socket().set_nonblocking(true).map_err(setup)?;
            }
            // The first message of a handshake; without one there is nothing to do before an answer arrives.
            dialled_now.open(&Door { rank, proofs, terms: &terms, refusals: Refusals::default() })?;
            dialled.push(dialled_now);
        }
    }
    let expected = 2 * (addresses.len() - rank - 1);
    let mut accepted = 0;
    let most = expected + MAX_STRANGERS;
    let door = Door { rank, proofs, terms: &terms, refusals: Refusals::default() };
    let mut reception = Reception::new(listener, most, door);
    // Members identify themselves on both of their connections at the same time as their own callers do: were one after
    // the other, each member would wait for those of higher ranks.
    while accepted < expected || dialled.iter().any(Dialled::is_opening) {
        let Some(known) = reception.next(&mut dialled, accepted < expected, deadline)? else { continue };
        let Known { mut stream, hello, encrypted, proved } = known;
        // A connection of another group: not ours to answer.
        if hello.group != group || hello.rank <= rank {
            continue;
        }
        let missing = match (&proofs.tls, &proofs.secret) {
            (Some(_), _) if !encrypted => Some(Problem::Tls(TlsProblem::MissingThere)),
            (_, Some(_)) if !proved => Some(Problem::MissingThere),
            _ => None,
        };
        if let Some(problem) = missing {
            reception.door.log(stream.socket(), &problem);
            // A caller that has hung up needs no answer.
            let _ = stream.write_all(&problem.to_bytes());
            continue;
        }
        if let Some(place @ None) = sockets.get_mut(hello.rank).and_then(|pair| pair.get_mut(hello.channel)) {
            // A caller that has hung up is not a member: a member waits for this.
            if stream.write_all(&Welcome { group, rank }.encode()).and_then(|()| stream.flush()).is_ok() {
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
    pub(super) stream: Stream,
    hello: Hello,
    opening: Opening,
}

/// How far both sides have identified themselves.
enum Opening {
    Handshake,
    Proof(Box<Calling>),
    Done,
}

/// Returns the first message inside of TLS or without: a call that proves the secret, if there is one, or a hello.
fn greeting(proofs: &Proofs, terms: &Terms, hello: &Hello, callee: usize) -> Result<(Opening, Vec<u8>), ConnectError> {
    match &proofs.secret {
        None => Ok((Opening::Done, hello.encode().to_vec())),
        Some(secret) => {
            let (calling, first) = Calling::new(secret, terms, &claim(hello, callee)).map_err(random)?;
            Ok((Opening::Proof(Box::new(calling)), first))
        }
    }
}

fn own(address: &str, source: io::Error) -> ConnectError {
    ConnectError { action: "show the certificate to", address: address.to_owned(), source }
}

impl Dialled<'_> {
    /// Returns whether a handshake or a proof is not complete.
    pub(super) fn is_opening(&self) -> bool {
        !matches!(self.opening, Opening::Done)
    }

    /// Continues the handshake and the proof with what has arrived.
    pub(super) fn open(&mut self, door: &Door<'_>) -> Result<(), ConnectError> {
        if let Opening::Handshake = self.opening {
            let hung_up = |error: io::Error| match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => io::Error::new(error.kind(), HUNG_UP),
                _ => match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsProblem>()) {
                    Some(problem) => Unproved::error(&Problem::Tls(problem.clone())),
                    None => error,
                },
            };
            let Some(binding) = self.stream.advance().map_err(|error| own(self.address, hung_up(error)))? else {
                return Ok(());
            };
            let (opening, first) = greeting(door.proofs, &door.terms.bound_to(&binding), &self.hello, self.peer)?;
            self.opening = opening;
            self.stream.write_all(&first).map_err(|error| own(self.address, error))?;
            if !self.is_opening() {
                self.stream.socket().set_nonblocking(false).map_err(setup)?;
                self.stream.flush().map_err(|error| own(self.address, error))?;
            }
        }
        let (action, address) = ("prove the job's secret to", self.address.to_owned());
        self.prove().map_err(|source| ConnectError { action, address, source })
    }

    fn prove(&mut self) -> io::Result<()> {
        let mut bytes = [0; PIECE_BYTES];
        while let Opening::Proof(calling) = &mut self.opening {
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
                    self.opening = Opening::Done;
                    self.stream.socket().set_nonblocking(false)?;
                    self.stream.flush()?;
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

/// Limit for connecting to one address, after which the next one is tried, or the same one again.
const MAX_ATTEMPT: Duration = Duration::from_secs(5);

/// Bytes that are read of a proof at a time.
const PIECE_BYTES: usize = 512;

/// Checks that the listener is the member that was meant.
fn read_welcome(stream: &mut Stream, expected: Welcome, left: Duration) -> io::Result<()> {
    stream.socket().set_read_timeout(Some(left))?;
    let (mut bytes, mut len) = ([0; Welcome::LEN], 0);
    while len < bytes.len() {
        match stream.read(&mut bytes[len..]) {
            Ok(0) if bytes[..len] == Problem::MissingThere.to_bytes() => {
                return Err(Unproved::error(&Problem::MissingHere));
            }
            Ok(0) if bytes[..len] == Problem::Tls(TlsProblem::MissingThere).to_bytes() => {
                return Err(Unproved::error(&Problem::Tls(TlsProblem::MissingHere)));
            }
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, HUNG_UP)),
            Ok(read) => len += read,
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
                    return Err(io::Error::new(error.kind(), HUNG_UP));
                }
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
    sockets: &mut [[Option<Stream>; 2]],
    sharing: Sharing,
    deadline: Instant,
) -> Result<Shared, ConnectError> {
    let mut lanes: Vec<Result<Lane, Obstacle>> = sockets.iter().map(|_| Err(Obstacle::OtherHost)).collect();
    if sharing == Sharing::Never {
        return Ok((lanes, (0..sockets.len()).collect()));
    }
    // Every message fits into the sockets' buffers, so the order of steps cannot block anybody.
    let failed = |source| ConnectError { action: "agree on shared memory with", address: "a peer".to_owned(), source };
    let limit = |stream: &Stream| stream.socket().set_read_timeout(Some(left(deadline))).map_err(setup);
    let mut data: Vec<Option<&mut Stream>> = sockets.iter_mut().map(|[data, _]| data.as_mut()).collect();
    for stream in data.iter().flatten() {
        stream.socket().set_nodelay(true).map_err(setup)?;
    }
    let mut offers = Vec::new();
    for (peer, stream) in data.iter_mut().enumerate().skip(rank + 1) {
        if let Some(stream) = stream {
            offers.push((peer, shm::offer(*stream).map_err(failed)?));
        }
    }
    let mut answers = Vec::new();
    for (peer, stream) in data.iter_mut().enumerate().take(rank) {
        if let Some(stream) = stream {
            limit(stream)?;
            answers.push((peer, shm::answer(*stream).map_err(failed)?));
        }
    }
    for (peer, offer) in offers {
        if let Some(stream) = &mut data[peer] {
            limit(stream)?;
            lanes[peer] = shm::accept(*stream, offer).map_err(failed)?;
        }
    }
    for (peer, answer) in answers {
        if let Some(stream) = &mut data[peer] {
            limit(stream)?;
            lanes[peer] = answer.finish(*stream).map_err(failed)?;
        }
    }
    // In this order no two members wait for each other, as all of them take the pairs by their lower rank, then by the
    // higher one.
    for (peer, stream) in data.iter_mut().enumerate() {
        if let (Some(stream), Err(obstacle)) = (stream, &lanes[peer])
            && obstacle.may_be_passed()
        {
            limit(stream)?;
            let passed = if peer < rank { shm::take(*stream, *obstacle) } else { shm::give(*stream, *obstacle) };
            lanes[peer] = passed.map_err(failed)?;
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

/// Connects to the member at an address and sends its first message. It tries until the deadline: the member may not
/// listen yet.
fn dial(address: &str, first: &[u8], deadline: Instant) -> Result<TcpStream, ConnectError> {
    dial_by(|time| look_up(address, time), address, first, deadline)
}

fn dial_by(
    resolve: impl Fn(Duration) -> io::Result<Vec<SocketAddr>>,
    address: &str,
    first: &[u8],
    deadline: Instant,
) -> Result<TcpStream, ConnectError> {
    let mut pause = Duration::from_millis(5);
    loop {
        let resolved = resolve(LOOK_UP.min(left(deadline)));
        match resolved.and_then(|resolved| dial_any(&resolved, first, deadline)) {
            Ok(stream) => return Ok(stream),
            Err(source) if Instant::now() + pause >= deadline => {
                return Err(ConnectError { action: "connect to", address: address.to_owned(), source });
            }
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Connects to the first of a name's addresses that answers, such as those of IPv6 and IPv4. Returns the error of the
/// last one if none does.
fn dial_any(addresses: &[SocketAddr], first: &[u8], deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::ErrorKind::NotFound.into();
    for (tried, address) in addresses.iter().enumerate() {
        // An address that does not answer leaves the others their share of the time.
        let share = left(deadline) / u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
        let connected = TcpStream::connect_timeout(address, share.min(MAX_ATTEMPT)).and_then(|mut stream| {
            stream.write_all(first)?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The time until a deadline in whole milliseconds, at least one: sockets take no limit of zero.
fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    Duration::from_millis((left.as_millis() as u64).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls a name with these addresses; the last one is a listener's, to which the first message must come.
    fn call(addresses: Vec<SocketAddr>, listener: &TcpListener, wait: Duration) {
        let resolve = |_| Ok(addresses.clone());
        let dialled = dial_by(resolve, "a.example:1", b"hello", Instant::now() + wait).expect("the last one listens");
        assert_eq!(dialled.peer_addr().expect("connected"), addresses[addresses.len() - 1]);
        let (mut accepted, _) = listener.accept().expect("it has been called");
        let mut first = [0; 5];
        accepted.read_exact(&mut first).expect("a message");
        assert_eq!(&first, b"hello");
    }

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        (listener, address)
    }

    #[test]
    fn every_address_of_a_name_is_tried() {
        let (listener, address) = listener();
        let (closed, refusing) = self::listener();
        drop(closed);
        call(vec![refusing, refusing, address], &listener, Duration::from_secs(20));
        let began = Instant::now();
        let error = dial_by(|_| Ok(vec![refusing]), "a.example:1", b"", began + Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let (listener, address) = listener();
        let (silent, full) = self::listener();
        // A listener whose queue is full ignores further calls.
        rustix::net::listen(&silent, 0).expect("it listens already");
        let fill = || TcpStream::connect_timeout(&full, Duration::from_millis(300));
        let calls: Vec<TcpStream> = std::iter::from_fn(|| fill().ok()).take(16).collect();
        if calls.len() == 16 {
            return distribute_testkit::skipped(format_args!("this system's queues of calls are not bounded"));
        }
        call(vec![full, address], &listener, Duration::from_secs(4));
    }
}

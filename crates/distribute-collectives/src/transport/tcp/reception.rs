//! The callers of a member that is being connected, until they have said who they are.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use distribute_cluster::secret::{Event, JOB_REMEDY, Listening, Problem, Refusals, Terms};
use distribute_cluster::tls::{Session, TlsProblem, is_client_hello};
use rustix::event::{PollFd, PollFlags};

use super::super::poll::poll;
use super::super::{ConnectError, Proofs};
use super::connect::Dialled;
use super::hello::{Hello, claimed};
use super::stream::Stream;

#[cfg(any(test, fuzzing))]
pub(super) mod fuzz;

/// How long a caller may take to send its hello. Port scanners never do.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// Most callers that have not yet sent their hello, in addition to those that are expected; beyond this the oldest is
/// turned away.
pub(super) const MAX_STRANGERS: usize = 256;

/// All open connections, of members or not; a silent one keeps no other waiting.
pub(super) struct Reception<'a> {
    listener: &'a TcpListener,
    callers: Vec<Caller>,
    /// The largest number of callers.
    most: usize,
    pub(super) door: Door<'a>,
}

/// The certificates and the secret that callers have to show and to prove.
pub(super) struct Door<'a> {
    pub(super) rank: usize,
    pub(super) proofs: &'a Proofs,
    pub(super) terms: &'a Terms,
    pub(super) refusals: Refusals,
}

/// A connection whose first bytes are still to come.
struct Caller {
    stream: Stream,
    stage: Stage,
    encrypted: bool,
    /// Whether it has begun a handshake or to prove the secret; a member does so while it still connects to others.
    proving: bool,
    bytes: [u8; Hello::LEN],
    len: usize,
    since: Instant,
}

/// The next part of a caller's introduction.
enum Stage {
    /// Its first byte, which says whether it begins a handshake.
    First,
    Handshake,
    /// The proof of the secret, or a hello.
    Proof(Box<Listening>),
    /// The rest of a hello.
    Hello,
}

/// A caller that has said who it is.
pub(super) struct Known {
    pub(super) stream: Stream,
    pub(super) hello: Hello,
    /// Whether it has shown a certificate.
    pub(super) encrypted: bool,
    /// Whether it has proved the job's secret.
    pub(super) proved: bool,
}

impl<'a> Reception<'a> {
    pub(super) fn new(listener: &'a TcpListener, most: usize, door: Door<'a>) -> Reception<'a> {
        Reception { listener, callers: Vec::new(), most, door }
    }

    /// Returns the next caller that has sent a hello, if callers are expected, or `None` once a connection of this
    /// member's own has moved on.
    pub(super) fn next(
        &mut self,
        dialled: &mut [Dialled<'_>],
        expects: bool,
        deadline: Instant,
    ) -> Result<Option<Known>, ConnectError> {
        let listener = self.listener;
        let failed = |source| ConnectError {
            action: "accept peers at",
            address: listener.local_addr().map_or_else(|_| "a closed socket".to_owned(), |address| address.to_string()),
            source,
        };
        listener.set_nonblocking(true).map_err(failed)?;
        let unproved = |dialled: &[Dialled<'_>]| dialled.iter().filter(|dialled| dialled.is_opening()).count();
        let waits = unproved(dialled);
        loop {
            if expects {
                self.accept().map_err(failed)?;
                if let Some(mut known) = self.listen() {
                    // The handshake over shared memory blocks.
                    known.stream.socket().set_nonblocking(false).map_err(failed)?;
                    // A caller that has hung up is noticed at its next message.
                    let _ = known.stream.flush();
                    return Ok(Some(known));
                }
            }
            let mut opening = dialled.iter_mut().filter(|dialled| dialled.is_opening());
            opening.try_for_each(|dialled| dialled.open(&self.door))?;
            if unproved(dialled) < waits {
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(io::Error::other("not all peers connected before the deadline")));
            }
            let left = if self.callers.is_empty() { left } else { left.min(MAX_SILENCE) };
            let mut fds = Vec::new();
            if expects {
                fds.push(PollFd::new(listener, PollFlags::IN));
                fds.extend(self.callers.iter().map(|caller| caller.stream.interest()));
            }
            let opening = dialled.iter().filter(|dialled| dialled.is_opening());
            fds.extend(opening.map(|dialled| dialled.stream.interest()));
            poll(&mut fds, left);
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    if self.callers.len() >= self.most {
                        let silent = self.callers.iter().position(|caller| !caller.proving).unwrap_or(0);
                        self.callers.remove(silent);
                    }
                    self.callers.push(Caller::new(stream));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // A caller that hung up at once was not a member: a member calls again.
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads hellos, proofs and handshakes, and drops callers that hang up, send anything else or stay silent.
    fn listen(&mut self) -> Option<Known> {
        let mut index = 0;
        while index < self.callers.len() {
            let caller = &mut self.callers[index];
            match caller.begin(&self.door).and_then(|()| caller.read()) {
                Ok(0) => drop(self.callers.remove(index)),
                Ok(read) => match caller.receive(read, &self.door) {
                    Received::More => {}
                    Received::Nothing => drop(self.callers.remove(index)),
                    Received::Hello(hello, proved) => {
                        let Caller { stream, encrypted, .. } = self.callers.remove(index);
                        return Some(Known { stream, hello, encrypted, proved });
                    }
                },
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && (caller.proving || caller.since.elapsed() < MAX_SILENCE) =>
                {
                    index += 1;
                }
                Err(error) => {
                    if let Some(problem) = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsProblem>()) {
                        self.door.log(caller.stream.socket(), &Problem::Tls(problem.clone()));
                    }
                    self.callers.remove(index);
                }
            }
        }
        None
    }
}

/// The meaning of a caller's bytes.
enum Received {
    More,
    Hello(Hello, bool),
    /// Nothing that a member sends, or no proof.
    Nothing,
}

impl Caller {
    /// Creates the caller of a connection that was accepted, which does not block.
    fn new(stream: TcpStream) -> Caller {
        Caller {
            stream: stream.into(),
            stage: Stage::First,
            encrypted: false,
            proving: false,
            bytes: [0; Hello::LEN],
            len: 0,
            since: Instant::now(),
        }
    }

    /// Begins and continues a handshake, where the caller begins one and a certificate is asked for.
    fn begin(&mut self, door: &Door<'_>) -> io::Result<()> {
        let listening = |terms: &Terms| {
            let listening = Listening::new(door.proofs.secret.as_ref(), terms);
            listening.map(Box::new).map_err(|error| io::Error::other(error.to_string()))
        };
        match (&self.stage, &door.proofs.tls) {
            (Stage::First, None) => self.stage = Stage::Proof(listening(door.terms)?),
            (Stage::First, Some(tls)) => {
                let mut first = [0];
                // The end of the stream is not the beginning of a handshake, and is read below.
                let arrived = self.stream.socket().peek(&mut first)?;
                if is_client_hello(&first[..arrived]) {
                    self.stream.encrypt(Session::listening(tls).map_err(io::Error::other)?);
                    self.stage = Stage::Handshake;
                } else {
                    let refusing = listening(door.terms)?.refusing(Problem::Tls(TlsProblem::MissingThere));
                    self.stage = Stage::Proof(Box::new(refusing));
                }
            }
            _ => {}
        }
        if let Stage::Handshake = self.stage {
            let advanced = self.stream.advance();
            self.proving |= self.stream.has_begun();
            let binding = advanced?.ok_or(io::ErrorKind::WouldBlock)?;
            self.encrypted = true;
            self.stage = Stage::Proof(listening(&door.terms.bound_to(&binding))?);
        }
        Ok(())
    }

    /// Reads behind what has arrived, at most to the end of a hello or of a piece of a proof.
    fn read(&mut self) -> io::Result<usize> {
        match &self.stage {
            Stage::Proof(listening) => {
                // A piece of a proof may be longer than a hello; the rest is read next.
                let most = listening.wants().min(self.bytes.len());
                self.stream.read(&mut self.bytes[..most])
            }
            _ => self.stream.read(&mut self.bytes[self.len..]),
        }
    }

    fn receive(&mut self, read: usize, door: &Door<'_>) -> Received {
        let Stage::Proof(listening) = &mut self.stage else {
            self.len += read;
            return self.hello();
        };
        match listening.receive(&mut &self.bytes[..read]) {
            Event::More => Received::More,
            Event::Plain(first) => {
                // A part of the magic may have arrived alone before.
                self.stage = Stage::Hello;
                let Some(begun) = self.bytes.get_mut(..first.len()) else { return Received::Nothing };
                begun.copy_from_slice(&first);
                self.len = first.len();
                self.hello()
            }
            Event::Send(bytes) => {
                self.proving = true;
                self.sent(&bytes, Received::More)
            }
            Event::Proved { send, claim } => {
                let hello = claimed(&claim, door.rank).map_or(Received::Nothing, |hello| Received::Hello(hello, true));
                self.sent(&send, hello)
            }
            Event::Failed { send, problem } => {
                door.log(self.stream.socket(), &problem);
                let nothing = self.sent(&send, Received::Nothing);
                // A socket that is closed with bytes unread takes back what it has sent.
                self.discard();
                nothing
            }
        }
    }

    fn hello(&self) -> Received {
        match (self.len == Hello::LEN, Hello::decode(&self.bytes)) {
            (false, _) => Received::More,
            (true, Some(hello)) => Received::Hello(hello, false),
            (true, None) => Received::Nothing,
        }
    }

    /// Takes unread bytes from the system, as far as they are there.
    fn discard(&mut self) {
        let mut bytes = [0; 4096];
        for _ in 0..16 {
            if !matches!(self.stream.read(&mut bytes), Ok(1..)) {
                break;
            }
        }
    }

    /// Sends a message, which an empty socket has room for; a caller that does not take it is none.
    fn sent(&mut self, bytes: &[u8], then: Received) -> Received {
        match self.stream.write_all(bytes) {
            Ok(()) => then,
            Err(_) => Received::Nothing,
        }
    }
}

impl Door<'_> {
    /// Logs a refusal, once for each address.
    pub(super) fn log(&self, caller: &TcpStream, problem: &Problem) {
        let peer = caller.peer_addr().ok();
        // A caller of another group is turned away without a message.
        if !matches!(problem, Problem::Other { .. } | Problem::Garbled) && self.refusals.is_first(peer) {
            let peer = peer.map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string());
            tracing::warn!(
                "member {} of a group refused a connection of {peer}: {problem}; {}; further ones of that host are \
                 refused without a message",
                self.rank,
                problem.remedy(JOB_REMEDY)
            );
        }
    }
}

//! TCP between processes: two sockets per pair of members, one for data and one for control messages (a member fails,
//! leaves or waits).
//!
//! Control messages have a socket of their own because the data socket may be full or in the middle of a message.
//! Members of one host may share memory; their data socket then only carries doorbells, and ends when the other dies.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use distribute_cluster::{JobSecret, JobTls};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::AsFd;
use smallvec::SmallVec;

use super::poll::poll;
use super::shm::{Lane, LaneError, Obstacle};
use super::{
    AbortReason, ConnectError, Incoming, Nonce, Outgoing, Progress, Proofs, Sharing, Timeout, Transport,
    TransportError, TransportKind,
};
use crate::schedule::Link;

mod connect;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzz;
mod hello;
mod reception;
mod stream;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "tls"))]
mod tls_tests;

use stream::Stream;

/// Bytes written or read on one socket before the others are served.
const TURN_BYTES: usize = 1 << 20;

/// How long a broken data socket waits for the reason to arrive on the control socket.
const CONTROL_GRACE: Duration = Duration::from_millis(100);

const CONTROL_ABORT: u8 = 1;
const CONTROL_LEFT: u8 = 2;
const CONTROL_WAITING: u8 = 3;

/// How long an idle exchange spins before it yields its core between two looks.
const SPIN_ONLY: Duration = Duration::from_micros(5);

/// Longest control message that is accepted; reasons are cut before they reach this.
const MAX_CONTROL_BYTES: usize = 64 * 1024;

/// The sockets of one peer.
struct Peer {
    data: Stream,
    control: Stream,
    heard: Option<Instant>,
    inbox: Vec<u8>,
    /// The last call in which it said that it waits.
    waiting: Option<u64>,
    /// Shared memory, through which data go where there is some.
    lane: Option<Lane>,
    /// How the data socket of a peer with shared memory has ended. What lies in the memory is still good.
    ended: Option<String>,
}

/// TCP sockets to every other member, and memory shared with those of this host.
pub(crate) struct TcpTransport {
    peers: Vec<Option<Peer>>,
    name: &'static str,
    sharing: Sharing,
    /// For each member the first one that it shares memory with, or itself; the same list on all members.
    hosts: Vec<usize>,
    /// How long an idle exchange spins without yielding its core.
    spin_only: Duration,
    proofs: Proofs,
    aborted: bool,
}

impl TcpTransport {
    /// Connects member `rank` with all others.
    ///
    /// `addresses` holds the listening address of every member; each connects to those before it and accepts those
    /// after. Both sides of each connection show their certificates and prove the secret, as far as there are both.
    pub(crate) fn connect(
        rank: usize,
        addresses: &[String],
        listener: &TcpListener,
        (group, proofs): (Nonce, Proofs),
        sharing: Sharing,
        deadline: Instant,
    ) -> Result<TcpTransport, ConnectError> {
        let mut sockets = connect::connect(rank, addresses, listener, group, &proofs, deadline)?;
        // From here on each socket is one of a member that has proved the job's secret, if there is one.
        let (lanes, hosts) = connect::share(rank, &mut sockets, sharing, deadline)?;
        let mut peers = Vec::with_capacity(sockets.len());
        let mut obstacles: Vec<(usize, Obstacle)> = Vec::new();
        for (peer, (pair, lane)) in sockets.into_iter().zip(lanes).enumerate() {
            if let (Err(obstacle), true) = (&lane, sharing != Sharing::Never && peer != rank) {
                if sharing == Sharing::Everywhere {
                    let source = io::Error::other(obstacle.to_string());
                    return Err(ConnectError { action: "share memory with", address: addresses[peer].clone(), source });
                }
                obstacles.push((peer, *obstacle));
            }
            let lane = lane.ok();
            peers.push(match pair {
                [Some(data), Some(control)] => {
                    for socket in [&data, &control] {
                        socket.socket().set_nodelay(true).map_err(connect::setup)?;
                        socket.socket().set_nonblocking(true).map_err(connect::setup)?;
                    }
                    Some(Peer { data, control, heard: None, inbox: Vec::new(), waiting: None, lane, ended: None })
                }
                _ => None,
            });
        }
        obstacles.retain(|(_, obstacle)| obstacle.is_surprising());
        if let Some((peer, obstacle)) = obstacles.first() {
            tracing::warn!(
                "no shared memory with {} of {} members; TCP is used with them. The first is at {}: {obstacle}",
                obstacles.len(),
                peers.len() - 1,
                addresses[*peer]
            );
        }
        let others = peers.iter().flatten().count();
        let lanes: Vec<&Lane> = peers.iter().flatten().filter_map(|peer| peer.lane.as_ref()).collect();
        let name = match lanes.len() {
            0 => "tcp",
            shared if shared == others => "shm",
            _ => "shm+tcp",
        };
        if lanes.iter().any(|lane| !lane.fetches()) {
            tracing::info!(
                "shared memory: this system does not let all processes read each other's memory, so long messages are \
                 copied twice; let them share a pid namespace and allow process_vm_readv (CAP_SYS_PTRACE, or \
                 kernel.yama.ptrace_scope = 0) to copy them once"
            );
        }
        let local = lanes.len();
        drop(lanes);
        // Where there are more ranks than cores, the one that is waited for needs this one's.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin_only = if local < cores { SPIN_ONLY } else { Duration::ZERO };
        Ok(TcpTransport { peers, name, sharing, hosts, spin_only, proofs, aborted: false })
    }

    /// Sleeps until a socket is ready that the exchange needs, or that may carry a control message.
    fn sleep(&self, writers: &[usize], readers: &[usize], time: Duration) {
        let mut fds = Vec::with_capacity(2 * self.peers.len());
        for (index, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            fds.push(PollFd::from_borrowed_fd(peer.control.as_fd(), PollFlags::IN));
            let mut flags = PollFlags::empty();
            if writers.contains(&index) {
                flags |= PollFlags::OUT;
            }
            if readers.contains(&index) {
                flags |= PollFlags::IN;
            }
            if peer.lane.is_some() && !flags.is_empty() {
                // The peer rings by a byte whenever it has read or written.
                flags = PollFlags::IN;
            }
            if !flags.is_empty() {
                fds.push(PollFd::from_borrowed_fd(peer.data.as_fd(), flags));
            }
        }
        poll(&mut fds, time);
    }

    /// Reads the control messages of every peer; an abort or a broken connection is an error, whoever's it is.
    ///
    /// A peer that has left may have sent data before, so that is not an error until its data socket ends.
    fn read_control(&mut self) -> Result<(), TransportError> {
        for (index, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            match peer.read_control() {
                None | Some(ControlMessage::Left) => {}
                Some(ControlMessage::Abort(reason)) => return Err(TransportError::Aborted { peer: index, reason }),
                Some(ControlMessage::Broken(how)) => return Err(TransportError::Lost { peer: index, how }),
            }
        }
        Ok(())
    }

    /// Returns whether data of the peer that an error is about may still be on their way to this member, which reads
    /// them. What lies in shared memory is there at once.
    fn may_have_sent(&self, error: &TransportError, readers: &[usize]) -> bool {
        let TransportError::Lost { peer, .. } = error else { return false };
        readers.contains(peer) && self.peers[*peer].as_ref().is_some_and(|peer| peer.lane.is_none())
    }

    /// Finds out why a data socket broke: from the control socket, within a short grace, else from what was seen.
    fn diagnose(&mut self, index: usize, seen: String) -> TransportError {
        let until = Instant::now() + CONTROL_GRACE;
        while let Some(peer) = &mut self.peers[index] {
            match peer.read_control() {
                Some(ControlMessage::Abort(reason)) => return TransportError::Aborted { peer: index, reason },
                Some(ControlMessage::Left) => return TransportError::Left { peer: index },
                Some(ControlMessage::Broken(_)) => break,
                None if Instant::now() >= until => break,
                None => self.sleep(&[], &[], Duration::from_millis(5)),
            }
        }
        TransportError::Lost { peer: index, how: seen }
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        self.name
    }

    fn link(&self) -> Link {
        if self.hosts.iter().all(|host| *host == self.hosts[0]) { Link::SHARED_MEMORY } else { Link::TCP }
    }

    fn hosts(&self) -> Option<&[usize]> {
        Some(&self.hosts)
    }

    fn exchange(
        &mut self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        timeout: &Timeout<'_>,
    ) -> Result<(), TransportError> {
        let mut idle_since: Option<Instant> = None;
        let mut announced = false;
        let mut moving = Progress::default();
        let mut lost: Option<(TransportError, Instant)> = None;
        let (mut writers, mut readers) = (SmallVec::<[usize; 4]>::new(), SmallVec::<[usize; 4]>::new());
        loop {
            let mut progress = false;
            writers.clear();
            readers.clear();
            for out in outgoing.iter_mut() {
                let Some(peer) = &mut self.peers[out.to] else { continue };
                match peer.write(&mut out.parts) {
                    Ok(wrote) => progress |= wrote,
                    Err(error) => return Err(self.diagnose(out.to, error.to_string())),
                }
                // What is encrypted must leave before this member may wait for something else.
                // A full socket has woken a peer with shared memory already.
                if !out.parts.is_empty() || (peer.lane.is_none() && peer.data.wants_write()) {
                    writers.push(out.to);
                }
            }
            for from in incoming.iter_mut() {
                let Some(peer) = &mut self.peers[from.from] else { continue };
                match peer.read(from) {
                    Ok(read) => progress |= read > 0,
                    Err(ReadError::Refused) => return Err(TransportError::Refused { peer: from.from }),
                    Err(ReadError::Io(error)) => return Err(self.diagnose(from.from, error.to_string())),
                }
                if !from.sink.space().is_empty() {
                    readers.push(from.from);
                }
            }
            if progress && announced {
                self.lanes(&writers, &readers).for_each(Lane::awake);
                announced = false;
            }
            if writers.is_empty() && readers.is_empty() {
                return Ok(());
            }
            if progress {
                idle_since = None;
                if moving.turn(timeout)? {
                    match self.read_control() {
                        // Noticed where nothing moves any more: it may have sent what is missing.
                        Err(TransportError::Lost { .. }) => {}
                        read => read?,
                    }
                }
                continue;
            }
            let now = Instant::now();
            // Nothing of what a lost peer had sent is left; data that a network delays arrive before their socket ends.
            if let Some((error, noticed)) = &lost
                && !(now - *noticed < CONTROL_GRACE && self.may_have_sent(error, &readers))
            {
                return Err(error.clone());
            }
            let idle = now - *idle_since.get_or_insert(now);
            if idle < timeout.spin {
                if idle < self.spin_only {
                    std::hint::spin_loop()
                } else {
                    std::thread::yield_now()
                }
                continue;
            }
            if !announced && self.lanes(&writers, &readers).next().is_some() {
                self.lanes(&writers, &readers).for_each(Lane::announce_sleep);
                announced = true;
                continue;
            }
            let ended = |index: &&usize| self.peers[**index].as_ref().is_some_and(|peer| peer.ended.is_some());
            if let Some(index) = writers.iter().chain(&readers).find(ended).copied() {
                let how = self.peers[index].as_ref().and_then(|peer| peer.ended.clone()).unwrap_or_default();
                return Err(self.diagnose(index, how));
            }
            let time = timeout.next_sleep()?;
            self.sleep(&writers, &readers, time);
            self.peers.iter_mut().flatten().for_each(Peer::clear_doorbell);
            // The wake-up is consumed even if no message was pending: the peer rings again only after an announcement.
            announced = false;
            match self.read_control() {
                // It may have sent what is missing before it ended.
                Err(error @ TransportError::Lost { .. }) => drop(lost.get_or_insert((error, Instant::now()))),
                read => read?,
            }
        }
    }

    fn abort(&mut self, reason: &AbortReason) {
        // The ranks take their memory back: a peer that still copies from it must know.
        self.peers.iter().flatten().filter_map(|peer| peer.lane.as_ref()).for_each(Lane::revoke);
        if !std::mem::replace(&mut self.aborted, true) {
            self.tell(CONTROL_ABORT, &reason.encode());
        }
    }

    fn announce(&mut self, sequence: u64) {
        self.tell(CONTROL_WAITING, &sequence.to_le_bytes());
    }

    fn announced(&self, peer: usize) -> Option<u64> {
        self.peers.get(peer)?.as_ref()?.waiting
    }

    fn local_host(&self) -> Option<String> {
        let address = self.peers.iter().flatten().find_map(|peer| peer.data.socket().local_addr().ok())?;
        Some(address.ip().to_string())
    }

    fn kind(&self) -> Option<TransportKind> {
        Some(self.sharing.kind())
    }

    fn secret(&self) -> Option<JobSecret> {
        self.proofs.secret.clone()
    }

    fn tls(&self) -> Option<JobTls> {
        self.proofs.tls.clone()
    }

    fn last_heard(&self, peer: usize) -> Option<Instant> {
        self.peers.get(peer)?.as_ref()?.heard
    }
}

impl TcpTransport {
    /// Returns the memory shared with the peers given.
    fn lanes<'a>(&'a self, writers: &'a [usize], readers: &'a [usize]) -> impl Iterator<Item = &'a Lane> {
        writers.iter().chain(readers).filter_map(|index| self.peers[*index].as_ref()?.lane.as_ref())
    }

    fn tell(&mut self, kind: u8, content: &[u8]) {
        let mut message = vec![kind];
        message.extend_from_slice(&(content.len() as u32).to_le_bytes());
        message.extend_from_slice(content);
        for peer in self.peers.iter_mut().flatten() {
            // Best effort: a peer that cannot be told will see the sockets close.
            let _ = peer.control.write_all(&message);
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.peers.iter().flatten().filter_map(|peer| peer.lane.as_ref()).for_each(Lane::revoke);
        if !self.aborted {
            self.tell(CONTROL_LEFT, &[]);
        }
        for peer in self.peers.iter_mut().flatten() {
            peer.data.close();
            peer.control.close();
        }
    }
}

#[derive(Debug, PartialEq)]
enum ControlMessage {
    Abort(Box<AbortReason>),
    Left,
    Broken(String),
}

enum ReadError {
    Refused,
    Io(io::Error),
}

impl Peer {
    /// Writes until everything is out, there is no room or `TURN_BYTES` are written; returns whether anything moved.
    fn write(&mut self, parts: &mut Vec<IoSlice<'_>>) -> io::Result<bool> {
        if let Some(lane) = &mut self.lane {
            let (progress, sleeps) = lane.write(parts, TURN_BYTES);
            if sleeps {
                self.ring_doorbell();
            }
            return Ok(progress);
        }
        let mut total = 0;
        if self.data.wants_write() {
            match self.data.flush() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                flushed => flushed?,
            }
            if parts.is_empty() {
                return Ok(true);
            }
        }
        while !parts.is_empty() && total < TURN_BYTES {
            match self.data.write_vectored(parts) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    total += written;
                    let mut rest: &mut [IoSlice<'_>] = parts;
                    IoSlice::advance_slices(&mut rest, written);
                    let left = rest.len();
                    parts.drain(..parts.len() - left);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(total > 0)
    }

    /// Reads until everything is there, the socket is empty or `TURN_BYTES` are read.
    fn read(&mut self, from: &mut Incoming<'_>) -> Result<usize, ReadError> {
        if let Some(lane) = &mut self.lane {
            let (read, sleeps) = lane.read(from, TURN_BYTES)?;
            if sleeps {
                self.ring_doorbell();
            }
            if read > 0 {
                self.heard = Some(Instant::now());
            }
            return Ok(read);
        }
        let mut total = 0;
        while total < TURN_BYTES {
            let space = from.sink.space();
            if space.is_empty() {
                break;
            }
            match self.data.read(space) {
                Ok(0) => return Err(ReadError::Io(io::Error::other("the connection was closed"))),
                Ok(read) => {
                    total += read;
                    from.sink.advance(read).map_err(|_| ReadError::Refused)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ReadError::Io(error)),
            }
        }
        if total > 0 {
            self.heard = Some(Instant::now());
        }
        Ok(total)
    }

    /// Wakes a peer that sleeps on shared memory. A full socket has woken it already; a broken one is noticed
    /// elsewhere.
    fn ring_doorbell(&mut self) {
        let _ = self.data.write(&[0]);
    }

    /// Reads the doorbells of a peer with shared memory, and notes that it has ended.
    fn clear_doorbell(&mut self) {
        if self.lane.is_none() || self.ended.is_some() {
            return;
        }
        let mut rings = [0; 64];
        match self.data.read(&mut rings) {
            Ok(0) => self.ended = Some("the connection was closed".to_owned()),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => self.ended = Some(error.to_string()),
        }
    }

    fn read_control(&mut self) -> Option<ControlMessage> {
        let mut buffer = [0u8; 1024];
        loop {
            match self.control.read(&mut buffer) {
                Ok(0) => {
                    return Some(
                        self.parse_control().unwrap_or(ControlMessage::Broken("the connection was closed".to_owned())),
                    );
                }
                Ok(read) => self.inbox.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.parse_control(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Some(self.parse_control().unwrap_or(ControlMessage::Broken(error.to_string()))),
            }
        }
    }

    fn parse_control(&mut self) -> Option<ControlMessage> {
        parse_control(&mut self.inbox, &mut self.waiting)
    }
}

/// Parses the control messages in `inbox`, up to the first that ends the connection; notices of waiting are taken out
/// of it and noted.
fn parse_control(inbox: &mut Vec<u8>, waiting: &mut Option<u64>) -> Option<ControlMessage> {
    loop {
        let (header, content) = inbox.split_at_checked(5)?;
        let len = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
        if len > MAX_CONTROL_BYTES {
            return Some(ControlMessage::Broken(format!("it sent a control message of {len} bytes")));
        }
        let content = content.get(..len)?;
        match header[0] {
            CONTROL_ABORT => return Some(ControlMessage::Abort(Box::new(AbortReason::decode(content)))),
            CONTROL_LEFT => return Some(ControlMessage::Left),
            CONTROL_WAITING => {
                *waiting = content.try_into().ok().map(u64::from_le_bytes);
                inbox.drain(..5 + len);
            }
            other => {
                return Some(ControlMessage::Broken(format!("it sent a control message of unknown kind {other}")));
            }
        }
    }
}

impl From<LaneError> for ReadError {
    fn from(error: LaneError) -> ReadError {
        match error {
            LaneError::Refused => ReadError::Refused,
            LaneError::Broken(error) => ReadError::Io(error),
        }
    }
}

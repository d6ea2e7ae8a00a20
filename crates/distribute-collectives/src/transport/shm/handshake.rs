//! How two connected processes find out that they can share memory, and do.
//!
//! The one with the lower rank makes the segment and says where it is; the other tries to open it, and to fetch a number
//! from the first one's memory, and answers how that went; then the first one tries to fetch as well. Trying is the only
//! proof that works for containers, namespaces and security settings of all kinds.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::ring::{Consumer, Producer};
use super::segment::{Segment, host_id, number};
use super::{Current, Lane, RING_BYTES, attach};

const MAGIC: &[u8; 8] = b"dst-shm1";

/// Longest host id that is compared.
const HOST_BYTES: usize = 128;

const OFFER_BYTES: usize = 8 + HOST_BYTES + 4 + 4 + 8 + 8 + 8;
const ANSWER_BYTES: usize = 1 + 1 + 4 + 8 + 8;

/// A segment that was offered to a peer.
pub(in crate::transport) struct Offered {
    segment: Option<(Segment, OwnedFd)>,
    probe: Box<u64>,
}

/// A segment that was opened, and that the first side may yet find out more about.
pub(in crate::transport) struct Answered {
    lane: Option<Lane>,
    _probe: Box<u64>,
}

/// Makes a segment and tells the peer of it.
pub(in crate::transport) fn offer(stream: &mut TcpStream, secret: u64) -> io::Result<Offered> {
    let made = host_id().and_then(|host| Ok((host, Segment::create(RING_BYTES)?)));
    let probe = Box::new(secret);
    let mut bytes = Vec::with_capacity(OFFER_BYTES);
    bytes.extend_from_slice(MAGIC);
    let (host, segment) = match made {
        Ok((host, made)) => (host, Some(made)),
        // An empty id is nobody's.
        Err(_) => (String::new(), None),
    };
    let mut padded = [0; HOST_BYTES];
    padded.iter_mut().zip(host.bytes()).for_each(|(place, byte)| *place = byte);
    bytes.extend_from_slice(&padded);
    bytes.extend_from_slice(&std::process::id().to_le_bytes());
    bytes.extend_from_slice(&segment.as_ref().map_or(-1, |(_, file)| number(file)).to_le_bytes());
    bytes.extend_from_slice(&(RING_BYTES as u64).to_le_bytes());
    bytes.extend_from_slice(&(&raw const *probe as u64).to_le_bytes());
    bytes.extend_from_slice(&secret.to_le_bytes());
    stream.write_all(&bytes)?;
    Ok(Offered { segment, probe })
}

/// Reads an offer, tries it, and tells the peer how that went.
pub(in crate::transport) fn answer(stream: &mut TcpStream, secret: u64) -> io::Result<Answered> {
    let mut bytes = [0; OFFER_BYTES];
    stream.read_exact(&mut bytes)?;
    let mut fields = Fields(&bytes);
    if fields.take(MAGIC.len()) != MAGIC {
        return Err(io::Error::other("the peer offers no shared memory; give every member the same transport"));
    }
    let host = fields.take(HOST_BYTES);
    let (pid, fd, capacity) = (fields.i32(), fields.i32(), fields.u64());
    let (address, expected) = (fields.u64(), fields.u64());
    let same_host = host_id().is_ok_and(|own| {
        let len = own.len().min(HOST_BYTES);
        host[..len] == own.as_bytes()[..len] && host[len..].iter().all(|byte| *byte == 0)
    });
    let opened = match same_host && capacity == RING_BYTES as u64 {
        true => Segment::open(pid, fd, RING_BYTES),
        false => Err(io::Error::other("another host")),
    };
    let can_fetch = opened.is_ok() && fetches(pid, address, expected);
    let probe = Box::new(secret);
    let mut bytes = vec![u8::from(opened.is_ok()), u8::from(can_fetch)];
    bytes.extend_from_slice(&std::process::id().to_le_bytes());
    bytes.extend_from_slice(&(&raw const *probe as u64).to_le_bytes());
    bytes.extend_from_slice(&secret.to_le_bytes());
    stream.write_all(&bytes)?;
    let lane = opened.ok().map(|segment| {
        let segment = Arc::new(segment);
        Lane {
            to_peer: Producer::new(segment.clone(), 1),
            from_peer: Consumer::new(segment, 0),
            peer_fetches: false,
            pid,
            told: 0,
            current: Current::None,
        }
    });
    Ok(Answered { lane, _probe: probe })
}

/// Reads the answer to an offer and says whether this side can fetch too; `None` where no memory can be shared.
pub(in crate::transport) fn accept(stream: &mut TcpStream, offered: Offered) -> io::Result<Option<Lane>> {
    let mut bytes = [0; ANSWER_BYTES];
    stream.read_exact(&mut bytes)?;
    let (opened, peer_fetches) = (bytes[0] == 1, bytes[1] == 1);
    let mut fields = Fields(&bytes[2..]);
    let (pid, address, expected) = (fields.i32(), fields.u64(), fields.u64());
    let can_fetch = opened && fetches(pid, address, expected);
    stream.write_all(&[u8::from(can_fetch)])?;
    drop(offered.probe);
    Ok(offered.segment.filter(|_| opened).map(|(segment, _)| {
        let segment = Arc::new(segment);
        Lane {
            to_peer: Producer::new(segment.clone(), 0),
            from_peer: Consumer::new(segment, 1),
            peer_fetches,
            pid,
            told: 0,
            current: Current::None,
        }
    }))
}

impl Answered {
    /// Reads whether the peer can fetch from this process's memory; `None` where no memory can be shared.
    pub(in crate::transport) fn finish(self, stream: &mut TcpStream) -> io::Result<Option<Lane>> {
        let mut can_fetch = [0];
        stream.read_exact(&mut can_fetch)?;
        Ok(self.lane.map(|lane| Lane { peer_fetches: can_fetch[0] == 1, ..lane }))
    }
}

impl Lane {
    /// Whether long messages are copied once only, in both directions.
    pub(in crate::transport) fn fetches(&self) -> bool {
        self.peer_fetches
    }
}

fn fetches(pid: i32, address: u64, expected: u64) -> bool {
    let mut bytes = [0; 8];
    attach::fetch(pid, address, &mut bytes).is_ok_and(|len| len == 8) && u64::from_ne_bytes(bytes) == expected
}

/// Numbers one after another.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn i32(&mut self) -> i32 {
        i32::from_le_bytes(self.take(4).try_into().unwrap_or_default())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap_or_default())
    }
}

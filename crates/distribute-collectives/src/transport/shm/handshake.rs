//! How two connected processes find out that they can share memory, and do.
//!
//! The one with the lower rank makes a segment, writes a random number into it, and says where it is: its process id
//! and the number of a file. Such names mean something else in another namespace, where they may even name the other
//! side's own segment, so finding one proves nothing. The other side therefore compares the number that it reads in the
//! segment with the one that it was told over the connection, writes a number of its own next to it, and tells that;
//! the first side looks for it in its own mapping. Only when both have read what the other wrote do they use the
//! segment. Fetching from each other's memory is tried in the same way, with a number at an address.

use std::io::{self, Read, Write};
use std::sync::Arc;

use super::super::nonce::Nonce;
use super::identity::{Obstacle, PidScope};
use super::ring::{Consumer, Producer};
use super::{Attached, Current, Lane, RING_BYTES, Segment, SegmentFile};

const MAGIC: &[u8; 8] = b"dst-shm4";

pub(super) const OFFER_BYTES: usize = 8 + PidScope::LEN + 4 + 4 + 8 + 8 + Nonce::LEN;
pub(super) const ANSWER_BYTES: usize = 1 + 1 + 4 + 8 + Nonce::LEN;

/// A segment that was offered to a peer.
pub(in crate::transport) struct Offered {
    segment: Option<(Segment, SegmentFile)>,
    /// The bytes that the peer tries to fetch.
    _probe: Box<Nonce>,
}

/// A segment that was opened, and that the first side has yet to recognise.
pub(in crate::transport) struct Answered {
    lane: Result<Lane, Obstacle>,
    _probe: Box<Nonce>,
}

/// Makes a segment and tells the peer of it.
pub(in crate::transport) fn offer(stream: &mut impl Write) -> io::Result<Offered> {
    let nonce = Nonce::new()?;
    let probe = Box::new(nonce);
    let place = PidScope::here();
    let segment = place.is_ok().then(|| Segment::create(RING_BYTES, nonce).ok()).flatten();
    let offer = Offer {
        // An empty place is nobody's.
        place: place.unwrap_or_default(),
        pid: std::process::id() as i32,
        fd: segment.as_ref().map_or(-1, |(_, file)| file.number()),
        capacity: RING_BYTES as u64,
        address: &raw const *probe as u64,
        nonce,
    };
    let bytes = offer.encode();
    stream.write_all(&bytes)?;
    Ok(Offered { segment, _probe: probe })
}

/// Reads an offer, tries it, and tells the peer how that went.
pub(in crate::transport) fn answer(stream: &mut (impl Read + Write)) -> io::Result<Answered> {
    let mut bytes = [0; OFFER_BYTES];
    stream.read_exact(&mut bytes)?;
    let Offer { place: theirs, pid, fd, capacity, address, nonce: expected } = Offer::decode(&bytes).ok_or_else(|| {
        io::Error::other(
            "the peer offers no shared memory as this version does; give every member the same transport and version",
        )
    })?;
    let nonce = Nonce::new()?;
    let opened = match PidScope::here().ok().map(|here| here.obstacle(&theirs)) {
        None => Err(Obstacle::Unsupported),
        Some(Some(obstacle)) => Err(obstacle),
        Some(None) if fd < 0 => Err(Obstacle::NoSegment),
        Some(None) if capacity != RING_BYTES as u64 => Err(Obstacle::OtherSegment),
        Some(None) => Segment::open(pid, fd, RING_BYTES, expected),
    };
    if let Ok(segment) = &opened {
        segment.sign(nonce);
    }
    let attached = opened.is_ok().then(|| Attached::new(pid, address, expected)).flatten();
    let probe = Box::new(nonce);
    let answer = Answer {
        obstacle: opened.as_ref().err().copied(),
        fetches: attached.is_some(),
        pid: std::process::id() as i32,
        address: &raw const *probe as u64,
        nonce,
    };
    stream.write_all(&answer.encode())?;
    Ok(Answered { lane: opened.map(|segment| Lane::new(segment, 1, attached)), _probe: probe })
}

/// Reads the answer to an offer, and tells the peer whether this side has recognised it and can fetch too.
pub(in crate::transport) fn accept(
    stream: &mut (impl Read + Write),
    offered: Offered,
) -> io::Result<Result<Lane, Obstacle>> {
    let mut bytes = [0; ANSWER_BYTES];
    stream.read_exact(&mut bytes)?;
    let Answer { obstacle, fetches: peer_fetches, pid, address, nonce: expected } = Answer::decode(&bytes);
    let shared = match (obstacle, offered.segment) {
        (Some(obstacle), _) => Err(obstacle),
        (None, Some((segment, _))) if segment.is_signed(expected) => Ok(segment),
        (None, _) => Err(Obstacle::OtherSegment),
    };
    let attached = shared.is_ok().then(|| Attached::new(pid, address, expected)).flatten();
    stream.write_all(&[u8::from(shared.is_ok()), u8::from(attached.is_some())])?;
    Ok(shared.map(|segment| Lane { peer_fetches, ..Lane::new(segment, 0, attached) }))
}

impl Answered {
    /// Reads whether the peer has recognised this side, and whether it can fetch from this process's memory.
    pub(in crate::transport) fn finish(self, stream: &mut impl Read) -> io::Result<Result<Lane, Obstacle>> {
        let mut bytes = [0; 2];
        stream.read_exact(&mut bytes)?;
        let [recognised, peer_fetches] = bytes.map(|byte| byte == 1);
        let lane = self.lane.and_then(|lane| if recognised { Ok(lane) } else { Err(Obstacle::OtherSegment) });
        Ok(lane.map(|lane| Lane { peer_fetches, ..lane }))
    }
}

impl Lane {
    /// On the side that sends in direction `direction`.
    pub(super) fn new(segment: Segment, direction: usize, attached: Option<Attached>) -> Lane {
        let segment = Arc::new(segment);
        Lane {
            to_peer: Producer::new(segment.clone(), direction),
            from_peer: Consumer::new(segment, 1 - direction),
            peer_fetches: false,
            attached,
            told: 0,
            current: Current::None,
        }
    }

    /// Returns whether long messages are copied once only, in both directions.
    pub(in crate::transport) fn fetches(&self) -> bool {
        self.peer_fetches && self.attached.is_some()
    }
}

/// Where a segment and a number of the offering process are.
#[derive(Debug, PartialEq)]
pub(super) struct Offer {
    pub(super) place: PidScope,
    pub(super) pid: i32,
    /// The file of the segment; negative if there is none.
    pub(super) fd: i32,
    pub(super) capacity: u64,
    pub(super) address: u64,
    pub(super) nonce: Nonce,
}

impl Offer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(OFFER_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.place.encode());
        bytes.extend_from_slice(&self.pid.to_le_bytes());
        bytes.extend_from_slice(&self.fd.to_le_bytes());
        bytes.extend_from_slice(&self.capacity.to_le_bytes());
        bytes.extend_from_slice(&self.address.to_le_bytes());
        bytes.extend_from_slice(&self.nonce.to_bytes());
        bytes
    }

    /// Returns the offer; `None` if the bytes are those of another protocol.
    pub(super) fn decode(bytes: &[u8; OFFER_BYTES]) -> Option<Offer> {
        let mut fields = Fields(bytes);
        if fields.take(MAGIC.len()) != MAGIC {
            return None;
        }
        let place = PidScope::decode(fields.take(PidScope::LEN));
        let (pid, fd, capacity) = (fields.i32(), fields.i32(), fields.u64());
        Some(Offer { place, pid, fd, capacity, address: fields.u64(), nonce: fields.nonce() })
    }
}

/// The outcome of an offer, and where a number of the answering process is.
#[derive(Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) obstacle: Option<Obstacle>,
    /// Whether the answering process can fetch from the other's memory.
    pub(super) fetches: bool,
    pub(super) pid: i32,
    pub(super) address: u64,
    pub(super) nonce: Nonce,
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.obstacle.map_or(0, |obstacle| obstacle as u8), u8::from(self.fetches)];
        bytes.extend_from_slice(&self.pid.to_le_bytes());
        bytes.extend_from_slice(&self.address.to_le_bytes());
        bytes.extend_from_slice(&self.nonce.to_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; ANSWER_BYTES]) -> Answer {
        let (obstacle, fetches) = (Obstacle::from_code(bytes[0]), bytes[1] == 1);
        let mut fields = Fields(&bytes[2..]);
        Answer { obstacle, fetches, pid: fields.i32(), address: fields.u64(), nonce: fields.nonce() }
    }
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

    fn nonce(&mut self) -> Nonce {
        Nonce::from_bytes(self.take(Nonce::LEN).try_into().unwrap_or_default())
    }
}

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

const MAGIC: &[u8; 8] = b"dst-shm2";

const OFFER_BYTES: usize = 8 + PidScope::LEN + 4 + 4 + 8 + 8 + Nonce::LEN;
const ANSWER_BYTES: usize = 1 + 1 + 4 + 8 + Nonce::LEN;

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
    let mut bytes = Vec::with_capacity(OFFER_BYTES);
    bytes.extend_from_slice(MAGIC);
    // An empty place is nobody's.
    bytes.extend_from_slice(&place.map_or([0; PidScope::LEN], |place| place.encode()));
    bytes.extend_from_slice(&std::process::id().to_le_bytes());
    bytes.extend_from_slice(&segment.as_ref().map_or(-1, |(_, file)| file.number()).to_le_bytes());
    bytes.extend_from_slice(&(RING_BYTES as u64).to_le_bytes());
    bytes.extend_from_slice(&(&raw const *probe as u64).to_le_bytes());
    bytes.extend_from_slice(&nonce.to_bytes());
    stream.write_all(&bytes)?;
    Ok(Offered { segment, _probe: probe })
}

/// Reads an offer, tries it, and tells the peer how that went.
pub(in crate::transport) fn answer(stream: &mut (impl Read + Write)) -> io::Result<Answered> {
    let mut bytes = [0; OFFER_BYTES];
    stream.read_exact(&mut bytes)?;
    let mut fields = Fields(&bytes);
    if fields.take(MAGIC.len()) != MAGIC {
        return Err(io::Error::other(
            "the peer offers no shared memory as this version does; give every member the same transport and version",
        ));
    }
    let theirs = PidScope::decode(fields.take(PidScope::LEN));
    let (pid, fd, capacity) = (fields.i32(), fields.i32(), fields.u64());
    let (address, expected) = (fields.u64(), fields.nonce());
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
    let mut bytes = vec![opened.as_ref().map_or_else(|obstacle| *obstacle as u8, |_| 0), u8::from(attached.is_some())];
    bytes.extend_from_slice(&std::process::id().to_le_bytes());
    bytes.extend_from_slice(&(&raw const *probe as u64).to_le_bytes());
    bytes.extend_from_slice(&nonce.to_bytes());
    stream.write_all(&bytes)?;
    Ok(Answered { lane: opened.map(|segment| Lane::new(segment, 1, attached)), _probe: probe })
}

/// Reads the answer to an offer, and tells the peer whether this side has recognised it and can fetch too.
pub(in crate::transport) fn accept(
    stream: &mut (impl Read + Write),
    offered: Offered,
) -> io::Result<Result<Lane, Obstacle>> {
    let mut bytes = [0; ANSWER_BYTES];
    stream.read_exact(&mut bytes)?;
    let (obstacle, peer_fetches) = (Obstacle::from_code(bytes[0]), bytes[1] == 1);
    let mut fields = Fields(&bytes[2..]);
    let (pid, address, expected) = (fields.i32(), fields.u64(), fields.nonce());
    let shared = match (obstacle, offered.segment) {
        (Some(obstacle), _) => Err(obstacle),
        (None, None) => Err(Obstacle::NoSegment),
        (None, Some((segment, _))) if !segment.is_signed(expected) => Err(Obstacle::OtherSegment),
        (None, Some((segment, _))) => Ok(segment),
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
    fn new(segment: Segment, direction: usize, attached: Option<Attached>) -> Lane {
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

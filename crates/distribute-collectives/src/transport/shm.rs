//! Shared memory between two processes of one host, as the fast lane of a pair that is connected by TCP already.
//!
//! Each direction has a ring in a segment that both map. Short messages are copied through the ring; of long ones only
//! the address goes through it, and the receiver fetches the bytes from the sender's memory by itself, so they are
//! copied once. Where the system does not allow that, all bytes go through the ring.
//!
//! The segment is an anonymous file (`memfd`), which the other side opens through `/proc`, or gets over a Unix socket.
//! It needs no space in `/dev/shm`, has no name, and is gone with the processes however they end. Sleepers are woken,
//! and deaths noticed, through the TCP socket of the pair. Systems other than Linux have neither: their processes use
//! TCP.

#[cfg(target_os = "linux")]
mod attach;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzz;
mod handshake;
mod identity;
#[cfg(target_os = "linux")]
mod passing;
mod ring;
#[cfg(target_os = "linux")]
mod segment;
#[cfg(not(target_os = "linux"))]
mod unsupported;

pub(super) use handshake::{accept, answer, offer};
pub(super) use identity::Obstacle;
#[cfg(target_os = "linux")]
pub(super) use passing::{give, take};
#[cfg(not(target_os = "linux"))]
pub(super) use unsupported::{give, take};

use std::io::{self, IoSlice};

#[cfg(target_os = "linux")]
use self::attach::Attached;
use self::ring::{Consumer, Producer, Record};
#[cfg(target_os = "linux")]
use self::segment::{Segment, SegmentFile};
#[cfg(not(target_os = "linux"))]
use self::unsupported::{Attached, Segment, SegmentFile};
use super::{Incoming, UnexpectedBytes};

/// Bytes of each direction's ring: two of them stay in a core's L2 cache.
pub(super) const RING_BYTES: usize = 256 * 1024;

/// From here on the receiver fetches the bytes: two copies through the ring then cost more than the system call.
const LONG_BYTES: usize = 16 * 1024;

/// Both directions between this process and one peer.
pub(super) struct Lane {
    to_peer: Producer,
    from_peer: Consumer,
    /// Whether the peer can copy from this process's memory.
    peer_fetches: bool,
    /// The peer's process, where bytes can be fetched from its memory.
    attached: Option<Attached>,
    /// Bytes of the first part that the peer has been told to fetch.
    told: usize,
    /// The rest of the record that is being received.
    current: Current,
}

#[derive(Clone, Copy)]
enum Current {
    None,
    /// Bytes in the ring.
    Short(usize),
    /// Bytes at an address of the peer's memory.
    Long(u64, usize),
}

/// The reason why a lane cannot continue.
pub(super) enum LaneError {
    Refused,
    Broken(io::Error),
}

impl From<UnexpectedBytes> for LaneError {
    fn from(_: UnexpectedBytes) -> LaneError {
        LaneError::Refused
    }
}

impl Lane {
    /// Sends as much as there is room for, at most about `turn` bytes. Returns whether anything was sent, and whether
    /// the peer sleeps and must be woken.
    pub(super) fn write(&mut self, parts: &mut Vec<IoSlice<'_>>, turn: usize) -> (bool, bool) {
        let all = parts.len();
        let mut rest = &mut parts[..];
        let mut sent = 0;
        let mut progress = false;
        let is_long = |part: &IoSlice<'_>| self.peer_fetches && part.len() >= LONG_BYTES;
        // Drops parts without bytes.
        IoSlice::advance_slices(&mut rest, 0);
        while sent < turn
            && let Some(first) = rest.first()
        {
            if self.told > 0 {
                if !self.to_peer.all_fetched() {
                    break;
                }
                IoSlice::advance_slices(&mut rest, std::mem::take(&mut self.told));
            } else if is_long(first) {
                if self.to_peer.push_long(first.as_ptr() as u64, first.len()) {
                    self.told = first.len();
                    progress = true;
                }
                break;
            } else {
                let short = rest.iter().position(is_long).unwrap_or(rest.len());
                let len = self.to_peer.push_short(&rest[..short]);
                if len == 0 {
                    break;
                }
                IoSlice::advance_slices(&mut rest, len);
                sent += len;
            }
            progress = true;
        }
        let left = rest.len();
        parts.drain(..all - left);
        (progress, progress && self.to_peer.must_wake())
    }

    /// Receives what is there, at most about `turn` bytes; how many, and whether the peer sleeps and must be woken.
    pub(super) fn read(&mut self, from: &mut Incoming<'_>, turn: usize) -> Result<(usize, bool), LaneError> {
        let mut total = 0;
        while total < turn {
            let space = from.sink.space();
            if space.is_empty() {
                break;
            }
            match self.current {
                Current::None => match self.from_peer.begin().map_err(LaneError::Broken)? {
                    Record::None => break,
                    Record::Short(len) => self.current = Current::Short(len),
                    Record::Long(address, len) => self.current = Current::Long(address, len),
                },
                Current::Short(left) => {
                    let len = left.min(space.len());
                    self.from_peer.copy(&mut space[..len]);
                    from.sink.advance(len)?;
                    total += len;
                    self.current = if len == left { Current::None } else { Current::Short(left - len) };
                }
                Current::Long(address, left) => {
                    let len = left.min(space.len());
                    let not_offered =
                        || io::Error::other("the peer offers to let its memory be read, which was not agreed");
                    let attached = self.attached.as_mut().ok_or_else(|| LaneError::Broken(not_offered()))?;
                    let read = attached.fetch(address, &mut space[..len]).map_err(LaneError::Broken)?;
                    from.sink.advance(read)?;
                    total += read;
                    self.current = match left - read {
                        0 => {
                            self.from_peer.fetched().map_err(LaneError::Broken)?;
                            Current::None
                        }
                        left => Current::Long(address + read as u64, left),
                    };
                }
            }
        }
        self.from_peer.release();
        Ok((total, total > 0 && self.from_peer.must_wake()))
    }

    /// Takes back what the peer was told to fetch, before its memory is used otherwise.
    pub(super) fn revoke(&self) {
        self.to_peer.revoke();
    }

    /// Announces that this side is about to sleep until there is something to read, or room to write; the peer that
    /// provides it then wakes this side. The caller must look once more, for what was provided before the announcement.
    pub(super) fn announce_sleep(&self) {
        self.from_peer.announce_sleep();
        self.to_peer.announce_sleep();
    }

    /// Takes the announcement back.
    pub(super) fn awake(&self) {
        self.from_peer.awake();
        self.to_peer.awake();
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests;

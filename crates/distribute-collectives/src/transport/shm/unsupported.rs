//! Shared memory on systems without `memfd` and `/proc`: no process makes or finds a segment, so these types have no
//! values.

use std::convert::Infallible;
use std::io;

use super::super::nonce::Nonce;
use super::Lane;
use super::identity::Obstacle;
use super::ring::{RingMemory, Words};

/// Tells the peer nothing, as it also has no segment that could be passed.
pub(in crate::transport) fn give<S>(_: &mut S, obstacle: Obstacle) -> io::Result<Result<Lane, Obstacle>> {
    Ok(Err(obstacle))
}

/// As [`give`].
pub(in crate::transport) fn take<S>(_: &mut S, obstacle: Obstacle) -> io::Result<Result<Lane, Obstacle>> {
    Ok(Err(obstacle))
}

/// Memory that two processes map.
pub(super) struct Segment(Infallible);

/// The file of a segment.
pub(super) struct SegmentFile(Infallible);

/// Another process, whose memory this one may read.
pub(super) struct Attached(Infallible);

impl Segment {
    pub(super) fn create(_: usize, _: Nonce) -> io::Result<(Segment, SegmentFile)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn open(_: i32, _: i32, _: usize, _: Nonce) -> Result<Segment, Obstacle> {
        Err(Obstacle::Unsupported)
    }

    pub(super) fn sign(&self, _: Nonce) {
        match self.0 {}
    }

    pub(super) fn is_signed(&self, _: Nonce) -> bool {
        match self.0 {}
    }
}

impl RingMemory for Segment {
    const LINE: usize = 64;

    fn capacity(&self) -> usize {
        match self.0 {}
    }

    fn words(&self, _: usize) -> Words<'_> {
        match self.0 {}
    }

    fn head(&self, _: usize, _: u64) -> &AtomicU64 {
        match self.0 {}
    }

    fn write(&self, _: usize, _: u64, _: &[u8]) {
        match self.0 {}
    }

    fn read(&self, _: usize, _: u64, _: &mut [u8]) {
        match self.0 {}
    }
}

impl SegmentFile {
    pub(super) fn number(&self) -> i32 {
        match self.0 {}
    }
}

impl Attached {
    pub(super) fn new(_: i32, _: u64, _: Nonce) -> Option<Attached> {
        None
    }

    pub(super) fn fetch(&mut self, _: u64, _: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }
}

//! Records from one process to another, through a ring in a segment.
//!
//! A record is a header of 16 bytes (kind and length) and either its bytes, or the address where they can be fetched.
//! Positions count bytes since the beginning and never wrap; `produced - consumed` bytes are in the ring.

use std::io;
use std::sync::Arc;

use super::Segment;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

const HEADER_BYTES: usize = 16;
const ADDRESS_BYTES: usize = 8;

const SHORT: u64 = 0x7368_6f72_7400;
const LONG: u64 = 0x6c6f_6e67_0000;

/// In the count of fetched records: the producer has taken back what has not been fetched yet.
const REVOKED: u64 = 1 << 63;

/// Shared memory of a ring: the counters and the bytes of each direction.
pub(super) trait RingMemory {
    /// Bytes of a ring.
    fn capacity(&self) -> usize;

    /// The words of direction 0 or 1.
    fn words(&self, direction: usize) -> Words<'_>;

    /// Copies bytes into the ring of a direction, from position `at` on, around its end where need be.
    ///
    /// Only the producer calls this, for positions that the consumer has released.
    fn write(&self, direction: usize, at: u64, bytes: &[u8]);

    /// Copies bytes out of the ring of a direction. Only the consumer calls this, for positions that were published.
    fn read(&self, direction: usize, at: u64, bytes: &mut [u8]);
}

/// The shared words of one direction.
pub(super) struct Words<'a> {
    /// Bytes that the producer has put into the ring since the beginning.
    pub(super) produced: &'a AtomicU64,
    /// Bytes that the consumer has taken out of it.
    pub(super) consumed: &'a AtomicU64,
    /// Long records that the consumer has fetched, and [`REVOKED`].
    pub(super) fetched: &'a AtomicU64,
    pub(super) consumer_sleeps: &'a AtomicU32,
    pub(super) producer_sleeps: &'a AtomicU32,
}

/// The sending end of one direction.
pub(super) struct Producer<M = Segment> {
    segment: Arc<M>,
    direction: usize,
    produced: u64,
    /// As last seen; there is at least this much room.
    consumed: u64,
    /// Long records so far.
    long: u64,
}

/// The receiving end of one direction.
pub(super) struct Consumer<M = Segment> {
    segment: Arc<M>,
    direction: usize,
    consumed: u64,
    /// As last seen; there is at least this much to read.
    produced: u64,
    /// The count that was last published to the producer.
    released: u64,
}

/// The record at the front of a ring.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// No record.
    None,
    /// This many bytes follow in the ring.
    Short(usize),
    /// The address of bytes in the memory of the producer, and their number.
    Long(u64, usize),
}

impl<M: RingMemory> Producer<M> {
    pub(super) fn new(segment: Arc<M>, direction: usize) -> Producer<M> {
        Producer { segment, direction, produced: 0, consumed: 0, long: 0 }
    }

    /// Puts in as many of the bytes as there is room for, as one record; returns their number.
    pub(super) fn push_short(&mut self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(self.room(bytes.len() + HEADER_BYTES).saturating_sub(HEADER_BYTES));
        if len > 0 {
            self.put(&header(SHORT, len), &bytes[..len]);
        }
        len
    }

    /// Publishes where bytes can be fetched; returns whether there was room for the record.
    pub(super) fn push_long(&mut self, address: u64, len: usize) -> bool {
        if self.room(HEADER_BYTES + ADDRESS_BYTES) < HEADER_BYTES + ADDRESS_BYTES {
            return false;
        }
        self.put(&header(LONG, len), &address.to_le_bytes());
        self.long += 1;
        true
    }

    /// Returns whether the consumer has fetched all long records.
    pub(super) fn all_fetched(&self) -> bool {
        // Acquire: what it did with our memory comes before.
        self.words().fetched.load(Ordering::Acquire) & !REVOKED >= self.long
    }

    /// Takes the long records back that have not been fetched: their memory is about to be used otherwise. The consumer
    /// learns that it may have read something else.
    pub(super) fn revoke(&self) {
        // One of this and the consumer's count comes first. Release: what is done to the memory comes after, so a
        // consumer that has counted the record first has read before.
        self.words().fetched.fetch_or(REVOKED, Ordering::AcqRel);
    }

    /// Returns whether the consumer sleeps, and clears that, since the caller wakes it.
    pub(super) fn must_wake(&self) -> bool {
        // Orders the publishing before the look; the consumer announces its sleep before it looks once more.
        fence(Ordering::SeqCst);
        let words = self.words();
        words.consumer_sleeps.load(Ordering::Relaxed) != 0 && words.consumer_sleeps.swap(0, Ordering::Relaxed) != 0
    }

    pub(super) fn announce_sleep(&self) {
        self.words().producer_sleeps.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn awake(&self) {
        self.words().producer_sleeps.store(0, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn segment(&self) -> Arc<M> {
        self.segment.clone()
    }

    fn put(&mut self, header: &[u8], bytes: &[u8]) {
        self.segment.write(self.direction, self.produced, header);
        self.segment.write(self.direction, self.produced + header.len() as u64, bytes);
        self.produced += (header.len() + bytes.len()) as u64;
        // Release: the bytes come before the word that publishes them.
        self.words().produced.store(self.produced, Ordering::Release);
    }

    /// Free bytes; looks anew only if there seem to be fewer than wanted.
    fn room(&mut self, wanted: usize) -> usize {
        let capacity = self.segment.capacity();
        let room = |consumed: u64| capacity.saturating_sub(self.produced.saturating_sub(consumed) as usize);
        if room(self.consumed) < wanted {
            // Acquire: the consumer's reads come before what is written over them.
            self.consumed = self.words().consumed.load(Ordering::Acquire);
        }
        room(self.consumed)
    }

    fn words(&self) -> Words<'_> {
        self.segment.words(self.direction)
    }
}

impl<M: RingMemory> Consumer<M> {
    pub(super) fn new(segment: Arc<M>, direction: usize) -> Consumer<M> {
        Consumer { segment, direction, consumed: 0, produced: 0, released: 0 }
    }

    /// Begins the next record. Its bytes in the ring, if it has any there, are taken by [`copy`](Consumer::copy).
    ///
    /// Fails where the other process has written something other than a record.
    pub(super) fn begin(&mut self) -> io::Result<Record> {
        if self.produced == self.consumed {
            // Acquire: the bytes come before the word that publishes them.
            self.produced = self.words().produced.load(Ordering::Acquire);
            if self.produced == self.consumed {
                return Ok(Record::None);
            }
        }
        let there = self.produced.wrapping_sub(self.consumed);
        let corrupt = || io::Error::other("the shared ring holds bytes that are not a record");
        if there > self.segment.capacity() as u64 || there < HEADER_BYTES as u64 {
            return Err(corrupt());
        }
        let mut header = [0; HEADER_BYTES];
        self.copy(&mut header);
        let [kind, len] = [0, 8].map(|at| {
            let word: [u8; 8] = header[at..at + 8].try_into().unwrap_or_default();
            u64::from_le_bytes(word)
        });
        let left = there - HEADER_BYTES as u64;
        match kind {
            SHORT if (1..=left).contains(&len) => Ok(Record::Short(len as usize)),
            LONG if left >= ADDRESS_BYTES as u64 && len > 0 => {
                let mut address = [0; ADDRESS_BYTES];
                self.copy(&mut address);
                let len = usize::try_from(len).map_err(|_| corrupt())?;
                Ok(Record::Long(u64::from_le_bytes(address), len))
            }
            _ => Err(corrupt()),
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.words().produced.load(Ordering::Acquire) == self.consumed
    }

    /// Takes bytes of the record that was begun.
    pub(super) fn copy(&mut self, bytes: &mut [u8]) {
        self.segment.read(self.direction, self.consumed, bytes);
        self.consumed += bytes.len() as u64;
        // Half a ring of silence would let the producer stand still.
        if self.consumed - self.released >= self.segment.capacity() as u64 / 2 {
            self.release();
        }
    }

    /// Gives the room of what was taken back to the producer.
    pub(super) fn release(&mut self) {
        if self.released != self.consumed {
            self.released = self.consumed;
            // Release: our reads come before the word that lets them be written over.
            self.words().consumed.store(self.consumed, Ordering::Release);
        }
    }

    /// Says that a long record has been fetched.
    ///
    /// Fails where the producer has taken it back meanwhile, so that what was fetched may be something else.
    pub(super) fn fetched(&self) -> io::Result<()> {
        // Release: our reads of the producer's memory come before the count that gives it back. Acquire: see `revoke`.
        let before = self.words().fetched.fetch_add(1, Ordering::AcqRel);
        if before & REVOKED == 0 { Ok(()) } else { Err(io::Error::other("it gave up while its memory was being read")) }
    }

    /// Returns whether the producer sleeps, and clears that, since the caller wakes it.
    pub(super) fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        let words = self.words();
        words.producer_sleeps.load(Ordering::Relaxed) != 0 && words.producer_sleeps.swap(0, Ordering::Relaxed) != 0
    }

    pub(super) fn announce_sleep(&self) {
        self.words().consumer_sleeps.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn awake(&self) {
        self.words().consumer_sleeps.store(0, Ordering::Relaxed);
    }

    fn words(&self) -> Words<'_> {
        self.segment.words(self.direction)
    }
}

fn header(kind: u64, len: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&(len as u64).to_le_bytes());
    header
}

#[cfg(all(test, distribute_loom))]
mod model;
#[cfg(test)]
mod tests;

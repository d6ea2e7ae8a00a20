//! Records from one process to another, through a ring in a segment.
//!
//! A record begins on a cache line, with a word that states its kind and length; its bytes follow, or the address where
//! they can be fetched. The word is written last: it publishes the record, so that a short one moves from core to core
//! as one line. It is zero until then, since the producer clears the place of the next record before it publishes one.
//! Positions count bytes since the beginning and never wrap.

use std::io::{self, IoSlice};
use std::sync::Arc;

use super::Segment;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes of the word at the beginning of a record.
pub(super) const HEAD_BYTES: usize = 8;
const ADDRESS_BYTES: usize = 8;

/// A record's word holds its length in the lower bits, and its kind above them.
const LEN_BITS: u32 = 48;
const MAX_LEN: u64 = (1 << LEN_BITS) - 1;
const SHORT: u64 = 0x5348;
const LONG: u64 = 0x4c4f;

/// In the count of fetched records: the producer has taken back what has not been fetched yet.
const REVOKED: u64 = 1 << 63;

/// Shared memory of a ring: the counters and the bytes of each direction. It begins as zeros.
pub(super) trait RingMemory {
    /// Records begin at multiples of this.
    const LINE: usize;

    /// Bytes of a ring, a multiple of [`LINE`](RingMemory::LINE).
    fn capacity(&self) -> usize;

    /// The words of direction 0 or 1.
    fn words(&self, direction: usize) -> Words<'_>;

    /// The word at position `at`, a multiple of [`LINE`](RingMemory::LINE), in the ring of a direction.
    fn head(&self, direction: usize, at: u64) -> &AtomicU64;

    /// Copies bytes into the ring of a direction, from position `at` on, around its end where need be.
    ///
    /// Only the producer calls this, for positions that the consumer has released, and not for those of heads.
    fn write(&self, direction: usize, at: u64, bytes: &[u8]);

    /// Copies bytes out of the ring of a direction. Only the consumer calls this, for positions that were published.
    fn read(&self, direction: usize, at: u64, bytes: &mut [u8]);
}

/// The shared words of one direction.
pub(super) struct Words<'a> {
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
    /// Where the next record begins.
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
    /// Where the present record's next byte is, or where the next record begins.
    at: u64,
    /// Bytes of the present record that were not taken.
    left: usize,
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

    /// Puts in as many of the parts' bytes as there is room for, as one record; returns their number.
    pub(super) fn push_short(&mut self, parts: &[IoSlice<'_>]) -> usize {
        let wanted = parts.iter().map(|part| part.len()).sum();
        let len = self.room(wanted).min(wanted);
        if len == 0 {
            return 0;
        }
        self.clear_next(len);
        // From the end: the consumer polls the first line, so it is written last, at once and by few stores.
        let (start, second_line) = (self.produced + HEAD_BYTES as u64, self.produced + M::LINE as u64);
        let mut end = wanted;
        for part in parts.iter().rev() {
            end -= part.len();
            let bytes = &part[..part.len().min(len.saturating_sub(end))];
            let at = start + end as u64;
            let (first, rest) = bytes.split_at(bytes.len().min(second_line.saturating_sub(at) as usize));
            self.segment.write(self.direction, at + first.len() as u64, rest);
            self.segment.write(self.direction, at, first);
        }
        self.publish(SHORT, len, len);
        len
    }

    /// Publishes where bytes can be fetched; returns whether there was room for the record.
    pub(super) fn push_long(&mut self, address: u64, len: usize) -> bool {
        if self.room(ADDRESS_BYTES) < ADDRESS_BYTES {
            return false;
        }
        self.clear_next(ADDRESS_BYTES);
        self.segment.write(self.direction, self.produced + HEAD_BYTES as u64, &address.to_le_bytes());
        self.publish(LONG, len, ADDRESS_BYTES);
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

    /// Clears the word after a record of `bytes` bytes.
    fn clear_next(&self, bytes: usize) {
        let next = self.produced + record_bytes::<M>(bytes) as u64;
        // Relaxed: the word of this record publishes it too.
        self.segment.head(self.direction, next).store(0, Ordering::Relaxed);
    }

    /// Publishes the record at the front, whose word `bytes` bytes follow.
    fn publish(&mut self, kind: u64, len: usize, bytes: usize) {
        // Release: the bytes, and the next word, come before the word that publishes them.
        self.segment.head(self.direction, self.produced).store(head(kind, len), Ordering::Release);
        self.produced += record_bytes::<M>(bytes) as u64;
    }

    /// Returns how many bytes fit into a record; looks anew only if there seem to be fewer than wanted.
    fn room(&mut self, wanted: usize) -> usize {
        let capacity = self.segment.capacity();
        // Besides the record there is the word of the one after it.
        let room = |consumed: u64| {
            let free = capacity.saturating_sub(self.produced.saturating_sub(consumed) as usize);
            free.saturating_sub(M::LINE + HEAD_BYTES)
        };
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
        Consumer { segment, direction, at: 0, left: 0, released: 0 }
    }

    /// Begins the next record, after the present one's bytes were taken. Its own, if it has any in the ring, are taken
    /// by [`copy`](Consumer::copy).
    ///
    /// Fails where the other process has written something other than a record.
    pub(super) fn begin(&mut self) -> io::Result<Record> {
        // Acquire: the bytes come before the word that publishes them.
        let head = self.segment.head(self.direction, self.at).load(Ordering::Acquire);
        if head == 0 {
            return Ok(Record::None);
        }
        let (kind, len) = (head >> LEN_BITS, (head & MAX_LEN) as usize);
        let largest = self.segment.capacity().saturating_sub(M::LINE + HEAD_BYTES);
        let bytes = match kind {
            SHORT if (1..=largest).contains(&len) => len,
            LONG if len > 0 => ADDRESS_BYTES,
            _ => return Err(io::Error::other("the shared ring holds bytes that are not a record")),
        };
        self.at += HEAD_BYTES as u64;
        self.left = bytes;
        if kind == SHORT {
            return Ok(Record::Short(len));
        }
        let mut address = [0; ADDRESS_BYTES];
        self.copy(&mut address);
        Ok(Record::Long(u64::from_le_bytes(address), len))
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.segment.head(self.direction, self.at).load(Ordering::Acquire) == 0
    }

    /// Takes bytes of the record that was begun, at most those that are left of it.
    pub(super) fn copy(&mut self, bytes: &mut [u8]) {
        self.segment.read(self.direction, self.at, bytes);
        self.at += bytes.len() as u64;
        self.left -= bytes.len();
        if self.left == 0 {
            self.at = self.at.next_multiple_of(M::LINE as u64);
        }
        // Half a ring of silence would let the producer stand still.
        if self.at - self.released >= self.segment.capacity() as u64 / 2 {
            self.release();
        }
    }

    /// Gives the room of what was taken back to the producer.
    pub(super) fn release(&mut self) {
        let taken = self.at / M::LINE as u64 * M::LINE as u64;
        if self.released != taken {
            self.released = taken;
            // Release: our reads come before the word that lets them be written over.
            self.words().consumed.store(taken, Ordering::Release);
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

/// Returns the word of a record.
fn head(kind: u64, len: usize) -> u64 {
    kind << LEN_BITS | (len as u64 & MAX_LEN)
}

/// Returns the bytes of a record with `bytes` bytes, with its word, up to where the next one begins.
fn record_bytes<M: RingMemory>(bytes: usize) -> usize {
    (HEAD_BYTES + bytes).next_multiple_of(M::LINE)
}

#[cfg(all(test, distribute_loom))]
mod model;
#[cfg(test)]
mod tests;

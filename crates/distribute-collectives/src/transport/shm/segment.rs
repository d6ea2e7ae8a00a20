//! Memory that two processes map.
#![expect(unsafe_code, reason = "mapped memory is shared with another process, which the compiler knows nothing of")]

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::super::nonce::Nonce;
use super::identity::Obstacle;
use super::ring::{RingMemory, Words};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// One cache line: what lies on lines of its own is not slowed down by accesses to its neighbours.
const LINE: usize = 64;

/// Header of a segment: the maker's nonce on the first line, the opener's on the second.
const HEADER_BYTES: usize = 2 * LINE;

/// The words of one direction: four lines.
const WORDS_BYTES: usize = 4 * LINE;

/// Name of a segment's file, which `/proc` shows.
const NAME: &str = "distribute";

/// Neither side can make the file shorter, so that no access to the mapping fails, nor take that promise back.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapped segment: a header, and two directions, each of them four words and a ring.
pub(super) struct Segment {
    start: NonNull<u8>,
    /// A power of two.
    capacity: usize,
}

// SAFETY: the mapping lives as long as the value, whatever thread holds it; all access goes through atomics, and
// through `read` and `write`, whose callers answer for exclusiveness.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new segment with the maker's nonce, and the file by which another process can open it.
    pub(super) fn create(capacity: usize, nonce: Nonce) -> io::Result<(Segment, SegmentFile)> {
        let file = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, Segment::len_bytes(capacity) as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let segment = Segment::map(&file, capacity)?;
        segment.write_nonce(0, nonce);
        Ok((segment, SegmentFile(file)))
    }

    /// Opens the segment that is file `fd` of process `pid`, if it is the one with the maker's nonce `expected`.
    pub(super) fn open(pid: i32, fd: i32, capacity: usize, expected: Nonce) -> Result<Segment, Obstacle> {
        let path = format!("/proc/{pid}/fd/{fd}");
        // In another namespace the path may name anything, such as a device that must not be opened.
        let name = fs::read_link(&path).map_err(|_| Obstacle::CannotOpen)?;
        if !name.to_string_lossy().starts_with(&format!("/memfd:{NAME}")) {
            return Err(Obstacle::OtherSegment);
        }
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        Segment::adopt(&OwnedFd::from(file.map_err(|_| Obstacle::CannotOpen)?), capacity, expected)
    }

    /// Maps the segment in a file, if it is the one with the maker's nonce `expected`.
    pub(super) fn adopt(file: &OwnedFd, capacity: usize, expected: Nonce) -> Result<Segment, Obstacle> {
        // Before it is mapped: a file that can become shorter kills a process that reads beyond its end.
        let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
        let len = fstat(file.as_fd()).map_or(-1, |stat| stat.st_size);
        if !sealed || len != Segment::len_bytes(capacity) as i64 {
            return Err(Obstacle::OtherSegment);
        }
        let segment = Segment::map(file, capacity).map_err(|_| Obstacle::CannotOpen)?;
        if segment.nonce(0) == expected.words() { Ok(segment) } else { Err(Obstacle::OtherSegment) }
    }

    /// Writes the opener's nonce.
    pub(super) fn sign(&self, nonce: Nonce) {
        self.write_nonce(1, nonce);
    }

    /// Returns whether an opener with this nonce has opened this segment.
    pub(super) fn is_signed(&self, expected: Nonce) -> bool {
        // Zeros are what an unsigned segment holds.
        expected.words() != [0; 2] && self.nonce(1) == expected.words()
    }

    fn write_nonce(&self, side: usize, nonce: Nonce) {
        for (index, word) in nonce.words().into_iter().enumerate() {
            // Relaxed: the message that tells the nonce to the other side comes after, by a system call.
            self.word64(side * LINE + index * 8).store(word, Ordering::Relaxed);
        }
    }

    fn nonce(&self, side: usize) -> [u64; 2] {
        // Relaxed: see `write_nonce`.
        [0, 1].map(|index| self.word64(side * LINE + index * 8).load(Ordering::Relaxed))
    }

    /// Memory of this process alone that is never given back, for two threads in Miri, which maps no files.
    #[cfg(any(test, fuzzing))]
    pub(super) fn leaked(capacity: usize) -> std::sync::Arc<Segment> {
        #[repr(align(64))]
        #[derive(Clone, Copy)]
        struct Line(#[expect(dead_code, reason = "only its size and place count")] [u8; LINE]);
        let memory = vec![Line([0; LINE]); Segment::len_bytes(capacity).div_ceil(LINE)].leak();
        let segment = std::sync::Arc::new(Segment { start: NonNull::from(memory).cast(), capacity });
        std::mem::forget(segment.clone());
        segment
    }

    fn map(file: &OwnedFd, capacity: usize) -> io::Result<Segment> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the system's choice, of a file that is as long as asked for, and whose
        // length is sealed.
        let start = unsafe { mmap(std::ptr::null_mut(), Segment::len_bytes(capacity), protection, flags, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("a segment mapped at address 0"))?;
        Ok(Segment { start, capacity })
    }

    fn len_bytes(capacity: usize) -> usize {
        HEADER_BYTES + 2 * (WORDS_BYTES + capacity)
    }

    /// Returns the offset of position `at`, and how many of `len` bytes follow before the end of the ring.
    fn place(&self, direction: usize, at: u64, len: usize) -> (usize, usize) {
        debug_assert!(len <= self.capacity && self.capacity.is_power_of_two());
        let offset = at as usize & (self.capacity - 1);
        (self.ring_start(direction) + offset, len.min(self.capacity - offset))
    }

    fn ring_start(&self, direction: usize) -> usize {
        HEADER_BYTES + direction * (WORDS_BYTES + self.capacity) + WORDS_BYTES
    }

    /// The address of a byte of the segment.
    fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }

    fn word64(&self, at: usize) -> &AtomicU64 {
        // SAFETY: `at` is a multiple of 8 inside the mapping (lines and capacities are multiples of 64), which begins
        // at a page and lives as long as `self`; both sides access this word as an atomic only, as long as it is one:
        // a record's word has been the bytes of an earlier record, which the consumer has released.
        unsafe { &*self.at(at).cast::<AtomicU64>() }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as in `word64`.
        unsafe { &*self.at(at).cast::<AtomicU32>() }
    }
}

impl RingMemory for Segment {
    const LINE: usize = LINE;

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn words(&self, direction: usize) -> Words<'_> {
        let at = |line: usize| HEADER_BYTES + direction * (WORDS_BYTES + self.capacity) + line * LINE;
        Words {
            consumed: self.word64(at(0)),
            fetched: self.word64(at(1)),
            consumer_sleeps: self.word32(at(2)),
            producer_sleeps: self.word32(at(3)),
        }
    }

    fn head(&self, direction: usize, at: u64) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(LINE as u64));
        self.word64(self.place(direction, at, 0).0)
    }

    fn write(&self, direction: usize, at: u64, bytes: &[u8]) {
        let (start, first) = self.place(direction, at, bytes.len());
        // SAFETY: both pieces lie inside the ring (`place`), which is mapped; the consumer does not read positions that
        // it has released until the producer publishes them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(start), first) };
        let (rest, begin) = (&bytes[first..], self.ring_start(direction));
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), self.at(begin), rest.len()) };
    }

    fn read(&self, direction: usize, at: u64, bytes: &mut [u8]) {
        let (start, first) = self.place(direction, at, bytes.len());
        let (head, rest) = bytes.split_at_mut(first);
        // SAFETY: both pieces lie inside the ring (`place`), which is mapped; the producer does not write to positions
        // that it has published until the consumer releases them.
        unsafe { std::ptr::copy_nonoverlapping(self.at(start), head.as_mut_ptr(), head.len()) };
        let begin = self.ring_start(direction);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.at(begin), rest.as_mut_ptr(), rest.len()) };
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this length, and nothing borrows from it any more. A failure
        // leaves it mapped, which does no harm.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), Segment::len_bytes(self.capacity)) };
    }
}

/// The file of a segment, kept open until the other process has opened it too.
pub(super) struct SegmentFile(OwnedFd);

impl SegmentFile {
    /// Its number in this process.
    pub(super) fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl AsFd for SegmentFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

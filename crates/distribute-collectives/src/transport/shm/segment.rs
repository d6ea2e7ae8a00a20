//! Memory that two processes map.
#![expect(unsafe_code, reason = "mapped memory is shared with another process, which the compiler knows nothing of")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes that only one word lies in, so that its readers and writers disturb nobody else.
const LINE: usize = 64;

/// The words of one direction: five lines.
const WORDS_BYTES: usize = 5 * LINE;

/// A mapped segment with two directions, each of them five words and a ring.
pub(super) struct Segment {
    start: NonNull<u8>,
    capacity: usize,
}

// SAFETY: the mapping lives as long as the value, whatever thread holds it; all access goes through atomics, and through
// `read` and `write`, whose callers answer for exclusiveness.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// The shared words of one direction.
pub(super) struct Words<'a> {
    /// Bytes that the producer has put into the ring since the beginning.
    pub(super) produced: &'a AtomicU64,
    /// Bytes that the consumer has taken out of it.
    pub(super) consumed: &'a AtomicU64,
    /// Long records that the consumer has fetched.
    pub(super) fetched: &'a AtomicU64,
    pub(super) consumer_sleeps: &'a AtomicU32,
    pub(super) producer_sleeps: &'a AtomicU32,
}

impl Segment {
    /// A new segment, and the file by which another process can open it.
    pub(super) fn create(capacity: usize) -> io::Result<(Segment, OwnedFd)> {
        let file = memfd_create("distribute", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, Segment::len_bytes(capacity) as u64)?;
        Ok((Segment::map(&file, capacity)?, file))
    }

    /// Opens the segment that is file `fd` of process `pid`.
    pub(super) fn open(pid: i32, fd: i32, capacity: usize) -> io::Result<Segment> {
        let file = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}"))?;
        let (found, expected) = (file.metadata()?.len(), Segment::len_bytes(capacity) as u64);
        if found != expected {
            return Err(io::Error::other(format!("the segment has {found} bytes, expected {expected}")));
        }
        Segment::map(&OwnedFd::from(file), capacity)
    }

    /// Memory of this process alone that is never given back, for two threads in Miri, which maps no files.
    #[cfg(test)]
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
        // SAFETY: a new mapping at an address of the system's choice, of a file that is as long as asked for; both sides
        // keep its length.
        let start = unsafe { mmap(std::ptr::null_mut(), Segment::len_bytes(capacity), protection, flags, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("a segment mapped at address 0"))?;
        Ok(Segment { start, capacity })
    }

    fn len_bytes(capacity: usize) -> usize {
        2 * (WORDS_BYTES + capacity)
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The words of direction 0 or 1.
    pub(super) fn words(&self, direction: usize) -> Words<'_> {
        let at = |line: usize| direction * (WORDS_BYTES + self.capacity) + line * LINE;
        Words {
            produced: self.word64(at(0)),
            consumed: self.word64(at(1)),
            fetched: self.word64(at(2)),
            consumer_sleeps: self.word32(at(3)),
            producer_sleeps: self.word32(at(4)),
        }
    }

    /// Copies bytes into the ring of a direction, from position `at` on, around its end where need be.
    ///
    /// Only the producer calls this, for positions that the consumer has released.
    pub(super) fn write(&self, direction: usize, at: u64, bytes: &[u8]) {
        let (start, first) = self.place(direction, at, bytes.len());
        // SAFETY: both pieces lie inside the ring (`place`), which is mapped; the consumer does not read positions that
        // it has released until the producer publishes them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(start), first) };
        let (rest, begin) = (&bytes[first..], self.ring_start(direction));
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), self.at(begin), rest.len()) };
    }

    /// Copies bytes out of the ring of a direction. Only the consumer calls this, for positions that were published.
    pub(super) fn read(&self, direction: usize, at: u64, bytes: &mut [u8]) {
        let (start, first) = self.place(direction, at, bytes.len());
        let (head, rest) = bytes.split_at_mut(first);
        // SAFETY: both pieces lie inside the ring (`place`), which is mapped; the producer does not write to positions
        // that it has published until the consumer releases them.
        unsafe { std::ptr::copy_nonoverlapping(self.at(start), head.as_mut_ptr(), head.len()) };
        let begin = self.ring_start(direction);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.at(begin), rest.as_mut_ptr(), rest.len()) };
    }

    /// Where position `at` lies, and how many of `len` bytes follow before the end of the ring.
    fn place(&self, direction: usize, at: u64, len: usize) -> (usize, usize) {
        debug_assert!(len <= self.capacity);
        let offset = (at % self.capacity as u64) as usize;
        (self.ring_start(direction) + offset, len.min(self.capacity - offset))
    }

    fn ring_start(&self, direction: usize) -> usize {
        direction * (WORDS_BYTES + self.capacity) + WORDS_BYTES
    }

    /// The address of a byte of the segment.
    fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }

    fn word64(&self, at: usize) -> &AtomicU64 {
        // SAFETY: `at` is a multiple of 64 inside the mapping (capacities are), which begins at a page and lives as long
        // as `self`; both sides access this word as an atomic only.
        unsafe { &*self.at(at).cast::<AtomicU64>() }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as in `word64`.
        unsafe { &*self.at(at).cast::<AtomicU32>() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this length, and nothing borrows from it any more. A failure leaves
        // it mapped, which harms nobody.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), Segment::len_bytes(self.capacity)) };
    }
}

/// The number of a file, for the other process to open it.
pub(super) fn number(file: &OwnedFd) -> i32 {
    file.as_raw_fd()
}

/// What tells this host and its boot from others. Where that is not enough, as between containers that must not share
/// memory, `DISTRIBUTE_HOST_ID` makes the difference.
pub(super) fn host_id() -> io::Result<String> {
    let mut text = String::new();
    io::Read::read_to_string(&mut File::open("/proc/sys/kernel/random/boot_id")?, &mut text)?;
    let own = std::env::var("DISTRIBUTE_HOST_ID").unwrap_or_default();
    Ok(format!("{} {own}", text.trim()))
}

//! The address range of one device's memory.

use std::io;
use std::ptr;
use std::sync::Mutex;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

use crate::registry::locked;

/// A range of addresses from which allocations are taken, each followed by an inaccessible guard page. No address is
/// used twice, so that a pointer to freed memory never points to another allocation.
pub(crate) struct Window {
    base: usize,
    len: usize,
    next: Mutex<usize>,
}

impl Window {
    /// Reserves addresses without memory.
    pub(crate) fn reserve(device: usize) -> io::Result<Self> {
        let mut len = LARGEST;
        let wish = ptr::without_provenance_mut(FIRST + device * LARGEST);
        loop {
            match map_nothing(wish, len, MapFlags::empty()) {
                Ok(base) => return Ok(Self { base, len, next: Mutex::new(base) }),
                // Under a limit on address space, a smaller window is sufficient for tests.
                Err(_) if len > SMALLEST => len /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.base..self.base + self.len).contains(&address)
    }

    /// Returns whether the address was ever allocated.
    pub(crate) fn has_used(&self, address: usize) -> bool {
        (self.base..*locked(&self.next)).contains(&address)
    }

    /// Maps memory at unused addresses and returns the first. The end is at most 255 bytes before a guard page.
    pub(crate) fn map(&self, bytes: usize) -> Option<usize> {
        let room = pages(bytes)?;
        let mut next = locked(&self.next);
        let end = next.checked_add(room)?.checked_add(PAGE)?;
        if end > self.base + self.len {
            return None;
        }
        let first_page = *next;
        // SAFETY: the pages are in this window's reservation, which stays, and nothing uses them yet.
        unsafe {
            mprotect(ptr::with_exposed_provenance_mut(first_page), room, MprotectFlags::READ | MprotectFlags::WRITE)
        }
        .ok()?;
        *next = end;
        Some(first_page + room - aligned(bytes)?)
    }

    /// Unmaps the memory at addresses that [`map`](Self::map) returned for `bytes`.
    pub(crate) fn unmap(&self, start: usize, bytes: usize) {
        let (Some(room), Some(used)) = (pages(bytes), aligned(bytes)) else { return };
        let first_page = ptr::with_exposed_provenance_mut(start + used - room);
        // If this fails, the memory is leaked, which is harmless.
        let _ = map_nothing(first_page, room, MapFlags::FIXED);
    }
}

fn map_nothing(at: *mut std::ffi::c_void, len: usize, flags: MapFlags) -> io::Result<usize> {
    // SAFETY: without FIXED the system chooses free addresses; with it they are pages of a window, whose allocation has
    // ended, and no Rust reference points there.
    let base = unsafe { mmap_anonymous(at, len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE | flags) }?;
    Ok(base.expose_provenance())
}

/// Returns the size that an allocation of `bytes` takes on the device.
pub(super) fn aligned(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGNMENT)
}

fn pages(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(PAGE)
}

/// The alignment that `cuMemAlloc` guarantees.
pub(crate) const ALIGNMENT: usize = 256;
const PAGE: usize = 64 << 10;
const LARGEST: usize = 1 << 40;
/// The start of the first device's addresses: far from code, heap and stack, so that pairs of other numbers are
/// unlikely to look like a device pointer.
const FIRST: usize = 0x6A00 << 32;
const SMALLEST: usize = 64 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_aligned_apart_and_never_reused() {
        let window = Window::reserve(0).unwrap();
        let one = window.map(1000).unwrap();
        window.unmap(one, 1000);
        let next = window.map(PAGE + 1).unwrap();
        assert!(one.is_multiple_of(ALIGNMENT) && next.is_multiple_of(ALIGNMENT));
        assert!(next >= one + 1024 + PAGE - 1, "no guard page between");
        assert!(window.contains(next) && !window.contains(0x1000));
        assert_eq!(window.map(usize::MAX), None);
    }
}

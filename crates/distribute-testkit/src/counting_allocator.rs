//! An allocator that counts.
#![expect(unsafe_code, reason = "allocators are unsafe to implement")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, with counts of the bytes that are in use in the process.
///
/// # Examples
/// ```
/// use distribute_testkit::CountingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator::new();
///
/// let before = ALLOCATOR.reset_peak();
/// drop(vec![0u8; 1 << 20]);
/// assert!(ALLOCATOR.peak() >= before + (1 << 20));
/// assert!(ALLOCATOR.live() < before + (1 << 20));
/// ```
#[derive(Debug, Default)]
pub struct CountingAllocator {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl CountingAllocator {
    /// Creates an allocator, for a static.
    pub const fn new() -> CountingAllocator {
        CountingAllocator { live: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Returns the bytes in use.
    pub fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Returns the most bytes that were in use since the process began, or since the last
    /// [`reset_peak`](CountingAllocator::reset_peak).
    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// Lets the peak begin at the bytes in use, and returns them.
    pub fn reset_peak(&self) -> usize {
        let live = self.live();
        self.peak.store(live, Ordering::Relaxed);
        live
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = self.live.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        self.peak.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is that of the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

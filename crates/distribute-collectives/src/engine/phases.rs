//! The phases of one collective call of all ranks of a process, as atomics: which thread may access which memory, and
//! when.
//!
//! ```text
//! Gathering ── last rank arrives ──> Reducing ──> Exchanging ──> Spreading ──> Done
//!     │                                 │             │             │
//!     └─ deadline, peer gone, abort,    └─────────────┴─────────────┴─ failing: when no thread holds a chunk
//!        calls differ ──> Failed <───────────────────────────────────┘
//! ```
//!
//! A barrier within one process is Done with the last arrival.
//!
//! Ownership: before Reducing a rank owns its memory. In Reducing and Spreading the bytes of a chunk belong to the
//! thread that the chunk was handed out to. In Exchanging the memory belongs to the one thread that exchanges it with
//! other processes. In Done and Failed the rank owns it again. The transitions below make the writes of one owner
//! visible to the next.

use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The state of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum OperationState {
    Gathering = 0,
    Reducing = 1,
    Exchanging = 2,
    Spreading = 3,
    Done = 4,
    Failed = 5,
}

impl OperationState {
    fn from_code(code: u32) -> OperationState {
        match code {
            0 => OperationState::Gathering,
            1 => OperationState::Reducing,
            2 => OperationState::Exchanging,
            3 => OperationState::Spreading,
            4 => OperationState::Done,
            _ => OperationState::Failed,
        }
    }

    /// Returns whether the operation is over, so that every rank may return.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, OperationState::Done | OperationState::Failed)
    }
}

/// The two phases whose work is cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Before the exchange with other processes: reduces, or collects, among the ranks of this process.
    Reduce,
    /// Afterwards: copies the result to every rank of this process.
    Spread,
}

/// The state of one operation, and the counters of its chunks.
pub(crate) struct Phases {
    state: AtomicU32,
    arrived: AtomicUsize,
    failing: AtomicBool,
    counters: [ChunkCounters; 2],
}

/// The numbers of chunks of one phase that were handed out, and given back.
struct ChunkCounters {
    next: AtomicUsize,
    finished: AtomicUsize,
}

impl Phases {
    pub(crate) fn new() -> Phases {
        let counters = |next| ChunkCounters { next: AtomicUsize::new(next), finished: AtomicUsize::new(0) };
        Phases {
            state: AtomicU32::new(OperationState::Gathering as u32),
            arrived: AtomicUsize::new(0),
            failing: AtomicBool::new(false),
            counters: [counters(1), counters(0)],
        }
    }

    /// Returns the current state.
    pub(crate) fn state(&self) -> OperationState {
        // Acquire: a thread that sees Done or Failed sees all writes to its memory, and one that sees Reducing sees the
        // plan. SeqCst because a rank that is about to sleep checks the state after it has counted itself as a sleeper,
        // and the thread that changes the state reads the count afterwards: one of the two must see the other
        // (`Engine::sleep`).
        OperationState::from_code(self.state.load(Ordering::SeqCst))
    }

    /// Counts a rank as arrived and returns whether it was the last of `ranks`.
    pub(crate) fn arrive(&self, ranks: usize) -> bool {
        // Release: this rank's earlier writes to its memory come before. Acquire: the last rank sees those of all
        // others.
        self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == ranks
    }

    /// Changes the state from `from` to `to`. Returns whether this call did.
    pub(crate) fn advance(&self, from: OperationState, to: OperationState) -> bool {
        // SeqCst: see `state`. Release: the plan and all writes to the ranks' memory come before.
        self.state.compare_exchange(from as u32, to as u32, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Hands out a chunk of a phase with `total` chunks, or `None` if there are no more.
    ///
    /// Chunk 0 of [`Phase::Reduce`] is not handed out: the rank that arrived last, and begins the phase, works on it. A
    /// short call has no other chunk, and ranks that wait for it then write nothing that this rank needs.
    pub(crate) fn take(&self, phase: Phase, total: usize) -> Option<usize> {
        // Relaxed: the counter alone ensures that no chunk is handed out twice. The caller has seen the phase in
        // `state`, which makes the writes of the previous phase visible. The load comes first because waiting ranks ask
        // repeatedly, and a write would take the cache line away from working threads.
        let next = &self.counters[phase as usize].next;
        let chunk = (next.load(Ordering::Relaxed) < total).then(|| next.fetch_add(1, Ordering::Relaxed))?;
        (chunk < total).then_some(chunk)
    }

    /// Takes a chunk back. Returns whether it was the last of `total`, so that the caller must end the phase.
    pub(crate) fn give_back(&self, phase: Phase, total: usize) -> bool {
        // Release: the chunk's writes come before. Acquire: the thread that ends the phase sees the writes of all
        // chunks.
        self.counters[phase as usize].finished.fetch_add(1, Ordering::AcqRel) + 1 == total
    }

    /// Makes the operation fail as soon as no thread holds a chunk; chunks that are handed out from now on are not
    /// worked on.
    pub(crate) fn set_failing(&self) {
        // Release: the cause was recorded before.
        self.failing.store(true, Ordering::Release);
    }

    pub(crate) fn is_failing(&self) -> bool {
        // Acquire: see `set_failing`. `give_back` orders the flag before the end of the phase.
        self.failing.load(Ordering::Acquire)
    }
}

#[cfg(all(test, distribute_loom))]
mod model;

//! A model of the operation protocol, whose interleavings loom explores: `cargo xtask loom`.
#![expect(unsafe_code, reason = "loom's cells watch accesses through pointers")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::{OperationState, Phase, Phases};

const RANKS: usize = 2;
const CHUNKS: usize = 2;

// SAFETY: the cells are under test; loom fails if two accesses to one are not ordered.
unsafe impl Sync for Operation {}
// SAFETY: as above.
unsafe impl Send for Operation {}

/// An operation of two ranks with two chunks, each of which accesses the memory of both.
struct Operation {
    phases: Phases,
    memory: [[UnsafeCell<u32>; CHUNKS]; RANKS],
}

impl Operation {
    fn new() -> Arc<Operation> {
        let cells = || [UnsafeCell::new(0), UnsafeCell::new(0)];
        Arc::new(Operation { phases: Phases::new(), memory: [cells(), cells()] })
    }

    /// Models `Engine::help`, with chunks; chunk `panics` fails.
    fn help(&self, panics: Option<usize>) {
        while self.phases.state() == OperationState::Reducing {
            let Some(chunk) = self.phases.take(Phase::Reduce, CHUNKS) else { return };
            self.work_on(chunk, panics);
        }
    }

    /// Models `Engine::begin`, when all ranks have arrived.
    fn begin(&self, panics: Option<usize>) {
        if self.phases.advance(OperationState::Gathering, OperationState::Reducing) {
            self.work_on(0, panics);
        }
    }

    fn work_on(&self, chunk: usize, panics: Option<usize>) {
        if !self.phases.is_failing() {
            if panics == Some(chunk) {
                self.phases.set_failing();
            } else {
                self.reduce(chunk);
            }
        }
        if self.phases.give_back(Phase::Reduce, CHUNKS) {
            let to = if self.phases.is_failing() { OperationState::Failed } else { OperationState::Done };
            self.phases.advance(OperationState::Reducing, to);
        }
    }

    fn reduce(&self, chunk: usize) {
        // SAFETY: loom fails if another thread accesses the cell at the same time; also below.
        let sum = self.memory.iter().map(|rank| rank[chunk].with(|value| unsafe { *value })).sum();
        for rank in &self.memory {
            // SAFETY: as above.
            rank[chunk].with_mut(|value| unsafe { *value = sum });
        }
    }

    /// Models one rank's call: writes its memory, takes part, and owns the memory again at the end.
    fn call(&self, rank: usize, panics: Option<usize>) -> OperationState {
        for cell in &self.memory[rank] {
            // SAFETY: as above.
            cell.with_mut(|value| unsafe { *value = 1 + rank as u32 });
        }
        if self.phases.arrive(RANKS) {
            self.begin(panics);
        }
        let state = loop {
            self.help(panics);
            let state = self.phases.state();
            if state.is_over() {
                break state;
            }
            thread::yield_now();
        };
        // The rank owns the memory again: loom reports any other access that is not ordered before these.
        for cell in &self.memory[rank] {
            if state == OperationState::Done {
                // SAFETY: as above.
                assert_eq!(cell.with(|value| unsafe { *value }), 3);
            }
            // SAFETY: as above.
            cell.with_mut(|value| unsafe { *value = u32::MAX });
        }
        state
    }
}

fn both_ranks(panics: Option<usize>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let operation = Operation::new();
        let other = operation.clone();
        let handle = thread::spawn(move || other.call(1, panics));
        let (first, second) = (operation.call(0, panics), handle.join().unwrap());
        let expected = if panics.is_some() { OperationState::Failed } else { OperationState::Done };
        assert_eq!([first, second], [expected; 2]);
    });
}

#[test]
fn memory_is_a_ranks_own_before_and_after() {
    both_ranks(None);
}

#[test]
fn after_a_failed_chunk_nobody_leaves_before_all_are_back() {
    both_ranks(Some(0));
    both_ranks(Some(1));
}

#[test]
fn a_rank_that_gives_up_while_gathering_and_the_last_to_arrive_agree() {
    loom::model(|| {
        let operation = Operation::new();
        let other = operation.clone();
        let handle = thread::spawn(move || {
            // A single rank past its deadline.
            other.phases.arrive(RANKS);
            other.phases.advance(OperationState::Gathering, OperationState::Failed);
            while !other.phases.state().is_over() {
                other.help(None);
                thread::yield_now();
            }
        });
        if operation.phases.arrive(RANKS) {
            operation.begin(None);
        }
        while !operation.phases.state().is_over() {
            operation.help(None);
            thread::yield_now();
        }
        handle.join().unwrap();
    });
}

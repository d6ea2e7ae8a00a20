//! A rank's side of a communicator.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use nccl_sys::{Code, DataType, RedOp};

use crate::failure::Failure;
use crate::link::Link;
use crate::operation::Factor;
use crate::wire::{Key, Membership, Request};

/// A communicator, from the call that creates it.
pub(crate) struct Comm {
    pub(crate) blocking: bool,
    pub(crate) device: i32,
    member: OnceLock<Member>,
    /// Set once to make operations and the creation of the communicator give up; polled.
    aborted: AtomicBool,
    /// Makes operations give up, before the communicator is shrunk.
    stopped: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    counters: Mutex<HashMap<Line, [u64; 2]>>,
    reductions: Mutex<HashMap<i32, Reduction>>,
}

/// A rank's place, and its connection to the others.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) link: Arc<Link>,
    pub(crate) place: Membership,
}

#[derive(Default)]
struct State {
    /// The number of threads that create or destroy something.
    jobs: u32,
    /// Whether a non-blocking operation was issued since the caller last queried the state.
    unasked: bool,
    /// The number of operations on streams.
    running: u64,
    failure: Option<Failure>,
}

/// The sequence by which calls of different ranks are matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    Collective,
    Send(u32),
    Receive(u32),
    Shrink,
}

/// A custom reduction.
#[derive(Clone)]
pub(crate) struct Reduction {
    pub(crate) data_type: DataType,
    pub(crate) factor: Factor,
}

impl Comm {
    pub(crate) fn new(blocking: bool, device: i32) -> Arc<Self> {
        Arc::new(Self {
            blocking,
            device,
            member: OnceLock::new(),
            aborted: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
            counters: Mutex::default(),
            reductions: Mutex::default(),
        })
    }

    /// Returns the rank's place once all ranks have joined.
    pub(crate) fn member(&self) -> Option<&Member> {
        self.member.get()
    }

    pub(crate) fn is_made(&self, member: Member) {
        // A communicator is created once.
        let _ = self.member.set(member);
    }

    /// Returns the rank's place if the communicator is usable.
    pub(crate) fn ready(&self) -> Result<&Member, Failure> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let state = self.lock();
        match self.member() {
            Some(member) if state.jobs == 0 && !state.unasked && !self.stops() => Ok(member),
            _ => Err(Failure::argument("the communicator is used before its last call is no longer in progress")),
        }
    }

    /// Returns the state for `ncclCommGetAsyncError`.
    pub(crate) fn state(&self) -> Code {
        if let Some(failure) = self.failure() {
            return failure.code();
        }
        let mut state = self.lock();
        let unasked = std::mem::take(&mut state.unasked);
        if state.jobs > 0 || unasked { Code::IN_PROGRESS } else { Code::SUCCESS }
    }

    fn failure(&self) -> Option<Failure> {
        let own = self.lock().failure.clone();
        own.or_else(|| self.member().and_then(|member| member.link.failure(member.place.group)))
    }

    /// Breaks the communicator, unless it is broken already.
    pub(crate) fn fail(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
    }

    /// Records that a call was issued; a non-blocking communicator is then in progress until its state is queried.
    pub(crate) fn issued(&self) {
        self.lock().unasked |= !self.blocking;
    }

    pub(crate) fn job_begins(&self) {
        self.lock().jobs += 1;
    }

    pub(crate) fn job_ends(&self) {
        self.lock().jobs -= 1;
        self.changed.notify_all();
    }

    pub(crate) fn operation_begins(&self) {
        self.lock().running += 1;
    }

    pub(crate) fn operation_ends(&self) {
        self.lock().running -= 1;
        self.changed.notify_all();
    }

    /// Waits until streams have completed every operation, or the communicator is aborted.
    pub(crate) fn drain(&self) {
        let mut state = self.lock();
        while state.running > 0 && !self.gives_up() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until no thread is creating or destroying anything.
    pub(crate) fn settle(&self) {
        let mut state = self.lock();
        while state.jobs > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns whether the creation of the communicator must give up.
    pub(crate) fn gives_up(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Returns whether operations must give up.
    pub(crate) fn stops(&self) -> bool {
        self.gives_up() || self.stopped.load(Ordering::SeqCst)
    }

    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        // Under the lock, so that no thread is between its check and its wait.
        let _state = self.lock();
        self.changed.notify_all();
    }

    /// Tells the hub that this rank has left.
    pub(crate) fn leave(&self, aborted: bool) {
        if let Some(Member { link, place }) = self.member() {
            link.send(&Request::Leave { group: place.group, aborted }, &[]);
        }
    }

    /// Returns the key of the next call of a sequence, which all ranks count equally.
    pub(crate) fn key(&self, line: Line, captured: bool) -> Key {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let counter = &mut counters.entry(line).or_default()[usize::from(captured)];
        *counter += 1;
        match (line, captured) {
            (Line::Shrink, _) => Key { space: Key::SHRINK, number: *counter },
            (_, false) => Key { space: Key::DIRECT, number: *counter },
            (_, true) => Key { space: *counter, number: 0 },
        }
    }

    /// Stores a reduction and returns its number.
    pub(crate) fn add_reduction(&self, reduction: Reduction) -> RedOp {
        let mut reductions = self.reductions.lock().unwrap_or_else(PoisonError::into_inner);
        let number = (5..).find(|number| !reductions.contains_key(number)).unwrap_or(i32::MAX);
        reductions.insert(number, reduction);
        RedOp(number)
    }

    pub(crate) fn remove_reduction(&self, op: RedOp) -> Result<(), Failure> {
        let mut reductions = self.reductions.lock().unwrap_or_else(PoisonError::into_inner);
        reductions.remove(&op.0).map(|_| ()).ok_or_else(|| no_reduction(op))
    }

    /// Returns the built-in reduction to send, and the factor to apply before it.
    pub(crate) fn reduction(&self, op: RedOp, data_type: DataType) -> Result<(RedOp, Option<Factor>), Failure> {
        if op.is_built_in() {
            return Ok((op, None));
        }
        let reductions = self.reductions.lock().unwrap_or_else(PoisonError::into_inner);
        let reduction = reductions.get(&op.0).ok_or_else(|| no_reduction(op))?;
        match reduction.data_type == data_type {
            true => Ok((RedOp::SUM, Some(reduction.factor.clone()))),
            false => Err(Failure::argument(format!("reduction {} was made for another data type", op.0))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn no_reduction(op: RedOp) -> Failure {
    Failure::argument(format!("reduction {} is not of this communicator", op.0))
}

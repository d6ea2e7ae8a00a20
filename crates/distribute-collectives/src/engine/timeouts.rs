//! Time limits of waiting and polling ranks: for missing ranks, and for operations that do not end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::io_thread::MAX_IDLE;
use super::operation::CallTimes;
use super::phases::OperationState;
use super::{Engine, MAX_SLEEP, Operation};
use crate::Error;
use crate::sync::lock;

impl Engine {
    /// Fails an operation that is gathering ranks if the group has ended, a missing rank cannot arrive, or time is up.
    pub(super) fn check_gathering(&self, local: usize, operation: &Operation) {
        let Some(CallTimes { call, deadline, started }) = operation.call_of(local) else { return };
        let context = &self.context;
        let here = context.local_name(local);
        if context.is_aborted() {
            let error = context.aborted(Some(call));
            self.fail(operation, OperationState::Gathering, "this rank", error);
            return;
        }
        let Missing { all: missing, left, idle } = Missing::new(&self.left, &self.idle, || operation.missing());
        if let Some(gone) = left {
            let error = Error::PeerLeft {
                name: here.clone(),
                peer: context.local_name(gone),
                group: context.name.clone(),
                during: call.to_string(),
            };
            self.fail(operation, OperationState::Gathering, &here, error);
        } else if let Some(idle) = idle {
            let error = Error::Absent {
                name: here,
                peer: context.local_name(idle),
                group: context.name.clone(),
                during: call.to_string(),
            };
            self.fail(operation, OperationState::Gathering, &context.local_name(idle), error);
        } else if Instant::now() >= deadline && !missing.is_empty() {
            let names: Vec<String> = missing.iter().map(|other| context.local_name(*other)).collect();
            let error = Error::Deadline {
                call: Box::new(call),
                name: here.clone(),
                group: context.name.clone(),
                waited: started.elapsed(),
                missing: format!("{} (which made no such call)", names.join(", ")),
            };
            self.fail(operation, OperationState::Gathering, &here, error);
        }
    }

    /// Fails an operation in progress if the group has ended or time is up.
    pub(super) fn check_under_way(&self, local: usize, operation: &Arc<Operation>, state: OperationState) {
        let Some(CallTimes { call, deadline, started }) = operation.call_of(local) else { return };
        let context = &self.context;
        let error = if context.is_aborted() {
            context.aborted(Some(call))
        } else if Instant::now() >= deadline {
            Error::Deadline {
                call: Box::new(call),
                name: context.local_name(local),
                group: context.name.clone(),
                waited: started.elapsed(),
                missing: match state {
                    OperationState::Exchanging => {
                        "earlier operations of this group, which are still under way".to_owned()
                    }
                    _ => "ranks of this process, which work on it".to_owned(),
                },
            }
        } else {
            return;
        };
        match state {
            // A queued operation has no thread working on it. One that is being exchanged has its own deadline.
            OperationState::Exchanging => {
                if self.inter_process.as_ref().is_some_and(|stage| stage.dequeue(call.sequence)) {
                    self.fail(operation, OperationState::Exchanging, &context.local_name(local), error);
                }
            }
            _ => self.fail_when_idle(operation, error),
        }
    }

    /// Does for an operation what a rank that waits for it does, without waiting.
    pub(super) fn attend(&self, local: usize, operation: &Arc<Operation>) {
        self.help(operation, false);
        match operation.phases.state() {
            state if state.is_over() => {}
            OperationState::Gathering => self.check_gathering(local, operation),
            state => self.check_under_way(local, operation, state),
        }
    }

    /// Makes the I/O thread watch an operation that a rank polls, because no other thread would notice its deadline or
    /// a peer that leaves.
    pub(super) fn watch(&self, local: usize, operation: &Arc<Operation>) {
        let mut polled = lock(&self.polled);
        polled.retain(|(_, operation)| !operation.is_over());
        polled.push((local, operation.clone()));
        drop(polled);
        self.io_thread.wake();
    }

    /// Does for polled operations what waiting ranks do for theirs. Returns how long the I/O thread may sleep.
    pub(super) fn serve_polled(&self) -> Duration {
        let mut polled = lock(&self.polled);
        polled.retain(|(_, operation)| !operation.is_over());
        // A copy, because failing an operation calls wakers, which may start other operations.
        let operations = polled.clone();
        drop(polled);
        let now = Instant::now();
        let mut sleep = MAX_IDLE;
        for (local, operation) in operations {
            self.attend(local, &operation);
            if let Some(CallTimes { deadline, .. }) = operation.call_of(local).filter(|_| !operation.is_over()) {
                let left = deadline.saturating_duration_since(now);
                // After its deadline an operation waits only for chunks that other threads hold.
                sleep = sleep.min(if left.is_zero() { MAX_SLEEP } else { left });
            }
        }
        sleep
    }
}

/// The local ranks that have not made a call.
#[derive(Debug, PartialEq)]
struct Missing {
    all: Vec<usize>,
    /// The first of them that has dropped its handle.
    left: Option<usize>,
    /// The first of them that makes no calls for now.
    idle: Option<usize>,
}

impl Missing {
    /// `look` lists the ranks that have not made the call.
    ///
    /// The flags are read before: a rank may make its call, leave or become idle meanwhile, and does so in this order.
    fn new(left: &[AtomicBool], idle: &[AtomicBool], look: impl FnOnce() -> Vec<usize>) -> Missing {
        let [left, idle] = [left, idle].map(|flags| {
            let is_set = |rank: &usize| flags[*rank].load(Ordering::SeqCst);
            (0..flags.len()).filter(is_set).collect::<Vec<usize>>()
        });
        let all = look();
        let first = |flagged: &[usize]| all.iter().find(|rank| flagged.contains(rank)).copied();
        let (left, idle) = (first(&left), first(&idle));
        Missing { all, left, idle }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_call_and_then_leave_or_pause_are_not_reported() {
        let flags = || [false, false, false].map(AtomicBool::new);
        let (left, idle) = (flags(), flags());
        left[2].store(true, Ordering::SeqCst);
        idle[0].store(true, Ordering::SeqCst);
        let missing = Missing::new(&left, &idle, || {
            // Rank 1 makes its call after the look for it.
            left[1].store(true, Ordering::SeqCst);
            idle[1].store(true, Ordering::SeqCst);
            vec![1]
        });
        assert_eq!(missing, Missing { all: vec![1], left: None, idle: None });
        let missing = Missing::new(&left, &idle, || vec![0, 1, 2]);
        assert_eq!(missing, Missing { all: vec![0, 1, 2], left: Some(1), idle: Some(0) });
    }
}

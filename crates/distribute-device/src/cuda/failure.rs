//! What failed in a stream, and who came after it.
//!
//! The driver knows only failures of its own, which end the whole context. Failures of host functions are kept here, with
//! their place in the stream's order; a stream that waits for another one takes over what failed there before that place.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;

/// The failures of one stream.
#[derive(Debug)]
pub(super) struct Failures {
    stream: Arc<str>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The place of the next operation.
    next: u64,
    own: Option<(u64, Failure)>,
    /// Places of other streams that this one waited for: where here, and what there.
    awaited: Vec<(u64, Place)>,
}

/// A place in a stream's order: behind all operations of a lower number.
#[derive(Clone, Debug)]
pub(super) struct Place {
    failures: Arc<Failures>,
    number: u64,
}

/// A failure of a stream.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    stream: Arc<str>,
    operation: &'static str,
    source: Arc<Error>,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::Stream { stream: failure.stream.to_string(), operation: failure.operation, source: failure.source }
    }
}

impl Failures {
    pub(super) fn new(stream: Arc<str>) -> Arc<Failures> {
        Arc::new(Failures { stream, state: Mutex::default() })
    }

    /// The place behind all operations so far.
    pub(super) fn here(self: &Arc<Self>) -> Place {
        self.place(self.locked(|state| state.next))
    }

    /// The place before the operation of a number.
    pub(super) fn place(self: &Arc<Self>, number: u64) -> Place {
        Place { failures: Arc::clone(self), number }
    }

    /// Gives an operation its number.
    pub(super) fn number(&self) -> u64 {
        self.locked(|state| {
            state.next += 1;
            state.next - 1
        })
    }

    /// The operation of a number failed.
    pub(super) fn fail(&self, number: u64, operation: &'static str, error: Error) {
        let failure = Failure { stream: Arc::clone(&self.stream), operation, source: Arc::new(error) };
        self.locked(|state| match &state.own {
            Some((earlier, _)) if *earlier <= number => {}
            _ => state.own = Some((number, failure)),
        });
    }

    /// The operation just before a place of this stream failed.
    pub(super) fn fail_at(self: &Arc<Self>, place: &Place, operation: &'static str, error: Error) {
        if Arc::ptr_eq(self, &place.failures) {
            self.fail(place.number.saturating_sub(1), operation, error);
        }
    }

    /// What is enqueued from now on comes after a place of another stream.
    pub(super) fn awaits(self: &Arc<Self>, place: Place) {
        if Arc::ptr_eq(self, &place.failures) {
            return;
        }
        self.locked(|state| {
            let next = state.next;
            let known = state.awaited.iter_mut().find(|(_, other)| Arc::ptr_eq(&other.failures, &place.failures));
            match known {
                // One entry for each stream keeps the list short. A failure in between counts from the earlier wait on.
                Some((_, other)) => other.number = other.number.max(place.number),
                None => state.awaited.push((next, place)),
            }
        });
    }

    /// The first failure before a place.
    pub(super) fn before(place: &Place) -> Option<Failure> {
        Failures::search(place, &mut Vec::new())
    }

    fn search(place: &Place, seen: &mut Vec<*const Failures>) -> Option<Failure> {
        let this = Arc::as_ptr(&place.failures);
        if seen.contains(&this) {
            return None;
        }
        seen.push(this);
        let (own, awaited) = place.failures.locked(|state| {
            let own = state.own.clone().filter(|(number, _)| *number < place.number);
            let awaited: Vec<Place> =
                state.awaited.iter().filter(|(at, _)| *at <= place.number).map(|(_, other)| other.clone()).collect();
            (own, awaited)
        });
        own.map(|(_, failure)| failure).or_else(|| awaited.iter().find_map(|other| Failures::search(other, seen)))
    }

    fn locked<R>(&self, action: impl FnOnce(&mut State) -> R) -> R {
        action(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Place {
    /// An error of the driver, told as that of the stream that this is a place of.
    pub(super) fn stream_error(&self, error: Error) -> Error {
        let (stream, operation) = (self.failures.stream.to_string(), "an operation");
        Error::Stream { stream, operation, source: Arc::new(error) }
    }
}

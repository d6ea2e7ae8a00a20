//! Failures of streams, and their propagation to operations and streams that came after.
//!
//! The driver only knows failures of its own, which end the whole context. Failures of host functions are stored here
//! with their position in the stream's order. A stream that waits for another one inherits the failures that occurred
//! there before the awaited position.

use std::sync::Arc;

use crate::Error;
use crate::mutex::Mutex;

/// The failures of one stream.
#[derive(Debug)]
pub(super) struct Failures {
    stream: Arc<str>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the next operation.
    next: u64,
    own: Option<(u64, Failure)>,
    awaited: Vec<Awaited>,
}

/// The wait of this stream for another one.
#[derive(Debug)]
struct Awaited {
    /// The numbers of the first and of the last wait.
    first: u64,
    last: u64,
    /// The latest awaited place of the other stream.
    place: StreamPosition,
}

/// A place in a stream's order: after all operations with a lower number.
#[derive(Clone, Debug)]
pub(super) struct StreamPosition {
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

    /// Returns the place after all operations so far.
    pub(super) fn here(self: &Arc<Self>) -> StreamPosition {
        self.place(self.locked(|state| state.next))
    }

    /// Returns the place before the operation with the given number.
    pub(super) fn place(self: &Arc<Self>, number: u64) -> StreamPosition {
        StreamPosition { failures: Arc::clone(self), number }
    }

    /// Assigns an operation its number.
    pub(super) fn number(&self) -> u64 {
        self.locked(|state| {
            state.next += 1;
            state.next - 1
        })
    }

    /// Records that the operation with the given number failed.
    pub(super) fn fail(&self, number: u64, operation: &'static str, error: Error) {
        let failure = Failure { stream: Arc::clone(&self.stream), operation, source: Arc::new(error) };
        self.locked(|state| match &state.own {
            Some((earlier, _)) if *earlier <= number => {}
            _ => state.own = Some((number, failure)),
        });
    }

    /// Records that the operation just before a place of this stream failed.
    pub(super) fn fail_at(self: &Arc<Self>, place: &StreamPosition, operation: &'static str, error: Error) {
        if Arc::ptr_eq(self, &place.failures) {
            self.fail(place.number.saturating_sub(1), operation, error);
        }
    }

    /// Records that operations enqueued from now on come after a place of another stream.
    pub(super) fn awaits(self: &Arc<Self>, place: StreamPosition) {
        if Arc::ptr_eq(self, &place.failures) {
            return;
        }
        self.locked(|state| {
            let number = state.next;
            state.next += 1;
            let known = state.awaited.iter_mut().find(|known| Arc::ptr_eq(&known.place.failures, &place.failures));
            match known {
                // One entry per stream keeps the list short. A failure between the waits counts from the earlier one.
                Some(known) => {
                    known.last = number;
                    known.place.number = known.place.number.max(place.number);
                }
                None => state.awaited.push(Awaited { first: number, last: number, place }),
            }
        });
    }

    /// Forgets the waits before a place, up to which everything has ended without failure.
    pub(super) fn settle(place: &StreamPosition) {
        place.failures.locked(|state| state.awaited.retain(|awaited| awaited.last >= place.number));
    }

    /// Returns the first failure before a place.
    pub(super) fn before(place: &StreamPosition) -> Option<Failure> {
        Failures::search(place, &mut Vec::new())
    }

    /// `seen` has the streams that were searched, each with the greatest number: a wait that is found later may be for
    /// a later place of the same stream.
    fn search(place: &StreamPosition, seen: &mut Vec<(*const Failures, u64)>) -> Option<Failure> {
        let this = Arc::as_ptr(&place.failures);
        match seen.iter_mut().find(|(stream, _)| *stream == this) {
            Some((_, number)) if *number >= place.number => return None,
            Some((_, number)) => *number = place.number,
            None => seen.push((this, place.number)),
        }
        let (own, awaited) = place.failures.locked(|state| {
            let own = state.own.clone().filter(|(number, _)| *number < place.number);
            let awaited = state.awaited.iter().filter(|awaited| awaited.first < place.number);
            let awaited: Vec<StreamPosition> = awaited.map(|awaited| awaited.place.clone()).collect();
            (own, awaited)
        });
        own.map(|(_, failure)| failure).or_else(|| awaited.iter().find_map(|other| Failures::search(other, seen)))
    }

    fn locked<R>(&self, action: impl FnOnce(&mut State) -> R) -> R {
        action(&mut self.state.lock())
    }
}

impl StreamPosition {
    /// Converts a driver error to an error of this place's stream.
    pub(super) fn stream_error(&self, error: Error) -> Error {
        let (stream, operation) = (self.failures.stream.to_string(), "an operation");
        Error::Stream { stream, operation, source: Arc::new(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(name: &str) -> Arc<Failures> {
        Failures::new(name.into())
    }

    #[test]
    fn a_failure_is_told_to_what_comes_after_it_only() {
        let (a, b) = (stream("a"), stream("b"));
        let before = a.here();
        let failing = a.number();
        let after = a.here();
        b.awaits(before.clone());
        let early = b.here();
        b.number();
        b.awaits(after.clone());
        a.fail(failing, "a host function", Error::Dropped);
        assert!(Failures::before(&before).is_none());
        assert_eq!(Failures::before(&after).unwrap().operation, "a host function");
        // With one entry per stream, the earlier waiter sees the failure, too.
        assert_eq!(&*Failures::before(&early).unwrap().stream, "a");
        assert_eq!(&*Failures::before(&b.here()).unwrap().stream, "a");
    }

    #[test]
    fn streams_that_wait_for_each_other_are_searched_once() {
        let (a, b) = (stream("a"), stream("b"));
        a.awaits(b.here());
        b.awaits(a.here());
        assert!(Failures::before(&a.here()).is_none());
        let number = b.number();
        a.awaits(b.here());
        b.fail(number, "a collective", Error::Dropped);
        assert_eq!(Failures::before(&a.here()).unwrap().operation, "a collective");
    }

    #[test]
    fn a_stream_that_is_reached_on_two_ways_is_searched_up_to_the_later_place() {
        let (a, b, c) = (stream("a"), stream("b"), stream("c"));
        b.awaits(a.here());
        c.awaits(b.here());
        let number = a.number();
        c.awaits(a.here());
        a.fail(number, "a collective", Error::Dropped);
        assert_eq!(Failures::before(&c.here()).unwrap().operation, "a collective");
        assert!(Failures::before(&b.here()).is_none());
    }

    #[test]
    fn what_has_ended_well_is_forgotten() {
        let (a, b) = (stream("a"), stream("b"));
        a.awaits(b.here());
        Failures::settle(&a.here());
        a.locked(|state| assert!(state.awaited.is_empty()));
        assert_eq!(Arc::strong_count(&b), 1);
    }

    #[test]
    fn the_first_failure_stays() {
        let a = stream("a");
        let (first, second) = (a.number(), a.number());
        a.fail(second, "the second", Error::Dropped);
        a.fail(first, "the first", Error::Dropped);
        a.fail_at(&a.here(), "the last", Error::Dropped);
        assert_eq!(Failures::before(&a.here()).unwrap().operation, "the first");
    }
}

//! Events of logical CPUs.

use std::sync::{Arc, Condvar};
use std::time::Instant;

use crate::mutex::Mutex;
use crate::{DeviceSpec, Error, Event, Result};

/// The result of an operation: if it failed, the first failure of its stream, with the names of stream and operation.
pub(super) type Outcome = Result<(), Failure>;

/// The first failure of a stream.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) stream: Arc<str>,
    pub(super) operation: &'static str,
    pub(super) source: Arc<Error>,
}

/// A flag that is set once, when a point in a stream is reached.
#[derive(Debug, Default)]
pub(super) struct Completion {
    outcome: Mutex<Option<Outcome>>,
    reached: Condvar,
}

/// Sets a completion. If it is dropped unset, it sets a failure, so that no waiter waits for an operation that is lost.
#[derive(Debug)]
pub(super) struct Finisher {
    completion: Arc<Completion>,
    stream: Arc<str>,
    operation: &'static str,
    finished: bool,
}

/// An event. Each recording replaces the completion, so that earlier waits keep the one they began to wait for.
#[derive(Debug)]
pub(super) struct CpuEvent {
    device: DeviceSpec,
    completion: Mutex<Option<Arc<Completion>>>,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::Stream { stream: failure.stream.to_string(), operation: failure.operation, source: failure.source }
    }
}

impl Completion {
    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().clone()
    }

    /// Waits for the outcome; `None` if the deadline passes first.
    pub(super) fn wait(&self, deadline: Instant) -> Option<Outcome> {
        let timeout = deadline.saturating_duration_since(Instant::now());
        self.outcome.wait_while(&self.reached, timeout, |outcome| outcome.is_none()).clone()
    }

    fn set(&self, outcome: Outcome) {
        *self.outcome.lock() = Some(outcome);
        self.reached.notify_all();
    }
}

impl Finisher {
    pub(super) fn new(stream: Arc<str>, operation: &'static str) -> (Finisher, Arc<Completion>) {
        let completion = Arc::new(Completion::default());
        (Finisher { completion: Arc::clone(&completion), stream, operation, finished: false }, completion)
    }

    pub(super) fn finish(mut self, outcome: Outcome) {
        self.finished = true;
        self.completion.set(outcome);
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        if !self.finished {
            let (stream, source) = (Arc::clone(&self.stream), Arc::new(Error::Dropped));
            self.completion.set(Err(Failure { stream, operation: self.operation, source }));
        }
    }
}

impl CpuEvent {
    pub(super) fn unrecorded(device: DeviceSpec) -> CpuEvent {
        CpuEvent { device, completion: Mutex::new(None) }
    }

    pub(super) fn recorded(device: DeviceSpec, completion: Arc<Completion>) -> CpuEvent {
        CpuEvent { device, completion: Mutex::new(Some(completion)) }
    }

    pub(super) fn replace(&self, completion: Arc<Completion>) {
        *self.completion.lock() = Some(completion);
    }

    /// Returns the completion of the last recording, if any.
    pub(super) fn current(&self) -> Option<Arc<Completion>> {
        self.completion.lock().clone()
    }
}

impl Event for CpuEvent {
    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn is_ready(&self) -> Result<bool> {
        match self.current().map(|completion| completion.outcome()) {
            None | Some(Some(Ok(()))) => Ok(true),
            Some(None) => Ok(false),
            Some(Some(Err(failure))) => Err(failure.into()),
        }
    }

    fn wait(&self, deadline: Instant) -> Result<()> {
        let Some(completion) = self.current() else {
            return Ok(());
        };
        let started = Instant::now();
        let outcome = completion.wait(deadline).ok_or_else(|| Error::Deadline {
            operation: format!("waiting for an event of {}", self.device.short()),
            waited: started.elapsed(),
            state: "its stream has not come to it".to_owned(),
        })?;
        Ok(outcome?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_that_is_lost_fails_those_who_wait_for_it() {
        let (finisher, completion) = Finisher::new("stream 0 of CPU:0".into(), "a fill");
        let event = CpuEvent::recorded(DeviceSpec::default(), completion);
        assert!(!event.is_ready().unwrap());
        drop(finisher);
        let Err(Error::Stream { operation, source, .. }) = event.wait(Instant::now()) else {
            panic!("the wait must fail at once");
        };
        assert_eq!(operation, "a fill");
        assert!(matches!(*source, Error::Dropped));
    }
}

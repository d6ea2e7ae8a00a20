//! Operations that run while their caller continues.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use distribute_cluster::FailureKind;

use super::handle::EngineHandle;
use crate::engine::Operation;
use crate::engine::memory::OwnedBuffers;
use crate::recorder::RecordToken;
use crate::{Error, Result};

/// An operation in progress, which owns the memory that it works on.
///
/// [Wait](Work::wait) for it, or `await` it: a `Work` is also a [`Future`] with the same result, for any executor.
///
/// # Ordering
/// A thread that waits, polls or [asks](Work::is_done) works on the operation meanwhile, but only waiting blocks on
/// other ranks. The waker is called by the thread that finishes or fails the operation. Progress does not depend on
/// further polls: between threads of one process it needs the other ranks' threads, whose calls complete the operation;
/// between processes the group's I/O thread exchanges it. From the first poll on, that thread also watches the
/// deadline.
///
/// Dropping a work waits for the operation, at most until its deadline, because other threads may still use the memory.
///
/// # Errors
/// The errors of [`wait`](Work::wait) occur in both forms.
///
/// # Examples
/// ```
/// use std::pin::pin;
/// use std::sync::Arc;
/// use std::task::{Context, Poll, Wake, Waker};
/// use distribute_collectives::{ProcessGroup, ReduceOp, Work};
///
/// /// The smallest executor: polls one future, and parks its thread in between.
/// struct Unpark(std::thread::Thread);
///
/// impl Wake for Unpark {
///     fn wake(self: Arc<Self>) {
///         self.0.unpark();
///     }
/// }
///
/// fn block_on<F: Future>(future: F) -> F::Output {
///     let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
///     let mut future = pin!(future);
///     loop {
///         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
///             Poll::Ready(output) => return output,
///             Poll::Pending => std::thread::park(),
///         }
///     }
/// }
///
/// let ranks = ProcessGroup::local(2)?;
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         scope.spawn(move || {
///             let sum = async { group.start().all_reduce(vec![group.rank().0; 3], ReduceOp::Sum)?.await };
///             assert_eq!(block_on(sum)?, [1; 3]);
///             Ok::<(), distribute_collectives::Error>(())
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
#[must_use = "the memory comes back from `wait`"]
pub struct Work<B: OwnedBuffers> {
    engine: Arc<EngineHandle>,
    local: usize,
    operation: Arc<Operation>,
    token: RecordToken,
    /// `None` once the memory was returned.
    buffers: Option<B>,
}

// The memory of an operation does not move with its owner (`OwnedBuffers`), so pinning is not needed.
impl<B: OwnedBuffers> Unpin for Work<B> {}

impl<B: OwnedBuffers> Work<B> {
    pub(super) fn new(
        engine: Arc<EngineHandle>,
        local: usize,
        operation: Arc<Operation>,
        token: RecordToken,
        buffers: B,
    ) -> Work<B> {
        Work { engine, local, operation, token, buffers: Some(buffers) }
    }

    /// Returns whether [`wait`](Work::wait) would return at once, with the memory or an error.
    ///
    /// Works on the operation and checks its time limit like a thread that polls it, and like that never blocks on
    /// other ranks. A thread may therefore call it until it returns true.
    ///
    /// # Source
    /// `MPI_Test`, without taking the result.
    pub fn is_done(&self) -> bool {
        self.engine.test(self.local, &self.operation)
    }

    /// Waits for the operation, works on it meanwhile, and returns the memory.
    ///
    /// # Errors
    /// The errors of the blocking call: [`Mismatch`](crate::Error::Mismatch), [`Deadline`](crate::Error::Deadline),
    /// [`PeerLost`](crate::Error::PeerLost), [`PeerLeft`](crate::Error::PeerLeft), [`Aborted`](crate::Error::Aborted).
    /// The memory is then dropped: its contents are unspecified.
    pub fn wait(mut self) -> Result<B> {
        let outcome = self.finish();
        self.hand_back(outcome)
    }

    fn finish(&self) -> Result<()> {
        let began = Instant::now();
        if !self.operation.is_over() {
            self.engine.recorders[self.local].block(self.token, began);
        }
        let outcome = self.engine.wait(self.local, &self.operation);
        self.record(&outcome, Some(began));
        outcome
    }

    fn record(&self, outcome: &Result<()>, blocked_since: Option<Instant>) {
        let recorder = &self.engine.recorders[self.local];
        let outcome = outcome.as_ref().copied();
        recorder.finish(self.token, outcome, blocked_since, || self.engine.flight_header(self.local));
    }

    /// Takes the memory out, even if the operation has failed, so that it is not waited for again.
    fn hand_back(&mut self, outcome: Result<()>) -> Result<B> {
        let buffers = self.buffers.take();
        outcome?;
        buffers.ok_or_else(|| {
            let cause = "the work was already waited for";
            Error::aborted(&self.engine.context.name, "this rank", cause, FailureKind::Permanent)
        })
    }
}

impl<B: OwnedBuffers> Future for Work<B> {
    type Output = Result<B>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        let work = self.get_mut();
        let outcome = ready!(work.engine.poll(work.local, &work.operation, context.waker()));
        if work.buffers.is_some() {
            work.record(&outcome, None);
        }
        Poll::Ready(work.hand_back(outcome))
    }
}

impl<B: OwnedBuffers> Drop for Work<B> {
    fn drop(&mut self) {
        if self.buffers.is_some() {
            // Other threads may still access the memory; an error means that they no longer do.
            let _ = self.finish();
        }
    }
}

impl<B: OwnedBuffers> std::fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let group = &self.engine.context.name;
        f.debug_struct("Work").field("group", group).field("is_done", &self.operation.is_over()).finish_non_exhaustive()
    }
}

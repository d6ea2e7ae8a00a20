//! Operations that run while their caller does something else.

use std::sync::Arc;

use distribute_cluster::FailureKind;

use crate::memory::OwnedBuffers;
use crate::recorder::Ticket;
use crate::team::{Handle, Operation, Team};
use crate::{Error, ProcessGroup, Result};

/// An operation under way, which owns the memory it works on.
///
/// Dropping it waits for the operation, at most until its deadline.
#[must_use = "the memory comes back from `wait`"]
pub struct Work<B: OwnedBuffers> {
    team: Arc<Handle>,
    local: usize,
    operation: Arc<Operation>,
    ticket: Ticket,
    /// `None` once the memory was handed back.
    buffers: Option<B>,
}

impl<B: OwnedBuffers> Work<B> {
    pub(crate) fn new(
        team: Arc<Handle>,
        local: usize,
        operation: Arc<Operation>,
        ticket: Ticket,
        buffers: B,
    ) -> Work<B> {
        Work { team, local, operation, ticket, buffers: Some(buffers) }
    }

    /// Whether [`wait`](Work::wait) would return at once.
    pub fn is_done(&self) -> bool {
        Team::is_over(&self.operation)
    }

    /// Waits for the operation, works on it meanwhile, and hands the memory back.
    ///
    /// # Errors
    /// As the blocking call: [`Mismatch`](crate::Error::Mismatch), [`Deadline`](crate::Error::Deadline),
    /// [`PeerLost`](crate::Error::PeerLost), [`PeerLeft`](crate::Error::PeerLeft), [`Aborted`](crate::Error::Aborted).
    /// The memory is then dropped: its contents are unspecified.
    pub fn wait(mut self) -> Result<B> {
        let outcome = self.finish();
        let buffers = self.buffers.take();
        outcome?;
        // `wait` consumes the work, so the memory is still here.
        buffers.ok_or_else(|| {
            let cause = "the work was already waited for";
            Error::aborted(&self.team.name, "this rank", cause, FailureKind::Permanent)
        })
    }
}

/// Begins an operation on each of this process's ranks and waits for all of them; what the last one's memory holds then.
///
/// For code that speaks for all ranks of its process, outside of their threads. Where every rank gets the same result, one is
/// as good as any.
///
/// # Errors
/// The first of beginning or waiting.
///
/// # Examples
/// ```
/// use distribute_collectives::{Error, ProcessGroup, ReduceOp, on_local_ranks};
/// let ranks = ProcessGroup::local(3)?;
/// let sum = on_local_ranks(&ranks, |local, rank| rank.all_reduce_async(vec![local as u64], ReduceOp::Sum))?;
/// assert_eq!(sum, Some(vec![3]));
/// # Ok::<(), Error>(())
/// ```
pub fn on_local_ranks<B: OwnedBuffers, E: From<Error>>(
    ranks: &[ProcessGroup],
    mut begin: impl FnMut(usize, &ProcessGroup) -> Result<Work<B>, E>,
) -> Result<Option<B>, E> {
    let mut works = Vec::with_capacity(ranks.len());
    for (local, rank) in ranks.iter().enumerate() {
        match begin(local, rank) {
            Ok(work) => works.push(work),
            Err(error) => {
                // What was begun waits for the ranks that did not begin, which no longer will.
                if !works.is_empty() {
                    rank.abort("an operation could not be begun on every rank of its process");
                }
                return Err(error);
            }
        }
    }
    let mut last = None;
    for work in works {
        last = Some(work.wait()?);
    }
    Ok(last)
}

impl<B: OwnedBuffers> Work<B> {
    fn finish(&self) -> Result<()> {
        let outcome = self.team.wait(self.local, &self.operation);
        let noted = outcome.as_ref().copied();
        self.team.recorders[self.local].finish(self.ticket, noted, || self.team.flight_header(self.local));
        outcome
    }
}

impl<B: OwnedBuffers> Drop for Work<B> {
    fn drop(&mut self) {
        if self.buffers.is_some() {
            // Others may still read or write the memory; an error means that they no longer do.
            let _ = self.finish();
        }
    }
}

impl<B: OwnedBuffers> std::fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("group", &self.team.name).field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

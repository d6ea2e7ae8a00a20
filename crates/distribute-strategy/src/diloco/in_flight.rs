//! Reductions of fragments that overlap with inner steps.

use distribute_collectives::{ProcessGroup, ReduceOp, Work};

use super::{Wire, int8};
use crate::{LocalReplica, Result};

/// The reduction of a fragment's changes, in progress.
pub(super) enum Reduction {
    Whole(Work<Vec<f32>>),
    Parts(int8::Parts),
    Means(int8::Means),
}

/// The mean of all replicas' changes, and what of this replica's changes was not sent: nothing in f32.
pub(super) struct Reduced {
    pub(super) means: Vec<f32>,
    pub(super) left: Option<Vec<f32>>,
}

impl Reduction {
    /// Starts the reduction of this replica's changes of variables with these numbers of elements. Every replica calls
    /// this and the other methods in the same order.
    pub(super) fn start(group: &ProcessGroup, wire: Wire, lens: &[usize], changes: Vec<f32>) -> Result<Reduction> {
        match wire {
            Wire::F32 => Ok(Reduction::Whole(group.start().all_reduce(changes, ReduceOp::Mean)?)),
            Wire::Int8 => Ok(Reduction::Parts(int8::start(group, lens, changes)?)),
        }
    }

    /// Starts the second half, if there is one and it has not been started.
    pub(super) fn combine(self, group: &ProcessGroup) -> Result<Reduction> {
        match self {
            Reduction::Parts(parts) => Ok(Reduction::Means(parts.combine(group)?)),
            other => Ok(other),
        }
    }

    /// Waits for the result.
    pub(super) fn finish(self, group: &ProcessGroup) -> Result<Reduced> {
        match self.combine(group)? {
            Reduction::Whole(work) => Ok(Reduced { means: work.wait()?, left: None }),
            Reduction::Parts(parts) => finish(parts.combine(group)?),
            Reduction::Means(means) => finish(means),
        }
    }
}

fn finish(means: int8::Means) -> Result<Reduced> {
    let (means, left) = means.finish()?;
    Ok(Reduced { means, left: Some(left) })
}

/// The reductions of a replica that are in progress, by fragment.
#[derive(Default)]
pub(super) struct InFlight(Vec<(usize, Reduction)>);

impl InFlight {
    /// Takes what the replica has kept, or nothing.
    pub(super) fn of(replica: &dyn LocalReplica) -> InFlight {
        let kept = replica.take_in_progress().and_then(|kept| kept.downcast::<InFlight>().ok());
        kept.map_or_else(InFlight::default, |kept| *kept)
    }

    /// Lets the replica keep them.
    pub(super) fn keep(self, replica: &dyn LocalReplica) {
        if !self.0.is_empty() {
            replica.keep_in_progress(Box::new(self));
        }
    }

    /// Takes the reduction of a fragment out.
    pub(super) fn take(&mut self, fragment: usize) -> Option<Reduction> {
        let at = self.0.iter().position(|(of, _)| *of == fragment)?;
        Some(self.0.remove(at).1)
    }

    /// Adds the reduction of a fragment.
    pub(super) fn put(&mut self, fragment: usize, reduction: Reduction) {
        self.0.push((fragment, reduction));
    }

    /// Waits for all of them, and drops the results.
    pub(super) fn abandon(self, group: &ProcessGroup) -> Result<()> {
        self.0.into_iter().try_for_each(|(_, reduction)| reduction.finish(group).map(drop))
    }
}

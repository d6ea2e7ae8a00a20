//! The functions that open a pass of a pipeline.

use std::sync::Arc;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::budget::{Budget, Limit};
use crate::Result;

/// The items of one pass. Items after an error are ignored: [`DatasetIter`](super::DatasetIter) ends there.
pub(crate) type Items<T> = Box<dyn Iterator<Item = Result<T>> + Send>;

/// Opens a pass.
pub(crate) type Opener<T> = Arc<dyn Fn(Pass) -> Items<T> + Send + Sync>;

/// The number of a pass, the share that is read, and the memory that stages may use. All randomness of a pipeline is
/// derived from its seeds and the number of the pass.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    epoch: u64,
    share: Option<Share>,
    budget: Option<Arc<Budget>>,
    /// Whether stages that may yield elements in any order must yield them in the order of the pipeline.
    in_order: bool,
    /// If batches are cut again, each worker taking its part of a global batch from its own share: the number of
    /// replicas of each worker.
    cut_again: Option<usize>,
}

/// One of several equal shares of a source. The stages that can divide apply it: lists of files, and `shard_hint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) struct Share {
    pub(crate) count: usize,
    pub(crate) index: usize,
}

impl Pass {
    pub(crate) fn epoch(epoch: u64) -> Pass {
        Pass { epoch, share: None, budget: None, in_order: false, cut_again: None }
    }

    pub(crate) fn of_share(self, share: Option<Share>) -> Pass {
        Pass { share, ..self }
    }

    pub(crate) fn share(&self) -> Option<Share> {
        self.share
    }

    /// Returns the number of the pass.
    pub(crate) fn number(&self) -> u64 {
        self.epoch
    }

    /// Returns the same pass with every element in the order of the pipeline.
    pub(crate) fn in_order(self) -> Pass {
        Pass { in_order: true, ..self }
    }

    pub(crate) fn is_in_order(&self) -> bool {
        self.in_order
    }

    /// Returns the same pass for a reader with `replicas` replicas that takes its rows of a global batch from the
    /// batches of its share.
    pub(crate) fn cut_again(self, replicas: usize) -> Pass {
        Pass { cut_again: Some(replicas), ..self }
    }

    /// Returns the pass of the elements of a batch, which is cut again instead of them.
    pub(crate) fn within_batches(self) -> Pass {
        Pass { cut_again: None, ..self }
    }

    /// Returns what the elements of the first pass depend on: the share, and how its batches are cut again.
    pub(crate) fn sequence(&self) -> (Option<Share>, Option<usize>) {
        (self.share, self.share.and(self.cut_again))
    }

    /// Returns of which number of rows the last of several batches of `size` is a multiple, where a smaller one is to
    /// be dropped: of the rows of one worker in a step, if a worker reads a share and has as many rows in each step.
    pub(crate) fn exact_rows(&self, size: usize) -> usize {
        match (self.share, self.cut_again) {
            (Some(Share { count, .. }), Some(replicas))
                if size.is_multiple_of(count.max(1).saturating_mul(replicas.max(1))) =>
            {
                size / count.max(1)
            }
            // A worker whose steps differ in size fills them by whole batches only.
            _ => size,
        }
    }

    pub(crate) fn with_budget(self, budget: Option<Arc<Budget>>) -> Pass {
        Pass { budget, ..self }
    }

    /// Returns the pass of one of several pipelines that together are one stage of this one.
    pub(crate) fn of_inner(&self, stages: usize) -> Pass {
        let budget = self.budget.as_ref().map(|budget| Arc::new(budget.divided(stages)));
        self.clone().of_share(None).with_budget(budget)
    }

    /// Returns the bytes that a stage may hold in elements of type `T`.
    pub(crate) fn limit<T: 'static>(&self, stage: &'static str) -> Result<Limit<T>> {
        self.budget.as_ref().map_or_else(|| Ok(Limit::none()), |budget| budget.limit(stage))
    }

    /// Returns pass 0 over the same share.
    pub(crate) fn first(self) -> Pass {
        Pass { epoch: 0, ..self }
    }

    /// Returns the upstream pass of a repetition. Finite repetitions number their passes consecutively, as if they were
    /// separate passes; an endless one reserves 2^32 numbers.
    pub(crate) fn repetition(self, index: u64, times: Option<usize>) -> Pass {
        let base = match times {
            Some(times) => self.epoch.wrapping_mul(times as u64),
            None => self.epoch << 32,
        };
        Pass { epoch: base.wrapping_add(index), ..self }
    }

    /// Returns a generator that depends only on the seed and the number of the pass.
    pub(crate) fn random(&self, seed: u64) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        ChaCha8Rng::from_seed(key)
    }
}

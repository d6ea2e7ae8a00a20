//! What a pipeline is made of inside: functions that open a pass.

use std::sync::Arc;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::Result;

/// The items of one pass. What follows an error is of no meaning: [`DatasetIter`](super::DatasetIter) ends there.
pub(crate) type Items<T> = Box<dyn Iterator<Item = Result<T>> + Send>;

/// Opens a pass.
pub(crate) type Opener<T> = Arc<dyn Fn(Pass) -> Items<T> + Send + Sync>;

/// Which pass is read, and which share of it. Everything random in a pipeline is drawn from its seed and the number of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass {
    epoch: u64,
    share: Option<Share>,
}

/// One of several equal shares of what a source has. Stages that can divide honour it: lists of files, and `shard_hint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) struct Share {
    pub(crate) count: usize,
    pub(crate) index: usize,
}

impl Pass {
    pub(crate) fn epoch(epoch: u64) -> Pass {
        Pass { epoch, share: None }
    }

    pub(crate) fn of_share(self, share: Option<Share>) -> Pass {
        Pass { share, ..self }
    }

    pub(crate) fn share(self) -> Option<Share> {
        self.share
    }

    /// The first pass over the same share.
    pub(crate) fn first(self) -> Pass {
        Pass { epoch: 0, ..self }
    }

    /// The pass upstream of a repetition. Finite repetitions number their passes through, as if they were passes of
    /// their own; an endless one gets room for 2^32.
    pub(crate) fn repetition(self, index: u64, times: Option<usize>) -> Pass {
        let base = match times {
            Some(times) => self.epoch.wrapping_mul(times as u64),
            None => self.epoch << 32,
        };
        Pass { epoch: base.wrapping_add(index), ..self }
    }

    /// A generator that depends on nothing but the seed and the pass.
    pub(crate) fn random(self, seed: u64) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        ChaCha8Rng::from_seed(key)
    }
}

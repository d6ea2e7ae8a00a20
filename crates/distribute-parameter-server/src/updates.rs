//! How workers' updates go together.

use crate::{Error, Result};

/// How the updates of workers go together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Updates {
    /// Each worker's gradients are applied when they come, however old the values they were computed with: what TensorFlow does.
    #[default]
    Asynchronous,
    /// As many closures as there are workers make a round, and one begins only while all closures of rounds more than so many
    /// before its own are over: no worker computes with values that lack older updates than that. 0: rounds do not overlap.
    ///
    /// # Source
    /// Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
    BoundedStaleness {
        /// How many rounds the fastest may be ahead of the slowest.
        rounds: u64,
    },
    /// The mean of so many closures' gradients makes one step, as if one worker had computed the whole batch; each function must
    /// push once. Where there are backups, as many more closures begin, and the slowest ones' gradients are dropped.
    ///
    /// # Source
    /// Chen et al., "Revisiting distributed synchronous SGD", 2016.
    Synchronous {
        /// Gradients that make a step, at least 1.
        contributions: usize,
        /// Further closures that compute for the same step.
        backups: usize,
    },
}

impl Updates {
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Updates::Synchronous { contributions: 0, .. } => Err(Error::Option {
                what: "the number of contributions of Updates::Synchronous",
                given: "0".to_owned(),
                expected: "at least 1, usually the number of workers",
            }),
            _ => Ok(()),
        }
    }

    /// Gradients that make a step together; 0 where each makes one.
    pub(crate) fn contributions(self) -> u32 {
        match self {
            Updates::Synchronous { contributions, .. } => contributions as u32,
            _ => 0,
        }
    }
}

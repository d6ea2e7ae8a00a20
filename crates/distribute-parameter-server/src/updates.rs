//! Combination of the workers' updates.

use crate::{Error, Result};

/// How the updates of workers are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Updates {
    /// Each worker's gradients are applied on arrival, whatever the age of the values they were computed with, as in
    /// TensorFlow.
    #[default]
    Asynchronous,
    /// Bounded staleness: as many closures as there are workers make a round, and a closure starts only when every
    /// closure more than `rounds` rounds older has finished. With 0, rounds do not overlap.
    ///
    /// # Source
    /// Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
    BoundedStaleness {
        /// The number of rounds that the fastest worker may be ahead of the slowest.
        rounds: u64,
    },
    /// The mean of the gradients of `contributions` closures makes one step, as if one worker had computed the whole
    /// batch. Each function that pushes must push once to every optimizer that is in use; those that push nothing, such
    /// as parts of an evaluation, take no part in a step. What is pushed for a step that is never complete is not
    /// applied: that at the end of a training, before a function fails, or before a checkpoint is loaded.
    ///
    /// With backups, that many more closures are started, and the gradients of the slowest are dropped. Each server
    /// keeps the first `contributions` that reach it, so with several servers the parts of one step may be the means
    /// of different closures, each over as many examples: with backups it is not always the step of one whole batch.
    ///
    /// # Source
    /// Chen et al., "Revisiting distributed synchronous SGD", 2016.
    Synchronous {
        /// The number of gradients that make a step, at least 1.
        contributions: usize,
        /// The number of additional closures that compute for the same step. Together with `contributions` at most
        /// `u32::MAX`.
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
            Updates::Synchronous { contributions, backups }
                if u32::try_from(contributions.saturating_add(backups)).is_err() =>
            {
                Err(Error::Option {
                    what: "the number of contributions and backups of Updates::Synchronous",
                    given: format!("{contributions} and {backups}"),
                    expected: "at most 4294967295 together, usually the number of workers",
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of gradients that make a step together; 0 if each makes its own.
    pub(crate) fn contributions(self) -> u32 {
        match self {
            Updates::Synchronous { contributions, .. } => u32::try_from(contributions).unwrap_or(u32::MAX),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_a_message_cannot_hold_are_refused() {
        let synchronous = |contributions, backups| Updates::Synchronous { contributions, backups };
        let largest = u32::MAX as usize;
        assert!(synchronous(largest - 1, 1).check().is_ok());
        assert_eq!(synchronous(largest, 0).contributions(), u32::MAX);
        for wrong in [synchronous(largest, 1), synchronous(largest.saturating_add(1), 0), synchronous(1, usize::MAX)] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.contains("at most 4294967295 together"), "{error}");
        }
    }
}

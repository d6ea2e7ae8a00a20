//! A record of the changes made, so that none is made twice.

use std::collections::HashMap;

use crate::wire::proto::Origin;

/// Changes that were made, by closure, index in it and part, each with a note.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    done: HashMap<(u64, u32, u32), u64>,
    /// The number of records after the last removal of old ones.
    kept: usize,
}

impl Tokens {
    /// Returns the note of this change, if it was made.
    pub(super) fn find(&self, origin: &Origin, part: u32) -> Option<u64> {
        origin.once.then(|| self.done.get(&(origin.closure, origin.change, part)).copied()).flatten()
    }

    /// Records that the change is made. Records of ended closures are removed regularly: only those that may run again
    /// matter.
    pub(super) fn note(&mut self, origin: &Origin, part: u32, note: u64) {
        if !origin.once {
            return;
        }
        self.done.insert((origin.closure, origin.change, part), note);
        if self.done.len() > 2 * self.kept + 64 {
            self.done.retain(|(closure, ..), _| *closure >= origin.horizon || origin.live.contains(closure));
            self.kept = self.done.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(closure: u64, change: u32, horizon: u64, live: &[u64]) -> Origin {
        Origin { closure, change, horizon, live: live.to_vec(), once: true, ..Origin::default() }
    }

    #[test]
    fn a_change_is_known_by_closure_and_place() {
        let mut tokens = Tokens::default();
        tokens.note(&origin(3, 0, 0, &[]), 0, 7);
        assert_eq!(tokens.find(&origin(3, 0, 0, &[]), 0), Some(7));
        assert_eq!(tokens.find(&origin(3, 1, 0, &[]), 0), None);
        assert_eq!(tokens.find(&Origin { once: false, ..origin(3, 0, 0, &[]) }, 0), None);
    }

    #[test]
    fn memory_is_bounded_and_what_may_run_again_stays() {
        let mut tokens = Tokens::default();
        for closure in 0..10_000 {
            // Closure 5 hangs; all others before the current one have ended.
            tokens.note(&origin(closure, 0, closure, &[5]), 0, 0);
            assert!(tokens.done.len() < 200);
        }
        assert!(tokens.find(&origin(5, 0, 0, &[]), 0).is_some());
        assert!(tokens.find(&origin(9_999, 0, 0, &[]), 0).is_some());
    }
}

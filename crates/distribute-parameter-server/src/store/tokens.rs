//! A record of the changes made, so that none is made twice.

use std::collections::HashMap;

use crate::wire::proto::Origin;

/// Changes that were made, by closure, index in it and part, each with a note.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    done: HashMap<(Maker, u32, u32), u64>,
    /// The number of records after the last removal of old ones.
    kept: usize,
}

/// The maker of a change: a numbered step, which is the same for all coordinators, or another closure of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Maker {
    Step(u64),
    Closure(u64),
}

impl Maker {
    fn of(origin: &Origin) -> Maker {
        origin.step.map_or(Maker::Closure(origin.closure), Maker::Step)
    }

    /// Returns whether it may run again, as far as `origin` knows.
    fn may_run_again(self, origin: &Origin) -> bool {
        match (self, &origin.steps) {
            (Maker::Closure(number), _) => number >= origin.horizon || origin.live.contains(&number),
            (Maker::Step(number), Some(steps)) => number >= steps.begun || steps.open.contains(&number),
            (Maker::Step(_), None) => true,
        }
    }
}

impl Tokens {
    /// Forgets the closures of an earlier coordinator, whose numbers recur, and keeps steps.
    pub(super) fn keep_steps(&mut self) {
        self.done.retain(|(maker, ..), _| matches!(maker, Maker::Step(_)));
        self.kept = self.done.len();
    }

    /// Forgets a change that was dropped.
    pub(super) fn forget(&mut self, origin: &Origin, part: u32) {
        self.done.remove(&(Maker::of(origin), origin.change, part));
    }

    /// Returns the note of this change, if it was made.
    pub(super) fn find(&self, origin: &Origin, part: u32) -> Option<u64> {
        origin.once.then(|| self.done.get(&(Maker::of(origin), origin.change, part)).copied()).flatten()
    }

    /// Records that the change is made. Records of ended closures are removed regularly: only those that may run again
    /// matter.
    pub(super) fn note(&mut self, origin: &Origin, part: u32, note: u64) {
        if !origin.once {
            return;
        }
        self.done.insert((Maker::of(origin), origin.change, part), note);
        if self.done.len() > 2 * self.kept + 64 {
            self.done.retain(|(maker, ..), _| maker.may_run_again(origin));
            self.kept = self.done.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::StepRecord;

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

    fn step(step: u64, begun: u64, open: &[u64]) -> Origin {
        let steps = Some(StepRecord { begun, open: open.to_vec() });
        // Each coordinator numbers its closures anew.
        Origin { step: Some(step), steps, ..origin(0, 0, 1, &[]) }
    }

    #[test]
    fn steps_outlive_the_closures_of_their_coordinator() {
        let mut tokens = Tokens::default();
        tokens.note(&step(7, 8, &[7]), 0, 1);
        tokens.note(&origin(0, 0, 0, &[]), 0, 2);
        assert_eq!(tokens.find(&origin(0, 0, 0, &[]), 0), Some(2));
        tokens.keep_steps();
        assert_eq!(tokens.find(&step(7, 8, &[7]), 0), Some(1));
        assert_eq!(tokens.find(&origin(0, 0, 0, &[]), 0), None);
        assert_eq!(tokens.find(&step(8, 9, &[7, 8]), 0), None);
        // Step 7 is open for long, and the others end.
        for number in 8..5000 {
            tokens.note(&step(number, number + 1, &[7, number]), 0, 0);
            assert!(tokens.done.len() < 200);
        }
        assert_eq!(tokens.find(&step(7, 8, &[7]), 0), Some(1));
        assert_eq!(tokens.find(&step(4999, 5000, &[7, 4999]), 0), Some(0));
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

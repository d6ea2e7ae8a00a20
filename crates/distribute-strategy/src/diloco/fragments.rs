//! The division of a model into fragments, and the steps after which each synchronizes.

use std::ops::Range;

use distribute_device::DType;

use crate::{Error, LocalVariable, Result};

/// When the fragments of a model synchronize: each every `inner_steps` steps, one after another at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    /// A multiple of the number of fragments.
    pub(super) inner_steps: u64,
    /// Above 0.
    pub(super) fragments: usize,
    /// The number of steps that the reduction of a fragment may take, fewer than `inner_steps`; 0 if replicas wait
    /// for it.
    pub(super) overlap: u64,
}

/// When each fragment of a model is exchanged, for authors of strategies: every `inner_steps` steps, one fragment after
/// another at equal distances, as under [`DilocoStrategy`](crate::DilocoStrategy).
///
/// # Examples
/// ```
/// let schedule = distribute_strategy::FragmentSchedule { inner_steps: 6, fragments: 2 };
/// let due: Vec<_> = (1..=6).map(|steps| schedule.due(steps)).collect();
/// assert_eq!(due, [None, None, Some(1), None, None, Some(0)]);
/// assert_eq!(schedule.divide(&[4, 4, 8]), [0..2, 2..3]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentSchedule {
    /// The number of steps between two exchanges of a fragment: a multiple of the number of fragments.
    pub inner_steps: u64,
    /// The number of fragments, at least 1.
    pub fragments: usize,
}

impl FragmentSchedule {
    /// Returns an error unless the model's variables can be exchanged by this schedule.
    ///
    /// # Errors
    /// [`Error::LocalUpdates`] if a number is 0, or the steps cannot be divided among the fragments.
    pub fn check(self) -> Result<()> {
        let FragmentSchedule { inner_steps, fragments } = self;
        let refuse = |problem: String| Err(Error::LocalUpdates { problem });
        if inner_steps == 0 || fragments == 0 {
            return refuse(format!("{inner_steps} inner steps and {fragments} fragments were given; give at least 1"));
        }
        if !inner_steps.is_multiple_of(fragments as u64) {
            return refuse(format!(
                "{inner_steps} inner steps cannot be divided among {fragments} fragments; give a multiple of their \
                 number, such as {}",
                inner_steps.next_multiple_of(fragments as u64)
            ));
        }
        Ok(())
    }

    /// Returns an error unless a model's variables can be divided into the fragments, and have outer parameters in f32.
    ///
    /// # Errors
    /// [`Error::LocalUpdates`] names the variable, or the numbers.
    pub fn check_variables(self, variables: &[LocalVariable]) -> Result<()> {
        let refuse = |problem: String| Err(Error::LocalUpdates { problem });
        if let Some(variable) = variables.iter().find(|variable| variable.dtype != DType::F32) {
            let LocalVariable { name, dtype, .. } = variable;
            return refuse(format!(
                "outer parameters are in f32, but {name} is trained in {dtype}; make it f32, or one of 16 bits with an \
                 optimizer of this workspace, which trains a copy in f32"
            ));
        }
        if variables.len() < self.fragments {
            return refuse(format!(
                "the model trains {} variables, which cannot be divided into {} fragments; ask for fewer",
                variables.len(),
                self.fragments
            ));
        }
        Ok(())
    }

    /// Returns the fragment that is exchanged after a number of steps, if one is.
    pub fn due(self, steps: u64) -> Option<usize> {
        Schedule { inner_steps: self.inner_steps, fragments: self.fragments, overlap: 0 }.due(steps)
    }

    /// Divides variables, given by their sizes in bytes, into ranges of nearly equal sums, in order. None is empty;
    /// there must be at least as many variables as fragments.
    pub fn divide(self, bytes: &[usize]) -> Vec<Range<usize>> {
        divide(bytes, self.fragments)
    }
}

/// An action of the fragment with an index after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Its changes are reduced, and it makes an outer step.
    Synchronize(usize),
    /// The reduction of its changes begins.
    Begin(usize),
    /// The reduction is half over: parts were sent to those that add them.
    Combine(usize),
    /// The reduction is over, and the fragment makes an outer step.
    Finish(usize),
}

impl Schedule {
    /// Returns what fragments do after a number of steps, in this order.
    pub(super) fn turns(self, steps: u64) -> impl Iterator<Item = Turn> {
        let begun = move |before: u64| steps.checked_sub(before).and_then(|steps| self.due(steps));
        let turns = match self.overlap {
            0 => [begun(0).map(Turn::Synchronize), None, None],
            overlap => {
                let half = begun(overlap.div_ceil(2)).map(Turn::Combine);
                [half, begun(overlap).map(Turn::Finish), begun(0).map(Turn::Begin)]
            }
        };
        turns.into_iter().flatten()
    }

    /// Returns the fragment whose reduction begins after a number of steps, if one does: fragment `p` when `steps + p *
    /// inner_steps / fragments` is a multiple of `inner_steps`.
    fn due(self, steps: u64) -> Option<usize> {
        let distance = self.inner_steps / self.fragments as u64;
        let left = (self.inner_steps - steps % self.inner_steps) % self.inner_steps;
        (steps > 0 && left.is_multiple_of(distance)).then(|| (left / distance) as usize)
    }
}

/// Divides variables, given by their sizes in bytes, into ranges of nearly equal sums, in order. None is empty; there
/// must be at least as many variables as fragments.
pub(super) fn divide(bytes: &[usize], fragments: usize) -> Vec<Range<usize>> {
    let total: u128 = bytes.iter().map(|bytes| *bytes as u128).sum();
    let mut ends = Vec::with_capacity(fragments);
    let (mut end, mut sum) = (0, 0u128);
    for fragment in 1..=fragments {
        let wanted = total * fragment as u128 / fragments as u128;
        let last = bytes.len() - (fragments - fragment);
        let is_nearer = |sum: u128, next: usize| (sum + next as u128).abs_diff(wanted) < sum.abs_diff(wanted);
        let begin = end;
        while end < last && (end == begin || fragment == fragments || is_nearer(sum, bytes[end])) {
            sum += bytes[end] as u128;
            end += 1;
        }
        ends.push(begin..end);
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_take_turns_at_equal_distances() {
        let schedule = Schedule { inner_steps: 12, fragments: 4, overlap: 0 };
        let due: Vec<(u64, usize)> =
            (1..=24).filter_map(|step| schedule.due(step).map(|fragment| (step, fragment))).collect();
        assert_eq!(due, [(3, 3), (6, 2), (9, 1), (12, 0), (15, 3), (18, 2), (21, 1), (24, 0)]);
        for (step, fragment) in due {
            assert_eq!((step + fragment as u64 * 3) % 12, 0);
        }
        let whole = Schedule { inner_steps: 5, fragments: 1, overlap: 0 };
        assert_eq!((1..=10).filter(|step| whole.due(*step) == Some(0)).collect::<Vec<_>>(), [5, 10]);
        let each = Schedule { inner_steps: 2, fragments: 2, overlap: 0 };
        assert_eq!([each.due(1), each.due(2)], [Some(1), Some(0)]);
        assert_eq!(each.turns(1).collect::<Vec<_>>(), [Turn::Synchronize(1)]);
        assert_eq!(each.turns(0).count(), 0);
    }

    #[test]
    fn every_reduction_that_begins_is_combined_and_finished_in_order() {
        for (inner_steps, fragments, overlap) in [(1, 1, 0), (2, 1, 1), (4, 2, 1), (4, 2, 3), (6, 3, 5), (12, 4, 7)] {
            let schedule = Schedule { inner_steps, fragments, overlap };
            // For each fragment when its reduction began, and whether it is combined.
            let mut begun: Vec<Option<(u64, bool)>> = vec![None; fragments];
            for (steps, turn) in (0..60).flat_map(|steps| schedule.turns(steps).map(move |turn| (steps, turn))) {
                match turn {
                    Turn::Synchronize(_) => assert_eq!(overlap, 0),
                    Turn::Begin(fragment) => assert_eq!(begun[fragment].replace((steps, false)), None),
                    Turn::Combine(fragment) => {
                        let (since, is_combined) = begun[fragment].unwrap();
                        assert_eq!((steps - since, is_combined), (overlap.div_ceil(2), false));
                        begun[fragment] = Some((since, true));
                    }
                    Turn::Finish(fragment) => assert_eq!(begun[fragment].take(), Some((steps - overlap, true))),
                }
            }
        }
    }

    #[test]
    fn fragments_have_nearly_equal_bytes_and_all_variables() {
        assert_eq!(divide(&[4, 4, 4, 4], 2), [0..2, 2..4]);
        assert_eq!(divide(&[100, 1, 1, 1], 3), [0..1, 1..2, 2..4]);
        assert_eq!(divide(&[1, 1, 1, 100], 2), [0..3, 3..4]);
        assert_eq!(divide(&[1, 100, 1], 3), [0..1, 1..2, 2..3]);
        assert_eq!(divide(&[400, 40, 300, 30], 2), [0..1, 1..4]);
        // Every division has all variables once, in order.
        for fragments in 1..=7 {
            let sizes: Vec<usize> = (0..7).map(|at| at * at * 31 % 17).collect();
            let ranges = divide(&sizes, fragments);
            assert_eq!(ranges.iter().flat_map(Clone::clone).collect::<Vec<_>>(), (0..7).collect::<Vec<_>>());
            assert!(ranges.len() == fragments && ranges.iter().all(|range| !range.is_empty()));
        }
    }
}

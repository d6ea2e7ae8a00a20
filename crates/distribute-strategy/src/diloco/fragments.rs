//! The division of a model into fragments, and the steps after which each synchronizes.

use std::ops::Range;

/// When the fragments of a model synchronize: each every `inner_steps` steps, one after another at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    /// A multiple of the number of fragments.
    pub(super) inner_steps: u64,
    /// Above 0.
    pub(super) fragments: usize,
}

impl Schedule {
    /// Returns the fragment that synchronizes after a number of steps, if one does: fragment `p` when `steps + p *
    /// inner_steps / fragments` is a multiple of `inner_steps`.
    pub(super) fn due(self, steps: u64) -> Option<usize> {
        let distance = self.inner_steps / self.fragments as u64;
        let left = (self.inner_steps - steps % self.inner_steps) % self.inner_steps;
        left.is_multiple_of(distance).then(|| (left / distance) as usize)
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
        let schedule = Schedule { inner_steps: 12, fragments: 4 };
        let due: Vec<(u64, usize)> =
            (1..=24).filter_map(|step| schedule.due(step).map(|fragment| (step, fragment))).collect();
        assert_eq!(due, [(3, 3), (6, 2), (9, 1), (12, 0), (15, 3), (18, 2), (21, 1), (24, 0)]);
        for (step, fragment) in due {
            assert_eq!((step + fragment as u64 * 3) % 12, 0);
        }
        let whole = Schedule { inner_steps: 5, fragments: 1 };
        assert_eq!((1..=10).filter(|step| whole.due(*step) == Some(0)).collect::<Vec<_>>(), [5, 10]);
        let each = Schedule { inner_steps: 2, fragments: 2 };
        assert_eq!([each.due(1), each.due(2)], [Some(1), Some(0)]);
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

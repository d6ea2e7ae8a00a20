//! Two binary trees at the same time, each for half of the elements, in chunks.

use std::collections::BTreeMap;

use super::{Action, Schedule, Step, Transfer, part};

/// Elements of a chunk, if there are enough, and the maximum number of chunks of one tree.
const CHUNK: usize = 64 * 1024;
const MAX_CHUNKS: usize = 32;

/// Returns the steps of an all-reduce up two binary trees and down again. An inner node of one tree is a leaf of the
/// other, so every rank sends and receives each element about twice, as in a ring, and the number of steps grows only
/// with log2(n). Unlike halving and doubling, this holds for any number of ranks.
///
/// # Cost
/// About 4 (k + 2 log2(n)) steps for k chunks per tree, each moving one chunk.
///
/// # Source
/// Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009. The trees
/// are those of NCCL 2.4.
pub fn double_tree_all_reduce(rank: usize, ranks: usize, count: usize) -> Schedule {
    let mut steps: BTreeMap<usize, Step> = BTreeMap::new();
    if ranks == 1 {
        return vec![Step { complete: Some(0..count), ..Step::default() }];
    }
    for (index, tree) in [Tree { ranks, mirrored: false }, Tree { ranks, mirrored: true }].into_iter().enumerate() {
        let half = part(count, 2, index);
        let chunks = chunks(half.len());
        let height = tree.level(tree.root());
        let range = |chunk: usize| {
            let within = part(half.len(), chunks, chunk);
            half.start + within.start..half.start + within.end
        };
        // Each tick has a slot for each child in each tree, so that messages of one pair, and of one chunk, never
        // coincide.
        let slot = |tick: usize, child: usize| 4 * tick + 2 * index + child;
        let children = tree.children(rank);
        // The child whose values arrive last.
        let last = (0..children.len()).max_by_key(|place| (tree.level(children[*place]), *place));
        for chunk in 0..chunks {
            for (place, child) in children.iter().copied().enumerate() {
                let up = steps.entry(slot(chunk + tree.level(child), place)).or_default();
                up.receives.push(Transfer { peer: child, range: range(chunk), action: Action::Combine });
                if rank == tree.root() && last == Some(place) {
                    up.complete = Some(range(chunk));
                }
                let down = steps.entry(slot(chunk + height + tree.depth(rank), place)).or_default();
                down.sends.push(Transfer { peer: child, range: range(chunk), action: Action::Copy });
            }
            if let Some(parent) = tree.parent(rank) {
                let place = tree.children(parent).iter().position(|child| *child == rank).unwrap_or(0);
                let up = steps.entry(slot(chunk + tree.level(rank), place)).or_default();
                up.sends.push(Transfer { peer: parent, range: range(chunk), action: Action::Combine });
                let down = steps.entry(slot(chunk + height + tree.depth(parent), place)).or_default();
                down.receives.push(Transfer { peer: parent, range: range(chunk), action: Action::Copy });
            }
        }
    }
    steps.into_values().collect()
}

/// Returns the number of chunks of one tree.
pub(super) fn chunks(elements: usize) -> usize {
    elements.div_ceil(CHUNK).clamp(1, MAX_CHUNKS)
}

/// The ranks in in-order traversal, in which every other rank is a leaf.
struct Tree {
    ranks: usize,
    /// Whether ranks are renumbered so that leaves and inner nodes change places.
    mirrored: bool,
}

impl Tree {
    /// Returns a rank's position in the traversal, from 1.
    fn place(&self, rank: usize) -> usize {
        match (self.mirrored, self.ranks.is_multiple_of(2)) {
            (false, _) => rank + 1,
            (true, true) => self.ranks - rank,
            (true, false) => (rank + 1) % self.ranks + 1,
        }
    }

    fn rank(&self, place: usize) -> usize {
        match (self.mirrored, self.ranks.is_multiple_of(2)) {
            (false, _) => place - 1,
            (true, true) => self.ranks - place,
            (true, false) => (place + self.ranks - 2) % self.ranks,
        }
    }

    fn root(&self) -> usize {
        self.rank(1 << self.ranks.ilog2())
    }

    fn parent(&self, rank: usize) -> Option<usize> {
        let place = self.place(rank);
        let lowest = place & place.wrapping_neg();
        let above = (place - lowest) | (lowest << 1);
        // If the traversal ends before this parent, it is the next one further up.
        let parent = if above > self.ranks { place - lowest } else { above };
        (parent > 0).then(|| self.rank(parent))
    }

    fn children(&self, rank: usize) -> Vec<usize> {
        let place = self.place(rank);
        let lowest = place & place.wrapping_neg();
        let left = (lowest > 1).then(|| self.rank(place - lowest / 2));
        // The right child is the root of the rest of its side.
        let mut half = lowest / 2;
        while half > 0 && place + half > self.ranks {
            half /= 2;
        }
        let right = (half > 0).then(|| self.rank(place + half));
        left.into_iter().chain(right).collect()
    }

    fn depth(&self, rank: usize) -> usize {
        std::iter::successors(self.parent(rank), |rank| self.parent(*rank)).count()
    }

    /// Returns the number of steps from the furthest leaf below.
    fn level(&self, rank: usize) -> usize {
        self.children(rank).into_iter().map(|child| self.level(child) + 1).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_and_children_agree_and_inner_nodes_are_leaves_elsewhere() {
        for ranks in 1..=70 {
            let trees = [false, true].map(|mirrored| Tree { ranks, mirrored });
            for tree in &trees {
                for rank in 0..ranks {
                    assert_eq!(tree.rank(tree.place(rank)), rank);
                    assert!(tree.children(rank).iter().all(|child| tree.parent(*child) == Some(rank)));
                    let known = tree.parent(rank).is_none_or(|parent| tree.children(parent).contains(&rank));
                    assert!(known, "{rank} of {ranks}");
                }
                assert_eq!((0..ranks).filter(|rank| tree.parent(*rank).is_none()).count(), 1);
                assert_eq!(tree.parent(tree.root()), None);
                assert!(tree.level(tree.root()) <= ranks.next_power_of_two().ilog2() as usize);
            }
            let inner_in_both = (0..ranks).filter(|rank| trees.iter().all(|tree| !tree.children(*rank).is_empty()));
            // With an odd number of ranks, one rank is an inner node of both trees.
            assert!(inner_in_both.count() <= ranks % 2, "{ranks}");
        }
    }

    #[test]
    fn receives_of_a_step_overlap_nothing() {
        for ranks in 2..=17 {
            for rank in 0..ranks {
                for step in double_tree_all_reduce(rank, ranks, 20 * CHUNK) {
                    for (index, receive) in step.receives.iter().enumerate() {
                        let others = step.receives[index + 1..].iter().chain(&step.sends);
                        let apart = |other: &Transfer| {
                            other.range.end <= receive.range.start || receive.range.end <= other.range.start
                        };
                        assert!(others.into_iter().all(apart), "{rank} of {ranks}: {step:?}");
                    }
                }
            }
        }
    }
}

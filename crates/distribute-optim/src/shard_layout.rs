//! The division of a variable into parts.

use std::ops::Range;

use distribute_strategy::Strategy;
use distribute_types::{FNV32, fnv1a_32};

/// The division of a variable into equal parts, one for each replica of a shard group.
///
/// The variable's elements, in row-major order, are cut into parts of ⌈elements / parts⌉; the last ones are shorter or
/// empty, and are filled up with zeros. So all replicas' components have the same shape.
///
/// # Examples
/// ```
/// use distribute_optim::backend::ShardLayout;
/// use distribute_strategy::FullyShardedStrategy;
///
/// let devices = ["CPU:0", "CPU:1", "CPU:2"];
/// let strategy = FullyShardedStrategy::builder().devices(devices).mirror_below(4).build()?;
/// let layout = ShardLayout::of(&strategy, &[2, 5]).expect("ten elements are enough");
/// assert_eq!((layout.parts(), layout.part_len()), (3, 4));
/// assert_eq!(layout.range(2), 8..10);
/// assert!(ShardLayout::of(&strategy, &[3]).is_none());
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardLayout {
    shape: Vec<usize>,
    parts: usize,
    /// The part of the first replica of this process.
    first: usize,
    /// The number of ranks of each replica, which have the same part.
    ranks: usize,
}

impl ShardLayout {
    /// Returns the layout of a variable of this shape under a strategy; `None` if every replica has the whole of it.
    pub fn of(strategy: &Strategy, shape: &[usize]) -> Option<ShardLayout> {
        let sharding = strategy.sharding()?;
        sharding.shards(shape.iter().product()).then(|| ShardLayout {
            shape: shape.to_vec(),
            parts: sharding.parts,
            first: sharding.part_of(strategy.topology().first_replica()),
            ranks: strategy.tensor_parallel(),
        })
    }

    /// Returns the shape of the whole variable.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the number of elements of the whole variable.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the variable has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of parts.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Returns the number of elements of every part, with its padding.
    pub fn part_len(&self) -> usize {
        self.len().div_ceil(self.parts)
    }

    /// Returns the part that a component of this process has, by its index.
    pub fn part_of(&self, local: usize) -> usize {
        (self.first + local / self.ranks) % self.parts
    }

    /// Returns the elements of the variable that are in a part, without its padding.
    pub fn range(&self, part: usize) -> Range<usize> {
        let (len, part_len) = (self.len(), self.part_len());
        let start = part.saturating_mul(part_len).min(len);
        start..(start + part_len).min(len)
    }

    /// Returns the number of elements of each part, without padding.
    pub(crate) fn counts(&self) -> Vec<usize> {
        (0..self.parts).map(|part| self.range(part).len()).collect()
    }

    /// Returns a part of the whole variable's elements, with its padding.
    pub fn cut<T: Copy + Default>(&self, whole: &[T], part: usize) -> Vec<T> {
        let range = self.range(part);
        let mut cut = whole.get(range).map_or_else(Vec::new, <[T]>::to_vec);
        cut.resize(self.part_len(), T::default());
        cut
    }
}

/// Returns the number by which the replicas' calls for a variable are compared.
pub(crate) fn tag(name: &str) -> u32 {
    fnv1a_32(FNV32, name.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(len: usize, parts: usize) -> ShardLayout {
        ShardLayout { shape: vec![len], parts, first: 0, ranks: 1 }
    }

    #[test]
    fn parts_cover_a_variable_once() {
        for parts in 1..6 {
            for len in 0..20 {
                let layout = layout(len, parts);
                let all: Vec<usize> = (0..parts).flat_map(|part| layout.range(part)).collect();
                assert_eq!(all, (0..len).collect::<Vec<_>>(), "{len} in {parts}");
                let whole: Vec<usize> = (1..=len).collect();
                let cut: Vec<usize> = (0..parts).flat_map(|part| layout.cut(&whole, part)).collect();
                assert_eq!(cut.len(), parts * layout.part_len());
                assert_eq!(cut.iter().filter(|element| **element > 0).count(), len);
            }
        }
    }

    #[test]
    fn local_replicas_continue_the_parts_of_the_process_before() {
        let layout = ShardLayout { shape: vec![8], parts: 4, first: 2, ranks: 1 };
        assert_eq!([0, 1, 2].map(|local| layout.part_of(local)), [2, 3, 0]);
        let layout = ShardLayout { ranks: 2, ..layout };
        assert_eq!([0, 1, 2, 3, 4].map(|local| layout.part_of(local)), [2, 2, 3, 3, 0]);
    }
}

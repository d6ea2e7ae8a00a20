//! Algorithms as schedules: the sends and receives of each rank in each step, with no I/O.
//!
//! A [`Schedule`] is a plain list of [`Step`]s over element ranges. The engine executes it over a transport; a test
//! runs all ranks' schedules in memory. Within a step all transfers happen at once, and sends carry the values that
//! were there when the step began.

use std::ops::Range;

mod algorithm;
mod dissemination;
mod double_tree;
mod doubling;
mod halving;
mod hierarchical;
mod link;
mod ring;
mod tree;

pub use algorithm::{Algorithm, AllReduceAlgorithm, CustomAlgorithm};
pub use dissemination::dissemination_all_gather;
pub use double_tree::double_tree_all_reduce;
pub use doubling::recursive_doubling_all_reduce;
pub use halving::halving_doubling_all_reduce;
pub use hierarchical::hierarchical_all_reduce;
pub use link::Link;
pub use ring::{ring_all_gather, ring_all_gather_v, ring_all_reduce, ring_reduce_scatter, ring_reduce_scatter_v};
pub use tree::{binomial_broadcast, binomial_reduce, dissemination_barrier, ordered_reduce, ordered_reduce_scatter};

/// The receiver's action on received elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They replace those at the range.
    Copy,
    /// They are combined with those at the range: on the left of them where they come from a lower rank, else on the
    /// right.
    Combine,
}

/// One message of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank at the other end.
    pub peer: usize,
    /// Elements that are sent, or the place where they arrive.
    pub range: Range<usize>,
    /// The receiver's action; a send names that of the other side.
    pub action: Action,
}

/// Transfers that happen at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Messages to other ranks.
    pub sends: Vec<Transfer>,
    /// Messages from other ranks.
    pub receives: Vec<Transfer>,
    /// Elements that hold their final combination after this step: where a mean divides.
    pub complete: Option<Range<usize>>,
}

/// The steps of one rank.
pub type Schedule = Vec<Step>;

/// Returns the range of part `index` when `count` elements are cut into `parts`: the first ones hold one element more.
///
/// # Examples
/// ```
/// use distribute_collectives::schedule::part;
/// assert_eq!([part(7, 3, 0), part(7, 3, 1), part(7, 3, 2)], [0..3, 3..5, 5..7]);
/// ```
pub fn part(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, extra) = (count / parts, count % parts);
    let start = index * each + index.min(extra);
    start..start + each + usize::from(index < extra)
}

#[cfg(test)]
mod tests;

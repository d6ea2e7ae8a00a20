//! Algorithms as schedules: the sends and receives of each rank in each step, with no I/O.
//!
//! A [`Schedule`] is a plain list of [`Step`]s over element ranges. The engine executes it over a transport; a test
//! runs all ranks' schedules in memory. Within a step all transfers happen at the same time, and sends carry the values
//! from the beginning of the step.

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
    /// Replaces the elements of the range.
    Copy,
    /// Combines the received elements with those of the range: on their left if they come from a lower rank, else on
    /// their right.
    Combine,
}

/// One message of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank at the other end.
    pub peer: usize,
    /// The elements to send, or the range at which they arrive.
    pub range: Range<usize>,
    /// The receiver's action; a send names the action on the other side.
    pub action: Action,
}

/// Transfers that happen at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Messages to other ranks.
    pub sends: Vec<Transfer>,
    /// Messages from other ranks.
    pub receives: Vec<Transfer>,
    /// The elements that are fully combined after this step, at which point a mean divides.
    pub complete: Option<Range<usize>>,
}

/// The steps of one rank.
pub type Schedule = Vec<Step>;

/// Returns the range of part `index` when `count` elements are cut into `parts`; the first parts have one element more
/// if the count does not divide evenly.
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

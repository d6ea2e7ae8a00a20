//! Algorithms as schedules: what each rank sends and receives in which step, with no I/O.
//!
//! A [`Schedule`] is a plain list of [`Step`]s over element ranges. Whoever carries bytes executes it; a test runs all
//! ranks' schedules in memory. Within a step all transfers happen at once, and sends carry the values that were there
//! when the step began.

use std::ops::Range;

mod doubling;
mod ring;
mod tree;

pub use doubling::recursive_doubling_all_reduce;
pub use ring::{ring_all_gather, ring_all_gather_v, ring_all_reduce, ring_reduce_scatter, ring_reduce_scatter_v};
pub use tree::{binomial_broadcast, binomial_reduce, dissemination_barrier};

/// What becomes of received elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They replace those at the range.
    Copy,
    /// They are combined with those at the range.
    Combine,
}

/// One message of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank at the other end.
    pub peer: usize,
    /// Elements that are sent, or the place where they arrive.
    pub range: Range<usize>,
    /// What the receiver does with them; sends say what the other side will do.
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

/// What one rank does.
pub type Schedule = Vec<Step>;

/// The range of part `index` when `count` elements are cut into `parts`: the first ones hold one element more.
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

/// Which algorithm moves an all-reduce between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Chosen by size: recursive doubling for short messages, the ring for long ones.
    #[default]
    Auto,
    /// Ring reduce-scatter, then ring all-gather: moves the fewest bytes, in 2 (n - 1) steps.
    Ring,
    /// Recursive doubling: everything in log2(n) steps, for messages whose latency counts.
    RecursiveDoubling,
}

impl Algorithm {
    /// Up to this many bytes a message's latency weighs more than its bytes: on loopback TCP a step costs about as much
    /// as moving 64 KiB.
    pub const SHORT_BYTES: usize = 64 * 1024;

    /// The concrete algorithm for one all-reduce.
    pub fn choose(self, bytes: usize, ranks: usize) -> Algorithm {
        match self {
            Algorithm::Auto if bytes <= Self::SHORT_BYTES && ranks > 1 => Algorithm::RecursiveDoubling,
            Algorithm::Auto => Algorithm::Ring,
            chosen => chosen,
        }
    }

    /// The lower-case name, as the environment spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Auto => "auto",
            Algorithm::Ring => "ring",
            Algorithm::RecursiveDoubling => "recursive-doubling",
        }
    }
}

impl std::str::FromStr for Algorithm {
    type Err = crate::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        [Algorithm::Auto, Algorithm::Ring, Algorithm::RecursiveDoubling]
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| crate::Error::UnknownName {
                what: "algorithm",
                given: name.to_owned(),
                expected: "auto, ring or recursive-doubling",
            })
    }
}

#[cfg(test)]
mod tests;

//! The choice of algorithms, and custom ones.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::{
    Link, Schedule, Step, binomial_broadcast, binomial_reduce, double_tree, double_tree_all_reduce,
    halving_doubling_all_reduce, recursive_doubling_all_reduce, ring_all_reduce,
};
use crate::Error;

/// The algorithm of an all-reduce between processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// The algorithm that is fastest for the size and the number of processes, according to the [`Link`]'s figures.
    #[default]
    Auto,
    /// [`ring_all_reduce`]: moves the fewest bytes, in 2 (n - 1) steps.
    Ring,
    /// [`recursive_doubling_all_reduce`]: all values in log2(n) steps, for messages that are dominated by latency.
    RecursiveDoubling,
    /// [`halving_doubling_all_reduce`]: as few bytes as the ring, in 2 log2(n) steps.
    HalvingDoubling,
    /// A binomial tree to rank 0 and back.
    Tree,
    /// [`double_tree_all_reduce`]: as few bytes as the ring, in a number of steps that grows with log2(n), for any n.
    DoubleTree,
    /// A custom algorithm.
    Custom(CustomAlgorithm),
}

/// A custom all-reduce: a schedule for each rank.
///
/// # Examples
/// Every rank sends to rank 0, which sends the result back:
/// ```
/// use distribute_collectives::schedule::{Action, AllReduceAlgorithm, Schedule, Step, Transfer};
/// use distribute_collectives::{Algorithm, Options};
///
/// struct Star;
///
/// impl AllReduceAlgorithm for Star {
///     fn name(&self) -> &str {
///         "star"
///     }
///     fn schedule(&self, rank: usize, ranks: usize, count: usize) -> Schedule {
///         let one = |peer, action| vec![Transfer { peer, range: 0..count, action }];
///         let (to_root, back) = (Action::Combine, Action::Copy);
///         if rank > 0 {
///             let send = Step { sends: one(0, to_root), ..Step::default() };
///             return vec![send, Step { receives: one(0, back), ..Step::default() }];
///         }
///         let collect = (1..ranks).map(|peer| Step { receives: one(peer, to_root), ..Step::default() });
///         // All values are combined here, so a mean divides.
///         let done = Step { complete: Some(0..count), ..Step::default() };
///         let spread = (1..ranks).map(|peer| Step { sends: one(peer, back), ..Step::default() });
///         collect.chain([done]).chain(spread).collect()
///     }
/// }
///
/// let options = Options::default().algorithm(Algorithm::custom(Star));
/// assert_eq!(options.algorithm.name(), "star");
/// ```
pub trait AllReduceAlgorithm: Send + Sync {
    /// Returns the name for errors and reports.
    fn name(&self) -> &str;

    /// Returns the steps of `rank` of `ranks` for `count` elements. Every send must match a receive of the same length
    /// at the other rank, in the same order for each pair, with at most one message in each direction per pair and
    /// step. Every element must be [`complete`](Step::complete) on one rank once, before it is copied to others.
    fn schedule(&self, rank: usize, ranks: usize, count: usize) -> Schedule;
}

/// A shared [`AllReduceAlgorithm`].
#[derive(Clone)]
pub struct CustomAlgorithm(Arc<dyn AllReduceAlgorithm>);

impl PartialEq for CustomAlgorithm {
    fn eq(&self, other: &CustomAlgorithm) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CustomAlgorithm {}

impl fmt::Debug for CustomAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

impl Algorithm {
    /// The algorithms that have a built-in schedule.
    pub const BUILT_IN: [Algorithm; 5] = [
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::HalvingDoubling,
        Algorithm::Tree,
        Algorithm::DoubleTree,
    ];

    /// Wraps a custom algorithm.
    pub fn custom(algorithm: impl AllReduceAlgorithm + 'static) -> Algorithm {
        Algorithm::Custom(CustomAlgorithm(Arc::new(algorithm)))
    }

    /// Returns the lower-case name, as used in the environment.
    pub fn name(&self) -> &str {
        match self {
            Algorithm::Auto => "auto",
            Algorithm::Ring => "ring",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Tree => "tree",
            Algorithm::DoubleTree => "double-tree",
            Algorithm::Custom(custom) => custom.0.name(),
        }
    }

    /// Returns the concrete algorithm for one all-reduce of `bytes` on `ranks` processes.
    pub fn choose(&self, bytes: usize, ranks: usize, link: &Link) -> Algorithm {
        match self {
            Algorithm::Auto => {
                let seconds = |algorithm: &Algorithm| algorithm.predict(bytes, ranks, link).unwrap_or(f64::INFINITY);
                let fastest = Algorithm::BUILT_IN.into_iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
                fastest.unwrap_or(Algorithm::Ring)
            }
            chosen => chosen.clone(),
        }
    }

    /// Estimates the seconds of an all-reduce of `bytes` on `ranks` processes; `None` for algorithms without a cost
    /// model.
    ///
    /// With latency a, seconds per byte b and per combined byte c: the ring takes 2 (n - 1) a + (n - 1)/n B (2b + c),
    /// doubling log2(n) (a + B (b + c)), halving and doubling 2 log2(n) a + (n - 1)/n B (2b + c), a tree 2 log2(n) (a +
    /// B b) + log2(n) B c, two trees in k chunks (k + 2 log2(n)) (4 a + B/(2 k) (4 b + 2 c)). If n is not a power of
    /// two, the exchange with the remaining ranks adds 2 a + B (2b + c) to the two in the middle.
    ///
    /// # Source
    /// Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 3.
    pub fn predict(&self, bytes: usize, ranks: usize, link: &Link) -> Option<f64> {
        let (n, size) = (ranks as f64, bytes as f64);
        let Link { latency_s: a, per_byte_s: b, per_combined_byte_s: c } = *link;
        let core = if ranks.is_power_of_two() { n } else { ranks.next_power_of_two() as f64 / 2.0 };
        let hand_over = if ranks.is_power_of_two() { 0.0 } else { 2.0 * a + size * (2.0 * b + c) };
        let moved = |n: f64| (n - 1.0) / n * size * (2.0 * b + c);
        match self {
            Algorithm::Ring => Some(2.0 * (n - 1.0) * a + moved(n)),
            Algorithm::RecursiveDoubling => Some(core.log2() * (a + size * (b + c)) + hand_over),
            Algorithm::HalvingDoubling => Some(2.0 * core.log2() * a + moved(core) + hand_over),
            Algorithm::Tree => {
                let depth = n.log2().ceil();
                Some(2.0 * depth * (a + size * b) + depth * size * c)
            }
            Algorithm::DoubleTree => {
                // Elements of four bytes are typical.
                let chunks = double_tree::chunks(bytes / 8) as f64;
                let ticks = chunks + 2.0 * n.log2().ceil();
                Some(ticks * (4.0 * a + size / (2.0 * chunks) * (4.0 * b + 2.0 * c)))
            }
            Algorithm::Auto | Algorithm::Custom(_) => None,
        }
    }

    /// Returns the steps of `rank` in an all-reduce of `count` elements; empty for [`Algorithm::Auto`], which must
    /// [`choose`](Algorithm::choose) first.
    pub fn schedule(&self, rank: usize, ranks: usize, count: usize) -> Schedule {
        match self {
            Algorithm::Auto => Schedule::new(),
            Algorithm::Ring => ring_all_reduce(rank, ranks, count),
            Algorithm::RecursiveDoubling => recursive_doubling_all_reduce(rank, ranks, count),
            Algorithm::HalvingDoubling => halving_doubling_all_reduce(rank, ranks, count),
            Algorithm::Tree => {
                let mut schedule: Vec<Step> = binomial_reduce(rank, ranks, 0, count);
                schedule.extend(binomial_broadcast(rank, ranks, 0, count));
                schedule
            }
            Algorithm::DoubleTree => double_tree_all_reduce(rank, ranks, count),
            Algorithm::Custom(custom) => custom.0.schedule(rank, ranks, count),
        }
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let all = std::iter::once(Algorithm::Auto).chain(Algorithm::BUILT_IN);
        all.into_iter().find(|algorithm| algorithm.name() == name).ok_or_else(|| Error::UnknownName {
            what: "algorithm",
            given: name.to_owned(),
            expected: "auto, ring, recursive-doubling, halving-doubling, tree or double-tree",
        })
    }
}

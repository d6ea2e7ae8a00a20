//! Ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The rank of a member in its process group: `0..world_size`.
///
/// # Examples
/// ```
/// use distribute_types::Rank;
/// assert_eq!(Rank(3).index(), 3);
/// assert_eq!(Rank(3).to_string(), "rank 3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u32);

impl Rank {
    /// Returns this rank as an index into per-rank lists.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the rank with this index; an index beyond `u32` becomes the largest rank.
    pub fn of(index: usize) -> Rank {
        Rank(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

impl From<u32> for Rank {
    fn from(rank: u32) -> Self {
        Rank(rank)
    }
}

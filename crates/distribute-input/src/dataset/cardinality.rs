//! How many elements a pass has.

use std::fmt;

/// The number of elements of a pass, as far as it is known without reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cardinality {
    /// Exactly this many.
    Known(usize),
    /// Not known; the pass may or may not end.
    Unknown,
    /// The pass never ends.
    Infinite,
}

impl Cardinality {
    pub(crate) fn map(self, known: impl FnOnce(usize) -> usize) -> Cardinality {
        match self {
            Cardinality::Known(count) => Cardinality::Known(known(count)),
            other => other,
        }
    }

    /// Returns the cardinality of two sequences read side by side that end with the shorter.
    pub(crate) fn shorter(self, other: Cardinality) -> Cardinality {
        match (self, other) {
            (Cardinality::Known(0), _) | (_, Cardinality::Known(0)) => Cardinality::Known(0),
            (Cardinality::Known(one), Cardinality::Known(two)) => Cardinality::Known(one.min(two)),
            (Cardinality::Infinite, other) | (other, Cardinality::Infinite) => other,
            _ => Cardinality::Unknown,
        }
    }

    /// Returns the cardinality of two sequences read side by side that end with the longer.
    pub(crate) fn longer(self, other: Cardinality) -> Cardinality {
        match (self, other) {
            (Cardinality::Known(one), Cardinality::Known(two)) => Cardinality::Known(one.max(two)),
            (Cardinality::Infinite, _) | (_, Cardinality::Infinite) => Cardinality::Infinite,
            _ => Cardinality::Unknown,
        }
    }

    /// Returns the cardinality of two sequences read one after the other.
    pub(crate) fn sum(self, other: Cardinality) -> Cardinality {
        match (self, other) {
            (Cardinality::Known(one), Cardinality::Known(two)) => Cardinality::Known(one.saturating_add(two)),
            (Cardinality::Infinite, _) | (_, Cardinality::Infinite) => Cardinality::Infinite,
            _ => Cardinality::Unknown,
        }
    }
}

impl fmt::Display for Cardinality {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cardinality::Known(count) => write!(formatter, "{count}"),
            Cardinality::Unknown => formatter.write_str("unknown"),
            Cardinality::Infinite => formatter.write_str("infinite"),
        }
    }
}

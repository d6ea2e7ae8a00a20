//! Reductions.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// How values of several ranks become one.
///
/// Floating-point `Mean` is the sum divided by the world size; integer `Mean` is that quotient rounded towards zero.
/// Integer sums and products wrap. `Min` and `Max` of floating-point values are NaN where any value is.
/// f16 and bf16 values are combined in f32.
///
/// # Source
/// The operations of `MPI_Op` and `ncclRedOp_t`; tf.distribute's `ReduceOp` has the first two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum over ranks.
    Sum = 0,
    /// The mean over ranks.
    Mean = 1,
    /// The least value.
    Min = 2,
    /// The greatest value.
    Max = 3,
    /// The product over ranks.
    Product = 4,
}

impl ReduceOp {
    /// Every reduction.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

    /// The lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        }
    }

    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    /// Reads a name, in any case: `sum`, `MEAN`.
    fn from_str(name: &str) -> Result<Self, Error> {
        ReduceOp::ALL.into_iter().find(|op| op.name().eq_ignore_ascii_case(name)).ok_or_else(|| Error::UnknownName {
            what: "reduction",
            given: name.to_owned(),
            expected: "sum, mean, min, max or product",
        })
    }
}

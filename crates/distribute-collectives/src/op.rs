//! Built-in reduction operators.

use std::fmt;
use std::str::FromStr;

use distribute_arithmetic::{Combine, Reduce};
use distribute_device::DType;

use crate::Error;

/// A reduction operator, which combines values of several ranks.
///
/// Floating-point `Mean` is the sum divided by the world size; integer `Mean` is that quotient rounded towards zero.
/// Integer sums and products wrap. `Min` and `Max` of floating-point values are NaN if any value is NaN. f16 and bf16
/// values are combined in f32.
///
/// # Source
/// The operations and bitwise names of `MPI_Op`, and `ncclRedOp_t`; tf.distribute's `ReduceOp` has the first two.
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
    /// The bitwise and; integers only.
    BitAnd = 5,
    /// The bitwise or; integers only.
    BitOr = 6,
    /// The bitwise exclusive or; integers only.
    BitXor = 7,
}

impl ReduceOp {
    /// All built-in operators.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Mean,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// Returns the lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
            ReduceOp::BitAnd => "band",
            ReduceOp::BitOr => "bor",
            ReduceOp::BitXor => "bxor",
        }
    }

    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| op.code() == code)
    }

    /// Returns how two values are combined; a mean is a sum until it is divided.
    pub(crate) const fn combine(self) -> Combine {
        match self {
            ReduceOp::Sum | ReduceOp::Mean => Combine::Sum,
            ReduceOp::Min => Combine::Min,
            ReduceOp::Max => Combine::Max,
            ReduceOp::Product => Combine::Product,
            ReduceOp::BitAnd => Combine::BitAnd,
            ReduceOp::BitOr => Combine::BitOr,
            ReduceOp::BitXor => Combine::BitXor,
        }
    }

    /// Returns how the values of several ranks are reduced, with a divisor to a mean.
    pub(crate) fn reduce(self, divisor: Option<u32>) -> Reduce {
        divisor.map_or(Reduce::Combined(self.combine()), Reduce::Mean)
    }

    /// Returns [`Error::UnfitType`] if the operator is not defined for a type.
    pub(crate) fn check(self, dtype: DType) -> Result<(), Error> {
        match self {
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor if dtype.is_float() => {
                Err(Error::UnfitType { op: self, dtype })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    /// Parses a name, in upper or lower case: `sum`, `MEAN`.
    fn from_str(name: &str) -> Result<Self, Error> {
        ReduceOp::ALL.into_iter().find(|op| op.name().eq_ignore_ascii_case(name)).ok_or_else(|| Error::UnknownName {
            what: "reduction",
            given: name.to_owned(),
            expected: "sum, mean, min, max, product, band, bor or bxor",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_read_in_any_case() {
        for op in ReduceOp::ALL {
            for name in [op.name().to_owned(), op.name().to_uppercase()] {
                assert_eq!(name.parse::<ReduceOp>().unwrap(), op);
            }
        }
        let problem = "average".parse::<ReduceOp>().unwrap_err().to_string();
        assert!(problem.contains("average") && problem.contains("sum, mean, min"), "{problem}");
    }
}

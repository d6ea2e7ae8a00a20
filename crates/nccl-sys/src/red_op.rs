//! Reduction operations.

use std::ffi::c_int;

/// `ncclRedOp_t`: a built-in reduction, or one created by `ncclRedOpCreatePreMulSum` (5 and above).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct RedOp(pub c_int);

impl RedOp {
    /// `ncclSum`.
    pub const SUM: Self = Self(0);
    /// `ncclProd`.
    pub const PROD: Self = Self(1);
    /// `ncclMax`.
    pub const MAX: Self = Self(2);
    /// `ncclMin`.
    pub const MIN: Self = Self(3);
    /// `ncclAvg`: the sum divided by the number of ranks.
    pub const AVG: Self = Self(4);

    /// Returns whether the reduction is built into NCCL; others belong to one communicator and one data type.
    #[must_use]
    pub const fn is_built_in(self) -> bool {
        matches!(self.0, 0..=4)
    }
}

/// `ncclScalarResidence_t`: the location of the factor of a reduction, and the time at which it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ScalarResidence(pub c_int);

impl ScalarResidence {
    /// `ncclScalarDevice`: in memory that the device reads while the operation runs.
    pub const DEVICE: Self = Self(0);
    /// `ncclScalarHostImmediate`: in host memory, read before the creating call returns.
    pub const HOST_IMMEDIATE: Self = Self(1);
}

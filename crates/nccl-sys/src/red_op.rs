//! How elements are combined.

use std::ffi::c_int;

/// `ncclRedOp_t`: a built-in reduction, or one that `ncclRedOpCreatePreMulSum` has made (5 and above).
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

    /// Whether NCCL has it built in; others belong to one communicator and one data type.
    #[must_use]
    pub const fn is_built_in(self) -> bool {
        matches!(self.0, 0..=4)
    }
}

/// `ncclScalarResidence_t`: where the factor of a reduction lies, and when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ScalarResidence(pub c_int);

impl ScalarResidence {
    /// `ncclScalarDevice`: in memory that the device reads, while the operation runs.
    pub const DEVICE: Self = Self(0);
    /// `ncclScalarHostImmediate`: in host memory, read before the creating call returns.
    pub const HOST_IMMEDIATE: Self = Self(1);
}

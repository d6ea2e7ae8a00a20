//! The return codes of NCCL's functions.

use std::ffi::c_int;

use crate::Version;

/// `ncclResult_t`, open to codes of future versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Code(pub c_int);

impl Code {
    /// `ncclSuccess`.
    pub const SUCCESS: Self = Self(0);
    /// `ncclUnhandledCudaError`: a CUDA call failed.
    pub const UNHANDLED_CUDA_ERROR: Self = Self(1);
    /// `ncclSystemError`: a system call failed.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// `ncclInternalError`: a bug in NCCL, or memory corruption.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// `ncclInvalidArgument`: an argument has an invalid value.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// `ncclInvalidUsage`: calls are inconsistent, such as two ranks on one device.
    pub const INVALID_USAGE: Self = Self(5);
    /// `ncclRemoteError`: a peer exited, or the network failed.
    pub const REMOTE_ERROR: Self = Self(6);
    /// `ncclInProgress`: an operation of a non-blocking communicator is in progress. Not an error.
    pub const IN_PROGRESS: Self = Self(7);
    /// `ncclTimeout` since 2.30; no earlier version returned 8, which was `ncclNumResults`.
    pub const TIMEOUT: Self = Self(8);

    /// Returns the code's name in nccl.h of `version`, or `"unknown result"`.
    ///
    /// # Examples
    /// ```
    /// use nccl_sys::{Code, Version};
    /// assert_eq!(Code::TIMEOUT.name(Version::new(2, 30, 0)), "ncclTimeout");
    /// assert_eq!(Code::TIMEOUT.name(Version::new(2, 29, 7)), "unknown result");
    /// ```
    #[must_use]
    pub fn name(self, version: Version) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            8 if version >= Version::new(2, 30, 0) => "ncclTimeout",
            _ => "unknown result",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_has_its_name_and_what_is_unknown_is_told_so() {
        let names: Vec<_> = (0..10).map(|code| Code(code).name(Version::new(2, 32, 3))).collect();
        assert_eq!(names[..3], ["ncclSuccess", "ncclUnhandledCudaError", "ncclSystemError"]);
        assert_eq!(names[3..6], ["ncclInternalError", "ncclInvalidArgument", "ncclInvalidUsage"]);
        assert_eq!(names[6..], ["ncclRemoteError", "ncclInProgress", "ncclTimeout", "unknown result"]);
        assert_eq!(Code(8).name(Version::new(2, 28, 9)), "unknown result");
    }
}

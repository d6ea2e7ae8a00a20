//! The result of `ncclGroupSimulateEnd`.

use std::ffi::c_uint;

use crate::Version;

/// `ncclSimInfo_t`: the estimated cost of a group of operations.
///
/// # Source
/// `NCCL_SIM_INFO_INITIALIZER` of nccl.h 2.22.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct SimInfo {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// The estimated time in microseconds; -1 before the call.
    pub estimated_time: f32,
}

impl SimInfo {
    /// Creates a value for NCCL to fill in.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0x7468_5283,
            version: Version::new(2, 22, 0).code() as c_uint,
            estimated_time: -1.0,
        }
    }
}

impl Default for SimInfo {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_layout_is_that_of_the_header() {
        let offsets = [offset_of!(SimInfo, magic), offset_of!(SimInfo, version), offset_of!(SimInfo, estimated_time)];
        assert_eq!((offsets, size_of::<SimInfo>()), ([8, 12, 16], 24));
    }
}

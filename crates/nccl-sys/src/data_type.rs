//! Element types.

use std::ffi::c_int;

use crate::Version;

/// `ncclDataType_t`, open to types of future versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DataType(pub c_int);

impl DataType {
    /// `ncclInt8`.
    pub const INT8: Self = Self(0);
    /// `ncclUint8`.
    pub const UINT8: Self = Self(1);
    /// `ncclInt32`.
    pub const INT32: Self = Self(2);
    /// `ncclUint32`.
    pub const UINT32: Self = Self(3);
    /// `ncclInt64`.
    pub const INT64: Self = Self(4);
    /// `ncclUint64`.
    pub const UINT64: Self = Self(5);
    /// `ncclFloat16`.
    pub const FLOAT16: Self = Self(6);
    /// `ncclFloat32`.
    pub const FLOAT32: Self = Self(7);
    /// `ncclFloat64`.
    pub const FLOAT64: Self = Self(8);
    /// `ncclBfloat16`.
    pub const BFLOAT16: Self = Self(9);
    /// `ncclFloat8e4m3`, since 2.24; reductions require compute capability 9.0 or newer.
    pub const FLOAT8_E4M3: Self = Self(10);
    /// `ncclFloat8e5m2`, since 2.24; reductions require compute capability 9.0 or newer.
    pub const FLOAT8_E5M2: Self = Self(11);

    /// All types known to this crate.
    pub const ALL: [Self; 12] = [
        Self::INT8,
        Self::UINT8,
        Self::INT32,
        Self::UINT32,
        Self::INT64,
        Self::UINT64,
        Self::FLOAT16,
        Self::FLOAT32,
        Self::FLOAT64,
        Self::BFLOAT16,
        Self::FLOAT8_E4M3,
        Self::FLOAT8_E5M2,
    ];

    /// Returns the size of an element in bytes, or `None` for a type unknown to this crate.
    #[must_use]
    pub const fn size_bytes(self) -> Option<usize> {
        match self.0 {
            0 | 1 | 10 | 11 => Some(1),
            6 | 9 => Some(2),
            2 | 3 | 7 => Some(4),
            4 | 5 | 8 => Some(8),
            _ => None,
        }
    }

    /// Returns the version of NCCL that introduced the type, if newer than [`Version::OLDEST`].
    #[must_use]
    pub const fn since(self) -> Option<Version> {
        match self.0 {
            10 | 11 => Some(Version::new(2, 24, 0)),
            _ => None,
        }
    }
}

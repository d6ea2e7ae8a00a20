//! Element types of buffers, and how long host memory is used.

use std::ffi::c_int;

/// `PJRT_Buffer_Type`, open to types of future versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct BufferType(pub c_int);

impl BufferType {
    /// No type.
    pub const INVALID: Self = Self(0);
    /// Truth values, one byte each.
    pub const PRED: Self = Self(1);
    /// Signed integers of 8 bits.
    pub const S8: Self = Self(2);
    /// Signed integers of 16 bits.
    pub const S16: Self = Self(3);
    /// Signed integers of 32 bits.
    pub const S32: Self = Self(4);
    /// Signed integers of 64 bits.
    pub const S64: Self = Self(5);
    /// Unsigned integers of 8 bits.
    pub const U8: Self = Self(6);
    /// Unsigned integers of 16 bits.
    pub const U16: Self = Self(7);
    /// Unsigned integers of 32 bits.
    pub const U32: Self = Self(8);
    /// Unsigned integers of 64 bits.
    pub const U64: Self = Self(9);
    /// IEEE numbers of 16 bits.
    pub const F16: Self = Self(10);
    /// IEEE numbers of 32 bits.
    pub const F32: Self = Self(11);
    /// IEEE numbers of 64 bits.
    pub const F64: Self = Self(12);
    /// bfloat16.
    pub const BF16: Self = Self(13);
}

/// `PJRT_HostBufferSemantics`: how long a copy to a device reads host memory, open to future values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct HostBufferSemantics(pub c_int);

impl HostBufferSemantics {
    /// During the call only.
    pub const IMMUTABLE_ONLY_DURING_CALL: Self = Self(0);
    /// Until the event `done_with_host_buffer`.
    pub const IMMUTABLE_UNTIL_TRANSFER_COMPLETES: Self = Self(1);
    /// For as long as the buffer exists, which may be that memory; it is never written.
    pub const IMMUTABLE_ZERO_COPY: Self = Self(2);
    /// For as long as the buffer exists, which may be that memory, and may be written.
    pub const MUTABLE_ZERO_COPY: Self = Self(3);
}

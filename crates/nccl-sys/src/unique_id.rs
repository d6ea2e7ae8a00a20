//! What the ranks of a communicator find each other by.

use std::fmt;

/// `ncclUniqueId`: made once by `ncclGetUniqueId`, carried to every rank by the caller, used for one communicator.
///
/// Whoever has it can join, so it should travel as a password does.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// `NCCL_UNIQUE_ID_BYTES`.
    pub const BYTES: usize = 128;

    /// An id that was made elsewhere.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes to carry to other ranks.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

/// Without the bytes.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

//! What can go wrong with devices.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A data type's name was not recognised.
    #[error("data type {given:?} is not known; give one of f32, f64, f16, bf16, i8, u8, i32, u32, i64, u64")]
    UnknownDType {
        /// The name that was given.
        given: String,
    },
    /// A view was asked for elements of another type than it holds.
    #[error("elements of type {asked} were asked for, but the buffer holds {held}; ask for {held}, or convert first")]
    WrongDType {
        /// The type that was asked for.
        asked: crate::DType,
        /// The type that is there.
        held: crate::DType,
    },
    /// A range of elements is not inside the buffer.
    #[error("elements {start}..{end} were asked for, but the buffer holds {len}")]
    OutOfRange {
        /// First element of the range.
        start: usize,
        /// One past its last element.
        end: usize,
        /// Elements in the buffer.
        len: usize,
    },
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

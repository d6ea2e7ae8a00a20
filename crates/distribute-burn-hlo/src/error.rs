//! Errors of lowering.

use distribute_types::{Class, ErrorClass};

/// An error of lowering burn's operations.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation, or one of its options, has no lowering.
    #[error("{operation} is not lowered to StableHLO: {problem}")]
    Unsupported {
        /// The name of the operation in burn's graphs.
        operation: String,
        /// The reason, and a remedy.
        problem: String,
    },
    /// An operation reads a tensor that nothing before it has made.
    #[error("{operation} reads tensor {tensor}, which is neither bound nor made by an operation before it")]
    Unbound {
        /// The operation.
        operation: String,
        /// The id of the tensor in the graph.
        tensor: u64,
    },
    /// The value of a tensor has another type than the graph says.
    #[error("{operation}: tensor {tensor} is {given}, but the graph says {expected}")]
    TypeDiffers {
        /// The operation.
        operation: String,
        /// The id of the tensor in the graph.
        tensor: u64,
        /// The type of the value.
        given: String,
        /// The type in the graph.
        expected: String,
    },
    /// The builder refused an operation. This is an error of this crate, or of the graph.
    #[error("{operation}: {source}")]
    Hlo {
        /// The operation of burn.
        operation: String,
        /// The builder's error.
        source: distribute_hlo::Error,
    },
}

impl ErrorClass for Error {
    fn class(&self) -> Class {
        Class::PERMANENT
    }
}

/// The result of lowering.
pub type Result<T, E = Error> = std::result::Result<T, E>;

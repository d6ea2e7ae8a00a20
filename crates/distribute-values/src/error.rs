//! What can go wrong with distributed values.

use distribute_collectives::ReduceOp;
use distribute_device::DType;

use crate::{Aggregation, Synchronization};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Components that must have the same shape do not.
    #[error("{what}: replica {replica} has shape {got:?}, replica 0 has {expected:?}; {remedy}")]
    Shape {
        /// The operation.
        what: &'static str,
        /// The replica that differs.
        replica: usize,
        /// Its shape.
        got: Vec<usize>,
        /// The shape of replica 0.
        expected: Vec<usize>,
        /// How to mend it.
        remedy: &'static str,
    },
    /// An axis is outside a value's shape.
    #[error("axis {axis} is outside a value of shape {shape:?}; give an axis below {}", shape.len())]
    Axis {
        /// The axis.
        axis: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A reduction is not defined for values of a type.
    #[error("reduce: {op} of {dtype} values: {remedy}")]
    Reduction {
        /// The operation.
        op: ReduceOp,
        /// The type of the values.
        dtype: DType,
        /// Why, and what to do instead.
        remedy: &'static str,
    },
    /// A list of components has the wrong length.
    #[error("{what} has {got} components, but this process has {expected} replicas")]
    Components {
        /// What was given.
        what: &'static str,
        /// Its components.
        got: usize,
        /// Local replicas.
        expected: usize,
    },
    /// Replicas bring structures of different forms.
    #[error(
        "{what}: replica {replica} has {got}, replica 0 has {expected}; all replicas must return the same structure"
    )]
    Structure {
        /// What differs: a list, a map.
        what: &'static str,
        /// The replica that differs.
        replica: usize,
        /// Its form.
        got: String,
        /// The form on replica 0.
        expected: String,
    },
    /// A variable cannot be written, or read, where the caller is.
    #[error("variable {name:?} ({synchronization:?}, aggregation {aggregation:?}): {problem}")]
    Variable {
        /// The variable.
        name: String,
        /// Its synchronization.
        synchronization: Synchronization,
        /// Its aggregation.
        aggregation: Aggregation,
        /// What is wrong, and what to do.
        problem: &'static str,
    },
    /// A row of a variable is written that it does not have.
    #[error("variable {name:?}: row {index} was given, but it has rows 0..{rows}; give indices of rows that are there")]
    Row {
        /// The variable.
        name: String,
        /// The index.
        index: i64,
        /// Its rows.
        rows: usize,
    },
    /// A variable cannot have these options.
    #[error("variable {name:?} of type {dtype}: {problem}")]
    VariableOptions {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
        /// What is wrong, and what to do.
        problem: &'static str,
    },
    /// A tensor library refused.
    #[error("{action}: {source}")]
    Tensor {
        /// What was tried.
        action: &'static str,
        /// The library's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// A buffer was of another type or size.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

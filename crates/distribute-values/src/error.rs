//! Errors of distributed values.

use distribute_types::{Class, ErrorClass};

use distribute_collectives::ReduceOp;
use distribute_device::DType;

use crate::{Aggregation, Synchronization};

/// An error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Components that must have the same shape have different ones.
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
        /// The remedy.
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
        /// The reason and the remedy.
        remedy: &'static str,
    },
    /// An operation is not defined for some rows of a tensor.
    #[error("rows with indices: {problem}")]
    Rows {
        /// The problem and the remedy.
        problem: String,
    },
    /// A list of components has the wrong length.
    #[error("{what} has {got} components, but this process has {expected} replicas")]
    Components {
        /// The value.
        what: &'static str,
        /// Its number of components.
        got: usize,
        /// Number of local replicas.
        expected: usize,
    },
    /// Replicas have structures of different forms.
    #[error(
        "{what}: replica {replica} has {got}, replica 0 has {expected}; all replicas must return the same structure"
    )]
    Structure {
        /// The part that differs: a list, a map.
        what: &'static str,
        /// The replica that differs.
        replica: usize,
        /// Its form.
        got: String,
        /// The form on replica 0.
        expected: String,
    },
    /// A variable cannot be written or read in the caller's place.
    #[error("variable {name:?} ({synchronization:?}, aggregation {aggregation:?}): {problem}")]
    Variable {
        /// The variable.
        name: String,
        /// Its synchronization.
        synchronization: Synchronization,
        /// Its aggregation.
        aggregation: Aggregation,
        /// The problem and the remedy.
        problem: &'static str,
    },
    /// An index names a row that the variable does not have.
    #[error("variable {name:?}: row {index} was given, but it has rows 0..{rows}; give indices of rows that are there")]
    Row {
        /// The variable.
        name: String,
        /// The index.
        index: i64,
        /// Its number of rows.
        rows: usize,
    },
    /// Ranks made different calls where this one used the variable: they use variables in different orders, under
    /// different names or in different ways, or one of them uses none. Remedy: use the same variables in the same order
    /// on every rank.
    #[error(
        "variable {name:?}: {source}; every rank must create, write and read the same variables, under the same names \
         and in the same order (the order of a HashMap differs between processes: iterate a list or a BTreeMap)"
    )]
    VariableOrder {
        /// The variable that this rank used.
        name: String,
        /// The calls that differ.
        source: distribute_collectives::Error,
    },
    /// The options do not fit the variable.
    #[error("variable {name:?} of type {dtype}: {problem}")]
    VariableOptions {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
        /// The problem and the remedy.
        problem: &'static str,
    },
    /// An operation of a tensor library failed.
    #[error("{action}: {source}")]
    Tensor {
        /// The operation.
        action: &'static str,
        /// The library's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// A buffer has another type or size than expected.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
}

distribute_types::debug_is_display!(Error);

impl Error {
    /// Adds the name of the variable that this rank used to the error of ranks that made different calls.
    pub(crate) fn in_variable(self, name: &str) -> Error {
        match self {
            Error::Collective(source @ distribute_collectives::Error::Mismatch { .. }) => {
                Error::VariableOrder { name: name.to_owned(), source }
            }
            other => other,
        }
    }
}

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Collective(error) | Error::VariableOrder { source: error, .. } => error.class(),
            Error::Device(error) => error.class(),
            _ => Class::PERMANENT,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

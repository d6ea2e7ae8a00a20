//! Values and variables that have one component per replica, and the rules by which the components are combined.
//!
//! The crate depends on no tensor library. A library's tensors enter through [`TensorStorage`]: a data type, a shape
//! and contiguous elements that can be reduced in place.
//!
//! - [`PerReplica`]: different values on each replica; [`Mirrored`]: equal ones.
//! - [`DistributedVariable`]: state with one component per replica, kept equal on write or combined on read.
//! - [`CallContext`]: whether code runs in a replica or outside, which determines the meaning of a read or a write.
//! - [`Structure`]: tensors, some [rows](IndexedRows) of them, and nests; [`reduce_structure`] and
//!   [`gather_structure`] combine those of many replicas, across processes too.
//! - [`PerWorkerVariable`]: state that each process has for itself.
//!
//! # Examples
//! ```
//! use distribute_values::PerReplica;
//! let losses = PerReplica::new(vec![0.5, 1.5]);
//! assert_eq!(losses.map(|loss| loss * 2.0).values(), [1.0, 3.0]);
//! ```
//!
//! # Invariants
//! - Components of an on-write variable are equal whenever no replica is inside an assignment.
//! - A mean over examples is a sum weighted by counts, never a mean of means.

mod combine;
mod elements;
mod error;
mod examples;
mod indexed_rows;
mod per_replica;
mod per_worker;
mod storage;
mod structure;
mod variable;

pub use combine::{Axis, broadcast_from, broadcast_value, gather_values, reduce_values};
pub use error::{Error, Result};
pub use examples::{reduce_examples, with_rows};
pub use indexed_rows::{Indexed, IndexedRows};
pub use per_replica::{Mirrored, PerReplica};
pub use per_worker::PerWorkerVariable;
pub use storage::{Host, HostTensor, TensorStorage, with_storage};
pub use structure::{Leaves, Nested, Number, Single, Structure, gather_structure, reduce_structure};
pub use variable::{
    Aggregation, Assignment, CallContext, DistributedVariable, Scatter, Synchronization, Undo, VariableOptions,
};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

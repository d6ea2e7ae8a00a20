//! Lowers burn's recorded operations to StableHLO programs.
//!
//! burn's capture backend records the operations of a model, forward and backward, as a list of
//! [`OperationIr`](burn_ir::OperationIr). [`Lowering`] adds them to a [`Builder`](distribute_hlo::Builder), one
//! after another, without those whose results are not needed. This crate knows neither devices nor replicas.
//!
//! [`OPERATIONS`] lists all operations of burn with what each becomes.
//!
//! # Invariants
//! - An operation without a lowering is an error that names it, never another result.
//! - Each result has the type that burn's graph says.

#![forbid(unsafe_code)]

mod activation;
mod base;
mod boolean;
mod contraction;
mod element;
mod error;
mod float;
mod int;
mod lowering;
mod math;
mod module;
mod numeric;
mod operations;
mod order;
mod random;
mod reduction;

pub use element::element_type;
pub use error::{Error, Result};
pub use lowering::Lowering;
pub use operations::OPERATIONS;

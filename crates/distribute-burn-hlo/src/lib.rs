//! Lowers burn's recorded operations to StableHLO programs.
//!
//! burn's capture backend records the operations of a model, forward and backward, as a list of
//! [`OperationIr`](burn_ir::OperationIr). [`Lowering`] adds them to a [`Builder`](distribute_hlo::Builder), one
//! after another, without those whose results are not needed. This crate knows neither devices nor replicas.
//!
//! [`OPERATIONS`] lists all operations of burn with what each becomes; `docs/burn_operations.md` has the same table.
//!
//! # Examples
//! ```
//! use burn_backend::DType;
//! use burn_ir::{FloatOperationIr, OperationIr, TensorId, TensorIr, UnaryOpIr};
//! use distribute_burn_hlo::Lowering;
//! use distribute_hlo::{Builder, ElementType, TensorType};
//!
//! let (x, y) = (TensorId::new(0), TensorId::new(1));
//! let tensor = |id| TensorIr::uninit(id, [4].into(), DType::F32);
//! let tanh = FloatOperationIr::Tanh(UnaryOpIr { input: tensor(x), out: tensor(y) });
//!
//! let mut builder = Builder::new("tanh");
//! let parameter = builder.parameter(TensorType::new(ElementType::F32, [4]));
//! let mut lowering = Lowering::new(&mut builder);
//! lowering.bind(x, parameter);
//! lowering.lower(&[OperationIr::Float(DType::F32, tanh)], &[y])?;
//! let result = lowering.value(y)?;
//! let program = builder.finish(&[result])?;
//! assert!(program.text().contains("stablehlo.tanh"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Results
//! Integers, truth values and places of elements are those of burn's Flex backend. Floating-point numbers are close to
//! its: NaN and infinities are where it has them, and sums are added in another order. Some results are not defined, in
//! burn or in programs: those of an index out of range, of an integer divided by 0, and of two values that are assigned
//! to one place. A device needs the option named at [`Reducer`](distribute_hlo::Reducer) to keep NaN in extremes.
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
mod graph;
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

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

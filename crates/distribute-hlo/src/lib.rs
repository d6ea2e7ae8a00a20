//! Builds StableHLO programs, the input of the compilers behind PJRT plugins, such as that of TPUs.
//!
//! It knows neither plugins nor devices: a [`Program`] is data and text. It folds, simplifies and differentiates
//! nothing.
//!
//! - [`Builder`] has one method for each operation, which checks types and sizes and returns a [`Value`].
//! - [`Program`] is the result: the text for a plugin, the graph for tools, a fingerprint for caches.
//! - [`TensorType`], [`ElementType`] and [`Literal`] are types and constants; [`Scalar`] the Rust types of elements.
//! - [`OpKind`] is an operation with its attributes: [`UnaryOp`], [`BinaryOp`], [`CompareOp`], [`Reducer`],
//!   [`DotDimensions`], [`Convolution`], [`Window`], [`GatherDimensions`], [`ScatterDimensions`], [`CollectiveGroups`].
//!
//! # Examples
//! ```
//! use distribute_hlo::{Builder, CollectiveGroups, ElementType, Reducer, TensorType};
//!
//! // w − 0.1 · mean of g over 4 replicas, into the buffer of w.
//! let mut b = Builder::new("step").replicas(4);
//! let ty = TensorType::new(ElementType::F32, [1000]);
//! let w = b.donated_parameter(ty.clone());
//! let g = b.parameter(ty);
//! let sum = b.all_reduce(g, Reducer::Sum, &CollectiveGroups::All)?;
//! let rate = b.splat(&[1000], 0.1f32 / 4.0)?;
//! let step = b.multiply(rate, sum)?;
//! let updated = b.subtract(w, step)?;
//! b.alias(w, 0)?;
//! let program = b.finish(&[updated])?;
//! assert_eq!(program.counts().get("all_reduce"), Some(&1));
//! # Ok::<(), distribute_hlo::Error>(())
//! ```
//!
//! # Invariants
//! - A value of another builder, or of a body that has ended, is an error and never another value.
//! - Equal calls make equal texts.
//!
//! # Source
//! The StableHLO specification, <https://openxla.org/stablehlo/spec>.

#![forbid(unsafe_code)]

mod attributes;
mod builder;
mod dimensions;
mod error;
mod literal;
mod op;
mod ops;
mod print;
mod program;
mod scalar;
mod shape;
mod tensor_type;

pub use attributes::{BinaryOp, CollectiveGroups, CompareOp, Precision, Reducer, RngAlgorithm, SortOrder, UnaryOp};
pub use builder::{Builder, Value};
pub use dimensions::{Convolution, DotDimensions, GatherDimensions, ScatterDimensions, Window};
pub use distribute_types::ElementType;
pub use error::{Error, Result};
pub use literal::{Literal, Number};
pub use op::OpKind;
pub use program::{Operation, Parameter, Program, Region, ValueId};
pub use scalar::Scalar;
pub use tensor_type::TensorType;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

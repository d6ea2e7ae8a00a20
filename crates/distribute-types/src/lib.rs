//! The vocabulary that the crates of the workspace share.
//!
//! It does not depend on devices, clusters or collectives, nor on any crate that does.
//!
//! - [`DType`] and [`Element`] are the element types of buffers, as values and as Rust types; [`with_dtype!`] converts
//!   from the former to the latter.
//! - [`ElementType`] is the type of an element in a compiled program.
//! - [`f16_from_f64`] and [`bf16_from_f64`] round to 16 bits once.
//! - [`Rank`] is a member's place in a process group.
//! - [`ErrorClass`] tells which part of a job an error concerns, whether a restart helps, and the exit code of the
//!   process; [`debug_is_display!`] makes a `main` that returns it print a sentence.
//! - [`Waits`] are the times for which a process waited for its peers and for data.
//!
//! # Examples
//! ```
//! use distribute_types::{DType, Rank, UnknownDType};
//! assert_eq!("bf16".parse::<DType>()?.size_bytes(), 2);
//! assert_eq!(Rank(3).index(), 3);
//! # Ok::<(), UnknownDType>(())
//! ```

mod debug_is_display;
mod dtype;
mod element_type;
mod error_class;
mod fnv;
mod narrow;
mod rank;
mod setters;
mod topology;
mod waits;

pub use dtype::{DType, Element, UnknownDType};
pub use element_type::ElementType;
pub use error_class::{Class, Classified, ErrorClass, FailureKind, Scope};
pub use fnv::{FNV32, FNV64, FNV128, fnv1a_32, fnv1a_64, fnv1a_128};
pub use half::{bf16, f16};
pub use narrow::{bf16_from_f64, f16_from_f64};
pub use rank::Rank;
pub use topology::{InvalidTopology, Topology};
pub use waits::Waits;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

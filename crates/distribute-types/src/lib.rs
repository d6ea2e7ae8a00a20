//! The vocabulary that the crates of the workspace share.
//!
//! It knows no devices, clusters or collectives, and depends on nothing that does.
//!
//! - [`DType`] and [`Element`]: the element types of buffers, as values and as Rust types; [`with_dtype!`] goes from one to the
//!   other.
//! - [`Rank`]: a place in a process group.
//! - [`fnv1a_64`] and its like: digests that are the same on every machine.
//! - [`ErrorClass`]: who an error concerns, whether a restart helps, and the exit code of a process that ends by it.
//!
//! # Examples
//! ```
//! use distribute_types::{DType, Rank, UnknownDType};
//! assert_eq!("bf16".parse::<DType>()?.size_bytes(), 2);
//! assert_eq!(Rank(3).index(), 3);
//! # Ok::<(), UnknownDType>(())
//! ```

mod dtype;
mod error_class;
mod fnv;
mod rank;

pub use dtype::{DType, Element, UnknownDType};
pub use error_class::{Class, Classified, ErrorClass, FailureKind, Scope};
pub use fnv::{FNV32, FNV64, FNV128, fnv1a_32, fnv1a_64, fnv1a_128};
pub use half::{bf16, f16};
pub use rank::Rank;

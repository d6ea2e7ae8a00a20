//! The vocabulary that the crates of the workspace share.
//!
//! It knows no devices, clusters or collectives, and depends on nothing that does.
//!
//! - [`DType`] and [`Element`]: the element types of buffers, as values and as Rust types; [`with_dtype!`] goes from one to the
//!   other.
//! - [`Rank`]: a place in a process group; [`Topology`]: which of all replicas a process has.
//! - [`fnv1a_64`] and its like: digests that are the same on every machine.
//! - [`setters!`]: setters of structs of options.
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
mod setters;
mod topology;

pub use dtype::{DType, Element, UnknownDType};
pub use error_class::{Class, Classified, ErrorClass, FailureKind, Scope};
pub use fnv::{FNV32, FNV64, FNV128, fnv1a_32, fnv1a_64, fnv1a_128};
pub use half::{bf16, f16};
pub use rank::Rank;
pub use topology::{InvalidTopology, Topology};

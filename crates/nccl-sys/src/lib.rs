//! Bindings of NCCL, opened at run time: raw functions, open integers for its enums, descriptive errors.
//!
//! The crate exposes C calls and manages neither ownership, streams nor threads: a communicator is a pointer, a stream
//! is a `cudaStream_t` (or `CUstream`) as `*mut c_void`. Building it requires neither CUDA nor NCCL; if NCCL is absent
//! at run time, the error value lists every file tried.
//!
//! - [`Library`]: an open NCCL with one `unsafe` method per function. [`Search`]: the places that are searched for it.
//! - [`Code`], [`DataType`], [`RedOp`], [`ScalarResidence`]: NCCL's enums as open integers, for values of future
//!   versions.
//! - [`Config`], [`UniqueId`], [`SimInfo`]: NCCL's structures.
//! - [`Progress`]: done, or in progress, as non-blocking communicators report.
//! - [`Error`]: NCCL is missing, lacks a function, or a call failed, with NCCL's own message.
//!
//! # This crate or `cudarc::nccl`
//! cudarc binds one header, chosen by a Cargo feature, with closed enums; it panics if the library or a function is
//! missing, and searches for `libnccl.so` under names that packages and Python wheels without headers lack. Choose it
//! for a program that is built for one machine with a known NCCL, with ownership of communicators and slices included.
//!
//! Choose this crate for one binary that runs with any NCCL since 2.18, or without one: it finds `libnccl.so.2` where
//! packages, CUDA and wheels install it, asks the library for its version, knows which version introduced each
//! function, and preserves codes, names and texts of errors. Streams and memory may still be cudarc's:
//! `stream.cu_stream().cast()`.
//!
//! # Examples
//! ```no_run
//! use nccl_sys::{DataType, Library, Progress, RedOp, UniqueId};
//!
//! # fn rank_and_device_memory() -> (i32, UniqueId, *mut std::ffi::c_void, *mut std::ffi::c_void) { panic!() }
//! let nccl = Library::load()?;
//! println!("NCCL {} at {}", nccl.version(), nccl.path().display());
//!
//! let (rank, id, memory, stream) = rank_and_device_memory();
//! let mut comm = std::ptr::null_mut();
//! // SAFETY: `comm` outlives the call; the other rank calls likewise; the memory holds 1024 floats until the stream
//! // is done.
//! unsafe {
//!     nccl.comm_init_rank(&mut comm, 2, id, rank)?;
//!     let progress = nccl.all_reduce(memory, memory, 1024, DataType::FLOAT32, RedOp::SUM, comm, stream)?;
//!     assert_eq!(progress, Progress::Done);
//! }
//! # Ok::<(), nccl_sys::Error>(())
//! ```
//!
//! # Invariants
//! - Nothing panics because NCCL, a function or a value is missing or unknown.
//! - An open NCCL is never unloaded, since its threads may be running.

mod code;
mod config;
mod data_type;
mod error;
mod functions;
mod library;
mod red_op;
mod search;
mod sim_info;
mod unique_id;
mod version;

pub use code::Code;
pub use config::Config;
pub use data_type::DataType;
pub use error::{Attempt, Error, Problem};
pub use library::{Comm, Library, NcclComm, Progress, Stream};
pub use red_op::{RedOp, ScalarResidence};
pub use search::{ENV_LIBRARY, NamedBy, Search};
pub use sim_info::SimInfo;
pub use unique_id::UniqueId;
pub use version::Version;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

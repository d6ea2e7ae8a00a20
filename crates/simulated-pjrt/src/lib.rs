//! A stand-in for a PJRT plugin on host memory, whose versions, failures and delays are scripted.
//!
//! The shared object of this crate exports `GetPjrtApi`; [`install`] copies it to a folder, with a [`Script`] next to
//! it. Each copy is a plugin of its own, so that tests of one process do not meet.
//!
//! - A program takes as many arguments as its function `main` has `%argN:`, or `%N:`, and gives them back as its
//!   outputs, in their order. An argument with `tf.aliasing_output` is donated to its output: it is deleted, and the
//!   memory is not copied.
//! - Copies are made when their event fires: host memory is read and written that late.
//! - Argument structs that are shorter than the header says are refused, as real plugins do.
//! - [`Installed::live`] counts the objects that were not destroyed.
//!
//! # Examples
//! ```no_run
//! use simulated_pjrt::{Script, install};
//!
//! let folder = std::env::temp_dir();
//! let plugin = install(&folder, &Script { devices: 2, ..Script::default() })?;
//! let library = pjrt_sys::Library::open(&pjrt_sys::Search::file(plugin.path()))?;
//! assert_eq!(library.version().to_string(), "0.81");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Not modelled
//! Computation, layouts, memories, and several processes: the key-value store is called, and its answers are checked.

#![expect(clippy::multiple_unsafe_ops_per_block, reason = "lists of lists of C are read in one expression")]

mod buffers;
mod clients;
mod events;
mod failure;
mod install;
mod programs;
mod script;
mod table;
mod topologies;

pub use failure::Live;
pub use install::{Installed, install};
pub use script::{Fail, Script};

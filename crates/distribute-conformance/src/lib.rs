//! The promises that every strategy makes: one body per promise, run under each strategy by `cargo xtask conformance`.
//!
//! Strategies of one process run in this process, a new one for each scenario; those of several processes run in
//! processes of this program, started anew for each scenario. Parameter servers and their workers are threads of this
//! process, with sockets between them.
//!
//! The Rust of docs/ is tested with this crate (`cargo test --workspace --doc -- docs.rs`) and not with the facade,
//! since packages are built without docs/.

mod arrangement;
mod check;
mod conditions;
mod library;
mod one_replica;
mod place;
mod scenarios;
mod suite;

pub use check::{Outcome, is_tried};
pub use scenarios::Case;
pub use suite::{main, run_within};

#[cfg(doctest)]
include!(concat!(env!("OUT_DIR"), "/docs.rs"));

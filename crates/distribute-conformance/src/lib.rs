//! The Rust of docs/, as tests: `cargo test --workspace --doc -- docs.rs`.
//!
//! This crate has them, and not the facade, since packages are built without docs/.

#[cfg(doctest)]
include!(concat!(env!("OUT_DIR"), "/docs.rs"));

//! All integration tests but those that Miri interprets (`threads.rs`), in one binary, which is linked once.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod faults;
mod futures;
mod groups;
mod harness;
mod matrix;
mod namespaces;
mod numbers;
mod operations;
mod own_transport;
mod panics;
mod stores;

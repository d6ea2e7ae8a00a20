//! All integration tests but those that Miri interprets (`threads.rs`), in one binary, which is linked once.

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

//! All integration tests, in one binary, which is linked once.

mod coordinator;
mod faults;
mod harness;
mod soak;
mod strangers;
mod variables;

//! All integration tests, in one binary, which is linked once.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod coordinator;
mod event_loop;
mod faults;
mod harness;
mod islands;
mod large_tables;
mod restarts;
mod restored;
mod soak;
mod strangers;
mod synchronous;
mod variables;

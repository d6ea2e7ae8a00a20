//! burn's learner under strategies.
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;
mod equality;
mod failures;
mod files;
mod groups;
mod overlap;
mod sharded;
mod tied;
mod workers;

//! Training of burn models under strategies.
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;
mod data;
mod elastic;
mod equality;
mod failures;
mod graphs;
mod integers;
mod mixed_precision;
mod optimizer_states;
mod optimizers;
mod sharded;
mod statistics;
mod tensor_parallel;
mod tied;
mod trainer;

//! Tests of lowering: burn's Flex backend is the oracle of programs that the evaluator and a plugin run.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod elementwise;
mod harness;
mod harness_tests;
mod models;
mod module;
mod movement;
mod operations;
mod plugin;
mod random;
mod reductions;
mod refusals;
mod values;

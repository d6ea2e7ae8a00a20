//! Tests of the evaluator, and of compilers against it.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod case;
mod every_operation;
mod identities;
mod plugin;
mod replicas;

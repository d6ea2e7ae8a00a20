//! Tests of the builder: refusals, texts and finished programs.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod programs;
mod refusals;
mod text;

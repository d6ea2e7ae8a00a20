//! The simulated NCCL, opened as a program opens it.
#![expect(unsafe_code, reason = "functions of C are called")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod collectives;
mod communicators;
mod cuda;
mod processes;
mod streams;
mod support;

//! Tests of PJRT plugins: a simulated one, and XLA's for CPUs and libtpu where they are named.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod cpu;
mod libtpu;
mod programs;
mod simulated;

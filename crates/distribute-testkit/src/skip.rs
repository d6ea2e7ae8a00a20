//! Tests that cannot run here.

use std::fmt::Display;
use std::io::{Write, stderr};
use std::thread;

/// Prints that the test of this thread is skipped, and why, on standard error. `cargo test` shows the line: it captures
/// the output of `println!` and `eprintln!` alone. Name what is missing, and how to install it.
pub fn skipped(reason: impl Display) {
    let thread = thread::current();
    let line = match thread.name() {
        Some(test) if test != "main" => format!("skipped: {test}: {reason}\n"),
        _ => format!("skipped: {reason}\n"),
    };
    // In one piece, so that lines of several tests do not mix. A closed standard error does not fail a test.
    let _ = stderr().write_all(line.as_bytes());
}

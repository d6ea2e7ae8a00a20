//! Tests that cannot run here.

use std::fmt::{Arguments, Display};
use std::io::{Write, stderr};
use std::thread;

/// Prints that the test of this thread is skipped, and why, on standard error. `cargo test` shows the line: it captures
/// the output of `println!` and `eprintln!` alone. Name what is missing, and how to install it.
pub fn skipped(reason: impl Display) {
    let thread = thread::current();
    match thread.name() {
        Some(test) if test != "main" => line(format_args!("skipped: {test}: {reason}\n")),
        _ => line(format_args!("skipped: {reason}\n")),
    }
}

/// Prints a line on standard error, in one piece, so that lines of several tests do not mix. A closed standard error
/// does not fail a test.
pub(crate) fn line(text: Arguments<'_>) {
    let _ = stderr().write_all(text.to_string().as_bytes());
}

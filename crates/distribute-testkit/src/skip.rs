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

/// Prints on standard error what a program that a test has started tells of what it has skipped, and why: the parts of
/// its output from `skipped: ` to the end of the line. `cargo test` shows them, as it shows those of [`skipped`]; the
/// output of a program that has succeeded is dropped otherwise.
pub fn show_skips(printed: &str) {
    for skip in skips(printed) {
        line(format_args!("{skip}\n"));
    }
}

/// Returns the parts of lines that tell what was skipped. Harnesses print the names of tests in front.
fn skips(printed: &str) -> impl Iterator<Item = &str> {
    printed.lines().filter_map(|line| line.find("skipped: ").map(|at| &line[at..]))
}

/// Prints a line on standard error, in one piece, so that lines of several tests do not mix. A closed standard error
/// does not fail a test.
pub(crate) fn line(text: Arguments<'_>) {
    let _ = stderr().write_all(text.to_string().as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_found_in_the_output_of_programs() {
        let printed =
            "running 2 tests\ntest a ... skipped: a: no b is installed\nok\nskipped: Tpu: no plugin\n0 skipped\n";
        assert_eq!(skips(printed).collect::<Vec<_>>(), ["skipped: a: no b is installed", "skipped: Tpu: no plugin"]);
    }
}

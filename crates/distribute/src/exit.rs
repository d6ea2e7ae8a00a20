//! The end of a program: messages and exit codes.

use std::process::ExitCode;

use crate::Result;

/// Converts a program's outcome into its exit code. An error's message is written to standard error, and the code tells
/// job managers [what to do](crate::Error::exit_code).
///
/// # Examples
/// ```
/// use std::process::ExitCode;
///
/// fn train() -> distribute::Result<()> {
///     Ok(())
/// }
///
/// fn main() -> ExitCode {
///     distribute::exit(train())
/// }
/// ```
#[expect(clippy::print_stderr, reason = "it is the program's last word")]
pub fn exit(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

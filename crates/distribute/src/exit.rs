//! How programs end.

use std::process::ExitCode;

use crate::Result;

/// What `main` returns for a program's outcome: where it is an error, its sentence goes to standard error, and the code tells job
/// managers [what to do](crate::Error::exit_code).
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

//! The end of a command, also where nothing reads its output any more.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs a command. A reader that closes the pipe, as `head` does, ends it without a message: `println!` panics then,
/// and the panic unwinds through the owners of started processes, which end these.
pub(crate) fn end_quietly(run: impl FnOnce() -> Result<(), String>) -> ExitCode {
    let default = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if is_closed_pipe(panic) {
            CLOSED.store(true, Ordering::Relaxed);
        }
        // Other threads panic on account of the first.
        if !CLOSED.load(Ordering::Relaxed) {
            default(panic);
        }
    }));
    let outcome = panic::catch_unwind(AssertUnwindSafe(run));
    match outcome {
        Ok(Ok(())) => ExitCode::SUCCESS,
        _ if CLOSED.load(Ordering::Relaxed) => ExitCode::from(CLOSED_PIPE),
        Ok(Err(problem)) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
        Err(panic) => panic::resume_unwind(panic),
    }
}

fn is_closed_pipe(panic: &PanicHookInfo<'_>) -> bool {
    message(panic.payload()).is_some_and(|text| text.starts_with("failed printing to stdout: Broken pipe"))
}

fn message(payload: &dyn Any) -> Option<&str> {
    payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied())
}

/// Whether standard output was closed by its reader.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// The exit code that shells report for a program that SIGPIPE ended.
const CLOSED_PIPE: u8 = 128 + 13;

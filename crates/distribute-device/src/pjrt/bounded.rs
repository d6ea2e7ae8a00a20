//! Calls that may block for long, with a deadline.

use std::thread;
use std::time::Instant;

use crossbeam_channel::{RecvTimeoutError, bounded};

use crate::{Error, Result};

/// Runs `work` on a thread of its own and waits for its result. At the deadline the thread is abandoned: it drops the
/// result when the plugin returns.
///
/// # Errors
/// [`Error::Deadline`]; [`Error::Thread`] if there is no thread; the error of `work`.
pub(super) fn run<T: Send + 'static>(
    operation: &str,
    deadline: Instant,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let started = Instant::now();
    let (sender, receiver) = bounded(1);
    let thread = thread::Builder::new().name("distribute-pjrt".to_owned());
    thread
        .spawn(move || {
            let _ = sender.send(work());
        })
        .map_err(|source| Error::Thread { stream: operation.to_owned(), source })?;
    match receiver.recv_deadline(deadline) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(Error::Deadline {
            operation: operation.to_owned(),
            waited: started.elapsed(),
            state: "the plugin has not returned".to_owned(),
        }),
        Err(RecvTimeoutError::Disconnected) => Err(Error::HostPanic { message: format!("{operation} panicked") }),
    }
}

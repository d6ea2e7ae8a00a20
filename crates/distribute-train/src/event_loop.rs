//! Threads with an event loop of their own.

use std::io;
use std::sync::mpsc::{self, SendError};
use std::thread::{self, JoinHandle};

use tokio::runtime::{Builder, Runtime};

/// Starts a thread that is given an event loop, which `body` shuts down at its end.
///
/// # Errors
/// An error of the system, if it gives no event loop or no thread.
pub(crate) fn start(
    thread: thread::Builder,
    body: impl FnOnce(Runtime) + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (hand, handed) = mpsc::sync_channel(1);
    let begin = move || {
        if let Ok(runtime) = handed.recv() {
            body(runtime);
        }
    };
    // The thread gets the event loop when it has begun. A thread that cannot be started would drop it on this one,
    // which panics where the caller has an event loop itself.
    match thread.spawn(begin) {
        Ok(thread) => {
            if let Err(SendError(runtime)) = hand.send(runtime) {
                runtime.shutdown_background();
            }
            Ok(thread)
        }
        Err(error) => {
            runtime.shutdown_background();
            Err(error)
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_be_started_is_an_error_also_within_an_event_loop() {
        let outer = Builder::new_current_thread().build().unwrap();
        outer.block_on(async {
            // More than there are addresses.
            let refused = start(thread::Builder::new().stack_size(1 << 62), Runtime::shutdown_background);
            assert!(refused.is_err());
            let (tell, told) = mpsc::channel();
            let body = move |runtime: Runtime| {
                tell.send(runtime.block_on(async { 7 })).unwrap();
                runtime.shutdown_background();
            };
            let thread = start(thread::Builder::new(), body).unwrap();
            assert_eq!(told.recv_timeout(std::time::Duration::from_secs(20)), Ok(7));
            thread.join().unwrap();
        });
    }
}

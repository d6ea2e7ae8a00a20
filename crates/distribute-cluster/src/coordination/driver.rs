//! A thread for an event loop: of the coordination service, or of an elastic job.

use std::sync::mpsc::{self, RecvTimeoutError, SendError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use super::limits::LONGEST;
use crate::{Error, Result};

/// A thread that runs an event loop. Calls from other threads are handed to it, so that they work on any thread,
/// including one that runs an event loop of its own.
pub(crate) struct Driver {
    handle: Handle,
    id: ThreadId,
    stop: Option<oneshot::Sender<()>>,
    ended: Mutex<mpsc::Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Driver {
    /// Time that a call may take beyond its own deadline, and that the thread may take to end.
    pub(crate) const MARGIN: Duration = Duration::from_millis(1500);

    pub(crate) fn start(name: &str) -> Result<Driver> {
        Driver::start_on(thread::Builder::new().name(name.to_owned()))
    }

    fn start_on(thread: thread::Builder) -> Result<Driver> {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Thread)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let (end, ended) = mpsc::sync_channel(1);
        let (hand, handed) = mpsc::sync_channel::<Runtime>(1);
        let body = move || {
            let Ok(runtime) = handed.recv() else { return };
            let _ = runtime.block_on(stopped);
            // A name lookup that hangs is detached; all other tasks end here.
            runtime.shutdown_background();
            let _ = end.send(());
        };
        // The thread gets the event loop when it has begun. A thread that cannot be started would drop it on this one,
        // which panics where the caller has an event loop itself.
        let thread = match thread.spawn(body) {
            Ok(thread) => thread,
            Err(error) => {
                runtime.shutdown_background();
                return Err(Error::Thread(error));
            }
        };
        if let Err(SendError(runtime)) = hand.send(runtime) {
            runtime.shutdown_background();
        }
        Ok(Driver {
            handle,
            id: thread.thread().id(),
            stop: Some(stop),
            ended: Mutex::new(ended),
            thread: Some(thread),
        })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns whether the caller is the service's thread, which must not wait for itself.
    pub(crate) fn is_current(&self) -> bool {
        thread::current().id() == self.id
    }

    /// Runs a future on the service's thread and waits for it; `None` at the timeout or on the service's thread itself.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
        timeout: Duration,
    ) -> Option<T> {
        let (done, result) = mpsc::sync_channel(1);
        let running = self.handle.spawn(async move {
            let _ = done.send(future.await);
        });
        if self.is_current() {
            return None;
        }
        let answer = result.recv_timeout(timeout.min(LONGEST)).ok();
        if answer.is_none() {
            running.abort();
        }
        answer
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.is_current() {
            return;
        }
        let ended = self.ended.lock().recv_timeout(Driver::MARGIN);
        // A thread that hangs in a callback is detached: drop does not wait without a deadline.
        if !matches!(ended, Err(RecvTimeoutError::Timeout))
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
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
            let refused = Driver::start_on(thread::Builder::new().stack_size(1 << 62));
            assert!(matches!(refused, Err(Error::Thread(_))));
            let driver = Driver::start_on(thread::Builder::new()).unwrap();
            assert_eq!(driver.call(async { 7 }, Duration::from_secs(20)), Some(7));
        });
    }
}

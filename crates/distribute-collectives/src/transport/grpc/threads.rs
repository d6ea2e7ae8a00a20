//! The threads that the streams live on.

use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use super::lock;

/// A runtime that can be used and dropped on any thread, including one that runs an event loop, such as that of
/// `#[tokio::main]`, where tokio's `block_on`, `shutdown_timeout` and the drop of a [`Runtime`] panic.
pub(super) struct Threads {
    /// `None` only while it is shut down.
    runtime: Option<Runtime>,
    running: Arc<Running>,
}

/// The number of threads that have begun and have not ended.
#[derive(Default)]
struct Running {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Threads {
    pub(super) fn start() -> std::io::Result<Threads> {
        let running: Arc<Running> = Arc::default();
        let (begun, ended) = (running.clone(), running.clone());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("distribute-grpc")
            .on_thread_start(move || begun.add(1))
            .on_thread_stop(move || ended.add(-1))
            .enable_all()
            .build()?;
        Ok(Threads { runtime: Some(runtime), running })
    }

    /// Runs a future on the threads and waits for it; `None` at the timeout.
    pub(super) fn call<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
        timeout: Duration,
    ) -> Option<T> {
        let (done, result) = mpsc::sync_channel(1);
        let task = self.runtime.as_ref()?.spawn(async move {
            // Fails only if the caller waits no more.
            let _ = done.send(future.await);
        });
        let outcome = result.recv_timeout(timeout).ok();
        task.abort();
        outcome
    }

    /// Returns whether a task has not ended.
    pub(super) fn have_tasks(&self) -> bool {
        self.runtime.as_ref().is_some_and(|runtime| runtime.metrics().num_alive_tasks() > 0)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
            self.running.wait_for_end(Instant::now() + SHUTDOWN);
        }
    }
}

impl Running {
    fn add(&self, change: isize) {
        let mut count = lock(&self.count);
        *count = count.saturating_add_signed(change);
        self.changed.notify_all();
    }

    /// Waits until all threads have ended. One that hangs, such as in the lookup of a name, is abandoned at the
    /// deadline.
    fn wait_for_end(&self, deadline: Instant) {
        let mut count = lock(&self.count);
        while *count > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            count = self.changed.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Limit for the end of the threads.
const SHUTDOWN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_can_be_used_and_dropped_within_an_event_loop() {
        let outer = tokio::runtime::Builder::new_current_thread().build().unwrap();
        outer.block_on(async {
            let threads = Threads::start().unwrap();
            let soon = Duration::from_secs(20);
            assert_eq!(threads.call(async { tokio::spawn(async { 7 }).await.unwrap() }, soon), Some(7));
            assert_eq!(threads.call(std::future::pending::<()>(), Duration::from_millis(10)), None);
            let running = threads.running.clone();
            drop(threads);
            assert_eq!(*lock(&running.count), 0);
        });
    }
}

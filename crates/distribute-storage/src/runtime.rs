//! The runtime on which requests run, and the wait for them.

use std::io;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;

use crate::{Error, Result};

/// A request under way, whose result is fetched by [`Pending::wait`]. Dropping it ends the request.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    outcome: Receiver<Result<T>>,
    task: AbortHandle,
    url: String,
    action: &'static str,
    limit: Duration,
    since: Instant,
    /// Whether the request goes to its end without being waited for.
    is_kept: bool,
}

/// Starts a request, whose whole time is limited.
pub(crate) fn start<T: Send + 'static>(
    url: String,
    action: &'static str,
    limit: Duration,
    request: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<Pending<T>> {
    let runtime = match &*RUNTIME {
        Ok(runtime) => runtime,
        Err(error) => return Err(Error::Thread { problem: error.to_string() }),
    };
    let (send, outcome) = bounded(1);
    let (since, late) = (Instant::now(), url.clone());
    let task = runtime.spawn(async move {
        let done = tokio::time::timeout(limit, request).await;
        let waited = limit;
        // Fails only if the result is not wanted any more.
        drop(send.send(done.unwrap_or(Err(Error::Slow { url: late, action, waited }))));
    });
    Ok(Pending { outcome, task: task.abort_handle(), url, action, limit, since, is_kept: false })
}

impl<T> Pending<T> {
    /// Waits for the result, at most until the request's limit.
    pub(crate) fn wait(self) -> Result<T> {
        let left = (self.limit + SLACK).saturating_sub(self.since.elapsed());
        let (url, action, waited) = (self.url.clone(), self.action, self.limit);
        match self.outcome.recv_timeout(left) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => Err(Error::Slow { url, action, waited }),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::Thread { problem: format!("the thread that was {action} {url} has ended") })
            }
        }
    }
}

impl<T> Pending<T> {
    /// Leaves the request to itself, until its limit.
    pub(crate) fn detach(mut self) {
        self.is_kept = true;
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.task.abort();
        }
    }
}

/// Added to a request's own limit, so that its own error comes first.
const SLACK: Duration = Duration::from_secs(5);

/// Started with the first request, and never ended: requests must not depend on whose thread asked first.
static RUNTIME: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    // One thread signs and compares checksums while the other one moves bytes.
    Builder::new_multi_thread().worker_threads(2).thread_name("distribute-storage").enable_all().build()
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_does_not_answer_is_named() {
        let limit = Duration::from_millis(20);
        let never = start("s3://bucket/a".to_owned(), "reading", limit, std::future::pending::<Result<()>>()).unwrap();
        let text = never.wait().unwrap_err().to_string();
        assert!(text.contains("s3://bucket/a") && text.contains("reading"), "{text}");
    }

    #[test]
    fn a_panic_is_an_error() {
        let request = async { panic!("as planned") };
        let pending = start::<()>("s3://b/a".to_owned(), "reading", Duration::from_secs(10), request).unwrap();
        assert!(matches!(pending.wait(), Err(Error::Thread { .. })));
    }
}

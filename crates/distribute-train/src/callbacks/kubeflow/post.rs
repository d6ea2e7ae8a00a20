//! The thread that posts the newest state of a training to Kubeflow's status server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fmt, io};

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::sync::watch;
use tokio::time::Instant;

use super::report::Report;
use super::request::{Client, Target};
use crate::event_loop;

/// The limits of posts.
#[derive(Clone)]
pub(super) struct Settings {
    /// From the begin of one post to that of the next.
    pub(super) interval: Duration,
    /// For one post, from the connection to the end of the answer.
    pub(super) request: Duration,
    /// For the last post and one before it, at the end of training.
    pub(super) end: Duration,
    /// Shows a warning.
    pub(super) warn: Arc<dyn Fn(&str) + Send + Sync>,
}

/// Posts the newest of the states that it is given until it is dropped, which waits at most half a second.
pub(super) struct Poster {
    /// Dropped to end the thread.
    newest: Option<watch::Sender<Option<Report>>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
    warnings: Arc<Warnings>,
    end: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        let warn = |text: &str| distribute_notice::warn!("{text}");
        Settings { interval: INTERVAL, request: REQUEST, end: END, warn: Arc::new(warn) }
    }
}

impl Poster {
    /// Starts the thread.
    pub(super) fn start(target: Target, settings: Settings) -> io::Result<Poster> {
        let warnings = Arc::new(Warnings::new(&settings));
        let end = settings.end;
        let (newest, states) = watch::channel(None);
        let (finished, done) = mpsc::channel();
        let client = Client::new(target, settings.request);
        let mut work = Work { interval: settings.interval, warnings: Arc::clone(&warnings), client };
        let thread = std::thread::Builder::new().name("kubeflow".into());
        let thread = event_loop::start(thread, move |runtime| {
            runtime.block_on(async {
                tokio::select! {
                    () = dropped(states.clone()) => {}
                    () = work.run(states) => {}
                }
            });
            // The system's lookup of a name has no deadline: its thread is abandoned.
            runtime.shutdown_background();
            // This fails only if no thread waits any more.
            let _ = finished.send(());
        })?;
        Ok(Poster { newest: Some(newest), done, thread: Some(thread), warnings, end })
    }

    /// Replaces the state that is posted next, without waiting.
    pub(super) fn send(&self, report: Report) {
        if let Some(newest) = &self.newest {
            newest.send_replace(Some(report));
        }
    }

    /// Posts the last state and ends the thread, within the limit.
    pub(super) fn finish(mut self, last: Report) {
        self.send(last);
        match self.done.recv_timeout(self.end) {
            Err(RecvTimeoutError::Timeout) => {
                let seconds = self.end.as_secs_f64();
                self.warnings.failure(&format!("the last state is not accepted within {seconds:.1} s"));
            }
            // The thread has ended.
            _ => self.join(),
        }
    }

    fn join(&mut self) {
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::debug!("the thread of the TrainJob's status panicked");
        }
    }
}

impl Drop for Poster {
    fn drop(&mut self) {
        drop(self.newest.take());
        if self.thread.is_none() {
            return;
        }
        match self.done.recv_timeout(CLOSE) {
            Err(RecvTimeoutError::Timeout) => tracing::debug!("a post of the TrainJob's status is stuck; given up"),
            _ => self.join(),
        }
    }
}

impl fmt::Debug for Poster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster").finish_non_exhaustive()
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { interval, request, end, .. } = self;
        let mut debug = f.debug_struct("Settings");
        debug.field("interval", interval).field("request", request).field("end", end).finish_non_exhaustive()
    }
}

/// Shows each kind of warning once.
struct Warnings {
    show: Arc<dyn Fn(&str) + Send + Sync>,
    has_failed: AtomicBool,
    has_left_out: AtomicBool,
}

impl Warnings {
    fn new(settings: &Settings) -> Warnings {
        let [has_failed, has_left_out] = [false.into(), false.into()];
        Warnings { show: Arc::clone(&settings.warn), has_failed, has_left_out }
    }

    fn failure(&self, problem: &str) {
        let text = format!("the status of the TrainJob is not updated: {problem}; training continues");
        // The flag guards no other memory.
        match self.has_failed.swap(true, Ordering::Relaxed) {
            true => tracing::debug!("{text}"),
            false => (self.show)(&format!("{text}, and further failures are logged at the level debug only")),
        }
    }

    fn left_out(&self, count: usize) {
        if count > 0 && !self.has_left_out.swap(true, Ordering::Relaxed) {
            (self.show)(&format!(
                "the status of the TrainJob lacks {count} metrics: Kubeflow takes 256 that have a name, in 64 KiB; \
                 report fewer"
            ));
        }
    }
}

type States = watch::Receiver<Option<Report>>;

/// The side of the thread.
struct Work {
    interval: Duration,
    warnings: Arc<Warnings>,
    client: Client,
}

impl Work {
    /// Posts until the last state is posted.
    async fn run(&mut self, mut states: States) {
        while states.changed().await.is_ok() {
            let Some(report) = states.borrow_and_update().clone() else { continue };
            let (body, left_out) = report.body();
            self.warnings.left_out(left_out);
            if report.is_last {
                return self.post_last(&body).await;
            }
            let next = Instant::now().checked_add(self.interval);
            if let Err(refusal) = self.client.post(&body).await {
                self.warnings.failure(&refusal.problem);
            }
            tokio::select! {
                () = until(next) => {}
                () = ended(states.clone()) => {}
            }
        }
    }

    /// Posts the last state, again if that may help, until it is accepted or the poster is dropped.
    async fn post_last(&mut self, body: &[u8]) {
        let pauses = ExponentialBuilder::new().with_min_delay(PAUSE).with_max_delay(LONGEST_PAUSE);
        for pause in pauses.without_max_times().build() {
            let Err(refusal) = self.client.post(body).await else { return };
            self.warnings.failure(&refusal.problem);
            if !refusal.is_passing {
                return;
            }
            tokio::time::sleep(pause).await;
        }
    }
}

/// Waits until the sender is dropped.
async fn dropped(mut states: States) {
    while states.changed().await.is_ok() {}
}

/// Waits for the last state.
async fn ended(mut states: States) {
    let is_last = |state: &Option<Report>| state.as_ref().is_some_and(|report| report.is_last);
    // An error means that the sender is dropped, which ends the thread.
    let _ = states.wait_for(is_last).await;
}

/// Waits until an instant; one that no clock can express never occurs.
async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// The interval that Kubeflow's user guide gives as an example for clients.
const INTERVAL: Duration = Duration::from_secs(5);

/// The timeout of a request in the example of the same guide.
const REQUEST: Duration = Duration::from_secs(5);

/// A post that is under way, and one after it.
const END: Duration = Duration::from_secs(10);

/// For the thread to notice that it is to end.
const CLOSE: Duration = Duration::from_millis(500);

/// Before the last state is posted again.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

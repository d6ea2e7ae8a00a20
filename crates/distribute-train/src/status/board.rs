//! A job's model, shared between the threads that report and those that serve.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::{Job, View};

/// A [`Job`] that threads share, with the clock by which it lives. Clones are the same board.
#[derive(Debug, Clone)]
pub struct Board(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    begun: Instant,
    job: Mutex<Job>,
    /// The number of times that the tasks were asked for a report at once.
    asked: watch::Sender<u64>,
}

impl Board {
    /// Shares a job, which begins now.
    pub fn new(job: Job) -> Board {
        Board(Arc::new(Shared { begun: Instant::now(), job: Mutex::new(job), asked: watch::Sender::new(0) }))
    }

    /// Changes the job. The second argument is the time since it began.
    pub fn update<R>(&self, change: impl FnOnce(&mut Job, Duration) -> R) -> R {
        let mut job = self.0.job.lock();
        change(&mut job, self.0.begun.elapsed())
    }

    /// Asks all tasks for a report at once, and returns the time since the job began. Tasks that can be asked notice it
    /// within a tenth of a second.
    pub(super) fn ask(&self) -> Duration {
        self.0.asked.send_modify(|asked| *asked += 1);
        self.0.begun.elapsed()
    }

    /// Returns whether every task that reports has done so since a time.
    pub(super) fn has_heard_since(&self, asked: Duration) -> bool {
        self.0.job.lock().has_heard_since(asked)
    }

    /// Returns a watch on the number of times that the tasks were asked.
    pub(super) fn asked(&self) -> watch::Receiver<u64> {
        self.0.asked.subscribe()
    }

    /// Returns the state of the job now.
    pub fn view(&self) -> View {
        self.0.job.lock().view(self.0.begun.elapsed())
    }
}

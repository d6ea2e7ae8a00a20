//! A job's model, shared between the threads that report and those that serve.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Job, View};

/// A [`Job`] that threads share, with the clock by which it lives. Clones are the same board.
#[derive(Debug, Clone)]
pub struct Board(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    begun: Instant,
    job: Mutex<Job>,
}

impl Board {
    /// Shares a job, which begins now.
    pub fn new(job: Job) -> Board {
        Board(Arc::new(Shared { begun: Instant::now(), job: Mutex::new(job) }))
    }

    /// Changes the job. The second argument is the time since it began.
    pub fn update<R>(&self, change: impl FnOnce(&mut Job, Duration) -> R) -> R {
        let mut job = self.0.job.lock();
        change(&mut job, self.0.begun.elapsed())
    }

    /// Returns the state of the job now.
    pub fn view(&self) -> View {
        self.0.job.lock().view(self.0.begun.elapsed())
    }
}

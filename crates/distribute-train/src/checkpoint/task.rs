//! Disk work on a thread of its own, which is waited for only as long as the disk makes progress.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use distribute_strategy::Strategy;
use distribute_types::ErrorClass;
use serde::{Deserialize, Serialize};

use super::disk::Disk;
use crate::chief::from_chief;
use crate::{Error, Result};

/// Work in progress.
#[derive(Debug)]
pub(super) struct Task<T> {
    what: String,
    disk: Disk,
    outcome: Receiver<Result<T>>,
    /// `None` if it could not be started.
    thread: Option<JoinHandle<()>>,
    /// The longest time that one operation on the disk may take.
    patience: Duration,
}

impl<T: Send + 'static> Task<T> {
    /// Starts `work`; `what` is the name that errors give it, as in "`what` is not done". If no thread can be started,
    /// the work has failed, which every worker learns as any other failure of it.
    pub(super) fn start(
        disk: &Disk,
        what: String,
        patience: Duration,
        work: impl FnOnce(&Disk) -> Result<T> + Send + 'static,
    ) -> Task<T> {
        let (send, outcome) = mpsc::sync_channel(1);
        let disk = disk.afresh();
        let (of_work, failed) = (disk.clone(), send.clone());
        let run = move || {
            // This fails only if no thread waits any more.
            drop(send.send(work(&of_work)));
        };
        let thread = match disk.spawn(run) {
            Ok(thread) => Some(thread),
            Err(error) => {
                let problem = format!("{what}: no thread can be started ({error}); look at the limit of threads");
                drop(failed.send(Err(Error::Part(problem.into()))));
                None
            }
        };
        Task { what, disk, outcome, thread, patience }
    }

    /// Returns an error if the operation in progress has taken too long.
    pub(super) fn hangs(&self) -> Option<Error> {
        let (under_way, waited) = self.disk.under_way();
        let hangs = waited >= self.patience;
        hangs.then(|| Error::DiskHangs { what: self.what.clone(), under_way, waited })
    }
}

/// Work that the chief waits for while the other workers wait for the chief.
pub(super) trait Awaited: Sized {
    type Value;

    /// Waits for a limited time; returns itself if it is not done by then.
    fn poll(self, limit: Duration) -> Result<Result<Self::Value>, Self>;

    /// Waits until it is done, or an operation on the disk has taken too long.
    ///
    /// # Errors
    /// [`Error::DiskHangs`] if an operation takes too long, in which case the thread is abandoned; else the error of
    /// the work.
    fn wait(self) -> Result<Self::Value> {
        let mut this = self;
        loop {
            match this.poll(LOOK) {
                Ok(outcome) => return outcome,
                Err(unfinished) => this = unfinished,
            }
        }
    }
}

impl<T: Send + 'static> Awaited for Task<T> {
    type Value = T;

    fn poll(self, limit: Duration) -> Result<Result<T>, Task<T>> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.outcome.recv_timeout(left.min(LOOK)) {
                Ok(outcome) => {
                    // The thread has nothing left to do.
                    drop(self.thread.map(JoinHandle::join));
                    return Ok(outcome);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Err(Error::Damaged {
                        path: self.what.into(),
                        problem: "its thread panicked".to_owned(),
                    }));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(error) = self.hangs() {
                return Ok(Err(error));
            }
            if Instant::now() >= until {
                return Err(self);
            }
        }
    }
}

/// Waits on every worker until the chief's work is done. Every worker calls this, those other than the chief with
/// `None`. Returns the work's result on the chief. The chief regularly tells the others that it still waits, so that no
/// collective exceeds its deadline, however slow the disk.
///
/// # Errors
/// On the chief the errors of [`Awaited::wait`], on the others [`Error::Chief`] or [`Error::ChiefsDisk`] with its
/// message; the error of `task` on a worker that is given one, and [`Error::OnWorker`] on the others;
/// [`Error::Collective`] if a worker is missing or fails.
pub(super) fn everywhere<A: Awaited>(strategy: &Strategy, task: Result<Option<A>>) -> Result<Option<A::Value>> {
    let limit = strategy.groups().first().map_or(LOOK, |group| group.options().timeout) / 4;
    let mut state = match task {
        Ok(Some(task)) => State::Waiting(task),
        Ok(None) => State::Done(None),
        Err(error) => State::Failed(error),
    };
    loop {
        if let State::Waiting(task) = state {
            state = match task.poll(limit) {
                Ok(Ok(value)) => State::Done(Some(value)),
                Ok(Err(error)) => State::Failed(error),
                Err(unfinished) => State::Waiting(unfinished),
            };
        }
        let told = match state {
            // The chief's own error is told as a status, which keeps its class.
            State::Failed(error) if !strategy.is_chief() => {
                return from_chief(strategy, Err::<ChiefStatus, Error>(error)).map(|_| None);
            }
            _ => from_chief(strategy, Ok::<_, Error>(state.told())),
        };
        state = match (told, state) {
            // The chief returns its own error.
            (_, State::Failed(error)) => return Err(error),
            (Ok(ChiefStatus::Done), State::Done(value)) => return Ok(value),
            (Ok(ChiefStatus::Failed { sentence, is_retryable: true }), _) => {
                return Err(Error::ChiefsDisk(sentence));
            }
            (Ok(ChiefStatus::Failed { sentence, .. }), _) => return Err(Error::Chief(sentence)),
            (Ok(_), state) => state,
            (Err(error), State::Waiting(task)) => {
                // The other workers are lost, but the write in progress is completed.
                task.wait()?;
                return Err(error);
            }
            (Err(error), _) => return Err(error),
        };
    }
}

/// Runs a write, or other work on a disk that may hang, and waits for it as for a checkpoint.
///
/// # Errors
/// [`Error::DiskHangs`] after [`TIMEOUT`], in which case the thread is abandoned; else the error of the work.
pub(crate) fn bounded<T: Send + 'static>(
    verb: &'static str,
    path: &Path,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let place = path.to_owned();
    let run = move |disk: &Disk| {
        disk.begin(verb, &place);
        work()
    };
    Task::start(&Disk::default(), path.display().to_string(), TIMEOUT, run).wait()
}

/// The default limit of one operation on a disk.
pub(super) const TIMEOUT: Duration = Duration::from_secs(300);

/// The state of the chief's work; the other workers have none, so theirs is done.
enum State<A: Awaited> {
    Waiting(A),
    Done(Option<A::Value>),
    Failed(Error),
}

/// The message by which the chief reports its state.
#[derive(Serialize, Deserialize)]
enum ChiefStatus {
    Waiting,
    Done,
    Failed { sentence: String, is_retryable: bool },
}

impl<A: Awaited> State<A> {
    fn told(&self) -> ChiefStatus {
        match self {
            State::Waiting(_) => ChiefStatus::Waiting,
            State::Done(_) => ChiefStatus::Done,
            State::Failed(error) => {
                ChiefStatus::Failed { sentence: error.to_string(), is_retryable: error.is_retryable() }
            }
        }
    }
}

/// How often the disk's progress is checked.
pub(super) const LOOK: Duration = Duration::from_millis(200);

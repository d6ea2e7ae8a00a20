//! The first failure of the job, and whom to tell.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::{lock, wire};
use crate::text::{LONGEST, clean};
use crate::{Failure, FailureCause, FailureKind, Membership};

pub(super) type Callback = Box<dyn Fn(&Failure) + Send + Sync>;

/// What the service's thread and its user share.
pub(super) struct Alarm {
    membership: Membership,
    news: Mutex<News>,
    rang: Condvar,
    /// Whether the leader can no longer be asked.
    leader_gone: watch::Sender<bool>,
}

#[derive(Default)]
struct News {
    failure: Option<Failure>,
    callbacks: Vec<Callback>,
    leader_left: bool,
}

impl Alarm {
    pub(super) fn new(membership: Membership) -> Alarm {
        let (leader_gone, _) = watch::channel(false);
        Alarm { membership, news: Mutex::default(), rang: Condvar::new(), leader_gone }
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.news).failure.clone()
    }

    pub(super) fn on_failure(&self, callback: Callback) {
        let failure = {
            let mut news = lock(&self.news);
            match &news.failure {
                None => return news.callbacks.push(callback),
                Some(failure) => failure.clone(),
            }
        };
        call(&callback, &failure);
    }

    /// Keeps the first failure and tells everybody who asked.
    pub(super) fn fail(&self, failure: Failure) {
        let callbacks = {
            let mut news = lock(&self.news);
            if news.failure.is_some() {
                return;
            }
            news.failure = Some(failure.clone());
            std::mem::take(&mut news.callbacks)
        };
        tracing::warn!(task = %self.membership.task(), "{failure}");
        self.rang.notify_all();
        for callback in &callbacks {
            call(callback, &failure);
        }
    }

    /// The leader no longer answers: it is lost.
    pub(super) fn leader_lost(&self, how: String, last_heard: Duration) {
        // Everybody who waits at the leader learns the reason, so it comes first.
        self.fail(Failure::new(self.membership.tasks[0], 0, FailureCause::Lost { how, last_heard }));
        self.leader_gone.send_replace(true);
    }

    /// The leader no longer answers: it has left.
    pub(super) fn leader_left(&self) {
        lock(&self.news).leader_left = true;
        self.rang.notify_all();
        self.leader_gone.send_replace(true);
    }

    /// Becomes true when the leader can no longer be asked.
    pub(super) fn leader_gone(&self) -> watch::Receiver<bool> {
        self.leader_gone.subscribe()
    }

    /// Waits for a failure or the leader's departure; whether one came.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let quiet = |news: &mut News| news.failure.is_none() && !news.leader_left;
        let waited = self.rang.wait_timeout_while(lock(&self.news), timeout, quiet);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// A failure as the leader tells it; `None` for a rank that the job does not have.
    pub(super) fn failure_of(&self, told: &wire::Failure) -> Option<Failure> {
        use wire::failure::Cause;
        let task = self.membership.task_of(told.rank)?;
        let cause = match told.cause.clone()? {
            Cause::Lost(lost) => FailureCause::Lost {
                how: clean(&lost.how, LONGEST),
                last_heard: Duration::from_millis(lost.last_heard_ms),
            },
            Cause::Reported(message) => FailureCause::Reported(clean(&message, LONGEST)),
        };
        Some(Failure::new(task, told.rank, cause).with_kind(FailureKind::from_code(told.kind)))
    }
}

/// A callback's panic must not end the service's thread, nor keep the other callbacks from being called.
fn call(callback: &Callback, failure: &Failure) {
    if catch_unwind(AssertUnwindSafe(|| callback(failure))).is_err() {
        tracing::error!("an on_failure callback panicked");
    }
}

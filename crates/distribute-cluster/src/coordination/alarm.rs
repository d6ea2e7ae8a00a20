//! The first failure of the job, and the callbacks and waiters to notify.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use super::wire;
use crate::text::{LONGEST, clean};
use crate::{Failure, FailureCause, FailureKind, Membership};

pub(super) type Callback = Box<dyn Fn(&Failure) + Send + Sync>;

/// The state that the service's thread shares with its user.
pub(super) struct Alarm {
    membership: Membership,
    news: Mutex<News>,
    rang: Condvar,
    /// Whether the leader has left or is lost.
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
        self.news.lock().failure.clone()
    }

    pub(super) fn on_failure(&self, callback: Callback) {
        let failure = {
            let mut news = self.news.lock();
            match &news.failure {
                None => return news.callbacks.push(callback),
                Some(failure) => failure.clone(),
            }
        };
        call(&callback, &failure);
    }

    /// Keeps the first failure and notifies all waiters and callbacks.
    pub(super) fn fail(&self, failure: Failure) {
        let callbacks = {
            let mut news = self.news.lock();
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

    /// Records that the leader is lost.
    pub(super) fn leader_lost(&self, how: String, last_heard: Duration) {
        // The failure comes first: calls that wait at the leader read it when `leader_gone` wakes them.
        self.fail(Failure::new(self.membership.tasks[0], 0, FailureCause::Lost { how, last_heard }));
        self.leader_gone.send_replace(true);
    }

    /// Records that the leader has left.
    pub(super) fn leader_left(&self) {
        self.news.lock().leader_left = true;
        self.rang.notify_all();
        self.leader_gone.send_replace(true);
    }

    /// Returns a channel that becomes true when the leader has left or is lost.
    pub(super) fn leader_gone(&self) -> watch::Receiver<bool> {
        self.leader_gone.subscribe()
    }

    /// Waits for a failure or the leader's departure and returns whether one occurred.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let quiet = |news: &mut News| news.failure.is_none() && !news.leader_left;
        !self.rang.wait_while_for(&mut self.news.lock(), quiet, timeout).timed_out()
    }

    /// Waits for a failure and returns it.
    pub(super) fn wait_for_failure(&self, timeout: Duration) -> Option<Failure> {
        let mut news = self.news.lock();
        self.rang.wait_while_for(&mut news, |news| news.failure.is_none(), timeout);
        news.failure.clone()
    }

    /// Converts a failure from its wire form; `None` if the rank is outside the job.
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

/// Calls a callback. Its panic must neither end the service's thread nor prevent the other callbacks.
fn call(callback: &Callback, failure: &Failure) {
    if catch_unwind(AssertUnwindSafe(|| callback(failure))).is_err() {
        tracing::error!("an on_failure callback panicked");
    }
}

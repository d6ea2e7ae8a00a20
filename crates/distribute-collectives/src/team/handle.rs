//! When a group is left: with the last of its handles and works, on the thread that drops it.

use std::ops::Deref;
use std::sync::Arc;

use super::Team;
use crate::bridge::Job;

/// The team as a process's group handles and works under way share it.
///
/// The courier, and whoever hears of a failure from the job, hold the [`Team`] itself for moments. If the group were left only
/// when the last of all lets go, a process could end before such a thread has said goodbye, and its peers would take it for lost.
pub(crate) struct Handle {
    team: Arc<Team>,
    /// Held so that the members know of each other for as long as the group lives.
    job: Option<Job>,
}

impl Handle {
    pub(crate) fn new(team: Arc<Team>, job: Option<Job>) -> Handle {
        Handle { team, job }
    }

    pub(crate) fn job(&self) -> Option<&Job> {
        self.job.as_ref()
    }

    /// What the courier holds.
    #[cfg(test)]
    pub(crate) fn team(&self) -> Arc<Team> {
        self.team.clone()
    }
}

impl Deref for Handle {
    type Target = Team;

    fn deref(&self) -> &Team {
        &self.team
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nobody has an operation under way any more: each is waited for by its handle or its work.
        if let Some(bridge) = self.team.bridge() {
            bridge.leave();
        }
    }
}

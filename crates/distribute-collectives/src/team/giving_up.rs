//! When a rank that waits gives up: on ranks that do not come, and on an operation that does not end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Operation, Team, lock};
use crate::Error;
use crate::phases::State;

impl Team {
    /// While ranks are missing: has the time come to give up on them?
    pub(super) fn check_gathering(&self, local: usize, operation: &Operation) {
        let Some((call, deadline, started)) =
            lock(&operation.entries[local]).as_ref().map(|entry| (entry.call, entry.deadline, entry.started))
        else {
            return;
        };
        if self.interrupted.load(Ordering::Acquire) {
            let error = self.aborted(Some(call));
            self.fail(operation, State::Gathering, "this rank", error);
            return;
        }
        let missing: Vec<usize> =
            (0..self.local_ranks).filter(|other| lock(&operation.entries[*other]).is_none()).collect();
        if let Some(gone) = missing.iter().find(|other| self.has_departed(**other)) {
            let error = Error::PeerLeft {
                name: self.local_name(local),
                peer: self.local_name(*gone),
                group: self.name.clone(),
                during: call.to_string(),
            };
            self.fail(operation, State::Gathering, &self.local_name(local), error);
        } else if let Some(idle) = missing.iter().find(|other| self.resting[**other].load(Ordering::SeqCst)) {
            let error = Error::Absent {
                name: self.local_name(local),
                peer: self.local_name(*idle),
                group: self.name.clone(),
                during: call.to_string(),
            };
            self.fail(operation, State::Gathering, &self.local_name(*idle), error);
        } else if Instant::now() >= deadline && !missing.is_empty() {
            let names: Vec<String> = missing.iter().map(|other| self.local_name(*other)).collect();
            let error = Error::Deadline {
                call: Box::new(call),
                name: self.local_name(local),
                group: self.name.clone(),
                waited: started.elapsed(),
                missing: format!("{} (which made no such call)", names.join(", ")),
            };
            self.fail(operation, State::Gathering, &self.local_name(local), error);
        }
    }

    /// While other threads work on the operation: has the group ended, or the time come to stop?
    pub(super) fn check_under_way(&self, local: usize, operation: &Arc<Operation>, state: State) {
        let Some((call, deadline, started)) =
            lock(&operation.entries[local]).as_ref().map(|entry| (entry.call, entry.deadline, entry.started))
        else {
            return;
        };
        let error = if self.interrupted.load(Ordering::Acquire) {
            self.aborted(Some(call))
        } else if Instant::now() >= deadline {
            Error::Deadline {
                call: Box::new(call),
                name: self.local_name(local),
                group: self.name.clone(),
                waited: started.elapsed(),
                missing: match state {
                    State::Bridging => "earlier operations of this group, which are still under way".to_owned(),
                    _ => "ranks of this process, which work on it".to_owned(),
                },
            }
        } else {
            return;
        };
        match state {
            // Still in line, so no thread works on it. What is on its way has a deadline of its own.
            State::Bridging => {
                if self.bridge.as_ref().is_some_and(|bridge| bridge.withdraw(call.sequence)) {
                    self.fail(operation, State::Bridging, &self.local_name(local), error);
                }
            }
            _ => self.doom(operation, error),
        }
    }
}

//! Groups created from a group, held for the local ranks that they are for.

use std::collections::HashMap;
use std::sync::Mutex;

use super::ProcessGroup;
use crate::Result;
use crate::sync::lock;

/// Handles that one local rank has created for the others.
#[derive(Default)]
pub(super) struct Children {
    handles: Mutex<HashMap<ChildKey, Result<ProcessGroup>>>,
}

/// The key of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ChildKey {
    /// This rank's handle of a sub-group: the count of splits, and the rank in the parent.
    Split(u64, usize),
    /// A member's handle of the group in which one rank sends to another: sender, receiver, and the member.
    Pair(usize, usize, usize),
}

impl ChildKey {
    fn is_for(&self, rank: usize) -> bool {
        let (ChildKey::Split(_, member) | ChildKey::Pair(.., member)) = self;
        *member == rank
    }
}

impl Children {
    /// Stores handles for other ranks, or the error that they get instead.
    pub(super) fn leave(&self, handles: impl IntoIterator<Item = (ChildKey, Result<ProcessGroup>)>) {
        lock(&self.handles).extend(handles);
    }

    /// Takes the handle that was stored under a key.
    pub(super) fn take(&self, key: ChildKey) -> Option<Result<ProcessGroup>> {
        lock(&self.handles).remove(&key)
    }

    /// Takes the handle that was stored under `mine`, or creates one for this rank and one for another, which is stored
    /// under `other`. If two ranks call this at the same time, one creates both.
    pub(super) fn take_or_make(
        &self,
        mine: ChildKey,
        other: ChildKey,
        make: impl FnOnce() -> (ProcessGroup, ProcessGroup),
    ) -> Result<ProcessGroup> {
        let mut handles = lock(&self.handles);
        if let Some(handle) = handles.remove(&mine) {
            return handle;
        }
        let (handle, for_other) = make();
        handles.insert(other, Ok(for_other));
        Ok(handle)
    }

    /// Drops the handles that were stored for a rank and not taken, so that their peers do not wait for it.
    pub(super) fn drop_unclaimed(&self, rank: usize) {
        // Dropped without the lock: a dropped handle looks for its own unclaimed children.
        let unclaimed: Vec<_> = lock(&self.handles).extract_if(|key, _| key.is_for(rank)).collect();
        drop(unclaimed);
    }
}

//! The folders in which one training run keeps checkpoints.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use distribute_strategy::Strategy;

use super::lock::absolute;
use super::{CheckpointManager, RunId};
use crate::{Error, Result};

/// The managers of a training run. Each removes the oldest checkpoints of its folder, whichever manager wrote them;
/// those that are to be removed at the end and the others are told apart.
#[derive(Debug, Default)]
pub(crate) struct Folders(Vec<Kept>);

#[derive(Debug)]
struct Kept {
    manager: Weak<()>,
    folder: PathBuf,
    backup: bool,
    count: usize,
}

impl Folders {
    /// Claims a manager's folder, as [`CheckpointManager::claim`] does. Every worker calls this.
    ///
    /// # Errors
    /// [`Error::SharedFolder`] if another manager of the training run has claimed it; the errors of
    /// [`CheckpointManager::claim`].
    pub(crate) fn claim(&mut self, strategy: &Strategy, manager: &mut CheckpointManager) -> Result<RunId> {
        let allowed = self.note(manager);
        manager.claim_if(strategy, allowed)
    }

    fn note(&mut self, manager: &CheckpointManager) -> Result<()> {
        // A manager that is gone removes nothing any more.
        self.0.retain(|kept| kept.manager.strong_count() > 0);
        let own = Kept {
            manager: Arc::downgrade(&manager.identity),
            folder: absolute(&manager.root),
            backup: manager.backup,
            count: manager.keep,
        };
        let is_same = |kept: &&Kept| (&kept.folder, kept.backup) == (&own.folder, own.backup);
        match self.0.iter().find(is_same) {
            None => self.0.push(own),
            Some(kept) if Weak::ptr_eq(&kept.manager, &own.manager) => {}
            Some(other) => {
                let (folder, keep) = (manager.root.clone(), [other.count, own.count]);
                return Err(Error::SharedFolder { folder, keep });
            }
        }
        Ok(())
    }
}

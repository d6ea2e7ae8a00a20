//! Checkpoints that a training has left by returning to an earlier one.

use std::collections::BTreeSet;
use std::path::Path;

use super::disk::Disk;
use super::folder::{self, Found};
use super::inflow;
use super::lock::exclusively;
use super::origin::Origin;
use super::run::RunId;
use super::survey::Survey;
use super::{CheckpointManager, Snapshot};
use crate::Result;

/// Checkpoints of a folder that a training has left by returning to an earlier one, see [`CheckpointManager::abandon`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Abandoned {
    /// Sequence numbers, with the checksums of the manifests: a step, and a number, may be given again.
    marks: BTreeSet<(u64, u32)>,
    /// The snapshots that were loaded when the folder could not be listed, in this order.
    unlisted: Vec<Loaded>,
}

/// A snapshot that is loaded, without its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Loaded {
    step: u64,
    run: Option<RunId>,
    origin: Option<Origin>,
}

impl Abandoned {
    /// Returns whether there are none, and no folder is left to be listed.
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty() && self.unlisted.is_empty()
    }

    fn has(&self, found: &Found) -> bool {
        mark(found).is_some_and(|mark| self.marks.contains(&mark))
    }

    /// Adds the checkpoints that are left by the snapshots that were loaded before the folder was listed.
    fn settle(&mut self, root: &Path, found: &[Found]) {
        for loaded in std::mem::take(&mut self.unlisted) {
            let of_run = |found: &&Found| loaded.run.is_none_or(|run| found.run() == Some(run));
            let same_step = |found: &Found| found.step == loaded.step;
            let is_there =
                |origin: &&Origin| origin.is_in(root) || found.iter().any(|found| mark(found) == Some(origin.mark()));
            // Without an origin in this folder, the checkpoint of the same step is taken for the snapshot's.
            let exact = loaded.origin.as_ref().filter(is_there).map(Origin::mark);
            let own = exact.or_else(|| found.iter().filter(of_run).filter(|found| same_step(found)).find_map(mark));
            let is_left = |found: &&Found| {
                let is_newer = own.zip(mark(found)).is_some_and(|((own, _), (sequence, _))| sequence > own);
                found.step > loaded.step || is_newer || (exact.is_some() && same_step(found))
            };
            self.marks.extend(found.iter().filter(of_run).filter(is_left).filter_map(mark));
            if let Some(own) = own {
                self.marks.remove(&own);
            }
        }
    }
}

impl CheckpointManager {
    /// Adds the checkpoints in the folder that a training leaves when it loads a snapshot: those of later steps, and
    /// those that were written after the one of the snapshot's step, which itself is no longer among them. Call this
    /// before anything is saved that follows the snapshot. Checkpoints that this process is writing are waited for.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) or [`Error::DiskHangs`](crate::Error::DiskHangs) if the folder cannot be
    /// read, [`Error::Format`](crate::Error::Format) for checkpoints of another version. The snapshot is then
    /// remembered, and [`list_abandoned`](CheckpointManager::list_abandoned) makes up for it.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::Strategy;
    /// use distribute_train::checkpoint::{Abandoned, CheckpointManager};
    /// # let folder = tempfile::tempdir()?;
    /// let strategy = Strategy::default_strategy()?;
    /// let mut checkpoints = CheckpointManager::new(folder.path());
    /// for step in [100, 200] {
    ///     checkpoints.save(&strategy, step, &[], &())?;
    /// }
    /// let earlier = checkpoints.restore_from(&strategy, &folder.path().join("step-00000100"), &[])?;
    /// let mut abandoned = Abandoned::default();
    /// checkpoints.abandon(&earlier, &mut abandoned)?;
    /// let newest = checkpoints.open_newest_but(&abandoned)?;
    /// assert_eq!(newest.map(|snapshot| snapshot.step()), Some(100));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn abandon(&self, snapshot: &Snapshot, abandoned: &mut Abandoned) -> Result<()> {
        let (step, run, origin) = (snapshot.step, snapshot.run, snapshot.origin.clone());
        abandoned.unlisted.push(Loaded { step, run, origin });
        let list = |disk: &Disk, root: &Path| exclusively(disk, root, || folder::list(disk, root));
        let found = self.alone("listing", list)?;
        abandoned.settle(&self.root, &found);
        Ok(())
    }

    /// Lists the folder for the snapshots that were loaded when it could not be listed; does nothing if there are none.
    /// Call this before a checkpoint is saved in the folder, which would be taken for one that was left; parts may call
    /// it in their [`save`](super::Checkpointed::save). Checkpoints that are being written are not waited for.
    ///
    /// # Errors
    /// The errors of [`abandon`](CheckpointManager::abandon) occur in the same cases.
    pub fn list_abandoned(&self, abandoned: &mut Abandoned) -> Result<()> {
        if abandoned.unlisted.is_empty() {
            return Ok(());
        }
        let found = self.alone("listing", folder::list)?;
        abandoned.settle(&self.root, &found);
        Ok(())
    }

    /// Opens the newest whole checkpoint like [`open_newest`](CheckpointManager::open_newest), as if there were no
    /// abandoned ones. If the folder could not be listed before, all that follow the snapshot that was loaded count as
    /// abandoned.
    ///
    /// # Errors
    /// The errors of [`read_newest`](CheckpointManager::read_newest) occur in the same cases.
    pub fn open_newest_but(&self, abandoned: &Abandoned) -> Result<Option<Snapshot>> {
        let mut abandoned = abandoned.clone();
        self.list_abandoned(&mut abandoned)?;
        let open = move |disk: &Disk, root: &Path| {
            let is_wanted = |found: &Found| !abandoned.has(found);
            Ok(folder::newest_of(disk, root, is_wanted, |path| Survey::of(disk, path))?.0)
        };
        let survey = self.alone("opening the newest checkpoint of", open)?;
        Ok(survey.map(|survey| inflow::alone(survey, &self.disk, self.write_timeout).into()))
    }
}

/// Identifies a checkpoint whose manifest can be read, by its contents.
fn mark(found: &Found) -> Option<(u64, u32)> {
    found.manifest.as_ref().map(|manifest| (manifest.sequence, manifest.crc32c))
}

#[cfg(test)]
mod tests {
    use distribute_strategy::Strategy;
    use tempfile::TempDir;

    use super::*;

    struct Folder {
        folder: TempDir,
        manager: CheckpointManager,
        abandoned: Abandoned,
    }

    impl Folder {
        /// Saves a value as the checkpoint of a step.
        fn save(&mut self, step: u64, value: u64) {
            let strategy = Strategy::default_strategy().unwrap();
            self.manager.save(&strategy, step, &[], &value).unwrap();
        }

        fn read(&mut self, step: u64) -> Snapshot {
            self.manager.finish().unwrap();
            Snapshot::read(self.folder.path().join(format!("step-{step:08}"))).unwrap()
        }

        fn leave_for(&mut self, snapshot: &Snapshot) {
            self.manager.abandon(snapshot, &mut self.abandoned).unwrap();
        }

        /// Returns the step and the value of the newest checkpoint that was not abandoned.
        fn newest(&mut self) -> Option<(u64, u64)> {
            self.manager.finish().unwrap();
            let snapshot = self.manager.open_newest_but(&self.abandoned).unwrap()?;
            Some((snapshot.step(), snapshot.program().unwrap()))
        }

        fn damage(&self, step: u64) {
            std::fs::write(self.folder.path().join(format!("step-{step:08}/state.json")), "{}").unwrap();
        }
    }

    fn folder() -> Folder {
        let folder = tempfile::tempdir().unwrap();
        let manager = CheckpointManager::new(folder.path());
        Folder { folder, manager, abandoned: Abandoned::default() }
    }

    #[test]
    fn checkpoints_after_the_one_that_is_loaded_are_left_until_their_step_is_saved_again() {
        let mut folder = folder();
        (1..=3).for_each(|step| folder.save(step, step));
        let first = folder.read(1);
        folder.leave_for(&first);
        assert_eq!(folder.newest(), Some((1, 1)));
        folder.save(2, 20);
        assert_eq!(folder.newest(), Some((2, 20)));
        // Also if another one is loaded, and those of the new course are damaged.
        let again = folder.read(2);
        folder.leave_for(&again);
        folder.damage(2);
        assert_eq!(folder.newest(), Some((1, 1)));
        folder.save(3, 30);
        assert_eq!(folder.newest(), Some((3, 30)));
    }

    #[test]
    fn a_training_may_return_to_what_it_has_left() {
        let mut folder = folder();
        folder.save(4, 1);
        folder.save(5, 2);
        let (fourth, fifth) = (folder.read(4), folder.read(5));
        folder.leave_for(&fourth);
        // The value of another course, of an earlier step than the one that is loaded then.
        folder.save(4, 3);
        assert_eq!(folder.newest(), Some((4, 3)));
        folder.leave_for(&fifth);
        assert_eq!(folder.newest(), Some((5, 2)));
        folder.damage(5);
        assert!(folder.manager.open_newest_but(&folder.abandoned).is_err());
    }

    #[test]
    fn a_snapshot_in_memory_leaves_checkpoints_of_later_steps_and_one_of_another_run_leaves_none() {
        let mut folder = folder();
        (1..=3).for_each(|step| folder.save(step, step));
        let mut other = super::tests::folder();
        other.save(1, 10);
        let of_other = other.read(1);
        folder.leave_for(&of_other);
        assert!(folder.abandoned.is_empty());
        assert_eq!(folder.newest(), Some((3, 3)));
        folder.leave_for(&Snapshot::new(2));
        assert!(!folder.abandoned.is_empty());
        assert_eq!(folder.newest(), Some((2, 2)));
        folder.leave_for(&Snapshot::new(0));
        assert_eq!(folder.newest(), None);
    }

    #[test]
    fn a_checkpoint_that_took_the_place_of_the_one_that_is_loaded_is_left_too() {
        let mut folder = folder();
        (1..=2).for_each(|step| folder.save(step, step));
        let second = folder.read(2);
        folder.save(2, 20);
        assert_eq!(folder.newest(), Some((2, 20)));
        folder.leave_for(&second);
        assert_eq!(folder.newest(), Some((1, 1)));
        folder.save(2, 200);
        assert_eq!(folder.newest(), Some((2, 200)));
        // One that another process has sent is the same.
        let second = Snapshot::from_bytes(&folder.read(2).to_bytes().unwrap()).unwrap();
        folder.save(2, 2000);
        folder.leave_for(&second);
        assert_eq!(folder.newest(), Some((1, 1)));
    }

    #[test]
    fn a_checkpoint_of_another_folder_leaves_the_one_of_its_step() {
        let (mut folder, mut other) = (folder(), super::tests::folder());
        (1..=3).for_each(|step| folder.save(step, step));
        folder.manager.finish().unwrap();
        other.manager.continue_run(folder.manager.run().unwrap());
        other.save(2, 20);
        let second = other.read(2);
        folder.leave_for(&second);
        assert_eq!(folder.newest(), Some((2, 2)));
    }

    #[test]
    fn a_folder_that_cannot_be_listed_is_listed_before_the_next_checkpoint_is_saved() {
        let mut folder = folder();
        (1..=3).for_each(|step| folder.save(step, step));
        let first = folder.read(1);
        let (root, aside) = (folder.folder.path().to_owned(), folder.folder.path().with_extension("aside"));
        std::fs::rename(&root, &aside).unwrap();
        std::fs::write(&root, "no folder").unwrap();
        assert!(folder.manager.abandon(&first, &mut folder.abandoned).is_err());
        assert!(!folder.abandoned.is_empty() && folder.manager.open_newest_but(&folder.abandoned).is_err());
        std::fs::remove_file(&root).unwrap();
        std::fs::rename(&aside, &root).unwrap();
        assert_eq!(folder.newest(), Some((1, 1)));
        folder.manager.list_abandoned(&mut folder.abandoned).unwrap();
        folder.save(2, 20);
        assert_eq!(folder.newest(), Some((2, 20)));
    }
}

//! Crashes and failures at every file operation: each leaves a good checkpoint.

use std::path::PathBuf;

use super::super::disk::{Fault, Faults};
use super::super::folder::Retention;
use super::super::run::{RunId, process_suffix};
use super::*;

/// A folder in which a test makes operations fail.
struct Folder {
    _folder: tempfile::TempDir,
    root: PathBuf,
    run: RunId,
    faults: Faults,
}

impl Folder {
    /// Creates a folder with whole checkpoints of these steps, with the step as weights.
    fn new(steps: &[u64], exchanges: bool) -> Folder {
        // In memory if there is such a folder, since it is synced some ten thousand times.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let (root, faults) = (folder.path().join("checkpoints"), Faults::default());
        if !exchanges {
            faults.without_exchange();
        }
        let run = folder::claim(&Disk::default(), &root, None, false).unwrap();
        let folder = Folder { _folder: folder, root, run, faults };
        for step in steps {
            folder.save(*step, *step).unwrap();
        }
        folder
    }

    fn save(&self, step: u64, number: u64) -> crate::Result<PathBuf> {
        let mut snapshot = Snapshot { run: Some(self.run), ..Snapshot::new(step) };
        Weights::new(&[number as f32; 3]).save(&strategy(), &mut snapshot).unwrap();
        snapshot.put_state("program", &number).unwrap();
        let how = SaveOptions { max_shard_bytes: 1 << 20, run: self.run, backup: false, keep_every: None };
        let keep = Retention { run: self.run, backup: false, count: 2, damaged: Vec::new() };
        write::save(&Disk::with(&self.faults), &self.root, &snapshot, &how, &keep)
    }

    /// Returns what a process finds that is started after this one was killed.
    fn restarted(&self) -> Option<(u64, u64, Vec<f32>)> {
        self.faults.set(Fault::None);
        for name in names(&self.root) {
            let other = name.replace(&process_suffix(), "0123456789abcdef-");
            fs::rename(self.root.join(&name), self.root.join(other)).unwrap();
        }
        restored(&self.root)
    }
}

#[test]
fn a_crash_or_a_failure_at_any_operation_of_a_save_leaves_a_good_checkpoint() {
    // A first one, a further one that removes the oldest, and one that replaces one of the same step.
    for (before, step) in [(&[][..], 1), (&[1, 2][..], 3), (&[1, 2][..], 2), (&[1, 2][..], 1)] {
        for exchanges in [true, false] {
            let calm = Folder::new(before, exchanges);
            calm.faults.set(Fault::None);
            calm.save(step, 100).unwrap();
            let count = calm.faults.count();
            assert!(count > 20, "{:?}", calm.faults.log());
            for at in 1..=count {
                for fault in [Fault::Killed(at), Fault::Fails(at)] {
                    let folder = Folder::new(before, exchanges);
                    folder.faults.set(fault);
                    let outcome = folder.save(step, 100);
                    let log = folder.faults.log();
                    let words = || format!("{before:?}, then {step}: {fault:?}, exchanges: {exchanges}: {log:#?}");
                    let new = Some((step, 100, vec![100.0; 3]));
                    let old = before.last().map(|last| (*last, *last, vec![*last as f32; 3]));
                    let found = folder.restarted();
                    assert!(found == new || (outcome.is_err() && found == old), "{found:?}: {}", words());
                    // The one of the same step is there, old or new, if it is not too old.
                    if before.contains(&step) {
                        assert!(steps(&folder.root).contains(&step), "{}", words());
                    }
                    // Saving still works afterwards.
                    folder.save(4, 4).unwrap();
                    assert_eq!(restored(&folder.root), Some((4, 4, vec![4.0; 3])), "{}", words());
                    let names = names(&folder.root);
                    assert!(names.iter().all(|name| !name.contains(".tmp-") && !name.contains(".old-")), "{names:?}");
                    assert_eq!(fs::read_to_string(folder.root.join("latest")).unwrap(), "step-00000004\n");
                }
            }
        }
    }
}

#[test]
fn readers_find_a_whole_checkpoint_at_every_moment_of_a_save() {
    for exchanges in [true, false] {
        let calm = Folder::new(&[1], exchanges);
        calm.faults.set(Fault::None);
        calm.save(1, 100).unwrap();
        for at in 1..=calm.faults.count() {
            let folder = Folder::new(&[1], exchanges);
            folder.faults.set(Fault::Killed(at));
            drop(folder.save(1, 100));
            // Without changing anything, as an evaluator in another process reads it.
            let found = CheckpointManager::new(&folder.root).read_newest().unwrap().unwrap();
            assert!([1, 100].contains(&found.program::<u64>().unwrap()), "{at}");
            assert!(CheckpointWatch::new(&folder.root).look().unwrap().is_some(), "{at}");
        }
    }
}

#[test]
fn a_crash_while_checkpoints_are_removed_leaves_the_newest_or_none() {
    let remove =
        |folder: &Folder| folder::remove_all(&Disk::with(&folder.faults), &folder.root, Some(folder.run), false);
    let calm = Folder::new(&[1, 2], true);
    calm.faults.set(Fault::None);
    remove(&calm).unwrap();
    assert!(!calm.root.exists());
    for at in 1..=calm.faults.count() {
        let folder = Folder::new(&[1, 2], true);
        folder.faults.set(Fault::Killed(at));
        drop(remove(&folder));
        if folder.root.exists() {
            let found = folder.restarted();
            assert!(found.is_none() || found == Some((2, 2, vec![2.0; 3])), "{at}: {found:?}");
            remove(&folder).unwrap();
        }
        assert!(!folder.root.exists(), "{at}");
    }
}

#[test]
fn a_crash_while_another_run_is_set_aside_loses_none_of_it() {
    let begin = |folder: &Folder| folder::claim(&Disk::with(&folder.faults), &folder.root, None, true);
    let calm = Folder::new(&[1, 2], true);
    calm.faults.set(Fault::None);
    begin(&calm).unwrap();
    for at in 1..=calm.faults.count() {
        let folder = Folder::new(&[1, 2], true);
        let aside = folder.root.join(format!("run-{}", folder.run));
        folder.faults.set(Fault::Killed(at));
        drop(begin(&folder));
        let mut all = [steps(&folder.root), steps(&aside)].concat();
        all.sort_unstable();
        assert_eq!(all, [1, 2], "{at}");
        folder.restarted();
        begin(&folder).unwrap();
        assert!(steps(&folder.root).is_empty(), "{at}");
        assert_eq!(restored(&aside), Some((2, 2, vec![2.0; 3])), "{at}");
    }
}

#[test]
fn a_checkpoint_that_cannot_be_read_for_now_is_not_passed_over() {
    let folder = Folder::new(&[1, 2], true);
    let restore = |fault| {
        folder.faults.set(fault);
        let mut manager = CheckpointManager::new(&folder.root).with_disk(Disk::with(&folder.faults));
        manager.restore::<u64>(&strategy(), &[&Weights::new(&[0.0; 3])])
    };
    assert_eq!(restore(Fault::None).unwrap(), Some((2, 2)));
    // Such as an unreachable network, or too many open files: the next start finds it again.
    for at in 1..=folder.faults.count() {
        match restore(Fault::Fails(at)) {
            Ok(found) => assert_eq!(found, Some((2, 2)), "{:?}", folder.faults.log()),
            Err(error) => assert!(error.to_string().contains("injected"), "{error}"),
        }
    }
}

//! A folder belongs to one run, and a run's newest checkpoint is never removed.

use super::*;
use distribute_types::ErrorClass;

#[test]
fn a_run_that_begins_in_another_runs_folder_is_refused_in_words_and_removes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut earlier = CheckpointManager::new(folder.path());
    save(&mut earlier, 300, 300).unwrap();
    save(&mut earlier, 400, 400).unwrap();
    let before = names(folder.path());
    let mut later = CheckpointManager::new(folder.path()).keep(2);
    let error = save(&mut later, 100, 100).unwrap_err();
    assert!(matches!(error, Error::OtherRun { .. }) && !error.is_retryable(), "{error}");
    let text = error.to_string();
    let run = earlier.run().unwrap().to_string();
    for words in
        [run.as_str(), "steps 300, 400", "restore before the first save", "another folder", "set_aside_other_runs"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(names(folder.path()), before);
    assert_eq!(restored(folder.path()).unwrap().0, 400);
    // The error is also available before the first step.
    assert!(matches!(CheckpointManager::new(folder.path()).claim(&strategy()), Err(Error::OtherRun { .. })));
}

#[test]
fn a_run_that_was_begun_meanwhile_is_found_by_the_writer() {
    let folder = tempfile::tempdir().unwrap();
    let (mut one, mut other) = (CheckpointManager::new(folder.path()), CheckpointManager::new(folder.path()));
    // Both find the folder empty, as two jobs that start at once do.
    one.claim(&strategy()).unwrap();
    fs::remove_file(folder.path().join("run")).unwrap();
    other.claim(&strategy()).unwrap();
    assert_ne!(one.run(), other.run());
    save(&mut one, 5, 5).unwrap();
    let error = save(&mut other, 3, 3).unwrap_err();
    assert!(matches!(error, Error::OtherRun { .. }), "{error}");
    assert_eq!(restored(folder.path()).unwrap().0, 5);
}

#[test]
fn restoring_continues_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let first = saved(folder.path(), 2);
    let mut second = resumed(folder.path()).keep(2);
    assert_eq!(second.run(), first.run());
    save(&mut second, 3, 3).unwrap();
    assert_eq!(steps(folder.path()), [3, 2]);
    let snapshot = Snapshot::read(folder.path().join("step-00000003")).unwrap();
    assert_eq!(snapshot.run(), first.run());
    assert_eq!(Snapshot::from_bytes(&snapshot.to_bytes().unwrap()).unwrap().run(), first.run());
}

#[test]
fn a_second_folder_of_the_same_run_is_continued_by_its_id() {
    let (last, best) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let run = saved(last.path(), 2).run().unwrap();
    let mut manager = CheckpointManager::new(best.path());
    manager.continue_run(run);
    save(&mut manager, 1, 1).unwrap();
    // The program is restarted.
    let mut manager = CheckpointManager::new(best.path());
    manager.continue_run(resumed(last.path()).run().unwrap());
    save(&mut manager, 2, 2).unwrap();
    assert_eq!(steps(best.path()), [2, 1]);
}

#[test]
fn a_run_that_was_stopped_before_its_first_checkpoint_is_the_same_when_it_starts_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = CheckpointManager::new(folder.path());
    assert_eq!(first.restore::<u64>(&strategy(), &[]).unwrap(), None);
    let run = first.claim(&strategy()).unwrap();
    let mut second = CheckpointManager::new(folder.path());
    assert_eq!(second.restore::<u64>(&strategy(), &[]).unwrap(), None);
    assert_eq!(second.claim(&strategy()).unwrap(), run);
    assert_eq!(first.claim(&strategy()).unwrap(), run);
}

#[test]
fn the_checkpoint_just_written_stays_after_going_back_to_an_earlier_step() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 5);
    let weights = Weights::new(&[0.0; 3]);
    let mut manager = CheckpointManager::new(folder.path()).keep(1);
    let earlier = manager.restore_from(&strategy(), &folder.path().join("step-00000001"), &[&weights]).unwrap();
    manager.continue_run(earlier.run().unwrap());
    save(&mut manager, 2, 20).unwrap();
    let latest = fs::read_to_string(folder.path().join("latest")).unwrap();
    assert_eq!(latest, "step-00000002\n");
    assert_eq!(restored(folder.path()), Some((2, 20, vec![20.0; 3])));
    assert_eq!(steps(folder.path()), [2]);
}

#[test]
fn other_runs_are_set_aside_when_asked_for_and_can_be_continued_there() {
    let folder = tempfile::tempdir().unwrap();
    let run = saved(folder.path(), 3).run().unwrap();
    let mut later = CheckpointManager::new(folder.path()).set_aside_other_runs();
    save(&mut later, 1, 10).unwrap();
    assert_eq!(restored(folder.path()), Some((1, 10, vec![10.0; 3])));
    let aside = folder.path().join(format!("run-{run}"));
    assert_eq!(restored(&aside), Some((3, 3, vec![3.0; 3])));
    assert_eq!(steps(&aside), [3, 2, 1]);
    // The run's own checkpoints stay in place when the program is restarted.
    let mut again = resumed(folder.path()).set_aside_other_runs();
    save(&mut again, 2, 20).unwrap();
    assert_eq!(steps(folder.path()), [2, 1]);
    // A third run, and one with checkpoints of steps that have been set aside already.
    save(&mut CheckpointManager::new(folder.path()).set_aside_other_runs(), 7, 7).unwrap();
    fs::remove_dir_all(folder.path().join("step-00000007")).unwrap();
    fs::rename(aside.join("step-00000003"), folder.path().join("step-00000003")).unwrap();
    fs::create_dir(aside.join("step-00000003")).unwrap();
    save(&mut CheckpointManager::new(folder.path()).set_aside_other_runs(), 8, 8).unwrap();
    assert_eq!(restored(&folder.path().join(format!("run-{run}-2"))), Some((3, 3, vec![3.0; 3])));
}

#[test]
fn checkpoints_of_several_runs_are_never_mixed() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (a, b) = (saved(one.path(), 2).run().unwrap(), saved(other.path(), 3).run().unwrap());
    fs::rename(other.path().join("step-00000003"), one.path().join("step-00000003")).unwrap();
    let mut manager = CheckpointManager::new(one.path());
    for error in [
        manager.restore::<u64>(&strategy(), &[]).map(drop).unwrap_err(),
        manager.restore_newest(&strategy(), &[]).map(drop).unwrap_err(),
        manager.read_newest().map(drop).unwrap_err(),
        manager.list().map(drop).unwrap_err(),
        CheckpointWatch::new(one.path()).look().map(drop).unwrap_err(),
    ] {
        let text = error.to_string();
        let steps = text.contains("steps 1, 2") && text.contains("step 3");
        assert!(steps && text.contains(&a.to_string()) && text.contains(&b.to_string()), "{text}");
    }
}

#[test]
fn whole_checkpoints_alone_count_and_damaged_ones_go_when_there_are_newer_ones() {
    let folder = tempfile::tempdir().unwrap();
    let mut manager = CheckpointManager::new(folder.path()).keep(2);
    for step in 1..=4 {
        save(&mut manager, step, step).unwrap();
    }
    assert_eq!(steps(folder.path()), [4, 3]);
    fs::write(folder.path().join("step-00000004/model.safetensors"), b"cut").unwrap();
    save(&mut manager, 5, 5).unwrap();
    assert_eq!(steps(folder.path()), [5, 4, 3]);
    save(&mut manager, 6, 6).unwrap();
    assert_eq!(steps(folder.path()), [6, 5]);
}

#[test]
fn what_a_restore_has_found_damaged_does_not_count_either() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 3);
    // Of the same length, so that only the checksum tells.
    let path = folder.path().join("step-00000003/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let mut manager = resumed(folder.path()).keep(2);
    save(&mut manager, 4, 4).unwrap();
    assert_eq!(steps(folder.path()), [4, 3, 2]);
}

#[test]
fn nothing_begins_anew_where_all_checkpoints_are_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let mut manager = saved(folder.path(), 2);
    for step in 1..=2 {
        fs::remove_file(folder.path().join(format!("step-{step:08}/model.safetensors"))).unwrap();
    }
    let error = manager.restore::<u64>(&strategy(), &[]).unwrap_err();
    assert!(matches!(error, Error::NoneWhole { count: 2, .. }), "{error}");
    assert!(error.to_string().contains("step-00000002") && error.to_string().contains("model.safetensors"), "{error}");
    assert_eq!(manager.list().unwrap(), []);
    // Nor if not even the run can be read.
    for step in 1..=2 {
        fs::remove_file(folder.path().join(format!("step-{step:08}/manifest.json"))).unwrap();
    }
    fs::remove_file(folder.path().join("run")).unwrap();
    let error = save(&mut CheckpointManager::new(folder.path()), 1, 1).unwrap_err();
    assert!(error.to_string().contains("an unknown run (steps 1, 2)"), "{error}");
}

#[test]
fn managers_of_one_process_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut kept = CheckpointManager::new(folder.path()).keep(2);
    let run = kept.claim(&strategy()).unwrap();
    let mut backups = CheckpointManager::new(folder.path()).keep(1).of_backups();
    backups.continue_run(run);
    let weights = Weights::new(&[1.0; 3]);
    for step in 1..=6 {
        // At the same time, of the same step.
        backups.save(&strategy(), step, &[&weights], &step).unwrap();
        if step % 2 == 0 {
            kept.save(&strategy(), step, &[&weights], &step).unwrap();
        }
    }
    backups.finish().unwrap();
    kept.finish().unwrap();
    // Step 5 was a backup only, and was removed if the backup of step 6 was written first.
    let mut there = steps(folder.path());
    // In which order the two managers have written is open.
    there.sort_unstable();
    assert!([vec![4, 6], vec![4, 5, 6]].contains(&there), "{there:?}");
    backups.remove_backups(&strategy()).unwrap();
    // Checkpoints that are both stay.
    assert_eq!(steps(folder.path()), [6, 4]);
    assert_eq!(fs::read_to_string(folder.path().join("latest")).unwrap(), "step-00000006\n");
    kept.remove().unwrap();
    assert!(!folder.path().exists());
}

#[test]
fn a_removed_folder_is_made_again_but_not_the_one_that_it_was_in() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let root = disk.join("checkpoints");
    let mut manager = saved(&root, 2);
    fs::remove_dir_all(&root).unwrap();
    save(&mut manager, 3, 3).unwrap();
    assert_eq!(restored(&root), Some((3, 3, vec![3.0; 3])));
    assert_eq!(resumed(&root).run(), manager.run());
    fs::remove_dir_all(&disk).unwrap();
    let error = save(&mut manager, 4, 4).unwrap_err();
    assert!(matches!(error, Error::FolderGone { .. }) && error.to_string().contains("unmounted"), "{error}");
    assert!(!disk.exists());
}

//! Disks that hang, and folders that are removed while they are written to.

use distribute_types::ErrorClass;
use std::time::{Duration, Instant};

use super::super::disk::{Fault, Faults};
use super::*;

fn manager(root: &Path, faults: &Faults) -> CheckpointManager {
    CheckpointManager::new(root).with_disk(Disk::with(faults)).write_timeout(Duration::from_millis(100))
}

#[test]
fn a_disk_that_hangs_is_an_error_that_says_what_is_being_written() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut training = manager(folder.path(), &faults);
    save(&mut training, 1, 1).unwrap();
    faults.set(Fault::Hangs("syncing"));
    let began = Instant::now();
    training.save(&strategy(), 2, &[&Weights::new(&[2.0; 3])], &2).unwrap();
    let error = training.save(&strategy(), 3, &[], &3).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::DiskHangs { .. }) && error.is_retryable(), "{text}");
    for words in ["the checkpoint of step 2 is not done", "syncing", "model.safetensors has taken 0.", "write_timeout"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    // Its own disk, so the members of an elastic job train on without it.
    assert_eq!((error.exit_code(), crate::elastic::is_of_members(&error)), (138, false));
    // Dropping it does not wait for the same disk again.
    drop(training);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    faults.set(Fault::None);
}

#[test]
fn every_wait_for_a_disk_is_bounded() {
    type Wait = fn(&mut CheckpointManager) -> crate::Result<()>;
    let waits: [(&'static str, Wait); 7] = [
        ("listing", |manager| manager.list().map(drop)),
        ("reading", |manager| manager.read_newest().map(drop)),
        ("listing", |manager| manager.restore::<u64>(&strategy(), &[]).map(drop)),
        ("listing", |manager| manager.claim(&strategy()).map(drop)),
        ("listing", CheckpointManager::remove),
        ("opening", |manager| manager.restore_newest(&strategy(), &[]).map(drop)),
        ("reading", |manager| {
            let step = manager.root().join("step-00000001");
            manager.restore_from(&strategy(), &step, &[]).map(drop)
        }),
    ];
    for (hangs, wait) in waits {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path(), 2);
        let faults = Faults::default();
        faults.set(Fault::Hangs(hangs));
        let error = wait(&mut manager(folder.path(), &faults)).unwrap_err();
        assert!(matches!(error, Error::DiskHangs { .. }) && error.to_string().contains(hangs), "{error}");
        faults.set(Fault::None);
    }
}

#[test]
fn a_writer_that_is_dropped_waits_only_as_long_as_the_disk_does_something() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut training = manager(folder.path(), &faults);
    save(&mut training, 1, 1).unwrap();
    faults.set(Fault::Hangs("writing"));
    training.save(&strategy(), 2, &[], &2).unwrap();
    faults.wait_for_hanging();
    let began = Instant::now();
    drop(training);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    faults.set(Fault::None);
}

#[test]
fn who_waits_for_another_writer_waits_for_its_disk() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut one = manager(folder.path(), &faults);
    save(&mut one, 1, 1).unwrap();
    let mut other = CheckpointManager::new(folder.path()).write_timeout(Duration::from_millis(100));
    other.continue_run(one.run().unwrap());
    save(&mut other, 2, 2).unwrap();
    faults.set(Fault::Hangs("syncing"));
    one.save(&strategy(), 3, &[&Weights::new(&[3.0; 3])], &3).unwrap();
    faults.wait_for_hanging();
    let text = save(&mut other, 4, 4).unwrap_err().to_string();
    // The error names the other writer's operation.
    assert!(text.contains("the checkpoint of step 4") && text.contains("step-00000003"), "{text}");
    faults.set(Fault::None);
    one.finish().unwrap();
}

#[test]
fn checkpoints_of_a_folder_are_written_in_the_order_of_their_saves() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut backups = manager(folder.path(), &faults).keep(9).write_timeout(Duration::from_secs(60));
    save(&mut backups, 1, 1).unwrap();
    let mut kept = CheckpointManager::new(folder.path());
    kept.continue_run(backups.run().unwrap());
    kept.claim(&strategy()).unwrap();
    faults.set(Fault::Hangs("syncing"));
    backups.save(&strategy(), 2, &[&Weights::new(&[2.0; 3])], &2u64).unwrap();
    faults.wait_for_hanging();
    kept.save(&strategy(), 3, &[&Weights::new(&[3.0; 3])], &3u64).unwrap();
    faults.set(Fault::None);
    for step in [4, 5] {
        backups.save(&strategy(), step, &[&Weights::new(&[step as f32; 3])], &step).unwrap();
    }
    backups.finish().unwrap();
    kept.finish().unwrap();
    assert_eq!(steps(folder.path()), [5, 4, 3, 2, 1]);
    assert_eq!(restored(folder.path()), Some((5, 5, vec![5.0; 3])));
}

#[test]
fn a_folder_that_is_removed_while_it_is_written_to_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let (root, faults) = (folder.path().join("checkpoints"), Faults::default());
    let mut training = manager(&root, &faults).write_timeout(Duration::from_secs(60));
    save(&mut training, 1, 1).unwrap();
    faults.set(Fault::Hangs("syncing"));
    training.save(&strategy(), 2, &[&Weights::new(&[2.0; 3])], &2u64).unwrap();
    faults.wait_for_hanging();
    fs::remove_dir_all(&root).unwrap();
    faults.set(Fault::None);
    training.finish().unwrap();
    assert_eq!(restored(&root), Some((2, 2, vec![2.0; 3])));
}

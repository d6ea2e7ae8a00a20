//! Checkpoints that are whole, damaged, incomplete or of other models.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use distribute_device::{bf16, f16};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_values::{Host, HostTensor, TensorStorage};

use super::disk::{Disk, Fault, Faults};
use super::draft::{Interval, SaveOptions};
use super::folder::{self, Found};
use super::write;
use super::*;
use crate::{BoxError, Error};

mod faults;
mod found;
mod hostile;
mod pieces;
mod runs;
mod several;
mod sharded;
#[cfg(feature = "object-store")]
mod stores;
mod waits;

/// A vector of numbers that a checkpoint keeps.
struct Weights(HostTensor<f32>);

impl Weights {
    fn new(values: &[f32]) -> Weights {
        Weights(HostTensor::new(&[values.len()], values.to_vec()).unwrap())
    }

    fn values(&self) -> Vec<f32> {
        self.0.to_elements::<f32>().unwrap()
    }
}

impl Checkpointed for Weights {
    fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        Ok(snapshot.put::<Host, _>("model", "w", &self.0)?)
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        let saved = snapshot.get::<Host, _>("model", "w", &self.0)?.to_elements::<f32>()?;
        self.0.write(&mut |mut buffer| buffer.as_mut_slice::<f32>().unwrap().copy_from_slice(&saved))?;
        Ok(())
    }
}

fn strategy() -> Strategy {
    MirroredStrategy::builder().build().unwrap()
}

/// Returns the contents of a folder, the newest first.
fn listed(root: &Path) -> Vec<Found> {
    folder::list(&Disk::default(), root).unwrap()
}

fn steps(root: &Path) -> Vec<u64> {
    listed(root).into_iter().map(|found| found.step).collect()
}

/// Returns the names in a folder.
fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Saves one step, with a number as weights and state, and waits for it.
fn save(manager: &mut CheckpointManager, step: u64, number: u64) -> crate::Result<()> {
    manager.save(&strategy(), step, &[&Weights::new(&[number as f32; 3])], &number)?;
    manager.finish()
}

/// Returns a manager that has restored.
fn resumed(root: &Path) -> CheckpointManager {
    let mut manager = CheckpointManager::new(root);
    manager.restore::<u64>(&strategy(), &[&Weights::new(&[0.0; 3])]).unwrap();
    manager
}

/// Saves checkpoints of the steps 1 to `count`, with the step as weights and state.
fn saved(root: &Path, count: u64) -> CheckpointManager {
    let mut manager = CheckpointManager::new(root);
    for step in 1..=count {
        manager.save(&strategy(), step, &[&Weights::new(&[step as f32; 3])], &step).unwrap();
    }
    manager.finish().unwrap();
    manager
}

/// Returns what is restored: step, state, and weights.
fn restored(root: &Path) -> Option<(u64, u64, Vec<f32>)> {
    let weights = Weights::new(&[0.0; 3]);
    let (step, state) = CheckpointManager::new(root).restore::<u64>(&strategy(), &[&weights]).unwrap()?;
    Some((step, state, weights.values()))
}

#[test]
fn the_newest_is_restored_and_the_oldest_go() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(restored(&folder.path().join("none")), None);
    saved(folder.path(), 7);
    assert_eq!(restored(folder.path()), Some((7, 7, vec![7.0; 3])));
    assert_eq!(steps(folder.path()), [7, 6, 5, 4, 3]);
    assert_eq!(fs::read_to_string(folder.path().join("latest")).unwrap(), "step-00000007\n");
}

#[test]
fn some_stay_for_good_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut manager = CheckpointManager::new(folder.path()).keep(1).keep_every(Duration::ZERO);
    for step in 1..4 {
        save(&mut manager, step, step).unwrap();
    }
    assert_eq!(steps(folder.path()), [3, 2, 1]);
    let mut again = resumed(folder.path()).keep(1);
    save(&mut again, 4, 4).unwrap();
    save(&mut again, 5, 5).unwrap();
    assert_eq!(steps(folder.path()), [5, 3, 2, 1]);
    // Written again, it still stays.
    save(&mut again, 2, 2).unwrap();
    save(&mut again, 6, 6).unwrap();
    assert_eq!(steps(folder.path()), [6, 2, 3, 1]);
}

#[test]
fn intervals_continue_over_restarts() {
    let folder = tempfile::tempdir().unwrap();
    // No manager lives as long as the interval.
    let manager = || resumed(folder.path()).keep(1).keep_every(Duration::from_millis(100));
    for step in 1..=4 {
        let mut manager = manager();
        std::thread::sleep(Duration::from_millis(60));
        save(&mut manager, step, step).unwrap();
    }
    save(&mut manager(), 5, 5).unwrap();
    let kept = steps(folder.path());
    assert!(kept[0] == 5 && kept[1..].iter().any(|step| *step <= 3), "{kept:?}");
}

#[test]
fn a_manager_without_intervals_keeps_the_time_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let every = Duration::from_millis(700);
    let mut one = resumed(folder.path()).keep(1).keep_every(every);
    save(&mut one, 1, 1).unwrap();
    let mut other = resumed(folder.path()).keep(1);
    for step in 1..=5 {
        // Both write each step.
        save(&mut one, step, step).unwrap();
        save(&mut other, step, step).unwrap();
        if step == 1 {
            std::thread::sleep(every);
        }
    }
    assert_eq!(steps(folder.path()), [5, 2]);
}

#[test]
fn a_failed_save_takes_no_interval() {
    let (folder, faults) = (tempfile::tempdir().unwrap(), Faults::default());
    let every = Duration::from_millis(500);
    let mut manager = resumed(folder.path()).keep(1).keep_every(every).with_disk(Disk::with(&faults));
    save(&mut manager, 1, 1).unwrap();
    std::thread::sleep(every);
    faults.set(Fault::Killed(1));
    save(&mut manager, 2, 2).unwrap_err();
    faults.set(Fault::None);
    for step in 3..=5 {
        save(&mut manager, step, step).unwrap();
    }
    let kept = steps(folder.path());
    assert!(kept.contains(&5) && kept.contains(&3), "{kept:?}");
}

#[test]
fn a_clock_that_was_set_back_begins_another_interval() {
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let next = |now, since| Interval { length: Duration::from_secs(10), begun: at(50), now: at(now) }.next(since);
    assert_eq!((next(59, None), next(60, None)), ((false, 50_000), (true, 60_000)));
    assert_eq!((next(69, Some(60_000)), next(75, Some(60_000))), ((false, 60_000), (true, 75_000)));
    // The checkpoint before was saved at a later time.
    assert_eq!((next(60, Some(90_000)), next(70, Some(60_000))), ((false, 60_000), (true, 70_000)));
}

#[test]
fn damaged_ones_are_named_and_the_one_before_is_used() {
    type Damage = fn(&Path);
    let truncate: Damage = |folder| {
        let path = folder.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    };
    let flip: Damage = |folder| {
        let path = folder.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
    };
    let remove: Damage = |folder| fs::remove_file(folder.join("state.json")).unwrap();
    let uncommitted: Damage = |folder| fs::remove_file(folder.join("manifest.json")).unwrap();
    for (damage, words) in [
        (truncate, ["model.safetensors", "bytes, and was written with"]),
        (flip, ["model.safetensors", "checksum"]),
        (remove, ["state.json", "No such file"]),
        (uncommitted, ["manifest.json", "No such file"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path(), 3);
        let newest = folder.path().join("step-00000003");
        damage(&newest);
        let text = Snapshot::read(&newest).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert_eq!(restored(folder.path()), Some((2, 2, vec![2.0; 3])));
    }
}

#[test]
fn what_a_killed_process_left_half_written_is_no_checkpoint_and_goes() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1);
    let half = folder.path().join("step-00000002.tmp-1");
    fs::create_dir(&half).unwrap();
    fs::write(half.join("model.safetensors"), b"half").unwrap();
    assert_eq!(restored(folder.path()).unwrap().0, 1);
    assert!(!half.exists());
}

#[test]
fn every_type_comes_back_from_files_of_any_number() {
    let folder = tempfile::tempdir().unwrap();
    let mut snapshot = Snapshot::new(12);
    snapshot
        .put::<Host, _>("model", "a.f32", &HostTensor::new(&[2, 2], vec![1.0f32, -0.0, f32::MAX, 0.1]).unwrap())
        .unwrap();
    snapshot.put::<Host, _>("model", "b.f16", &HostTensor::new(&[1], vec![f16::from_f32(0.1)]).unwrap()).unwrap();
    snapshot.put::<Host, _>("model", "c.bf16", &HostTensor::new(&[1], vec![bf16::from_f32(0.1)]).unwrap()).unwrap();
    snapshot.put::<Host, _>("model", "d.i64", &HostTensor::scalar(i64::MIN)).unwrap();
    snapshot.put::<Host, _>("optimizer", "empty", &HostTensor::new(&[0, 3], Vec::<f64>::new()).unwrap()).unwrap();
    snapshot.put::<Host, _>("expert-01", "w", &HostTensor::scalar(1u8)).unwrap();
    snapshot.put_state("note", &"a note").unwrap();
    let run = RunId::draw();
    snapshot.run = Some(run);
    let keep = folder::Retention { run, backup: false, count: 5, damaged: Vec::new() };
    let write = |max_shard_bytes| {
        let how = SaveOptions { max_shard_bytes, run, backup: false, keep_every: None };
        write::save(&Disk::default(), folder.path(), &snapshot, &how, &keep).unwrap()
    };
    for max_shard_bytes in [1, 20, 1000] {
        let path = write(max_shard_bytes);
        assert_eq!(Snapshot::read(&path).unwrap(), snapshot);
        assert_eq!(path.join("model.safetensors.index.json").exists(), max_shard_bytes < 1000);
    }
    assert_eq!(Snapshot::from_bytes(&snapshot.to_bytes().unwrap()).unwrap(), snapshot);
    assert!(Snapshot::from_bytes(b"nothing").is_err());
    write(20);
    let index = fs::read_to_string(folder.path().join("step-00000012/model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["weight_map"]["d.i64"], "model-00002-of-00002.safetensors");
    assert_eq!(index["metadata"]["total_size"], 28);
}

#[test]
fn a_checkpoint_of_something_else_is_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1);
    let longer = Weights::new(&[0.0; 4]);
    let mut manager = CheckpointManager::new(folder.path());
    let text = manager.restore::<u64>(&strategy(), &[&longer]).unwrap_err().to_string();
    assert!(text.contains("\"w\"") && text.contains("f32 [3]") && text.contains("f32 [4]"), "{text}");
    let text = manager.restore::<String>(&strategy(), &[]).unwrap_err().to_string();
    assert!(text.contains("\"program\""), "{text}");
    let missing = Snapshot::new(1).get::<Host, _>("model", "w", &longer.0).unwrap_err().to_string();
    assert!(missing.contains("none of this name"), "{missing}");
}

#[test]
fn a_folder_that_cannot_be_written_is_told_at_once_and_later_at_the_next_save() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = save(&mut CheckpointManager::new(file.join("checkpoints")), 1, 1).unwrap_err();
    assert!(matches!(error, Error::File { .. }) && error.to_string().contains("file/checkpoints"), "{error}");

    let root = folder.path().join("checkpoints");
    let mut manager = saved(&root, 1);
    fs::remove_dir_all(&root).unwrap();
    fs::write(&root, b"").unwrap();
    let weights = Weights::new(&[1.0]);
    manager.save(&strategy(), 2, &[&weights], &()).unwrap();
    let error = manager.save(&strategy(), 3, &[&weights], &()).unwrap_err();
    assert!(matches!(error, Error::File { .. }) && error.to_string().contains("checkpoints"), "{error}");
}

#[test]
fn any_checkpoint_can_be_read_without_touching_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let manager = saved(folder.path(), 3);
    let half = folder.path().join("step-00000004.tmp-1");
    fs::create_dir(&half).unwrap();
    let found = manager.list().unwrap();
    assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 2, 1]);
    let weights = Weights::new(&[0.0; 3]);
    let snapshot = manager.restore_from(&strategy(), &found[1].1, &[&weights]).unwrap();
    assert_eq!((snapshot.step(), snapshot.program::<u64>().unwrap(), weights.values()), (2, 2, vec![2.0; 3]));
    let (dtype, shape, bytes) = snapshot.tensor("model", "w").unwrap();
    assert_eq!((dtype, shape, bytes.len()), (distribute_device::DType::F32, &[3][..], 12));
    assert!(snapshot.tensor("model", "v").is_none() && snapshot.tensor("optimizer", "w").is_none());
    // Files that another process is writing stay.
    assert!(half.exists());
    assert_eq!(Snapshot::read(&found[0].1).unwrap().step(), 3);
    assert!(manager.restore_from(&strategy(), &half, &[&weights]).unwrap_err().to_string().contains("manifest.json"));
}

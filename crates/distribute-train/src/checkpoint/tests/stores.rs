//! The same in a store of objects: in the memory of the process, where every operation can be made to fail.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use distribute_device::DType;
use distribute_storage::Location;
use distribute_types::ErrorClass;

use super::super::disk::{Fault, Faults};
use super::super::folder::Retention;
use super::super::run::RunId;
use super::pieces::Tables;
use super::*;

/// Returns a folder that no other test uses.
fn place() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    PathBuf::from(format!("memory://checkpoints/{}/run", COUNT.fetch_add(1, Ordering::Relaxed)))
}

fn object(path: &Path) -> Location {
    Location::open(path.to_str().unwrap()).unwrap()
}

/// Returns the names of all objects below a folder.
fn below(root: &Path) -> Vec<String> {
    object(root).list_below().unwrap().into_iter().map(|entry| entry.name).collect()
}

fn text(path: &Path) -> String {
    String::from_utf8(object(path).read(1 << 20).unwrap().to_vec()).unwrap()
}

#[test]
fn the_newest_is_restored_and_the_oldest_go() {
    let root = place();
    assert_eq!(restored(&root), None);
    saved(&root, 7);
    assert_eq!(restored(&root), Some((7, 7, vec![7.0; 3])));
    assert_eq!(steps(&root), [7, 6, 5, 4, 3]);
    assert_eq!(text(&root.join("latest")), "step-00000007\n");
    let of_one: Vec<String> = below(&root.join("step-00000007"));
    assert_eq!(of_one, [".folder", "manifest.json", "model.safetensors", "state.json"]);
    let listed = CheckpointManager::new(&root).list().unwrap();
    assert_eq!(listed[0], (7, root.join("step-00000007")));
    assert_eq!(Snapshot::read(&listed[1].1).unwrap().step(), 6);
    assert_eq!(CheckpointManager::new(&root).read_newest().unwrap().unwrap().step(), 7);
}

#[test]
fn a_step_that_is_saved_again_takes_the_place_of_the_earlier_one() {
    let root = place();
    let mut manager = CheckpointManager::new(&root).keep(2);
    for number in [1, 2, 3] {
        save(&mut manager, 12, number).unwrap();
        assert_eq!(restored(&root), Some((12, number, vec![number as f32; 3])));
        assert_eq!(steps(&root), [12]);
    }
    // Names are used again when nothing is left of them.
    assert!(text(&root.join("latest")).starts_with("step-00000012"));
    let mut kept = CheckpointManager::new(&root).keep(1).keep_every(std::time::Duration::ZERO);
    kept.restore::<u64>(&strategy(), &[]).unwrap();
    save(&mut kept, 13, 13).unwrap();
    save(&mut kept, 13, 14).unwrap();
    save(&mut kept, 15, 15).unwrap();
    assert_eq!(steps(&root), [15, 13]);
}

#[test]
fn damaged_ones_are_named_and_the_one_before_is_used() {
    let tensors = "model.safetensors";
    for (damage, words) in [("cut", "bytes, and was written with"), ("flip", "checksum"), ("remove", "no such object")]
    {
        let root = place();
        saved(&root, 3);
        let newest = root.join("step-00000003");
        let file = object(&newest.join(tensors));
        let mut bytes = file.read(1 << 20).unwrap().to_vec();
        match damage {
            "cut" => file.write(bytes[..bytes.len() - 1].to_vec()).unwrap(),
            "flip" => {
                *bytes.last_mut().unwrap() ^= 1;
                file.write(bytes).unwrap();
            }
            _ => file.delete().unwrap(),
        }
        let said = Snapshot::read(&newest).unwrap_err().to_string();
        assert!(said.contains(tensors) && said.contains(words), "{said}");
        assert_eq!(restored(&root), Some((2, 2, vec![2.0; 3])));
        // Without a manifest it has never been published.
        object(&newest.join("manifest.json")).delete().unwrap();
        assert_eq!(steps(&root), [2, 1]);
        let mut again = resumed(&root);
        save(&mut again, 3, 30).unwrap();
        assert_eq!(restored(&root), Some((3, 30, vec![30.0; 3])));
        assert_eq!(below(&root).iter().filter(|name| name.starts_with("step-00000003")).count(), 4);
    }
}

#[test]
fn tensors_in_pieces_are_uploaded_in_parts_under_their_names() {
    let tables = |seed| {
        let mut tables = Tables::small(true, seed);
        tables.add("large", DType::U8, &[17 << 20], seed);
        tables
    };
    let (root, faults) = (place(), Faults::default());
    // Two files of small tensors are less than a part each, and one file is more.
    let mut manager = CheckpointManager::new(&root).max_shard_bytes(10_000).with_disk(Disk::with(&faults));
    manager.claim(&strategy()).unwrap();
    faults.set(Fault::None);
    manager.save(&strategy(), 1, &[&tables(1)], &()).unwrap();
    manager.finish().unwrap();
    let log = faults.log();
    let of_tensors = |verb: &str| log.iter().filter(|op| op.starts_with(verb) && op.ends_with(".safetensors")).count();
    // The store does not copy what has its name from the start.
    assert_eq!(["making", "writing", "completing", "copying"].map(of_tensors), [1, 4, 1, 0], "{log:#?}");
    let restored = tables(2);
    manager.restore::<()>(&strategy(), &[&restored]).unwrap().unwrap();
    assert!(*restored.values.lock() == *tables(1).values.lock());
}

#[test]
fn an_earlier_writer_ends_when_another_process_has_claimed_the_folder() {
    let root = place();
    let mut earlier = saved(&root, 2);
    // As a restarted job does on another machine.
    object(&root.join("writer")).write("0123456789abcdef-\n").unwrap();
    let error = save(&mut earlier, 3, 3).unwrap_err();
    assert!(matches!(error, Error::OtherWriter { .. }) && !error.is_retryable(), "{error}");
    let said = error.to_string();
    assert!(said.contains(root.to_str().unwrap()) && said.contains("a folder of its own"), "{said}");
    assert_eq!(steps(&root), [2, 1]);
    assert!(matches!(earlier.remove(), Err(Error::OtherWriter { .. })));
    // The next process takes it over.
    let mut next = resumed(&root);
    save(&mut next, 4, 4).unwrap();
    assert_eq!(steps(&root), [4, 2, 1]);
    next.remove().unwrap();
    assert_eq!(below(&root), Vec::<String>::new());
}

#[test]
fn runs_are_told_apart_and_set_aside() {
    let root = place();
    let earlier = saved(&root, 2).run().unwrap();
    let error = save(&mut CheckpointManager::new(&root), 9, 9).unwrap_err();
    assert!(matches!(error, Error::OtherRun { .. }), "{error}");
    assert_eq!(steps(&root), [2, 1]);
    let mut later = CheckpointManager::new(&root).set_aside_other_runs();
    save(&mut later, 1, 10).unwrap();
    assert_eq!(steps(&root), [1]);
    assert_eq!(restored(&root.join(format!("run-{earlier}"))), Some((2, 2, vec![2.0; 3])));
    // The run is known before its first checkpoint.
    let other = place();
    let run = CheckpointManager::new(&other).claim(&strategy()).unwrap();
    assert_eq!(resumed(&other).claim(&strategy()).unwrap(), run);
}

#[test]
fn a_folder_that_is_removed_while_it_is_written_to_is_made_again() {
    let root = place();
    let mut manager = saved(&root, 1);
    for name in below(&root) {
        object(&root.join(name)).delete().unwrap();
    }
    save(&mut manager, 2, 2).unwrap();
    assert_eq!(restored(&root), Some((2, 2, vec![2.0; 3])));
    assert_eq!(text(&root.join("run")).trim_end(), manager.run().unwrap().to_string());
}

#[test]
fn an_evaluator_follows_a_store() {
    let root = place();
    let mut training = saved(&root, 1);
    let mut seen = Vec::new();
    SidecarEvaluator::new(&root)
        .until_step(3)
        .run(|snapshot| {
            seen.push(snapshot.step());
            save(&mut training, 1 + seen.len() as u64, 1)
        })
        .unwrap();
    assert_eq!(seen, [1, 2, 3]);
}

#[test]
fn files_of_several_parts_come_back_bit_for_bit() {
    let root = place();
    let bytes: Vec<u8> = (0..40 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let large = |bytes: Vec<u8>| {
        let mut snapshot = Snapshot::new(1);
        snapshot.put_bytes("model", "w", distribute_device::DType::U8, &[bytes.len()], bytes);
        snapshot
    };
    struct Large(Snapshot);
    impl Checkpointed for Large {
        fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
            let (dtype, shape, bytes) = self.0.tensor("model", "w").ok_or("nothing to save")?;
            snapshot.put_bytes("model", "w", dtype, shape, bytes.to_vec());
            Ok(())
        }
        fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
            if snapshot.tensor("model", "w") == self.0.tensor("model", "w") { Ok(()) } else { Err("it differs".into()) }
        }
    }
    let part = Large(large(bytes));
    for max_shard_bytes in [usize::MAX, 1 << 20] {
        let mut manager = CheckpointManager::new(&root).max_shard_bytes(max_shard_bytes).set_aside_other_runs();
        manager.save(&strategy(), 1, &[&part], &0).unwrap();
        manager.finish().unwrap();
        assert_eq!(CheckpointManager::new(&root).restore::<u64>(&strategy(), &[&part]).unwrap(), Some((1, 0)));
    }
}

#[test]
fn urls_of_files_are_paths_and_unknown_ones_errors() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/checkpoints", folder.path().display());
    let mut manager = CheckpointManager::new(&url);
    save(&mut manager, 1, 1).unwrap();
    assert_eq!(manager.root(), folder.path().join("checkpoints"));
    assert!(folder.path().join("checkpoints/step-00000001/manifest.json").exists());
    assert_eq!(Snapshot::read(format!("{url}/step-00000001")).unwrap().step(), 1);
    let error = save(&mut CheckpointManager::new("ftp://host/run"), 1, 1).unwrap_err().to_string();
    assert!(error.contains("ftp://host") && error.contains("s3://"), "{error}");
}

/// A folder in which a test makes operations fail.
struct Folder {
    root: PathBuf,
    run: RunId,
    faults: Faults,
}

impl Folder {
    /// Creates a folder with whole checkpoints of these steps, with the step as weights.
    fn new(steps: &[u64]) -> Folder {
        let (root, faults) = (place(), Faults::default());
        let run = folder::claim(&Disk::default(), &root, None, false).unwrap();
        let folder = Folder { root, run, faults };
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

    fn restarted(&self) -> Option<(u64, u64, Vec<f32>)> {
        self.faults.set(Fault::None);
        restored(&self.root)
    }
}

#[test]
fn a_crash_or_a_failure_at_any_operation_of_a_save_leaves_a_good_checkpoint() {
    for (before, step) in [(&[][..], 1), (&[1, 2][..], 3), (&[1, 2][..], 2), (&[1, 2][..], 1)] {
        let calm = Folder::new(before);
        calm.faults.set(Fault::None);
        calm.save(step, 100).unwrap();
        let count = calm.faults.count();
        assert!(count > 10, "{:?}", calm.faults.log());
        for at in 1..=count {
            for fault in [Fault::Killed(at), Fault::Fails(at)] {
                let folder = Folder::new(before);
                folder.faults.set(fault);
                let outcome = folder.save(step, 100);
                let log = folder.faults.log();
                let words = || format!("{before:?}, then {step}: {fault:?}: {log:#?}");
                // An evaluator in another process, which changes nothing, finds one at every moment.
                let found = CheckpointManager::new(&folder.root).read_newest().unwrap();
                assert_eq!(found.is_some(), !steps(&folder.root).is_empty(), "{}", words());
                let new = Some((step, 100, vec![100.0; 3]));
                let old = before.last().map(|last| (*last, *last, vec![*last as f32; 3]));
                let found = folder.restarted();
                assert!(found == new || (outcome.is_err() && found == old), "{found:?}: {}", words());
                if before.contains(&step) {
                    assert!(steps(&folder.root).contains(&step), "{}", words());
                }
                // A restarted program saves, and removes what is incomplete.
                let run = folder::claim(&Disk::default(), &folder.root, Some(folder.run), false).unwrap();
                assert_eq!(run, folder.run);
                folder.save(4, 4).unwrap();
                assert_eq!(restored(&folder.root), Some((4, 4, vec![4.0; 3])), "{}", words());
                let all = below(&folder.root);
                let folders = all.iter().filter(|name| name.ends_with("/.folder")).count();
                let published = all.iter().filter(|name| name.ends_with("/manifest.json")).count();
                assert!(folders == published, "{all:?}: {}", words());
                assert_eq!(text(&folder.root.join("latest")), "step-00000004\n");
            }
        }
    }
}

#[test]
fn a_crash_while_checkpoints_are_removed_leaves_the_newest_or_none() {
    let remove =
        |folder: &Folder| folder::remove_all(&Disk::with(&folder.faults), &folder.root, Some(folder.run), false);
    let calm = Folder::new(&[1, 2]);
    calm.faults.set(Fault::None);
    remove(&calm).unwrap();
    assert_eq!(below(&calm.root), Vec::<String>::new());
    for at in 1..=calm.faults.count() {
        let folder = Folder::new(&[1, 2]);
        folder.faults.set(Fault::Killed(at));
        drop(remove(&folder));
        let found = folder.restarted();
        assert!(found.is_none() || found == Some((2, 2, vec![2.0; 3])), "{at}: {found:?}");
        remove(&folder).unwrap();
        assert_eq!(below(&folder.root), Vec::<String>::new(), "{at}");
    }
}

#[test]
fn a_crash_while_another_run_is_set_aside_loses_none_of_it() {
    let begin = |folder: &Folder| folder::claim(&Disk::with(&folder.faults), &folder.root, None, true);
    let calm = Folder::new(&[1, 2]);
    calm.faults.set(Fault::None);
    begin(&calm).unwrap();
    for at in 1..=calm.faults.count() {
        let folder = Folder::new(&[1, 2]);
        folder.faults.set(Fault::Killed(at));
        drop(begin(&folder));
        // A copy that is whole may be there twice, here or in a second folder.
        let all = || {
            let asides = (1..5).map(|number| match number {
                1 => folder.root.join(format!("run-{}", folder.run)),
                _ => folder.root.join(format!("run-{}-{number}", folder.run)),
            });
            let mut all: Vec<u64> = asides.flat_map(|aside| steps(&aside)).chain(steps(&folder.root)).collect();
            all.sort_unstable();
            all.dedup();
            all
        };
        assert_eq!(all(), [1, 2], "{at}");
        folder.faults.set(Fault::None);
        // As long as only the claim was lost, it is a new run's folder already.
        begin(&folder).unwrap();
        assert!(steps(&folder.root).is_empty(), "{at}");
        assert_eq!(all(), [1, 2], "{at}");
    }
}

#[test]
fn a_store_that_cannot_be_read_for_now_is_not_passed_over() {
    let folder = Folder::new(&[1, 2]);
    let restore = |fault| {
        folder.faults.set(fault);
        let mut manager = CheckpointManager::new(&folder.root).with_disk(Disk::with(&folder.faults));
        manager.restore::<u64>(&strategy(), &[&Weights::new(&[0.0; 3])])
    };
    assert_eq!(restore(Fault::None).unwrap(), Some((2, 2)));
    for at in 1..=folder.faults.count() {
        match restore(Fault::Fails(at)) {
            Ok(found) => assert_eq!(found, Some((2, 2)), "{:?}", folder.faults.log()),
            Err(error) => assert!(error.to_string().contains("injected"), "{error}"),
        }
    }
}

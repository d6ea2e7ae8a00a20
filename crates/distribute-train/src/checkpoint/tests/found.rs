//! The findings of the simulation, one by one.

use super::super::disk::{Fault, Faults};
use super::super::folder::Retention;
use super::super::manifest::{MANIFEST, Manifest};
use super::super::read;
use super::super::run::RunId;
use super::*;

fn save_as(root: &Path, disk: &Disk, run: RunId, (step, number): (u64, u64)) -> crate::Result<()> {
    let mut snapshot = Snapshot { run: Some(run), ..Snapshot::new(step) };
    Weights::new(&[number as f32; 3]).save(&strategy(), &mut snapshot).unwrap();
    snapshot.put_state("program", &number).unwrap();
    let options = SaveOptions { max_shard_bytes: 1 << 20, run, backup: false, keep_every: None };
    let keep = Retention { run, backup: false, count: 2, damaged: Vec::new() };
    write::save(disk, root, &snapshot, &options, &keep).map(drop)
}

fn temporary(root: &Path) -> Vec<String> {
    names(root).into_iter().filter(|name| name.contains(".tmp-") || name.contains(".old-")).collect()
}

#[test]
fn what_a_failed_operation_has_left_goes_with_the_next_save_of_the_same_process() {
    for exchanges in [true, false] {
        let count = {
            let (folder, faults) = (tempfile::tempdir().unwrap(), Faults::default());
            let run = folder::claim(&Disk::default(), folder.path(), None, false).unwrap();
            save_as(folder.path(), &Disk::with(&faults), run, (1, 1)).unwrap();
            faults.set(Fault::None);
            save_as(folder.path(), &Disk::with(&faults), run, (1, 2)).unwrap();
            faults.count()
        };
        for at in 1..=count + 1 {
            let (folder, faults) = (tempfile::tempdir().unwrap(), Faults::default());
            if !exchanges {
                faults.without_exchange();
            }
            let run = folder::claim(&Disk::default(), folder.path(), None, false).unwrap();
            save_as(folder.path(), &Disk::with(&faults), run, (1, 1)).unwrap();
            faults.set(Fault::Fails(at));
            drop(save_as(folder.path(), &Disk::with(&faults), run, (1, 2)));
            faults.set(Fault::None);
            save_as(folder.path(), &Disk::with(&faults), run, (2, 3)).unwrap();
            assert_eq!(temporary(folder.path()), Vec::<String>::new(), "{at}, exchanges: {exchanges}");
        }
    }
}

#[test]
fn a_reader_finds_the_newest_that_has_replaced_what_it_was_reading() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder::claim(&Disk::default(), folder.path(), None, false).unwrap();
    for step in [1, 2] {
        save_as(folder.path(), &Disk::default(), run, (step, step)).unwrap();
    }
    let reads = std::cell::Cell::new(0);
    let (found, damaged) = folder::newest(&Disk::default(), folder.path(), |path| {
        reads.set(reads.get() + 1);
        if reads.get() == 1 {
            // Its files go while they are read.
            save_as(folder.path(), &Disk::default(), run, (2, 3)).unwrap();
            return Err(Error::Damaged { path: path.to_owned(), problem: "it is gone".to_owned() });
        }
        read::read(&Disk::default(), path)
    })
    .unwrap();
    assert_eq!((found.unwrap().program::<u64>().unwrap(), damaged), (3, Vec::new()));
}

#[test]
fn a_run_that_began_at_the_same_time_does_not_replace_a_checkpoint_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = [0, 1].map(|_| {
        let _ = fs::remove_file(folder.path().join("run"));
        folder::claim(&Disk::default(), folder.path(), None, false).unwrap()
    });
    let options = |run| SaveOptions { max_shard_bytes: 1 << 20, run, backup: false, keep_every: None };
    // The other has looked at the folder before this one is there.
    let disk = Disk::default();
    let draft = super::super::draft::Draft::begin(&disk, folder.path(), 1, &options(other)).unwrap();
    save_as(folder.path(), &Disk::default(), one, (1, 1)).unwrap();
    let error = draft.filled(|_| Ok(std::collections::BTreeMap::new())).unwrap_err();
    assert!(matches!(error, Error::OtherRun { .. }), "{error}");
    assert_eq!(restored(folder.path()).unwrap(), (1, 1, vec![1.0; 3]));
}

#[test]
fn a_bit_of_a_manifests_format_is_damage_and_the_one_before_is_used() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 2);
    let path = folder.path().join("step-00000002").join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    for (field, other) in [("\"format\": 2", "\"format\": 3"), ("\"format\"", "\"fornat\"")] {
        fs::write(&path, text.replacen(field, other, 1)).unwrap();
        assert_eq!(restored(folder.path()).unwrap().0, 1, "{other}");
    }
}

#[test]
fn a_checkpoint_whose_manifest_cannot_be_read_for_a_moment_is_older_than_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder::claim(&Disk::default(), folder.path(), None, false).unwrap();
    for step in [1, 9] {
        save_as(folder.path(), &Disk::default(), run, (step, step)).unwrap();
    }
    // Twice, since the number of the next one is unknown the second time, too.
    for (hidden, step) in [(9, 5), (5, 3)] {
        let path = folder.path().join(format!("step-{hidden:08}")).join(MANIFEST);
        let text = fs::read(&path).unwrap();
        fs::write(&path, &text[1..]).unwrap();
        save_as(folder.path(), &Disk::default(), run, (step, step)).unwrap();
        fs::write(&path, text).unwrap();
        assert_eq!(restored(folder.path()).unwrap().0, step);
    }
    let sequence = |step: u64| {
        let text = fs::read(folder.path().join(format!("step-{step:08}")).join(MANIFEST)).unwrap();
        Manifest::from_text(&text).unwrap().sequence
    };
    assert!(sequence(3) > sequence(5));
}

#[test]
fn the_names_of_new_folders_are_synced_or_it_is_an_error() {
    let count = |faults: &Faults| {
        let (folder, disk) = (tempfile::tempdir().unwrap(), Disk::with(faults));
        drop(folder::claim(&disk, &folder.path().join("a/b"), None, false));
        faults.log().iter().filter(|step| step.starts_with("syncing") && !step.ends_with("run")).count()
    };
    // Above the new folders, and of the file in the last one.
    assert!(count(&Faults::default()) >= 4);
    let mut swallowed = Vec::new();
    for at in 1.. {
        let (folder, faults) = (tempfile::tempdir().unwrap(), Faults::default());
        faults.set(Fault::Fails(at));
        let claimed = folder::claim(&Disk::with(&faults), &folder.path().join("a/b"), None, false);
        if faults.count() < at {
            break;
        }
        let log = faults.log();
        if claimed.is_ok() && log[at - 1].starts_with("syncing") {
            swallowed.push(log[at - 1].clone());
        }
        // A process that is started again syncs what one has made that was killed.
        faults.set(Fault::None);
        folder::claim(&Disk::with(&faults), &folder.path().join("a/b"), None, false).unwrap();
        let above = folder.path().join("a").display().to_string();
        assert!(faults.log().iter().any(|step| *step == format!("syncing {above}")), "{:?}", faults.log());
    }
    assert_eq!(swallowed, Vec::<String>::new());
}

#[test]
fn names_are_synced_before_what_they_named_is_removed() {
    for exchanges in [true, false] {
        let (folder, faults) = (tempfile::tempdir().unwrap(), Faults::default());
        if !exchanges {
            faults.without_exchange();
        }
        let run = folder::claim(&Disk::default(), folder.path(), None, false).unwrap();
        for step in [1, 2] {
            save_as(folder.path(), &Disk::default(), run, (step, step)).unwrap();
        }
        // One that replaces, and one that removes the oldest; also if the sync of the new name fails.
        for (step, fails) in [(2, false), (3, false), (2, true)] {
            faults.set(Fault::None);
            if fails {
                save_as(folder.path(), &Disk::with(&faults), run, (step, step)).unwrap();
                let place = faults.log().iter().position(|step| step.starts_with("exchanging")).unwrap();
                let sync = faults.log().iter().skip(place).position(|step| step.starts_with("syncing")).unwrap();
                faults.set(Fault::Fails(place + sync + 1));
            }
            let outcome = save_as(folder.path(), &Disk::with(&faults), run, (step, step));
            assert_eq!(outcome.is_err(), fails, "{:?}", faults.log());
            let (mut renamed, mut log) = (false, Vec::new());
            for step in faults.log() {
                let is_sync = step == format!("syncing {}", folder.path().display());
                log.push(step.clone());
                if step.starts_with("renaming to") || step.starts_with("exchanging") {
                    renamed = true;
                } else if is_sync {
                    renamed = false;
                }
                let is_of_checkpoint = step.starts_with("removing") && step.contains("step-");
                assert!(!(is_of_checkpoint && renamed), "exchanges: {exchanges}: {log:#?}");
            }
        }
    }
}

//! Restoring: damage, failures, and workers that load different tensors.

use super::*;

#[test]
fn damage_is_found_before_anything_is_overwritten() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 4] = [
        ("the last byte", |bytes| *bytes.last_mut().unwrap() ^= 1),
        ("the header", |bytes| bytes[12] ^= 1),
        ("its length", |bytes| bytes[6] ^= 1),
        ("the end", |bytes| bytes.truncate(bytes.len() - 1)),
    ];
    for (what, damage) in damages {
        let folder = folder_in_memory();
        let strategy = in_parts(2);
        let trained = made(&strategy);
        let mut manager = manager(folder.path());
        save_in(&mut manager, &strategy, &trained, 1).unwrap();
        let then = wholes(&strategy, &trained);
        train(&strategy, &trained, 0..1);
        save_in(&mut manager, &strategy, &trained, 2).unwrap();
        let newest = folder.path().join("step-00000002");
        let file = names(&newest).into_iter().rfind(|name| name.starts_with("optimizer-")).unwrap();
        let mut bytes = fs::read(newest.join(&file)).unwrap();
        damage(&mut bytes);
        fs::write(newest.join(&file), &bytes).unwrap();
        // Asked for by name, it is an error, and the model stays as it is.
        let now = wholes(&strategy, &trained);
        let error = manager.restore_from(&strategy, &newest, &[&trained.0, &trained.1]).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }) && error.to_string().contains(&file), "{what}: {error}");
        assert_eq!(wholes(&strategy, &trained), now, "{what}");
        assert_eq!(restore_in(&mut manager, &strategy, &trained).unwrap(), Some((1, 1)), "{what}");
        assert_eq!(wholes(&strategy, &trained), then, "{what}");
    }
}

#[test]
fn a_disk_that_fails_while_tensors_are_read_is_told_to_all_workers() {
    let folder = folder_in_memory();
    let strategy = in_parts(1);
    save_in(&mut manager(folder.path()), &strategy, &made(&strategy), 1).unwrap();
    let faults = Faults::default();
    let told = two_workers(|rank, strategy| {
        let trained = made(strategy);
        let restore = |fault| {
            let mut manager = manager(folder.path());
            if rank == 0 {
                faults.set(fault);
                manager = manager.with_disk(Disk::with(&faults));
            }
            let began = Instant::now();
            let outcome = restore_in(&mut manager, strategy, &trained).map_err(|error| error.to_string());
            assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
            outcome
        };
        assert_eq!(restore(Fault::None).unwrap(), Some((1, 1)));
        let count = crate::from_chief::<_, Error>(strategy, Ok(faults.count())).unwrap();
        (1..=count).step_by(3).map(|at| restore(Fault::Fails(at))).collect::<Vec<_>>()
    });
    assert!(told[0].iter().filter(|outcome| outcome.is_err()).count() > 5, "{told:?}");
    for (chiefs, others) in told[0].iter().zip(&told[1]) {
        match (chiefs, others) {
            (Ok(found), Ok(other)) => assert_eq!((found, other), (&Some((1, 1)), &Some((1, 1)))),
            (Err(chiefs), Err(others)) => assert_eq!(*others, format!("on the chief: {chiefs}")),
            _ => panic!("{chiefs:?} and {others:?}"),
        }
    }
}

#[test]
fn workers_that_load_in_different_orders_get_an_error_and_no_values() {
    let folder = folder_in_memory();
    let strategy = in_parts(1);
    save_in(&mut manager(folder.path()), &strategy, &made(&strategy), 1).unwrap();
    let errors = two_workers(|rank, strategy| {
        let (layers, _) = made(strategy);
        let layers = Layers { is_reversed: rank == 1, ..layers };
        let began = Instant::now();
        let error = manager(folder.path()).restore::<u64>(strategy, &[&layers]).unwrap_err();
        assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
        error
    });
    for (error, [name, other]) in errors.iter().zip([["embed", "worker:1"], ["head", "worker:0"]]) {
        assert!(matches!(error, Error::LoadOrder { .. }), "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains(other), "{error}");
    }
}

#[test]
fn a_worker_with_another_model_does_not_make_the_others_wait() {
    let folder = folder_in_memory();
    let strategy = in_parts(1);
    save_in(&mut manager(folder.path()), &strategy, &made(&strategy), 1).unwrap();
    let errors = two_workers(|rank, strategy| {
        let name = if rank == 1 { "other" } else { "embed" };
        // No variable of it is in parts, so that it can be created.
        let model = HostModel::new(strategy, [(name, values(&[2], 0))]).unwrap();
        let began = Instant::now();
        let part = Layers { model, is_reversed: false };
        let error = manager(folder.path()).restore::<u64>(strategy, &[&part]).unwrap_err().to_string();
        assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
        error
    });
    assert!(errors[0].contains("f32 [7, 3]") && errors[0].contains("f32 [2]"), "{errors:?}");
    assert!(errors[1].contains("none of this name"), "{errors:?}");
}

#[test]
fn tensors_are_read_while_parts_are_loaded_and_not_later() {
    /// Reads in every way that there is.
    struct Reader;
    impl Checkpointed for Reader {
        fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
            snapshot.put::<Host, _>("extra", "x", &HostTensor::scalar(7.0f32))?;
            Ok(snapshot.put::<Host, _>("extra", "y", &HostTensor::scalar(8.0f32))?)
        }
        fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
            assert_eq!(snapshot.names("extra"), ["x", "y"]);
            assert_eq!(snapshot.numbers("extra", "x").unwrap(), [7.0]);
            assert_eq!(snapshot.tensor("extra", "x").unwrap().2, 7.0f32.to_le_bytes());
            assert_eq!(snapshot.bytes("extra", "y").unwrap().unwrap(), 8.0f32.to_le_bytes());
            assert!(snapshot.bytes("extra", "z").unwrap().is_none() && snapshot.tensor("none", "z").is_none());
            Ok(())
        }
    }
    let folder = folder_in_memory();
    let told = two_workers(|_, strategy| {
        let mut manager = manager(folder.path());
        manager.save(strategy, 1, &[&Reader], &1).unwrap();
        manager.finish_everywhere(strategy).unwrap();
        let snapshot = manager.restore_newest(strategy, &[&Reader]).unwrap().unwrap();
        assert_eq!((snapshot.step(), snapshot.program::<u64>().unwrap(), snapshot.run()), (1, 1, manager.run()));
        // What was borrowed is in memory.
        assert!(snapshot.tensor("extra", "x").is_some() && snapshot.tensor("extra", "y").is_none());
        snapshot.get::<Host, _>("extra", "y", &HostTensor::scalar(0.0f32)).unwrap_err().to_string()
    });
    assert!(told.iter().all(|error| error.contains("Snapshot::read")), "{told:?}");
}

#[test]
fn a_file_that_changes_after_it_was_checked_is_an_error() {
    /// Writes to the files of a checkpoint while it is loaded.
    struct Writer(std::path::PathBuf);
    impl Checkpointed for Writer {
        fn save(&self, _: &Strategy, _: &mut Snapshot) -> Result<(), BoxError> {
            Ok(())
        }
        fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
            for name in names(&self.0).into_iter().filter(|name| name.starts_with("model-")) {
                let mut bytes = fs::read(self.0.join(&name))?;
                *bytes.last_mut().ok_or("an empty file")? ^= 1;
                fs::write(self.0.join(&name), bytes)?;
            }
            Ok(())
        }
    }
    let folder = folder_in_memory();
    let strategy = in_parts(2);
    let trained = made(&strategy);
    let mut manager = manager(folder.path());
    save_in(&mut manager, &strategy, &trained, 1).unwrap();
    let checkpoint = folder.path().join("step-00000001");
    let writer = Writer(checkpoint.clone());
    let error = manager.restore_from(&strategy, &checkpoint, &[&writer, &trained.0]).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }) && error.to_string().contains("has changed since"), "{error}");
}

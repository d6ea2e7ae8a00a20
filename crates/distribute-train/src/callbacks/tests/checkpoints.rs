//! Checkpoints that callbacks save: the last ones, the best, and backups.

use super::*;

/// Shows a whole epoch with this loss, and returns whether it was saved.
fn saves_an_epoch(toy: &mut Toy, checkpoint: &mut ModelCheckpoint, loss: f64) -> bool {
    let saved = toy.show(&[("val_loss", loss)], |training| {
        checkpoint.epoch_begin(training)?;
        checkpoint.epoch_end(training)?;
        checkpoint.save(training, Occasion::Epoch)
    });
    saved.unwrap()
}

#[test]
fn the_best_is_the_one_that_is_in_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (mut toy, mut before) = (Toy::new(), ModelCheckpoint::new(folder.path()).best("val_loss"));
    toy.train(&mut before, "val_loss", &[3.0]);
    // The second was not written before the process was killed.
    (toy.epoch, toy.step) = (2, 6);
    toy.show(&[("val_loss", 1.0)], |training| before.epoch_end(training)).unwrap();
    let state = before.state();
    for (is_empty, value, saves) in [(false, 3.5, false), (false, 2.0, true), (true, 9.0, true)] {
        let empty = tempfile::tempdir().unwrap();
        let mut checkpoints = CheckpointManager::new(if is_empty { empty.path() } else { folder.path() });
        let mut again = Toy::new();
        assert_eq!(checkpoints.restore::<()>(&again.strategy, &[&again.weight]).unwrap().is_none(), is_empty);
        let mut after = ModelCheckpoint::with(checkpoints).best("val_loss");
        after.set_state(&state);
        (again.epoch, again.step) = (3, 9);
        assert_eq!(saves_an_epoch(&mut again, &mut after, value), saves, "{value}");
    }
}

#[test]
fn a_state_from_before_the_best_of_the_folder_keeps_what_it_knows() {
    let folder = tempfile::tempdir().unwrap();
    let (mut toy, mut before) = (Toy::new(), ModelCheckpoint::new(folder.path()).best("val_loss"));
    toy.train(&mut before, "val_loss", &[3.0]);
    let state = before.state();
    // A better one replaces it in the folder, of which the state that is restored does not know.
    (toy.epoch, toy.step) = (2, 6);
    toy.show(&[("val_loss", 1.0)], |training| {
        before.epoch_end(training)?;
        before.save(training, Occasion::Epoch)
    })
    .unwrap();
    drop(before);
    for (value, saves) in [(3.5, false), (2.0, true)] {
        let mut checkpoints = CheckpointManager::new(folder.path());
        let mut again = Toy::new();
        assert!(checkpoints.restore::<()>(&again.strategy, &[&again.weight]).unwrap().is_some());
        let mut after = ModelCheckpoint::with(checkpoints).best("val_loss");
        after.set_state(&state);
        (again.epoch, again.step) = (2, 9);
        assert_eq!(saves_an_epoch(&mut again, &mut after, value), saves, "{value}");
    }
}

#[test]
fn a_checkpoint_of_steps_that_a_restart_has_undone_does_not_take_the_place_of_a_later_best() {
    let folder = tempfile::tempdir().unwrap();
    let best = |state: &Value| {
        let mut checkpoints = CheckpointManager::new(folder.path());
        let mut toy = Toy::new();
        assert!(checkpoints.restore::<()>(&toy.strategy, &[&toy.weight]).unwrap().is_some());
        let mut best = ModelCheckpoint::with(checkpoints).best("val_loss");
        best.set_state(state);
        toy.show(&[], |training| best.epoch_begin(training)).unwrap();
        (toy, best)
    };
    let (mut toy, mut first) = (Toy::new(), ModelCheckpoint::new(folder.path()).best("val_loss"));
    toy.train(&mut first, "val_loss", &[3.0]);
    let state = first.state();
    toy.step = 18;
    toy.show(&[("val_loss", 1.0)], |training| {
        first.epoch_end(training)?;
        first.save(training, Occasion::Epoch)
    })
    .unwrap();
    drop(first);
    // The steps after the first epoch are made again. The next best is not written before the process is killed.
    let (mut toy, mut second) = best(&state);
    toy.step = 15;
    toy.show(&[("val_loss", 2.0)], |training| second.epoch_end(training)).unwrap();
    let state = second.state();
    drop(second);
    for (value, saves) in [(3.5, false), (2.5, true)] {
        let (mut toy, mut third) = best(&state);
        toy.step = 21;
        let saved = toy.show(&[("val_loss", value)], |training| {
            third.epoch_end(training)?;
            third.save(training, Occasion::Epoch)
        });
        assert_eq!(saved.unwrap(), saves, "{value}");
    }
}

#[test]
fn a_setting_that_the_best_overrides_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let new = || ModelCheckpoint::new(folder.path());
    for (mut checkpoint, setting) in [
        (new().every_steps(500).best("val_loss"), "every_steps(500)"),
        (new().best("val_loss").every_epochs(2), "every_epochs(2)"),
    ] {
        let error = Toy::new().show(&[], |training| checkpoint.train_begin(training)).unwrap_err();
        assert!(matches!(error, Error::WithoutEffect { .. }) && error.to_string().contains(setting), "{error}");
    }
    // Both orders keep as many.
    for checkpoint in [new().best("val_loss").keep(2), new().keep(2).best("val_loss")] {
        Toy::new().train(&mut { checkpoint.set_aside_other_runs() }, "val_loss", &[3.0, 2.0, 1.0]);
        let names: Vec<String> = kept(folder.path()).into_iter().filter(|name| name.starts_with("step-")).collect();
        assert_eq!(names, ["step-00000006", "step-00000009"]);
    }
}

#[test]
fn checkpoints_are_the_last_or_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let train = |checkpoint: ModelCheckpoint, values: &[f64]| {
        Toy::new().train(&mut { checkpoint }, "val_loss", values);
    };
    let last = folder.path().join("last");
    train(ModelCheckpoint::new(&last).keep(2), &[1.0, 2.0, 3.0]);
    assert_eq!(kept(&last), ["latest", "run", "step-00000006", "step-00000009"]);
    let steps = folder.path().join("steps");
    train(ModelCheckpoint::new(&steps).every_steps(2), &[1.0, 2.0]);
    assert_eq!(kept(&steps), ["latest", "run", "step-00000002", "step-00000003", "step-00000004", "step-00000006"]);
    let second = folder.path().join("second");
    train(ModelCheckpoint::new(&second).every_epochs(2), &[1.0, 2.0, 3.0]);
    assert_eq!(kept(&second), ["latest", "run", "step-00000006"]);
    let best = folder.path().join("best");
    train(ModelCheckpoint::new(&best).best("val_loss"), &[3.0, 1.0, 2.0]);
    assert_eq!(kept(&best), ["latest", "run", "step-00000006"]);
}

#[test]
fn a_training_that_begins_in_another_ones_folder_ends_before_its_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let best = || ModelCheckpoint::new(folder.path()).best("val_loss");
    Toy::new().train(&mut best(), "val_loss", &[3.0, 2.0]);
    let before = kept(folder.path());
    let (mut toy, mut again) = (Toy::new(), best());
    toy.show(&[], |training| again.train_begin(training)).unwrap();
    let error = toy.show(&[], |training| again.epoch_begin(training)).unwrap_err();
    assert!(matches!(error, Error::OtherRun { .. }) && error.to_string().contains("step 6"), "{error}");
    drop(again);
    assert_eq!(kept(folder.path()), before);
    // With the option set, it moves the present checkpoints, whatever their steps.
    Toy::new().train(&mut best().set_aside_other_runs(), "val_loss", &[3.0]);
    let names = kept(folder.path());
    assert!(names.contains(&"step-00000003".to_owned()) && !names.contains(&"step-00000006".to_owned()), "{names:?}");
    let aside = names.iter().find(|name| name.starts_with("run-")).unwrap();
    assert_eq!(kept(&folder.path().join(aside)), ["step-00000006"]);
}

#[test]
fn a_backup_in_the_folder_of_checkpoints_removes_its_own_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut toy = Toy::new();
    toy.train(&mut ModelCheckpoint::new(folder.path()), "x", &[1.0, 2.0]);
    let mut again = Toy::new();
    let mut backup = BackupAndRestore::new(folder.path());
    again.show(&[], |training| backup.train_begin(training)).unwrap();
    assert_eq!(again.weight.get(), 2.0);
    again.step = 7;
    again.show(&[], |training| backup.save(training, Occasion::Epoch)).unwrap();
    again.show(&[], |training| backup.train_end(training)).unwrap();
    assert_eq!(kept(folder.path()), ["latest", "run", "step-00000003", "step-00000006"]);
    assert_eq!(std::fs::read_to_string(folder.path().join("latest")).unwrap(), "step-00000006\n");
}

#[test]
fn a_backup_is_restored_and_removed_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("backup");
    let mut toy = Toy::new();
    let mut backup = BackupAndRestore::new(&path);
    toy.step = 7;
    toy.weight.set(&toy.strategy, 5.0);
    assert!(toy.show(&[], |training| backup.save(training, Occasion::Leaving)).unwrap());
    assert!(!toy.show(&[], |training| backup.save(training, Occasion::Step)).unwrap());
    assert_eq!(kept(&path), ["latest", "run", "step-00000007"]);
    let mut again = Toy::new();
    let mut backup = BackupAndRestore::new(&path);
    again.show(&[], |training| backup.train_begin(training)).unwrap();
    assert_eq!(again.weight.get(), 5.0);
    again.show(&[], |training| backup.train_end(training)).unwrap();
    assert!(!path.exists());
}

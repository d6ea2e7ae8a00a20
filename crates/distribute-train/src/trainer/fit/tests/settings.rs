//! Settings that workers compare.

use super::*;

#[test]
fn settings_that_differ_between_workers_are_named_in_the_first_step() {
    type Settings = Fit<Array<i64>, Error>;
    type Change = fn(Settings) -> Settings;
    let base = || Fit::epochs(2).validation(&Numbers(4));
    let same: Change = |fit| fit;
    let others: [(&str, Change, Change); 12] = [
        ("collective callbacks: [ModelCheckpoint]", same, |fit| fit.callback(ModelCheckpoint::new("never-made"))),
        ("stop_on: yes", same, |fit| fit.stop_on(TerminationConfig::default().signals(Vec::new()))),
        ("class_weights: [1.0, 2.0]", same, |fit| fit.class_weights([1.0, 2.0])),
        ("epochs: 3", same, |fit| Fit { epochs: 3, ..fit }),
        ("steps_per_epoch: 2", same, |fit| fit.steps_per_epoch(2)),
        ("steps_per_execution: 2", same, |fit| fit.steps_per_execution(2)),
        ("validation: no", same, |fit| Fit { validation: None, ..fit }),
        ("validation_steps: 1", same, |fit| fit.validation_steps(1)),
        ("validation_every: 2", same, |fit| fit.validation_every(2)),
        (
            "settings of callbacks: [BackupAndRestore(every_steps 2)]",
            |fit| fit.callback(BackupAndRestore::new("never-made")),
            |fit| fit.callback(BackupAndRestore::new("never-made").every_steps(2)),
        ),
        (
            "settings of callbacks: [ModelCheckpoint(loss, rises false)]",
            |fit| fit.callback(ModelCheckpoint::new("never-made").every_epochs(3)),
            |fit| fit.callback(ModelCheckpoint::new("never-made").best("loss").rises(false)),
        ),
        (
            "settings of callbacks: [EarlyStopping(loss, min_delta 0.5, start_from_epoch 2)]",
            |fit| fit.callback(EarlyStopping::new("loss").restore_best()),
            |fit| fit.callback(EarlyStopping::new("loss").min_delta(0.5).start_from_epoch(2).restore_best()),
        ),
    ];
    for (line, first, other) in others {
        let told = on_two(|rank, address| {
            let settings = if rank == 0 { first(base()) } else { other(base()) };
            fit(&Toy::new(one_of_two(rank, address)), &Numbers(8), settings).unwrap_err().to_string()
        });
        for told in told {
            assert!(told.contains(&format!("fit, {line}")), "{line}: {told}");
        }
    }
}

#[test]
fn metrics_of_other_names_on_one_worker_are_not_added_up() {
    type Call = fn(&Toy) -> Option<Error>;
    let calls: [(&str, Call); 2] = [
        ("fit", |toy| fit(toy, &Numbers(8), Fit::epochs(1)).err()),
        ("evaluate", |toy| evaluate(toy, &Numbers(8)).err()),
    ];
    for (name, call) in calls {
        let told = on_two(|rank, address| {
            let metrics = Metrics::new().with(Mean);
            let metrics = if rank == 0 { metrics } else { Metrics::new().with(Named::new("median", Mean)) };
            call(&Toy { metrics, ..Toy::new(one_of_two(rank, address)) }).unwrap().to_string()
        });
        for told in told {
            let line = |metric: &str| format!("{name}, metrics: [{metric}] on");
            assert!(told.contains(&line("mean")) && told.contains(&line("median")), "{told}");
        }
    }
}

#[test]
fn callbacks_without_collective_calls_may_be_those_of_one_worker() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("history.csv");
    let epochs = on_two(|rank, address| {
        let strategy = MultiWorkerMirroredStrategy::builder()
            .membership(Membership::new(rank, 2, address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
            .build()
            .unwrap();
        let logger = (rank == 0).then(|| CsvLogger::new(&table));
        fit(&Toy::new(strategy), &Numbers(8), Fit::epochs(1).callback(logger)).unwrap().epochs.len()
    });
    assert_eq!(epochs, [1, 1]);
    assert!(table.exists());
    let collective = |callback: &dyn Callback| (callback.is_collective(), callback.name());
    assert_eq!(collective(&Some(BackupAndRestore::new("b"))), (true, "BackupAndRestore"));
    assert!(!Option::<BackupAndRestore>::None.is_collective());
    assert!(!EarlyStopping::new("loss").is_collective() && EarlyStopping::new("loss").restore_best().is_collective());
    assert!(collective(&Prints).1.ends_with("tests::Prints"), "{}", Prints.name());
}

#[test]
fn settings_that_differ_are_named_where_one_worker_has_no_step_left() {
    let folder = tempfile::tempdir().unwrap();
    let backup = || BackupAndRestore::new(folder.path()).keep_at_end();
    fit(&Toy::of_losses(&[]), &Numbers(4), Fit::epochs(2).callback(backup())).unwrap();
    let told = on_two(|rank, address| {
        let strategy = one_of_two(rank, address);
        let outcome = fit(&Toy::new(strategy), &Numbers(4), Fit::epochs(2 + rank).callback(backup()));
        outcome.unwrap_err().to_string()
    });
    for told in told {
        assert!(told.contains("fit, epochs: 2 on") && told.contains("fit, epochs: 3 on"), "{told}");
    }
}

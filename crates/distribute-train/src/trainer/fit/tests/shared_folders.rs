//! Callbacks that keep checkpoints in one folder.

use super::*;

/// Trains on two workers, and returns the outcomes.
fn trained(change: impl Fn(Fit<Array<i64>, Error>) -> Fit<Array<i64>, Error> + Sync) -> [Result<()>; 2] {
    on_two(|rank, address| {
        let toy = Toy::new(one_of_two(rank, address));
        let outcome = fit(&toy, &Numbers(8), change(Fit::epochs(2))).map(drop);
        assert_eq!(toy.calls.load(Ordering::Relaxed) == 0, outcome.is_err());
        outcome
    })
}

#[test]
fn two_of_them_are_an_error_of_all_workers_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path();
    let [chief, other] = trained(|fit| {
        fit.callback(ModelCheckpoint::new(runs)).callback(ModelCheckpoint::new(runs.join(".")).best("loss"))
    });
    let (chief, other) = (chief.unwrap_err(), other.unwrap_err().to_string());
    let said = chief.to_string();
    assert!(matches!(&chief, Error::SharedFolder { keep: [5, 1], .. }), "{said}");
    assert!(said.contains(runs.to_str().unwrap()) && said.contains("a folder of its own"), "{said}");
    assert!(other.contains("a folder of its own"), "{other}");
}

#[test]
fn a_backup_and_folders_of_their_own_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path();
    let outcomes = trained(|fit| {
        let best = ModelCheckpoint::new(runs.join("best")).best("loss");
        fit.callback(BackupAndRestore::new(runs)).callback(ModelCheckpoint::new(runs)).callback(best)
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(kept(runs), ["step-00000004", "step-00000008"]);
}

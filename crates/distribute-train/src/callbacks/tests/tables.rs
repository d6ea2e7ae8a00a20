//! Tables of epochs.

use std::path::Path;

use super::*;

/// Trains, and returns the state of the table's callback after `epochs` epochs.
fn train_past_a_checkpoint(toy: &mut Toy, path: &Path, epochs: usize, values: &[f64]) -> Value {
    let mut logger = CsvLogger::new(path);
    toy.train(&mut logger, "val_loss", &values[..epochs]);
    let saved = logger.state();
    toy.train(&mut logger, "val_loss", &values[epochs..]);
    saved
}

/// Trains with the state that was saved after an epoch.
fn resume(toy: &mut Toy, path: &Path, (epoch, saved): (u32, Value), values: &[f64]) {
    let mut logger = CsvLogger::new(path);
    logger.set_state(&saved);
    toy.epoch = epoch;
    toy.show(&[], |training| logger.resumed(training)).unwrap();
    toy.train(&mut logger, "val_loss", values);
}

/// Returns the epochs of a table's rows.
fn epochs(path: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().skip(1).map(|line| line.split(',').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn a_training_that_resumes_leaves_the_rows_of_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.csv");
    // Killed after the row of an epoch and before its backup, or before the row.
    for rows in [6, 5] {
        let (mut first, mut other) = (Toy::new(), Toy::new());
        let saved = train_past_a_checkpoint(&mut first, &path, 5, &[1.0; 6][..rows]);
        other.train(&mut CsvLogger::new(&path), "val_loss", &[0.5; 10]);
        resume(&mut first, &path, (5, saved), &[0.25; 2]);
        let expected: Vec<u32> = (1..=5).chain(1..=10).chain(6..=7).collect();
        assert_eq!(epochs(&path), expected, "{rows} rows");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn the_rows_of_a_training_are_known_after_the_table_has_got_a_column() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.csv");
    let mut first = Toy::new();
    let saved = train_past_a_checkpoint(&mut first, &path, 2, &[1.0; 3]);
    Toy::new().train(&mut CsvLogger::new(&path), "val_accuracy", &[0.5; 4]);
    resume(&mut first, &path, (2, saved), &[0.25]);
    assert_eq!(epochs(&path), [1, 2, 1, 2, 3, 4, 3]);
}

#[test]
fn the_first_epoch_has_one_row_if_the_backup_is_of_a_step_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.csv");
    for before in [0, 2] {
        let mut toy = Toy::new();
        let mut logger = CsvLogger::new(&path);
        if before > 0 {
            Toy::new().train(&mut CsvLogger::new(&path), "val_loss", &[2.0; 2]);
        }
        toy.epoch = 1;
        toy.show(&[], |training| logger.epoch_begin(training)).unwrap();
        let saved = logger.state();
        toy.show(&[("loss", 1.0), ("val_loss", 1.0)], |training| logger.epoch_end(training)).unwrap();
        resume(&mut toy, &path, (0, saved), &[0.5; 2]);
        let expected: Vec<u32> = (1..=before).chain(1..=2).collect();
        assert_eq!(epochs(&path), expected);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_process_that_does_not_know_its_rows_removes_that_of_the_epoch_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.csv");
    let mut toy = Toy::new();
    toy.train(&mut CsvLogger::new(&path), "val_loss", &[1.0; 3]);
    // The new chief of an elastic job, and a checkpoint of an earlier version.
    resume(&mut toy, &path, (2, Value::Null), &[0.5]);
    assert_eq!(epochs(&path), [1, 2, 3]);
    resume(&mut toy, &path, (0, Value::Null), &[0.5]);
    assert_eq!(epochs(&path), [1, 2, 3, 1]);
}

#[test]
fn an_end_of_an_epoch_that_fails_and_is_repeated_has_one_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.csv");
    let (mut toy, mut logger) = (Toy::new(), CsvLogger::new(&path));
    toy.train(&mut logger, "val_loss", &[1.0]);
    let before = logger.state();
    toy.train(&mut logger, "val_loss", &[0.5]);
    logger.set_state(&before);
    toy.epoch = 1;
    toy.train(&mut logger, "val_loss", &[0.25]);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "epoch,loss,val_loss\n1,1,1\n2,0.25,0.25\n");
}

#[test]
fn a_table_has_each_epoch_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.csv");
    let mut toy = Toy::new();
    let saved = train_past_a_checkpoint(&mut toy, &path, 1, &[1.0, 0.5, 0.25]);
    resume(&mut toy, &path, (1, saved), &[0.75]);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "epoch,loss,val_loss\n1,1,1\n2,0.75,0.75\n");
}

#[test]
fn values_are_in_the_columns_of_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.csv");
    let mut toy = Toy::new();
    // The program that resumes has other metrics.
    toy.train(&mut CsvLogger::new(&path), "recall, of 3", &[1.0, 0.5]);
    toy.train(&mut CsvLogger::new(&path), "val_loss", &[0.25]);
    toy.train(&mut CsvLogger::new(&path), "recall, of 3", &[0.125]);
    let expected = "epoch,loss,\"recall, of 3\",val_loss\n1,1,1,\n2,0.5,0.5,\n3,0.25,,0.25\n4,0.125,0.125,\n";
    assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
    assert_eq!(kept(folder.path()), ["log.csv"]);
}

#[test]
fn a_line_of_a_table_that_was_cut_off_does_not_run_into_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.csv");
    std::fs::write(&path, "epoch,loss,val_loss\n1,1,1\n1,0.").unwrap();
    let mut toy = Toy::new();
    toy.epoch = 1;
    toy.train(&mut CsvLogger::new(&path), "val_loss", &[0.75]);
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text, "epoch,loss,val_loss\n1,1,1\n1,0.\n2,0.75,0.75\n");
    assert_eq!(kept(folder.path()), ["log.csv"]);
}

#[cfg(feature = "object-store")]
#[test]
fn a_table_in_a_store_has_each_epoch_once() {
    let object = distribute_storage::Location::open("memory://tables/log.csv").unwrap();
    let text = || String::from_utf8(object.read(1000).unwrap().to_vec()).unwrap();
    let mut toy = Toy::new();
    let saved = train_past_a_checkpoint(&mut toy, Path::new(&object.url()), 1, &[1.0, 0.5, 0.25]);
    resume(&mut toy, Path::new(&object.url()), (1, saved), &[0.75]);
    assert_eq!(text(), "epoch,loss,val_loss\n1,1,1\n2,0.75,0.75\n");
    object.write("epoch,loss,val_loss\n1,1,1\n1,0.").unwrap();
    toy.epoch = 1;
    toy.train(&mut CsvLogger::new(object.url()), "val_loss", &[0.75]);
    assert_eq!(text(), "epoch,loss,val_loss\n1,1,1\n1,0.\n2,0.75,0.75\n");
}

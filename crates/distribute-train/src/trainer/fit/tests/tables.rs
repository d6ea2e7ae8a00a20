//! Tables of epochs over restarts.

use super::*;

#[test]
fn an_epoch_whose_end_fails_has_one_row_after_the_restart() {
    for epoch in 1..=2 {
        let folder = tempfile::tempdir().unwrap();
        let (table, backup) = (folder.path().join("history.csv"), folder.path().join("backup"));
        let settings = |fails: Option<Fails>| {
            let backup = BackupAndRestore::new(&backup).every_steps(1);
            Fit::epochs(3).callback(CsvLogger::new(&table)).callback(fails).callback(backup)
        };
        // The row is written, and the newest backup is that of the last step.
        let fails = Fails { step: 4 * epoch, at_end: true };
        fit(&Toy::of_losses(&[]), &Numbers(8), settings(Some(fails))).unwrap_err();
        assert_eq!(std::fs::read_to_string(&table).unwrap().lines().count() as u64, 1 + epoch);
        // Another run has appended its rows in between.
        fit(&Toy::of_losses(&[]), &Numbers(8), Fit::epochs(3).callback(CsvLogger::new(&table))).unwrap();
        fit(&Toy::of_losses(&[]), &Numbers(8), settings(None)).unwrap();
        let text = std::fs::read_to_string(&table).unwrap();
        let epochs: Vec<u64> =
            text.lines().skip(1).map(|line| line.split(',').next().unwrap().parse().unwrap()).collect();
        let expected: Vec<u64> = (1..epoch).chain(1..=3).chain(epoch..=3).collect();
        assert_eq!(epochs, expected);
    }
}

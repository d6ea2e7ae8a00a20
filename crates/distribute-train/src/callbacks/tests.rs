use super::*;

/// Shows a callback some epochs' values; why it stopped, at which epoch, and the learning rate then.
fn show(callback: &mut impl Callback, name: &str, values: &[f64]) -> (Option<(u32, String)>, f64) {
    let mut learning_rate = 1.0;
    for (epoch, value) in (1..).zip(values) {
        let values = [("loss".to_owned(), *value), (name.to_owned(), *value)];
        let mut stop = None;
        let mut end =
            EpochEnd { epoch, values: &values, is_chief: true, learning_rate: &mut learning_rate, stop: &mut stop };
        callback.epoch_end(&mut end).unwrap();
        if let Some(why) = stop {
            return (Some((epoch, why)), learning_rate);
        }
    }
    (None, learning_rate)
}

#[test]
fn stopping_waits_as_long_as_its_patience() {
    let stopped = |stopping: EarlyStopping, name: &str, values: &[f64]| {
        show(&mut stopping.clone(), name, values).0.map(|(epoch, _)| epoch)
    };
    let falling = EarlyStopping::new("val_loss").patience(1);
    assert_eq!(stopped(falling.clone(), "val_loss", &[3.0, 2.0, 2.5, 1.0, 1.0, 1.0]), Some(6));
    assert_eq!(stopped(falling, "val_loss", &[3.0, 2.0, 1.0, 0.5]), None);
    assert_eq!(stopped(EarlyStopping::new("val_accuracy"), "val_accuracy", &[0.5, 0.6, 0.6]), Some(3));
    assert_eq!(stopped(EarlyStopping::new("val_loss").min_delta(0.5), "val_loss", &[3.0, 2.0, 1.9]), Some(3));
    assert_eq!(stopped(EarlyStopping::new("val_loss"), "val_loss", &[f64::NAN, 1.0]), Some(1));
    let (stop, _) = show(&mut EarlyStopping::new("val_loss"), "val_loss", &[1.0, 2.0]);
    assert_eq!(stop.unwrap().1, "val_loss has not got better than 1 for 1 epochs");
}

#[test]
fn the_rate_falls_on_a_plateau_and_not_below_its_least() {
    let mut plateau = ReduceLrOnPlateau::new("val_loss").patience(0).factor(0.5).min_learning_rate(0.3);
    assert_eq!(show(&mut plateau, "val_loss", &[1.0, 1.0]).1, 0.5);
    let mut plateau = ReduceLrOnPlateau::new("val_loss").patience(0).factor(0.5).min_learning_rate(0.3);
    assert_eq!(show(&mut plateau, "val_loss", &[1.0, 1.0, 1.0, 1.0]).1, 0.3);
}

#[test]
fn a_loss_that_is_no_number_ends_the_training() {
    assert_eq!(show(&mut TerminateOnNan, "x", &[1.0, f64::NAN]).0, Some((2, "the loss is NaN".to_owned())));
}

#[test]
fn a_name_that_is_not_there_is_a_sentence() {
    let (mut learning_rate, mut stop) = (1.0, None);
    let values = [("loss".to_owned(), 1.0), ("accuracy".to_owned(), 0.5)];
    let mut end =
        EpochEnd { epoch: 1, values: &values, is_chief: true, learning_rate: &mut learning_rate, stop: &mut stop };
    let text = EarlyStopping::new("val_loss").epoch_end(&mut end).unwrap_err().to_string();
    assert!(text.contains("\"val_loss\"") && text.contains("loss, accuracy"), "{text}");
}

#[test]
fn files_are_written_on_the_chief_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.csv");
    let (mut learning_rate, mut stop) = (0.5, None);
    for (epoch, is_chief) in [(1, true), (2, false), (3, true)] {
        let values = [("loss".to_owned(), 1.0 / f64::from(epoch)), ("val_loss".to_owned(), 2.0)];
        let mut end = EpochEnd { epoch, values: &values, is_chief, learning_rate: &mut learning_rate, stop: &mut stop };
        CsvLogger::new(&path).epoch_end(&mut end).unwrap();
        TensorBoard::new(folder.path().join(epoch.to_string())).epoch_end(&mut end).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "epoch,loss,val_loss\n1,1,2\n3,0.3333333333333333,2\n");
    assert!(folder.path().join("1/validation").exists() && !folder.path().join("2").exists());
}

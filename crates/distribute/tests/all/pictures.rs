//! The examples that classify pictures: the same in every arrangement, and CIFAR-10's files.

use std::fs;
use std::path::Path;

use distribute_testkit::Outcome;

use super::examples::{DEADLINE, example, in_every_arrangement, numbers};

const BRIEF: [&str; 10] = ["--size", "8", "--images", "70", "--batch", "16", "--epochs", "2", "--seed", "7"];

/// Returns the numbers of the last epoch in the progress.
#[track_caller]
fn last_epoch(outcome: &Outcome) -> Vec<f64> {
    let line = outcome.stderr.lines().rfind(|line| line.contains("epoch=2/2"));
    let line = line.unwrap_or_else(|| panic!("no second epoch in {outcome:?}"));
    let timed = |word: &&str| !["examples_per_s", "elapsed_s"].iter().any(|name| word.starts_with(name));
    let words = line.split_whitespace().filter(timed);
    words.filter_map(|word| word.split_once('=')?.1.parse().ok()).collect()
}

#[track_caller]
fn are_close(outcomes: &[Outcome; 3]) {
    let [one, two, workers] = outcomes.each_ref().map(last_epoch);
    // Of step, loss and measures, at least.
    assert!(one.len() >= 3 && one[0] == 5.0, "{one:?}");
    assert!(one.iter().zip(&two).all(|(one, two)| (one - two).abs() < 2e-3), "{one:?} {two:?}");
    assert_eq!(two, workers, "two replicas in one process and in two differ");
}

#[test]
fn a_residual_network_learns_the_same_in_every_arrangement() {
    let args = [&BRIEF[..], &["--depth", "14", "--width", "4"]].concat();
    let outcomes = in_every_arrangement("resnet", &args);
    are_close(&outcomes);
    let losses = outcomes.each_ref().map(|outcome| [1, 2].map(|epoch| numbers(outcome, &format!("{epoch} "))[0]));
    assert!(losses.iter().all(|[first, second]| second < first), "{losses:?}");
}

#[test]
fn a_densely_connected_network_learns_the_same_in_every_arrangement() {
    are_close(&in_every_arrangement("densenet", &[&BRIEF[..], &["--depth", "16", "--growth", "4"]].concat()));
}

/// Writes a file of pictures, whose pixels depend on their classes.
fn write(folder: &Path, name: &str, classes: &[u8]) {
    let record = |class: &u8| [vec![*class], (0..3072).map(|at| class * 20 + (at % 7) as u8).collect()].concat();
    fs::write(folder.join(name), classes.iter().flat_map(record).collect::<Vec<u8>>()).unwrap();
}

#[test]
fn cifar_10_is_read_and_what_is_no_picture_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for number in 1..=5 {
        write(path, &format!("data_batch_{number}.bin"), &[number, 9 - number]);
    }
    write(path, "test_batch.bin", &[3, 4]);
    let saved = path.join("saved");
    let args = ["--depth", "8", "--width", "2", "--batch", "4", "--epochs", "1", "--data", path.to_str().unwrap()];
    let args = [&args[..], &["--save", saved.to_str().unwrap()]].concat();
    let ended = || example("resnet", &args).start().unwrap().wait(0, DEADLINE).unwrap();
    let read = ended();
    assert!(read.success() && read.stderr.contains("epoch=1/1 step=3"), "{read:?}");
    for name in ["data_batch_1.bin", "data_batch_5.bin", "test_batch.bin"] {
        assert_eq!(fs::read(path.join(name)).unwrap(), fs::read(saved.join(name)).unwrap(), "{name}");
    }
    let drawn = [&args[..8], &["--size", "8"], &args[10..]].concat();
    let refused = example("resnet", &drawn).start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(refused.code == Some(1) && refused.stderr.contains("give --size 32"), "{refused:?}");
    for (contents, words) in [
        (vec![0; 3072], "test_batch.bin has 3072 bytes; expected a multiple of 3073"),
        (vec![10; 3073], "test_batch.bin: picture 0 has class 10; expected 0 to 9"),
        (vec![], "test_batch.bin has 0 bytes"),
    ] {
        fs::write(path.join("test_batch.bin"), contents).unwrap();
        let refused = ended();
        assert!(refused.code == Some(1) && refused.stderr.contains(words), "{words}: {refused:?}");
    }
    fs::remove_file(path.join("data_batch_2.bin")).unwrap();
    let refused = ended();
    assert!(refused.code == Some(1) && refused.stderr.contains("data_batch_2.bin cannot be read"), "{refused:?}");
}

#[test]
fn networks_that_are_none_are_told_in_a_sentence() {
    for (name, args) in [("resnet", ["--depth", "21"]), ("densenet", ["--depth", "21"]), ("resnet", ["--size", "10"])] {
        let refused = example(name, &args).start().unwrap().wait(0, DEADLINE).unwrap();
        let value = format!("{} {}", args[0], args[1]);
        assert!(refused.code == Some(1) && refused.stderr.contains(&value), "{refused:?}");
    }
}

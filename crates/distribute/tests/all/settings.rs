//! Settings that are wrong. Two workers that were started with different ones both end with exit code 2 and an error
//! that names the setting, before any parameter changes.

use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Ports, target_binary};

const DEADLINE: Duration = Duration::from_secs(60);

/// Two workers of the example mnist; the second one has additional flags and other variables.
fn workers(flags: &'static str, more: &'static str, variable: (&'static str, [&'static str; 2])) -> JobBuilder {
    let addresses = Ports::reserve(2).unwrap().addresses();
    let environment = move |index: u32| {
        let task = format!(r#"{{"type": "worker", "index": {index}}}"#);
        let config = format!(r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {task}}}"#);
        let flags = if index == 1 { format!("{flags} {more}") } else { flags.to_owned() };
        let (name, values) = variable;
        [("TF_CONFIG", config), ("FLAGS", flags), (name, values[index as usize].to_owned())]
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec()
    };
    let program = target_binary("mnist").unwrap();
    let job = Job::builder("sh").args(["-c", "exec \"$PROGRAM\" $FLAGS"]).tasks(2).task_env(environment);
    job.env("PROGRAM", program.to_string_lossy()).env("RAYON_NUM_THREADS", "1")
}

/// Checks that both print `words` and end with exit code 2 long before any deadline.
#[track_caller]
fn refused(job: JobBuilder, words: &[&str]) {
    let began = Instant::now();
    let outcomes = job.start().unwrap().wait_all(DEADLINE).unwrap();
    for outcome in &outcomes {
        assert_eq!(outcome.code, Some(2), "{words:?}: {outcome:?}");
        for word in words {
            assert!(outcome.stderr.contains(word), "{word:?} is not said: {}", outcome.stderr);
        }
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{words:?} took {:?}", began.elapsed());
}

const NONE: (&str, [&str; 2]) = ("NOTHING", ["", ""]);

#[test]
fn learning_rates_batches_and_epochs_that_differ_are_named() {
    let flags = "--epochs 2";
    refused(workers(flags, "--learning-rate 0.01", NONE), &["learning rate: 0.001", "learning rate: 0.01", "worker:1"]);
    refused(workers(flags, "--batch 64", NONE), &["input, global batch: 128", "input, global batch: 64"]);
    refused(workers("", "--epochs 1", NONE), &["epochs: 5", "epochs: 1"]);
}

#[test]
fn ways_of_reducing_that_differ_are_named() {
    let flags = "--epochs 1";
    refused(workers(flags, "--compress bf16", NONE), &["compression: None", "compression: Bf16"]);
    refused(workers(flags, "--zero1", NONE), &["zero1", "true", "false"]);
}

#[test]
fn options_of_the_collectives_that_differ_are_named() {
    let flags = "--epochs 1";
    refused(workers(flags, "", ("DISTRIBUTE_ALGORITHM", ["ring", "tree"])), &["algorithm", "ring", "tree"]);
    refused(workers(flags, "", ("DISTRIBUTE_TRANSPORT", ["tcp", "shm"])), &["transport", "tcp", "shm"]);
    refused(workers(flags, "", ("DISTRIBUTE_LINK", ["30,1", "30,2"])), &["link figures"]);
}

#[test]
fn models_that_differ_are_named_and_no_reason_to_start_again() {
    let outcomes = workers("--epochs 1", "--model cnn", NONE).start().unwrap().wait_all(DEADLINE).unwrap();
    for outcome in &outcomes {
        assert!(matches!(outcome.code, Some(1 | 2)), "{outcome:?}");
        assert!(outcome.stderr.contains("conv1"), "{outcome:?}");
    }
}

#[test]
fn a_filter_of_messages_that_is_none_is_reported() {
    let job = Job::builder(target_binary("mnist").unwrap()).args(["--devices", "NONE:0"]);
    let outcome = job.env("RUST_LOG", "info,distribute=loud").start().unwrap().wait_all(DEADLINE).unwrap().remove(0);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.contains("RUST_LOG does not say which messages to show"), "{}", outcome.stderr);
}

#[test]
fn flags_that_cannot_have_an_effect_are_refused() {
    let refused = |flags: &'static str, words: &str| {
        let job = Job::builder(target_binary("mnist").unwrap()).args(flags.split(' '));
        let outcome = job.start().unwrap().wait_all(DEADLINE).unwrap().remove(0);
        assert_ne!(outcome.code, Some(0), "{flags}: {outcome:?}");
        assert!(outcome.stderr.contains(words), "{flags}: {}", outcome.stderr);
    };
    let two = "trains on one device, and --devices is CPU:0,CPU:1";
    refused("--epochs 1 --strategy one-device --devices CPU:0,CPU:1", two);
    refused("--compare-one-and-many --strategy one-device --devices CPU:0,CPU:1", two);
    refused("--epochs 1 --strategy default --devices CPU:1", "--strategy default chooses its device itself");
    refused("--checkpoints nowhere --checkpoint-every 0", "0 is not in 1..");
}

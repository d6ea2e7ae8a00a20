//! The example mnist as users start it: one process, several processes, and all kinds of failures.
//!
//! It runs the example and the launcher in the target folder. `cargo test --workspace` builds both before it runs any
//! test, and so does `cargo xtask multiprocess`; `cargo test --test mnist` alone does not.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Ports, Signal, apart, target_binary};

use crate::digit_files::write_digits;

const DEADLINE: Duration = Duration::from_secs(120);

fn mnist(args: &[&str]) -> JobBuilder {
    Job::builder(target_binary("mnist").unwrap()).args(args)
}

/// Two workers, one core each, with a TF_CONFIG.
fn workers(args: &[&str]) -> JobBuilder {
    let config = tf_config();
    let config = move |rank| vec![("TF_CONFIG".to_owned(), config(rank))];
    mnist(args).tasks(2).env("RAYON_NUM_THREADS", "1").task_env(config)
}

/// Returns the TF_CONFIG of each of two workers, on free ports.
fn tf_config() -> impl Fn(u32) -> String {
    let addresses = Ports::reserve(2).unwrap().addresses();
    move |index| config_of(&addresses, index)
}

fn config_of(addresses: &[String], index: u32) -> String {
    format!(r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {{"type": "worker", "index": {index}}}}}"#)
}

fn accuracy(stdout: &str) -> f64 {
    let line = stdout.lines().find(|line| line.starts_with("test accuracy")).unwrap();
    line.split_whitespace().find_map(|word| word.parse().ok()).unwrap()
}

/// Runs mnist; returns the losses of its steps and its output.
fn train(job: JobBuilder, folder: &Path, name: &str) -> (Vec<f32>, String) {
    let file = folder.join(name);
    let outcomes = job.args(["--losses", file.to_str().unwrap()]).start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.success()), "{outcomes:?}");
    let losses = fs::read_to_string(&file).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    (losses, outcomes[0].stdout.clone())
}

#[test]
fn one_replica_two_replicas_and_two_processes_learn_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let brief = ["--epochs", "2"];
    let one = train(mnist(&brief), folder.path(), "one");
    let two =
        train(mnist(&brief).args(["--devices", "CPU:0,CPU:1"]).env("RAYON_NUM_THREADS", "1"), folder.path(), "two");
    let launcher = Job::builder(target_binary("distribute").unwrap()).args(["run", "--workers", "2", "--"]);
    let launched = train(launcher.args([target_binary("mnist").unwrap()]).args(brief), folder.path(), "launched");
    for (losses, stdout) in [&one, &two, &launched] {
        assert_eq!(losses.len(), 250);
        assert!(accuracy(stdout) >= 94.0, "{stdout}");
    }
    let difference = apart(&one.0[..125], &two.0[..125]);
    assert!(difference <= 1e-3, "losses differ by {difference} in the first epoch");
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&two.0), bits(&launched.0), "one process and two processes differ");
}

#[test]
fn a_run_that_has_no_epochs_left_measures_what_it_has_restored() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let run = |epochs: &str| {
        let job = mnist(&["--epochs", epochs, "--checkpoints", checkpoints.to_str().unwrap()]);
        let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
        assert!(outcome.success(), "{outcome:?}");
        outcome
    };
    run("2");
    let ended = run("1");
    assert!(ended.stderr.contains("resuming after step 250"), "{ended:?}");
    assert!(accuracy(&ended.stdout) > 85.0, "{ended:?}");
    assert!(!ended.stdout.contains("NaN") && !ended.stdout.contains("samples/s"), "{ended:?}");
}

#[test]
fn the_convolutional_model_trains_in_two_processes_too() {
    let folder = tempfile::tempdir().unwrap();
    write_digits(folder.path(), 4000, 1000);
    let brief = ["--model", "cnn", "--epochs", "1", "--batch", "32", "--data", folder.path().to_str().unwrap()];
    let outcomes = workers(&brief).start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(accuracy(&outcomes[0].stdout) > 85.0, "{outcomes:?}");
}

#[test]
fn a_killed_worker_ends_the_other_within_a_second() {
    for victim in [0, 1] {
        let mut job = workers(&["--epochs", "1000000"]).start().unwrap();
        // Only the first worker reports; when it has finished an epoch, so has the other.
        job.wait_for_line(0, "epoch=1/", DEADLINE).unwrap();
        job.kill(victim, Signal::KILL).unwrap();
        let killed = Instant::now();
        let survivor = job.wait(1 - victim, DEADLINE).unwrap();
        let elapsed = killed.elapsed();
        assert!(elapsed < Duration::from_secs(1), "it took {elapsed:?}");
        assert_eq!(survivor.code, Some(138), "{survivor:?}");
        says(error_line(&survivor.stderr), &[&format!("lost worker:{victim} during all_reduce #")]);
        assert_eq!(job.wait(victim, DEADLINE).unwrap().signal, Some(9));
    }
}

#[test]
fn a_wrong_tf_config_gets_a_sentence_and_exit_code_2() {
    let typo = r#"{"cluster": {"wroker": ["a:1"]}, "task": {"type": "worker", "index": 0}}"#;
    let short = r#"{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}"#;
    let index = r#"{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 3}}"#;
    for (given, words) in [
        (typo, ["wroker", "chief, worker, ps or evaluator", "Did you mean worker?"]),
        (short, ["not JSON", "Expected: {\"cluster\"", "Check quotes, commas and brackets"]),
        (index, ["index 3", "one of 0, 1", "Correct the task's index"]),
    ] {
        let (code, error) = failure(mnist(&[]).env("TF_CONFIG", given));
        assert_eq!(code, Some(2), "{error}");
        says(&error, &["TF_CONFIG"]);
        says(&error, &words);
    }
}

#[test]
fn a_port_in_use_gets_a_sentence() {
    let taken = Ports::reserve(2).unwrap();
    let addresses = taken.addresses();
    let (code, error) = failure(mnist(&[]).env("TF_CONFIG", config_of(&addresses, 0)));
    assert_eq!(code, Some(138), "{error}");
    says(&error, &["worker:0", &format!("cannot listen on {}", addresses[0]), "in use", "set DISTRIBUTE_PORT"]);
}

#[test]
fn a_missing_peer_gets_a_sentence_at_the_deadline() {
    for (index, words) in [
        (0, ["worker:1 at 127.0.0.1:", "did not join within 4 s"]),
        (1, ["cannot join the leader worker:0 at 127.0.0.1:", "within 4 s"]),
    ] {
        let job = mnist(&[]).env("TF_CONFIG", tf_config()(index)).env("DISTRIBUTE_TIMEOUT", "4");
        let mut job = job.start().unwrap();
        // It names the tasks that it waits for long before it gives up.
        job.wait_for_line(0, "waiting for", DEADLINE).unwrap();
        let outcome = job.wait(0, DEADLINE).unwrap();
        assert_eq!(outcome.code, Some(138), "{outcome:?}");
        says(error_line(&outcome.stderr), &words);
    }
}

#[test]
fn models_that_differ_between_workers_get_a_sentence_on_both() {
    let script = r#"case $TF_CONFIG in *'"index": 0'*) exec "$0" --model mlp;; *) exec "$0" --model cnn;; esac"#;
    let config = tf_config();
    let config = move |rank| vec![("TF_CONFIG".to_owned(), config(rank))];
    let program = target_binary("mnist").unwrap();
    let job = Job::builder("sh").args(["-c", script]).args([program]).tasks(2).task_env(config);
    for outcome in job.start().unwrap().wait_all(DEADLINE).unwrap() {
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        let error = error_line(&outcome.stderr);
        says(error, &["model differs", "conv1.weight [8, 1, 5, 5]", "fc1.weight [128, 784]", "build the same model"]);
        says(error, &["worker:0", "worker:1"]);
    }
}

#[test]
fn wrong_settings_end_with_exit_code_2() {
    for (name, value) in [
        ("DISTRIBUTE_TIMEOUT", "soon"),
        ("DISTRIBUTE_TRANSPORT", "carrier-pigeon"),
        ("DISTRIBUTE_ALGORITHM", "rign"),
        ("DISTRIBUTE_PROGRESS", "loud"),
        ("DISTRIBUTE_LOG", "xml"),
    ] {
        let (code, error) = failure(mnist(&["--devices", "CPU:0,CPU:1"]).env(name, value));
        assert_eq!(code, Some(2), "{error}");
        says(&error, &[name, value]);
    }
    let (code, error) = failure(mnist(&["--devices", "GPU:7x"]));
    assert_eq!(code, Some(2), "{error}");
    says(&error, &["GPU:7x"]);
}

/// Runs one task until it fails; returns its exit code and its error.
fn failure(job: JobBuilder) -> (Option<i32>, String) {
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    (outcome.code, error_line(&outcome.stderr).to_owned())
}

/// Returns the only line that reports the error.
#[track_caller]
fn error_line(stderr: &str) -> &str {
    let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(lines.len(), 1, "one error in {stderr:?}");
    lines[0]
}

#[track_caller]
fn says(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
}

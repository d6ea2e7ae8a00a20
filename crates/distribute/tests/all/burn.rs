//! The examples with burn models as users start them. They are in the target folder; see `tests/mnist.rs`.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Outcome, Ports, Signal, target_binary};

use crate::digit_files::write_digits;

const DEADLINE: Duration = Duration::from_secs(120);
const TWO: &str = "CPU:0,CPU:1";

fn example(name: &str, args: &[&str]) -> JobBuilder {
    Job::builder(target_binary(name).unwrap()).args(args).env("RAYON_NUM_THREADS", "1")
}

/// The same example as two workers, with a TF_CONFIG.
fn workers(name: &str, args: &[&str]) -> JobBuilder {
    let addresses = Ports::reserve(2).unwrap().addresses();
    let config = move |rank| {
        let task = format!(r#"{{"type": "worker", "index": {rank}}}"#);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {task}}}"#))]
    };
    example(name, args).tasks(2).task_env(config)
}

/// Runs a job to its end; returns what its first task printed.
#[track_caller]
fn run(job: JobBuilder) -> Outcome {
    let mut outcomes = job.start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    outcomes.remove(0)
}

/// Returns the first number after `label`; the launcher's lines begin with the name of the task.
#[track_caller]
fn number(outcome: &Outcome, label: &str) -> f64 {
    let rest = outcome.stdout.split_once(label);
    let (_, rest) = rest.unwrap_or_else(|| panic!("no {label:?} in {}", outcome.stdout));
    rest.split_whitespace().find_map(|word| word.trim_end_matches(',').parse().ok()).unwrap()
}

/// Runs burn_mnist; returns the losses of its epochs.
#[track_caller]
fn losses(job: JobBuilder, folder: &Path, name: &str) -> (Vec<f64>, Outcome) {
    let file = folder.join(name);
    let outcome = run(job.args(["--losses", file.to_str().unwrap()]));
    (fs::read_to_string(&file).unwrap().lines().map(|line| line.parse().unwrap()).collect(), outcome)
}

#[test]
fn burn_mnist_learns_the_same_on_one_replica_on_two_and_in_two_processes() {
    let folder = tempfile::tempdir().unwrap();
    let brief = ["--epochs", "1"];
    let one = losses(example("burn_mnist", &brief), folder.path(), "one");
    let two = losses(example("burn_mnist", &brief).args(["--devices", TWO]), folder.path(), "two");
    let launcher = Job::builder(target_binary("distribute").unwrap()).args(["run", "--workers", "2", "--"]);
    let launched = launcher.args([target_binary("burn_mnist").unwrap()]).args(brief);
    let launched = losses(launched, folder.path(), "launched");
    for (losses, outcome) in [&one, &two, &launched] {
        assert_eq!(losses.len(), 1);
        assert!(number(outcome, "test accuracy") > 85.0, "{outcome:?}");
    }
    for (a, b) in one.0.iter().zip(&two.0) {
        assert!((a - b).abs() < 1e-3, "{one:?} {two:?}");
    }
    let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&two.0), bits(&launched.0), "one process and two processes differ");
}

#[test]
fn burn_mnist_resumes_after_a_worker_was_killed() {
    let (calm, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let job = |folder: &Path| {
        let checkpoints = folder.join("checkpoints").to_str().unwrap().to_owned();
        let args =
            ["--epochs", "2", "--batch", "256", "--checkpoint-every", "10", "--zero1", "--checkpoints", &checkpoints];
        workers("burn_mnist", &args)
    };
    let expected = losses(job(calm.path()), calm.path(), "losses");
    let mut disturbed = job(killed.path()).start().unwrap();
    let began = Instant::now();
    let saved = || {
        let steps = fs::read_dir(killed.path().join("checkpoints")).into_iter().flatten().flatten();
        steps.filter(|step| step.path().join("manifest.json").exists()).count()
    };
    while saved() == 0 {
        assert!(began.elapsed() < DEADLINE, "no checkpoint: {:?}", disturbed.printed(0));
        std::thread::sleep(Duration::from_millis(5));
    }
    disturbed.kill(1, Signal::KILL).unwrap();
    let survivor = disturbed.wait(0, DEADLINE).unwrap();
    assert_eq!(survivor.code, Some(138), "{survivor:?}");
    assert!(survivor.stderr.contains("lost worker:1"), "{survivor:?}");
    let resumed = losses(job(killed.path()), killed.path(), "losses");
    assert!(resumed.1.stderr.contains("resuming after step"), "{resumed:?}");
    assert_eq!(number(&resumed.1, "test accuracy"), number(&expected.1, "test accuracy"));
    // The parts of an epoch were summed in another order.
    for (a, b) in resumed.0.iter().zip(&expected.0) {
        assert!((a - b).abs() < 1e-12, "{resumed:?} {expected:?}");
    }
}

#[test]
fn the_convolutional_model_of_burn_trains_on_files_with_compressed_gradients() {
    let folder = tempfile::tempdir().unwrap();
    write_digits(folder.path(), 512, 100);
    let (data, board) = (folder.path().to_str().unwrap(), folder.path().join("board"));
    let args = ["--model", "cnn", "--epochs", "2", "--batch", "32", "--learning-rate", "0.01", "--data", data];
    let more = ["--compress", "f16", "--devices", TWO, "--tensorboard", board.to_str().unwrap()];
    let outcome = run(example("burn_mnist", &args).args(more));
    assert!(number(&outcome, "test accuracy") > 30.0, "{outcome:?}");
    assert!(fs::read_dir(&board).unwrap().count() > 0);
}

#[test]
fn burn_char_lm_learns_more_than_frequencies_in_one_process_and_in_two() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clusters.md");
    let mut brief = vec!["--text", text, "--width", "32", "--layers", "1", "--context", "32", "--sample", "40"];
    brief.extend(["--epochs", "1", "--steps", "32"]);
    let one = run(example("burn_char_lm", &brief));
    let two = run(example("burn_char_lm", &brief).args(["--devices", TWO]));
    let processes = run(workers("burn_char_lm", &brief));
    for outcome in [&one, &two, &processes] {
        let (bits, unigram) = (number(outcome, "bits per character"), number(outcome, "by frequency alone"));
        assert!(bits < unigram - 0.2, "{outcome:?}");
    }
    let written = |outcome: &Outcome| outcome.stdout.split("by frequency alone").nth(1).unwrap().to_owned();
    assert_eq!(written(&two), written(&processes));
    assert!(written(&one).chars().count() >= 40, "{one:?}");
}

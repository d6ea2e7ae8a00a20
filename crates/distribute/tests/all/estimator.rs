//! The example estimator_linear as users start it: alone, and as chief, worker and evaluator. It starts the example in
//! the target folder; see `tests/mnist.rs`.

use std::path::Path;
use std::time::Duration;

use distribute_testkit::{Job, JobBuilder, Outcome, Ports, Signal, target_binary};

const DEADLINE: Duration = Duration::from_secs(120);

/// Runs in a test's folder, where killed tasks leave their tables too.
fn people(folder: &Path, args: &[&str]) -> JobBuilder {
    let (model_dir, temporary) = (folder.join("model"), folder.to_str().unwrap());
    let job =
        Job::builder(target_binary("estimator_linear").unwrap()).args(["--model-dir", model_dir.to_str().unwrap()]);
    job.args(args).env("RAYON_NUM_THREADS", "1").env("RUST_LOG", "info").env("TMPDIR", temporary)
}

/// Starts chief, worker and evaluator on free ports.
fn cluster(folder: &Path, args: &[&str]) -> JobBuilder {
    let addresses = Ports::reserve(3).unwrap().addresses();
    let config = move |rank: u32| {
        let kind = ["chief", "worker", "evaluator"][rank as usize];
        let [chief, worker, evaluator] = [0, 1, 2].map(|index: usize| &addresses[index]);
        let cluster = format!(r#"{{"chief": [{chief:?}], "worker": [{worker:?}], "evaluator": [{evaluator:?}]}}"#);
        let task = format!(r#"{{"type": "{kind}", "index": 0}}"#);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {cluster}, "task": {task}}}"#))]
    };
    people(folder, args).tasks(3).task_env(config)
}

fn score(outcome: &Outcome, name: &str) -> Option<f64> {
    let line = outcome.stdout.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn files(folder: &Path, prefix: &str) -> usize {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter(|name| name.to_string_lossy().starts_with(prefix)).count()
}

#[test]
fn both_models_learn_who_earns_much() {
    for (args, least) in [(&["--devices", "CPU:0,CPU:1"][..], 0.8), (&["--dnn", "--max-steps", "400"][..], 0.8)] {
        let folder = tempfile::tempdir().unwrap();
        let outcome = &people(folder.path(), args).start().unwrap().wait_all(DEADLINE).unwrap()[0];
        assert!(outcome.success(), "{outcome:?}");
        assert!(score(outcome, "accuracy").unwrap() > least && score(outcome, "auc").unwrap() > 0.85, "{outcome:?}");
        assert_eq!(outcome.stdout.matches("for >50K").count(), 5, "{outcome:?}");
    }
}

#[test]
fn chief_and_worker_train_while_the_evaluator_evaluates() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--max-steps", "400", "--save-steps", "100"];
    let outcomes = cluster(folder.path(), &args).start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    let [chief, worker, evaluator] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(score(evaluator, "global_step"), Some(400.0), "{evaluator:?}");
    assert!(score(evaluator, "accuracy").unwrap() > 0.75, "{evaluator:?}");
    assert!(score(chief, "accuracy").is_none() && score(worker, "accuracy").is_none(), "{outcomes:?}");
    // The same checkpoint, read by the chief for both workers, and by the evaluator for itself.
    let predicted = |outcome: &Outcome, task: &str| {
        let lines = outcome.stdout.lines().filter_map(|line| line.strip_prefix(task)).map(str::to_owned);
        lines.collect::<Vec<_>>()
    };
    assert_eq!(predicted(chief, "chief:0: ").len(), 5, "{chief:?}");
    assert_eq!(predicted(chief, "chief:0: "), predicted(evaluator, "evaluator:0: "));
    // One writer for each kind of events: the chief, and the evaluator once per evaluation.
    assert_eq!(files(&folder.path().join("model"), "events.out"), 1);
    assert!(files(&folder.path().join("model/eval"), "events.out") >= 1);
    assert_eq!(files(&folder.path().join("model"), "step-"), 4);
}

#[test]
fn a_cluster_that_is_told_to_stop_goes_on_and_the_evaluator_waits() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--max-steps", "1000000", "--save-steps", "50"];
    let mut job = cluster(folder.path(), &args).start().unwrap();
    job.wait_for_line(2, "accuracy", DEADLINE).unwrap();
    // The worker that is not the chief.
    job.kill(1, Signal::TERM).unwrap();
    let (chief, worker) = (job.wait(0, DEADLINE).unwrap(), job.wait(1, DEADLINE).unwrap());
    let stopped =
        |outcome: &Outcome| outcome.stderr.split("stopped after step ").nth(1)?.split(',').next()?.parse().ok();
    let step: u64 = stopped(&chief).unwrap();
    assert_eq!((chief.code, worker.code, stopped(&worker)), (Some(143), Some(143), Some(step)), "{chief:?} {worker:?}");
    // The evaluator is still running, and waits for the restarted tasks.
    assert!(files(&folder.path().join("model"), "step-") > 0);
    job.wait_for_line(2, "the evaluator waits for a checkpoint after step", DEADLINE).unwrap();
    drop(job);
    let target = (step + 25).to_string();
    let args = ["--max-steps", &target, "--save-steps", "50"];
    let outcomes = cluster(folder.path(), &args).start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    assert!(outcomes[0].stderr.contains(&format!("resuming after step {step}")), "{outcomes:?}");
    assert_eq!(score(&outcomes[2], "global_step"), Some((step + 25) as f64), "{outcomes:?}");
}

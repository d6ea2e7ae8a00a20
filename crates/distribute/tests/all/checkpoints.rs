//! Runs that are killed and resume. They start the example in the target folder; see `tests/mnist.rs`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Ports, Signal, skipped, target_binary};

const DEADLINE: Duration = Duration::from_secs(120);

/// The number of times that a run is killed; the environment can raise it, and `cargo xtask ci` does.
fn kills() -> usize {
    std::env::var("DISTRIBUTE_TEST_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(3)
}

fn mnist(folder: &Path, workers: u32, losses: &str) -> JobBuilder {
    epochs(2, folder, workers, losses)
}

fn epochs(epochs: u32, folder: &Path, workers: u32, losses: &str) -> JobBuilder {
    let folder = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let job = Job::builder(target_binary("mnist").unwrap()).args(["--checkpoint-every", "10", "--epochs"]);
    let job = job.args([epochs.to_string()]);
    let job = job.args(["--losses", &folder(losses), "--checkpoints", &folder("checkpoints")]);
    let job = job.env("RAYON_NUM_THREADS", "1");
    if workers == 1 {
        return job.args(["--devices", "CPU:0,CPU:1"]);
    }
    let addresses = Ports::reserve(workers as usize).unwrap().addresses();
    let config = move |rank| {
        let task = format!(r#"{{"type": "worker", "index": {rank}}}"#);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {task}}}"#))]
    };
    job.tasks(workers).task_env(config)
}

fn has_checkpoint(folder: &Path) -> bool {
    let mut steps = fs::read_dir(folder.join("checkpoints")).into_iter().flatten().flatten();
    steps.any(|step| step.path().join("manifest.json").exists())
}

fn losses(folder: &Path, name: &str) -> Vec<u32> {
    let text = fs::read_to_string(folder.join(name)).unwrap();
    text.lines().map(|line| line.parse::<f32>().unwrap().to_bits()).collect()
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_as_one_that_is_not() {
    let (calm, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let began = Instant::now();
    let outcomes = mnist(calm.path(), 1, "losses").start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes[0].success(), "{outcomes:?}");
    let whole = began.elapsed();
    let expected = losses(calm.path(), "losses");
    let (mut killed_runs, mut resumed) = (0, 0);
    for round in 0.. {
        let mut job = mnist(killed.path(), 1, "losses").start().unwrap();
        // At any point of a run: at its start, in a step, while a checkpoint is written. On a busy machine the first
        // checkpoint may come late, so that every other round waits for it.
        while round % 2 == 1 && !has_checkpoint(killed.path()) && began.elapsed() < DEADLINE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let part = (round * 37 % 101) as f64 / 101.0;
        std::thread::sleep(whole.mul_f64(0.1 + 0.6 * part));
        let last = killed_runs == kills();
        if !last {
            // The job may have ended by itself meanwhile.
            drop(job.kill(0, Signal::KILL));
        }
        let outcome = &job.wait_all(DEADLINE).unwrap()[0];
        resumed += usize::from(outcome.stderr.contains("resuming after step"));
        assert!(!outcome.stderr.contains("error:"), "{outcome:?}");
        if outcome.success() {
            assert_eq!(losses(killed.path(), "losses"), expected);
            if last {
                break;
            }
            fs::remove_dir_all(killed.path().join("checkpoints")).unwrap();
        } else {
            killed_runs += 1;
        }
    }
    assert!(resumed > 0, "no run resumed from a checkpoint");
}

#[test]
fn workers_go_on_from_what_one_process_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let outcomes = mnist(folder.path(), 1, "one").start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes[0].success(), "{outcomes:?}");
    // Return to the middle of the second epoch.
    for step in [240, 250] {
        fs::remove_dir_all(folder.path().join(format!("checkpoints/step-{step:08}"))).unwrap();
    }
    let outcomes = mnist(folder.path(), 2, "two").start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.success()), "{outcomes:?}");
    assert!(outcomes[0].stderr.contains("resuming after step 230"), "{outcomes:?}");
    // Two replicas in one process and in two processes are equal bit for bit.
    assert_eq!(losses(folder.path(), "two"), losses(folder.path(), "one"));
}

#[test]
fn a_signal_to_one_worker_stops_all_after_the_same_step_which_is_saved() {
    let (calm, told) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let outcomes = epochs(2, calm.path(), 2, "losses").start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.success()), "{outcomes:?}");
    let mut job = epochs(2, told.path(), 2, "losses").start().unwrap();
    job.wait_for_line(0, "epoch=1/", DEADLINE).unwrap();
    // The worker that is not the chief.
    job.kill(1, Signal::TERM).unwrap();
    // Once the first worker leaves, the chief has written, so a job manager may stop the others.
    job.wait_for_line(1, "stopped after step", DEADLINE).unwrap();
    let names = fs::read_dir(told.path().join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    let outcomes = job.wait_all(DEADLINE).unwrap();
    let step = |stderr: &str| {
        stderr.split("stopped after step ").nth(1).and_then(|rest| Some(rest.split(',').next()?.to_owned()))
    };
    for outcome in &outcomes {
        assert_eq!(outcome.code, Some(143), "{outcome:?}");
        assert_eq!(step(&outcome.stderr), step(&outcomes[0].stderr), "{outcomes:?}");
    }
    let step = step(&outcomes[0].stderr).unwrap();
    let newest = format!("step-{:08}", step.parse::<u64>().unwrap());
    assert_eq!(names.last(), Some(&newest), "{names:?}");
    let outcomes = epochs(2, told.path(), 2, "losses").start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.success()), "{outcomes:?}");
    assert!(outcomes[0].stderr.contains(&format!("resuming after step {step}")), "{outcomes:?}");
    assert_eq!(losses(told.path(), "losses"), losses(calm.path(), "losses"));
}

#[test]
fn python_reads_the_model() {
    let python = std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/peers/venv/bin/python"));
    let installed = Command::new(&python).args(["-c", "import safetensors, numpy"]).output();
    if !installed.is_ok_and(|output| output.status.success()) {
        return skipped(
            "Python's safetensors is not installed \
             (python3 -m venv target/peers/venv && target/peers/venv/bin/pip install safetensors numpy)",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let outcomes = mnist(folder.path(), 1, "losses").start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes[0].success(), "{outcomes:?}");
    let script = "import sys; from safetensors.numpy import load_file; model = load_file(sys.argv[1]); \
                  print(sorted((name, tensor.shape, str(tensor.dtype)) for name, tensor in model.items()))";
    let path = folder.path().join("checkpoints/step-00000250/model.safetensors");
    let output = Command::new(&python).args(["-c", script]).arg(path).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = "[('fc1.bias', (128,), 'float32'), ('fc1.weight', (128, 784), 'float32'), \
                    ('fc2.bias', (10,), 'float32'), ('fc2.weight', (10, 128), 'float32')]";
    assert_eq!(printed.trim(), expected, "{}", String::from_utf8_lossy(&output.stderr));
}

//! The example burn_fsdp_lm, whose parameters are sharded, in several processes.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Outcome, Ports, Signal, target_binary};

const DEADLINE: Duration = Duration::from_secs(120);
const SMALL: [&str; 8] = ["--width", "64", "--layers", "2", "--context", "16", "--text", TEXT];
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clusters.md");

fn alone(args: &[&str]) -> JobBuilder {
    Job::builder(target_binary("burn_fsdp_lm").unwrap()).args(args).env("RAYON_NUM_THREADS", "1")
}

fn workers(count: u32, args: &[&str]) -> JobBuilder {
    cluster(count, alone(args))
}

/// Gives the tasks of a job places in a cluster of workers.
fn cluster(count: u32, job: JobBuilder) -> JobBuilder {
    let addresses = Ports::reserve(count as usize).unwrap().addresses();
    let config = move |rank| {
        let task = format!(r#"{{"type": "worker", "index": {rank}}}"#);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {task}}}"#))]
    };
    job.tasks(count).task_env(config)
}

/// Runs the example; returns the losses of its steps.
#[track_caller]
fn losses(job: JobBuilder, folder: &Path, name: &str) -> Vec<f32> {
    let file = folder.join(name);
    let outcomes =
        job.args(SMALL).args(["--losses", file.to_str().unwrap()]).start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    fs::read_to_string(&file).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[track_caller]
fn assert_close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 2e-3 * a.abs()), "{a:?}\n{b:?}");
}

#[test]
fn sharded_and_mirrored_replicas_learn_the_same_in_one_process_and_in_several() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |job: JobBuilder, name: &str| losses(job, folder.path(), name);
    let steps = ["--steps", "8"];
    let one = losses(alone(&steps).arg("--mirrored"), "one");
    let mirrored = losses(alone(&steps).args(["--mirrored", "--devices", "CPU:0,CPU:1"]), "mirrored");
    let threads = losses(alone(&steps).args(["--devices", "CPU:0,CPU:1"]), "threads");
    let processes = losses(workers(2, &steps), "processes");
    // A sum of two is the same in any order.
    assert_eq!(threads, mirrored);
    assert_eq!(processes, mirrored);
    assert!(one[7] < one[0] - 0.25, "{one:?}");
    for other in [&mirrored, &losses(workers(4, &steps), "four")] {
        assert_close(&one, other);
    }
    let hybrid = workers(2, &steps).args(["--devices", "CPU:0,CPU:1", "--hybrid"]);
    assert_close(&one, &losses(hybrid, "hybrid"));
}

#[test]
fn a_checkpoint_of_four_processes_is_restored_by_two_and_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("checkpoint");
    let part = |job: JobBuilder, name: &str| {
        let copy = folder.path().join(format!("{name}-checkpoint"));
        let _ = std::process::Command::new("cp").arg("-r").args([&saved, &copy]).status();
        losses(job.args(["--checkpoint", copy.to_str().unwrap()]), folder.path(), name)
    };
    losses(workers(4, &["--steps", "6", "--checkpoint", saved.to_str().unwrap()]), folder.path(), "first");
    let steps = ["--steps", "5"];
    let four = part(workers(4, &steps), "four");
    let two = part(workers(2, &steps), "two");
    let mirrored = part(alone(&steps).arg("--mirrored"), "mirrored");
    assert_close(&four, &two);
    assert_close(&four, &mirrored);
}

/// Parameters, gradients and Adam's slots take 115 MB, which the limit on each process's data does not allow.
#[cfg(target_os = "linux")]
#[test]
fn a_model_that_does_not_fit_one_process_trains_on_four() {
    const LIMIT_KIB: &str = "155000";
    let program = target_binary("burn_fsdp_lm").unwrap();
    let limited = || {
        let shell = Job::builder("/bin/sh").args(["-c", "ulimit -d $0 && exec \"$@\"", LIMIT_KIB]).arg(&program);
        shell
            .args(["--width", "384", "--layers", "4", "--context", "16", "--steps", "1", "--text", TEXT])
            .env("RAYON_NUM_THREADS", "1")
    };
    let one = limited().arg("--mirrored").start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(!one[0].success() && one[0].stderr.contains("memory allocation of"), "{one:?}");
    let four = cluster(4, limited()).start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(four.iter().all(Outcome::success), "{four:?}");
    assert!(four[0].stdout.contains("peak memory"), "{four:?}");
}

/// A frozen process makes the others wait in the gather of a weight, in forward or in backward; then it is killed.
#[test]
fn survivors_of_a_kill_during_a_gather_name_the_killed_rank() {
    let steps = ["--steps", "100000", "--width", "64", "--layers", "3"];
    let mut job = workers(3, &steps).start().unwrap();
    job.wait_for_line(0, "step   11", DEADLINE).unwrap();
    job.kill(1, Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    job.kill(1, Signal::KILL).unwrap();
    let killed = Instant::now();
    for rank in [0, 2] {
        let survivor = job.wait(rank, DEADLINE).unwrap();
        assert_eq!(survivor.code, Some(138), "{survivor:?}");
        assert!(survivor.stderr.contains("lost worker:1"), "{survivor:?}");
    }
    assert!(killed.elapsed() < Duration::from_secs(15), "{:?}", killed.elapsed());
}

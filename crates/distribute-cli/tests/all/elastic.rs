//! `distribute run --elastic`, with shell scripts as programs.

use std::fs;
use std::path::Path;
use std::time::Duration;

use distribute_cluster::{ElasticMember, FileRegister, Generation, JobId, Register};
use distribute_testkit::{Job, JobBuilder, Outcome, Signal};

const DEADLINE: Duration = Duration::from_secs(60);

/// Builds `distribute run FLAGS -- PROGRAM`.
fn launcher(flags: &[&str], program: &[&str]) -> JobBuilder {
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("run").args(flags).arg("--").args(program);
    job.without_env("DISTRIBUTE_GENERATIONS")
}

fn run(flags: &[&str], script: &str) -> Outcome {
    launcher(flags, &["sh", "-c", script]).start().unwrap().wait(0, DEADLINE).unwrap()
}

/// Returns the lines that a worker printed, without their prefix.
fn lines_of<'a>(outcome: &'a Outcome, task: &str) -> Vec<&'a str> {
    let of_task = |line: &'a str| line.split_once(" │ ").filter(|(name, _)| *name == task);
    outcome.stdout.lines().filter_map(of_task).map(|(_, text)| text).collect()
}

/// Returns the row of the summary with a worker's exit, time, starts and note.
fn row<'a>(outcome: &'a Outcome, task: &str) -> &'a str {
    outcome.stderr.lines().find(|line| line.starts_with(&format!("{task}  "))).unwrap()
}

#[test]
fn a_lost_worker_is_started_again_while_the_others_run() {
    // Worker 1 kills itself once the others are there, and they end once it is there again.
    let script = r#"
        folder=${DISTRIBUTE_GENERATIONS#file:}; touch "$folder/$RANK-$DISTRIBUTE_RESTART_COUNT"
        echo "$DISTRIBUTE_GENERATIONS $DISTRIBUTE_JOB_ID $TF_CONFIG"; echo "pid $$ of start $DISTRIBUTE_RESTART_COUNT"
        case $RANK-$DISTRIBUTE_RESTART_COUNT in
        1-0) until [ -e "$folder/0-0" ] && [ -e "$folder/2-0" ]; do sleep 0.02; done; kill -9 $$;;
        1-1) ;;
        *) until [ -e "$folder/1-1" ]; do sleep 0.02; done;;
        esac"#;
    let logs = tempfile::tempdir().unwrap();
    let flags = ["--elastic", "2:3", "--restart-backoff", "0", "--log-dir", logs.path().to_str().unwrap()];
    let outcome = run(&flags, script);
    assert!(outcome.success(), "{outcome:?}");
    let lines = ["worker-0", "worker-1", "worker-2"].map(|task| lines_of(&outcome, task));
    assert_eq!(lines.each_ref().map(Vec::len), [2, 4, 2], "{outcome:?}");
    assert!(lines[1][0] == lines[1][2] && lines[1][1] != lines[1][3] && lines[1][3].ends_with("of start 1"));
    let folder = lines[0][0].split(' ').next().unwrap().strip_prefix("file:").unwrap();
    assert!(Path::new(folder).is_absolute() && !Path::new(folder).exists(), "{folder}");
    let note = "; starting it again in 0 s (1 of 3), the others train on";
    assert!(outcome.stderr.lines().any(|line| line.contains("worker-1 was killed by SIGKILL") && line.ends_with(note)));
    let starts = ["worker-0", "worker-1", "worker-2"].map(|task| row(&outcome, task).rsplit(' ').next().unwrap());
    assert_eq!(starts, ["1", "2", "1"], "{outcome:?}");
    let log = fs::read_to_string(logs.path().join("attempt-1/worker-1/stdout.log")).unwrap();
    assert!(log.contains("of start 1"), "{log}");
}

#[test]
fn workers_that_were_all_lost_begin_another_job() {
    let script = r#"
        echo "$DISTRIBUTE_JOB_ID $DISTRIBUTE_RESTART_COUNT $DISTRIBUTE_TASK_RESTARTS"
        here=${DISTRIBUTE_GENERATIONS#file:}/$DISTRIBUTE_RESTART_COUNT; touch "$here-$RANK"
        until [ -e "$here-0" ] && [ -e "$here-1" ]; do sleep 0.02; done
        if [ $DISTRIBUTE_RESTART_COUNT = 0 ]; then kill -9 $$; fi"#;
    let outcome = run(&["--elastic", "1:2", "--restart-backoff", "1"], script);
    assert!(outcome.success(), "{outcome:?}");
    let lines = ["worker-0", "worker-1"].map(|task| lines_of(&outcome, task));
    assert_eq!(lines[0], lines[1], "{outcome:?}");
    let starts: Vec<(&str, &str)> = lines[0].iter().map(|line| line.split_once(' ').unwrap()).collect();
    assert!(starts.len() == 2 && starts[0].0 != starts[1].0, "{starts:?}");
    assert_eq!((starts[0].1, starts[1].1), ("0 0", "1 0"));
    assert!(outcome.stderr.contains("all workers were lost"), "{outcome:?}");
}

#[test]
fn workers_that_wait_for_lost_members_begin_another_job() {
    // The test decides the generations in their place. In the second job all end once they have met.
    let script = r#"
        echo "start $DISTRIBUTE_RESTART_COUNT $$ $DISTRIBUTE_JOB_ID $DISTRIBUTE_GENERATIONS $TF_CONFIG"
        again=${DISTRIBUTE_GENERATIONS#file:}/again
        if [ $DISTRIBUTE_RESTART_COUNT != 0 ] && [ $DISTRIBUTE_TASK_RESTARTS = 0 ]; then
            touch "$again-$RANK"; until [ -e "$again-0" ] && [ -e "$again-1" ]; do sleep 0.02; done; exit 0
        fi
        trap 'exit 143' TERM; while :; do sleep 0.05; done"#;
    let flags = ["--elastic", "1:2", "--restart-backoff", "1"];
    let mut job = launcher(&flags, &["sh", "-c", script]).start().unwrap();
    let started = |rank: usize, count: u32| -> Vec<String> {
        let line = job.wait_for_line(0, &format!("worker-{rank} │ start {count} "), DEADLINE).unwrap();
        line.split("start ").nth(1).unwrap().split(' ').map(str::to_owned).collect()
    };
    let kill = |worker: &[String]| {
        assert!(std::process::Command::new("kill").args(["-9", &worker[1]]).status().unwrap().success());
    };
    let workers = [started(0, 0), started(1, 0)];
    let config: serde_json::Value = serde_json::from_str(&workers[0][4..].join(" ")).unwrap();
    let member = |rank: u64| ElasticMember {
        join_number: rank,
        joined_in: 1,
        identity: u128::from(rank + 1) << 32,
        control: config["cluster"]["worker"][rank as usize].as_str().unwrap().to_owned(),
        service: "127.0.0.1:1".to_owned(),
    };
    let first = Generation { number: 1, members: vec![member(0), member(1)], next_join: 2, trained: 0 };
    let second = Generation { number: 2, members: vec![member(1)], next_join: 2, trained: 1 };
    let folder = workers[0][3].strip_prefix("file:").unwrap();
    let register = FileRegister::new(folder, &JobId::new(workers[0][2].as_str()).unwrap()).unwrap();
    register.decide(&first).unwrap();
    kill(&workers[0]);
    register.decide(&second).unwrap();
    assert_eq!(started(0, 1)[2], workers[0][2]);
    kill(&workers[1]);
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    assert!(outcome.stderr.contains("all workers with the state of the job were lost"), "{outcome:?}");
    let ids = |task: &str| -> Vec<String> {
        lines_of(&outcome, task).iter().map(|line| line.split(' ').nth(3).unwrap().to_owned()).collect()
    };
    let (ids_0, ids_1) = (ids("worker-0"), ids("worker-1"));
    assert!(ids_0.len() == 3 && ids_1.len() == 2 && ids_0[2] == ids_1[1] && ids_0[2] != ids_0[1], "{ids_0:?}");
}

#[test]
fn empty_variables_count_as_none() {
    let script = "echo \"$DISTRIBUTE_GENERATIONS $RAYON_NUM_THREADS $DISTRIBUTE_PROGRESS_ADDR\"";
    let job = launcher(&["--elastic", "1:1"], &["sh", "-c", script]).env("DISTRIBUTE_GENERATIONS", " ");
    let job = job.env("RAYON_NUM_THREADS", "").env("DISTRIBUTE_PROGRESS", " ");
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    let words: Vec<&str> = lines_of(&outcome, "worker-0")[0].split_whitespace().collect();
    assert!(words.len() == 3 && words[0].starts_with("file:/"), "{outcome:?}");
}

#[test]
fn a_failure_that_a_restart_would_not_change_stops_the_others() {
    let script = r#"
        echo "$DISTRIBUTE_GENERATIONS"; trap 'echo stopped; exit 143' TERM
        if [ $RANK = 2 ]; then sleep 0.2; echo "disk full" >&2; exit 1; fi
        while :; do sleep 0.05; done"#;
    let job = launcher(&["-n", "3"], &["sh", "-c", script]).env("DISTRIBUTE_ELASTIC", "1:3");
    let outcome = job.env("DISTRIBUTE_GENERATIONS", "file:/elsewhere").start().unwrap().wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert_eq!((lines_of(&outcome, "worker-0"), lines_of(&outcome, "worker-1")), {
        let both = vec!["file:/elsewhere", "stopped"];
        (both.clone(), both)
    });
    assert!(row(&outcome, "worker-2").contains("← first cause"), "{outcome:?}");
    assert!(outcome.stderr.contains("its last 2 lines\n    file:/elsewhere\n    disk full\n"), "{outcome:?}");
}

#[test]
fn a_job_ends_by_a_signal_or_with_too_few_workers() {
    let script = "trap 'exit 143' TERM; echo \"$DISTRIBUTE_GENERATIONS\" \"$$.\"; while :; do sleep 0.05; done";
    let start = |flags: &[&str]| {
        let job = launcher(flags, &["sh", "-c", script]).start().unwrap();
        let lines = [0, 1].map(|rank| job.wait_for_line(0, &format!("worker-{rank} │ file:"), DEADLINE).unwrap());
        let folder = lines[0].split("file:").nth(1).unwrap().split(' ').next().unwrap().to_owned();
        assert!(Path::new(&folder).is_dir(), "{folder}");
        (job, folder, lines[1].rsplit(' ').next().unwrap().trim_end_matches('.').to_owned())
    };
    let (mut job, folder, _) = start(&["--elastic", "1:2"]);
    job.kill(0, Signal::TERM).unwrap();
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(143), "{outcome:?}");
    assert!(!Path::new(&folder).exists(), "{folder}");

    let (mut job, _, second) = start(&["--elastic", "2:2", "--max-restarts", "0"]);
    assert!(std::process::Command::new("kill").args(["-9", &second]).status().unwrap().success());
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(137), "{outcome:?}");
    assert!(outcome.stderr.contains("1 worker is left, and the job needs 2; stopping it"), "{outcome:?}");
    assert!(outcome.stderr.ends_with("stopped with fewer workers than --elastic 2:2 needs\n"), "{outcome:?}");
    assert!(row(&outcome, "worker-1").contains("← first cause") && row(&outcome, "worker-0").contains("143"));
    job.family().wait_gone(DEADLINE).unwrap();
}

#[test]
fn others_are_stopped_where_a_worker_cannot_be_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("train");
    let script = "#!/bin/sh\ntrap 'echo stopped; exit 143' TERM; echo ready\n\
                  if [ $RANK = 1 ]; then sleep 0.2; rm \"$0\"; kill -9 $$; fi\nwhile :; do sleep 0.05; done\n";
    fs::write(&program, script).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(&program, executable).unwrap();
    let flags = ["--elastic", "1:2", "--restart-backoff", "0"];
    let mut job = launcher(&flags, &[program.to_str().unwrap()]).start().unwrap();
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert!(outcome.code == Some(2) && outcome.stderr.contains("there is no such file"), "{outcome:?}");
    assert_eq!(lines_of(&outcome, "worker-0"), ["ready", "stopped"], "{outcome:?}");
}

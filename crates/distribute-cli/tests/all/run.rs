//! `distribute run` as users see it, with shell scripts as programs.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Outcome, Signal};

const DEADLINE: Duration = Duration::from_secs(60);

/// Builds `distribute run FLAGS -- sh -c SCRIPT`.
fn launcher(flags: &[&str], script: &str) -> JobBuilder {
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("run").args(flags);
    job.args(["--", "sh", "-c", script])
}

fn run(flags: &[&str], script: &str) -> Outcome {
    launcher(flags, script).start().unwrap().wait(0, DEADLINE).unwrap()
}

/// Returns the lines that a task printed, without their prefix.
fn lines_of<'a>(outcome: &'a Outcome, task: &str) -> Vec<&'a str> {
    // Names are padded to the longest.
    let of_task = |line: &'a str| line.split_once(" │ ").filter(|(name, _)| name.trim_end() == task);
    outcome.stdout.lines().filter_map(of_task).map(|(_, text)| text).collect()
}

#[test]
fn tasks_learn_their_place_and_their_output_is_told_apart() {
    let script = r#"
        echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE"; echo "$TF_CONFIG"; echo "$MASTER_ADDR:$MASTER_PORT""#;
    let outcome = run(&["-n", "2"], script);
    assert!(outcome.success(), "{outcome:?}");
    let (first, second) = (lines_of(&outcome, "worker-0"), lines_of(&outcome, "worker-1"));
    assert_eq!((first[0], second[0]), ("0/2 0/2", "1/2 1/2"));
    assert_eq!(first[2], second[2]);
    let configs: Vec<serde_json::Value> =
        [first[1], second[1]].iter().map(|config| serde_json::from_str(config).unwrap()).collect();
    assert_eq!(configs[0]["cluster"], configs[1]["cluster"]);
    assert_eq!(configs[0]["cluster"]["worker"].as_array().unwrap().len(), 2);
    let tasks = configs.iter().map(|config| config["task"]["index"].as_u64());
    assert!(tasks.eq([Some(0), Some(1)]));
}

#[test]
fn every_job_has_an_identity_of_its_own() {
    let jobs = [(); 2].map(|()| {
        let outer = launcher(&["-n", "2"], r#"echo "$DISTRIBUTE_JOB_ID""#).env("DISTRIBUTE_JOB_ID", "outer");
        let outcome = outer.start().unwrap().wait(0, DEADLINE).unwrap();
        let ids = ["worker-0", "worker-1"].map(|task| lines_of(&outcome, task)[0].to_owned());
        assert!(ids[0] == ids[1] && ids[0].len() == 32, "{ids:?}");
        ids[0].clone()
    });
    assert_ne!(jobs[0], jobs[1]);
}

#[test]
fn every_job_has_a_secret_of_its_own_that_ends_with_it() {
    let script = r#"
        echo "$DISTRIBUTE_JOB_SECRET_FILE"; stat -c %a "$DISTRIBUTE_JOB_SECRET_FILE"
        cat "$DISTRIBUTE_JOB_SECRET_FILE"; tr '\0' ' ' < /proc/$PPID/cmdline; echo"#;
    let jobs = [(); 2].map(|()| {
        let launcher = launcher(&["-n", "2"], script).without_env("DISTRIBUTE_JOB_SECRET_FILE");
        let outcome = launcher.start().unwrap().wait(0, DEADLINE).unwrap();
        let (first, second) = (lines_of(&outcome, "worker-0"), lines_of(&outcome, "worker-1"));
        assert!(first[..3] == second[..3] && first[1] == "600" && first[2].len() == 64, "{outcome:?}");
        assert!(!first[3].is_empty() && !first[3].contains(first[2]), "the secret is in a command line: {outcome:?}");
        assert!(!fs::exists(first[0]).unwrap());
        first[2].to_owned()
    });
    assert_ne!(jobs[0], jobs[1]);
    let own = launcher(&["-n", "1"], r#"echo "$DISTRIBUTE_JOB_SECRET ${DISTRIBUTE_JOB_SECRET_FILE:-none}""#);
    let own = own.without_env("DISTRIBUTE_JOB_SECRET_FILE").env("DISTRIBUTE_JOB_SECRET", "the secret of the user");
    let outcome = own.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.stdout.contains("the secret of the user none"), "{outcome:?}");
}

#[test]
fn parameter_servers_come_with_a_chief_and_one_lost_worker_ends_no_job() {
    let script = r#"
        case "$TF_CONFIG" in *'"type":"worker","index":1'*|*'"index":1,"type":"worker"'*) exit 3;; esac
        sleep 0.5; echo "$TF_CONFIG""#;
    let outcome = run(&["-n", "2", "--ps", "1"], script);
    assert!(outcome.success(), "{outcome:?}");
    let chief: serde_json::Value = serde_json::from_str(lines_of(&outcome, "chief-0")[0]).unwrap();
    assert_eq!(chief["cluster"]["ps"].as_array().unwrap().len(), 1);
    assert_eq!(lines_of(&outcome, "ps-0").len(), 1);
    assert!(outcome.stderr.contains("worker-1") && outcome.stderr.contains("the others continue"), "{outcome:?}");
}

#[test]
fn what_a_lost_chief_has_printed_comes_before_what_the_next_one_prints() {
    let script = r#"
        case "$TF_CONFIG" in
            *'"type":"chief"'*)
                echo "begins $DISTRIBUTE_RESTART_COUNT"
                case "$DISTRIBUTE_RESTART_COUNT" in 40) ;; *) seq 300; kill -9 $$;; esac;;
            *) sleep 0.2;;
        esac"#;
    let flags = ["-n", "1", "--ps", "1", "--chief-restarts", "40", "--restart-backoff", "0"];
    let outcome = run(&flags, script);
    assert!(outcome.success(), "{outcome:?}");
    let of_start = |start: u32| {
        let counted = if start < 40 { 300 } else { 0 };
        [format!("begins {start}")].into_iter().chain((1..=counted).map(|number: u32| number.to_string()))
    };
    let expected: Vec<String> = (0..=40).flat_map(of_start).collect();
    assert_eq!(lines_of(&outcome, "chief-0"), expected, "lines of different starts are mixed");
}

#[test]
fn a_lost_chief_is_started_again_alone() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        echo "begins $DISTRIBUTE_RESTART_COUNT"
        case "$TF_CONFIG" in
            *'"type":"chief"'*)
                case "$DISTRIBUTE_RESTART_COUNT" in 0) kill -9 $$;; 1) exit 138;; esac
                touch "$FOLDER/done"; echo "$TF_CONFIG";;
            *) while [ ! -e "$FOLDER/done" ]; do sleep 0.05; done;;
        esac"#;
    let flags = ["-n", "2", "--ps", "1", "--chief-restarts", "2", "--restart-backoff", "0"];
    let job = launcher(&flags, script).env("FOLDER", folder.path().to_str().unwrap());
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    assert_eq!(lines_of(&outcome, "chief-0")[..3], ["begins 0", "begins 1", "begins 2"]);
    assert!(lines_of(&outcome, "chief-0")[3].contains("127.0.0.1"), "{outcome:?}");
    for task in ["worker-0", "worker-1", "ps-0"] {
        assert_eq!(lines_of(&outcome, task), ["begins 0"]);
    }
    for words in ["chief-0 was killed by SIGKILL", "(1 of 2), the others wait for it", "(2 of 2)"] {
        assert!(outcome.stderr.contains(words), "{words}: {outcome:?}");
    }
    // Once more than that.
    let flags = ["-n", "1", "--ps", "1", "--chief-restarts", "1", "--restart-backoff", "0"];
    let outcome = run(&flags, r#"case "$TF_CONFIG" in *'"type":"chief"'*) kill -9 $$;; *) sleep 60;; esac"#);
    assert_eq!(outcome.code, Some(137), "{outcome:?}");
    assert!(outcome.stderr.contains("as often as --chief-restarts says"), "{outcome:?}");
    // Restarts of all tasks do not begin the count anew.
    let all = [&flags[..], &["--max-restarts", "2"]].concat();
    let outcome = run(&all, r#"case "$TF_CONFIG" in *'"type":"chief"'*) kill -9 $$;; *) exec sleep 60;; esac"#);
    assert_eq!(outcome.code, Some(137), "{outcome:?}");
    assert_eq!(outcome.stderr.matches("starting it again in").count(), 1, "{outcome:?}");
    assert_eq!(outcome.stderr.matches("starting the job again in").count(), 2, "{outcome:?}");
    // An error of its own.
    let outcome = run(&flags, r#"case "$TF_CONFIG" in *'"type":"chief"'*) exit 7;; *) sleep 60;; esac"#);
    assert_eq!(outcome.code, Some(7), "{outcome:?}");
    assert!(!outcome.stderr.contains("starting it again"), "{outcome:?}");
    let outcome = run(&["-n", "2", "--chief-restarts", "1"], "true");
    assert!(outcome.code == Some(2) && outcome.stderr.contains("--ps N too"), "{outcome:?}");
}

#[test]
fn nothing_but_text_goes_into_a_pipe() {
    let colors = r#"printf '\033[1;31mred\033[0m\033[2K\rbar 10%%\rbar 20%%\r\n'; printf '\007\033[3Aend\n' >&2"#;
    let outcome = run(&["-n", "2", "--timestamps"], colors);
    for text in [&outcome.stdout, &outcome.stderr] {
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }
    for text in ["red", "bar 10%", "bar 20%"] {
        assert!(outcome.stdout.contains(&format!("worker-1 │ {text}\n")), "{outcome:?}");
    }
    assert!(outcome.stderr.contains("worker-0 │ end\n"), "{outcome:?}");
}

#[test]
fn one_task_can_be_shown_alone_and_all_of_them_logged() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["-n", "2", "--only", "worker-1", "--log-dir", folder.path().to_str().unwrap()];
    let outcome = run(&flags, "echo out $RANK; echo err $RANK >&2");
    assert_eq!(outcome.stdout, "worker-1 │ out 1\n");
    for (file, text) in [("worker-0/stdout.log", "out 0\n"), ("worker-1/stderr.log", "err 1\n")] {
        assert_eq!(fs::read_to_string(folder.path().join("attempt-0").join(file)).unwrap(), text);
    }
}

#[test]
fn a_task_that_was_told_of_a_failure_is_no_first_cause() {
    // Worker 0 was told of the failure, and is the first to end with the same code, while the other one still runs.
    let script = r#"
        trap 'exit 2' TERM
        told='error: group "world" was aborted by worker:1: wrong model'
        if [ $RANK = 0 ]; then sleep 0.3; echo "$told" >&2; exit 2; fi
        echo 'error: wrong model' >&2; sleep 0.8; exit 2"#;
    let outcome = run(&["-n", "2"], script);
    assert_eq!(outcome.code, Some(2));
    let cause = outcome.stderr.lines().find(|line| line.contains("first cause")).unwrap();
    assert!(cause.starts_with("worker-1  2 "), "{outcome:?}");
}

#[test]
fn the_first_cause_is_named_and_never_a_victim() {
    // Worker 0 learns of the loss before worker 1 has ended, and says so.
    let script = r#"if [ $RANK = 1 ]; then echo "disk full" >&2; sleep 0.2; exit 7; fi; sleep 0.1; exit 138"#;
    let outcome = run(&["-n", "2"], script);
    assert_eq!(outcome.code, Some(7));
    let report = &outcome.stderr;
    assert!(report.contains("error: worker-1 (pid "), "{report}");
    assert!(report.contains("its last line\n    disk full\n"), "{report}");
    let cause = report.lines().find(|line| line.contains("first cause")).unwrap();
    assert!(cause.starts_with("worker-1  7 "), "{cause}");
    assert!(report.contains("lost another task, or a deadline passed"), "{report}");
}

#[test]
fn a_killed_task_ends_the_job_with_its_signal() {
    let script = "if [ $RANK = 1 ]; then kill -9 $$; fi; echo waiting; exec sleep 600";
    let outcome = run(&["-n", "3"], script);
    assert_eq!(outcome.code, Some(137), "{outcome:?}");
    assert!(outcome.stderr.contains("worker-1  SIGKILL"), "{outcome:?}");
    assert_eq!(outcome.stderr.matches("stopped by the launcher").count(), 2, "{outcome:?}");
}

#[test]
fn a_task_that_does_not_stop_is_killed_after_the_grace() {
    let script = "if [ $RANK = 1 ]; then sleep 0.3; exit 3; fi; trap '' TERM; while :; do sleep 0.1; done";
    let started = Instant::now();
    let outcome = run(&["-n", "2", "--grace", "1"], script);
    assert_eq!(outcome.code, Some(3), "{outcome:?}");
    assert!(outcome.stderr.contains("killing worker-0: not stopped within 1 s"), "{outcome:?}");
    assert!(started.elapsed() >= Duration::from_secs(1));
}

#[test]
fn one_interrupt_stops_and_two_kill() {
    let mut job = launcher(&["-n", "2"], "echo ready $RANK; exec sleep 600").start().unwrap();
    for rank in 0..2 {
        job.wait_for_line(0, &format!("ready {rank}"), DEADLINE).unwrap();
    }
    job.kill(0, Signal::INT).unwrap();
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(130), "{outcome:?}");
    job.family().wait_gone(DEADLINE).unwrap();

    let stubborn = "trap '' INT; echo ready; while :; do sleep 0.1; done";
    let mut job = launcher(&["-n", "1"], stubborn).start().unwrap();
    job.wait_for_line(0, "ready", DEADLINE).unwrap();
    job.kill(0, Signal::INT).unwrap();
    job.wait_for_line(0, "SIGINT: stopping 1 task", DEADLINE).unwrap();
    job.kill(0, Signal::INT).unwrap();
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(130), "{outcome:?}");
    assert!(outcome.stderr.contains("killing worker-0: interrupted again"), "{outcome:?}");
}

#[test]
fn a_killed_launcher_leaves_nobody_behind() {
    // Each task is a shell with a child of its own, as with `cargo run`.
    let script = "sleep 600 & until grep -q sleep /proc/$!/comm; do :; done; echo ready $RANK; wait";
    let mut job = launcher(&["-n", "2"], script).start().unwrap();
    for rank in 0..2 {
        job.wait_for_line(0, &format!("ready {rank}"), DEADLINE).unwrap();
    }
    // The launcher, its guardian, two shells and two sleeps.
    assert_eq!(job.family().members().len(), 6);
    let launcher = job.pid(0).unwrap();
    let killed = std::process::Command::new("kill").args(["-9", &launcher.to_string()]).status().unwrap();
    assert!(killed.success());
    job.family().wait_gone(Duration::from_secs(10)).unwrap();
    assert_eq!(job.wait(0, DEADLINE).unwrap().signal, Some(9));
}

#[test]
fn what_cannot_be_started_gets_a_sentence() {
    let distribute = |args: &[&str]| {
        let mut job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("run").args(args).start().unwrap();
        let outcome = job.wait(0, DEADLINE).unwrap();
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        outcome.stderr
    };
    let missing = distribute(&["-n", "2", "--", "./no-such-program"]);
    assert!(missing.contains("given     ./no-such-program") && missing.contains("build it first"), "{missing}");
    let folder = distribute(&["-n", "2", "--", "/tmp"]);
    assert!(folder.contains("it is a folder"), "{folder}");
    let only = distribute(&["-n", "2", "--only", "wroker-0", "--", "true"]);
    assert!(only.contains("expected  worker-0, worker-1, or chief for rank 0"), "{only}");
    let log = distribute(&["-n", "2", "--log-dir", "/proc/none", "--", "true"]);
    assert!(log.contains("cannot write logs to /proc/none"), "{log}");
}

#[test]
fn a_job_that_was_told_to_end_is_not_started_again() {
    // A task that fails while it is being stopped, and one that had failed before.
    for (script, code) in [
        (r#"trap "exit 1" TERM; echo ready; while :; do sleep 0.05; done"#, 1),
        (
            r#"if [ $RANK = 1 ]; then until [ -e "$FOLDER/trapped" ]; do sleep 0.02; done; exit 7; fi
            trap "echo ready; sleep 0.5; exit 143" TERM; touch "$FOLDER/trapped"; while :; do sleep 0.05; done"#,
            7,
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let flags = ["-n", "2", "--max-restarts", "3", "--restart-backoff", "0"];
        let job = launcher(&flags, script).env("FOLDER", folder.path().to_str().unwrap());
        let mut job = job.start().unwrap();
        job.wait_for_line(0, "worker-0 │ ready", DEADLINE).unwrap();
        job.kill(0, Signal::TERM).unwrap();
        let outcome = job.wait(0, DEADLINE).unwrap();
        assert_eq!(outcome.code, Some(code), "{outcome:?}");
        assert!(!outcome.stderr.contains("starting the job again"), "{outcome:?}");
        assert!(outcome.stderr.ends_with("not started again: SIGTERM has stopped the job\n"), "{outcome:?}");
    }
}

#[test]
fn requests_to_the_program_do_not_end_a_job_that_pauses() {
    let script = "if [ $DISTRIBUTE_RESTART_COUNT = 0 ]; then exit 5; fi";
    let mut job = launcher(&["-n", "1", "--max-restarts", "1"], script).start().unwrap();
    job.wait_for_line(0, "starting the job again", DEADLINE).unwrap();
    [Signal::USR1, Signal::USR2].into_iter().for_each(|signal| job.kill(0, signal).unwrap());
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    // A request to end does, at once.
    let flags = ["-n", "1", "--max-restarts", "1", "--restart-backoff", "600"];
    let mut job = launcher(&flags, script).start().unwrap();
    job.wait_for_line(0, "starting the job again", DEADLINE).unwrap();
    job.kill(0, Signal::TERM).unwrap();
    assert_eq!(job.wait(0, DEADLINE).unwrap().code, Some(143));
}

#[test]
fn tasks_of_several_do_not_inherit_that_they_train_alone() {
    let script = r#"echo "[$DISTRIBUTE_ALONE] [$DISTRIBUTE_TASK_RESTARTS]""#;
    for (flags, expected) in [(&["-n", "2"][..], "[] []"), (&["--elastic", "2:2"], "[] [0]"), (&["-n", "1"], "[1] []")]
    {
        let job = launcher(flags, script).env("DISTRIBUTE_ALONE", "1").env("DISTRIBUTE_TASK_RESTARTS", "4");
        let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
        assert!(outcome.success() && lines_of(&outcome, "worker-0") == [expected], "{outcome:?}");
    }
}

#[test]
fn one_worker_in_each_of_several_processes_is_refused() {
    let several = r#"{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}"#;
    // As TFJob has it for a worker that knows no other.
    let sparse =
        r#"{"sparseCluster": {"worker": {"1": "b:1"}, "ps": ["a:1"]}, "task": {"type": "worker", "index": 1}}"#;
    let alone = |flags: &[&str], env: &[(&str, &str)]| {
        let job = launcher(flags, "echo trained").without_env("DISTRIBUTE_ALONE").without_env("TF_CONFIG");
        let job = env.iter().fold(job, |job, (name, value)| job.env(*name, *value));
        job.start().unwrap().wait(0, DEADLINE).unwrap()
    };
    let ranks = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "9000")];
    for (env, words) in [
        (&[("TF_CONFIG", several)][..], "worker:1 of 2"),
        (&[("TF_CONFIG", sparse)], "a part of the cluster"),
        (&ranks, "RANK and"),
    ] {
        for flags in [&["-n", "1"][..], &["--elastic", "1:1"]] {
            let outcome = alone(flags, env);
            assert!(outcome.code == Some(2) && outcome.stderr.contains(words), "{outcome:?}");
            assert!(!outcome.stdout.contains("trained"), "{outcome:?}");
        }
        assert!(alone(&["-n", "1"], &[env, &[("DISTRIBUTE_ALONE", "1")]].concat()).success());
        assert!(alone(&["-n", "2"], env).success());
    }
}

/// Runs a job with these standard streams to its end; returns its exit code.
fn run_on(stdout: impl Into<Stdio>, stderr: impl Into<Stdio>, flags: &[&str], script: &str) -> Option<i32> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distribute"));
    command.arg("run").args(flags).args(["--", "sh", "-c", script]).stdin(Stdio::null());
    command.stdout(stdout).stderr(stderr).spawn().unwrap().wait().unwrap().code()
}

#[test]
fn the_exit_code_outlives_the_reader_of_the_report() {
    for flags in [&["-n", "1"][..], &["--elastic", "1:1"]] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        assert_eq!(run_on(Stdio::null(), OwnedFd::from(theirs), flags, "exit 7"), Some(7));
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    assert_eq!(run_on(Stdio::null(), OwnedFd::from(theirs), &["-n", "1", "--only", "x"], "true"), Some(2));
}

#[test]
fn streams_that_do_not_block_lose_no_line() {
    let [mut out, mut err] = [(); 2].map(|()| UnixStream::pair().unwrap());
    [&out.1, &err.1].into_iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    let [out_end, err_end] = [out.1, err.1].map(OwnedFd::from);
    let job = thread::spawn(move || run_on(out_end, err_end, &["-n", "1"], "seq 200000; seq 200000 >&2; exit 3"));
    // Both are full before they are read.
    thread::sleep(Duration::from_millis(300));
    let errors = thread::spawn(move || {
        let mut text = String::new();
        err.0.read_to_string(&mut text).unwrap();
        text
    });
    let mut text = String::new();
    out.0.read_to_string(&mut text).unwrap();
    let errors = errors.join().unwrap();
    let lines = |text: &str| text.lines().filter(|line| line.starts_with("worker-0 │ ")).count();
    assert_eq!((lines(&text), lines(&errors)), (200_000, 200_000));
    assert!(errors.contains("error: worker-0"), "no report");
    assert_eq!(job.join().unwrap(), Some(3));
}

#[test]
fn output_that_cannot_be_written_is_said_to_be_lost() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_distribute"));
    command.args(["run", "-n", "1", "--", "echo", "x"]).stdin(Stdio::null()).stdout(full);
    let output = command.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && errors.contains("standard output ends here: No space left"), "{errors}");
}

//! `distribute run` with several launchers, all of them on this machine.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Outcome, Ports, Signal};

const DEADLINE: Duration = Duration::from_secs(60);

/// Builds a launcher: `distribute run FLAGS -- sh -c SCRIPT`.
fn launcher(flags: &[&str], script: &str) -> JobBuilder {
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("run").args(flags);
    job.args(["--", "sh", "-c", script])
}

fn rendezvous() -> String {
    format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0])
}

/// Starts as many launchers with the same command as there are hosts; returns how each ended.
fn run_on(hosts: usize, flags: &[&str], script: &str) -> Vec<Outcome> {
    let (address, nodes) = (rendezvous(), hosts.to_string());
    let flags = [&["--nnodes", &nodes, "--rendezvous", &address], flags].concat();
    let jobs: Vec<Job> = (0..hosts).map(|_| launcher(&flags, script).start().unwrap()).collect();
    jobs.into_iter().map(|mut job| job.wait(0, DEADLINE).unwrap()).collect()
}

/// Returns what a task printed on any of the hosts.
fn lines_of<'a>(outcomes: &'a [Outcome], task: &str) -> Vec<&'a str> {
    let lines = outcomes.iter().flat_map(|outcome| outcome.stdout.lines());
    let split = lines.filter_map(|line| line.split_once(" │ "));
    split.filter(|(name, _)| name.trim_end() == task).map(|(_, text)| text).collect()
}

fn says(outcomes: &[Outcome], words: &str) -> bool {
    outcomes.iter().any(|outcome| outcome.stderr.contains(words))
}

#[test]
fn the_same_command_on_every_host_is_one_job() {
    let script = r#"
        echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK"
        echo "$DISTRIBUTE_JOB_ID"; echo "$TF_CONFIG""#;
    let outcomes = run_on(3, &["-n", "5"], script);
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    let tasks: Vec<_> = (0..5).map(|index| lines_of(&outcomes, &format!("worker-{index}"))).collect();
    let places: Vec<_> = tasks.iter().map(|lines| lines[0]).collect();
    assert_eq!(places, ["0/5 0/2 0", "1/5 1/2 0", "2/5 0/2 1", "3/5 1/2 1", "4/5 0/1 2"]);
    assert!(tasks.iter().all(|lines| lines[1] == tasks[0][1]), "{tasks:?}");
    let config: serde_json::Value = serde_json::from_str(tasks[4][2]).unwrap();
    let mut addresses: Vec<_> =
        config["cluster"]["worker"].as_array().unwrap().iter().map(ToString::to_string).collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 5, "{config}");
    assert!(says(&outcomes, "all 3 hosts have joined"), "{outcomes:?}");
    assert!(!says(&outcomes, "has not told"), "{outcomes:?}");
}

#[test]
fn the_launchers_of_all_hosts_end_with_the_code_of_the_first_cause() {
    let script = r#"if [ $RANK = 3 ]; then echo "disk full" >&2; exit 7; fi; exec sleep 600"#;
    let outcomes = run_on(2, &["--workers-per-node", "2"], script);
    assert_eq!(outcomes.iter().map(|outcome| outcome.code).collect::<Vec<_>>(), [Some(7); 2], "{outcomes:?}");
    assert!(says(&outcomes, "← first cause: failed") && says(&outcomes, "    disk full\n"), "{outcomes:?}");
    assert!(says(&outcomes, "the job ended with exit code 7: error: worker-3"), "{outcomes:?}");
}

#[test]
fn a_command_that_differs_is_refused_and_a_missing_host_is_named() {
    let address = rendezvous();
    let flags =
        |workers| ["--nnodes", "2", "--rendezvous", &address, "--join-timeout", "3", "-n", workers].map(str::to_owned);
    let start = |workers| {
        let flags = flags(workers);
        launcher(&flags.each_ref().map(|flag| &flag[..]), "true").start().unwrap()
    };
    let mut leader = start("2");
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let other = start("4").wait(0, DEADLINE).unwrap();
    assert!(
        other.code == Some(2)
            && other.stderr.contains("it was started with the tasks 4 worker, the others with 2 worker"),
        "{other:?}"
    );
    let leader = leader.wait(0, DEADLINE).unwrap();
    assert!(leader.code == Some(138) && leader.stderr.contains("1 of 2 hosts; joined: 1"), "{leader:?}");
}

#[test]
fn strangers_at_the_door_are_left_alone() {
    let address = rendezvous();
    let flags = ["--nnodes", "2", "--rendezvous", &address, "-n", "2"];
    let mut leader = launcher(&flags, "true").start().unwrap();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let strangers = [&b"GET / HTTP/1.1\r\n\r\n"[..], b"{\"signal\": 9}\n", b"\xff\xfe\n", b""].map(|bytes| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        std::io::Write::write_all(&mut stream, bytes).unwrap();
        stream
    });
    let member = launcher(&flags, "true").start().unwrap().wait(0, DEADLINE).unwrap();
    let leader = leader.wait(0, DEADLINE).unwrap();
    assert!(member.success() && leader.success(), "{member:?} {leader:?}");
    drop(strangers);
}

#[test]
fn a_lost_host_ends_the_job_with_a_sentence() {
    let address = rendezvous();
    let flags = ["--nnodes", "2", "--rendezvous", &address, "-n", "2", "--grace", "1"];
    let script = "echo ready $RANK; exec sleep 600";
    let mut leader = launcher(&flags, script).start().unwrap();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let member = launcher(&flags, script).start().unwrap();
    leader.wait_for_line(0, "ready 0", DEADLINE).unwrap();
    member.wait_for_line(0, "ready 1", DEADLINE).unwrap();
    member.kill(0, Signal::KILL).unwrap();
    let leader = leader.wait(0, DEADLINE).unwrap();
    assert_eq!(leader.code, Some(138), "{leader:?}");
    assert!(leader.stderr.contains("← first cause: its host was lost"), "{leader:?}");
    member.family().wait_gone(DEADLINE).unwrap();

    // The other way round, the member stops its tasks by itself.
    let address = rendezvous();
    let flags = ["--nnodes", "2", "--rendezvous", &address, "-n", "2", "--grace", "1"];
    let leader = launcher(&flags, script).start().unwrap();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let mut member = launcher(&flags, script).start().unwrap();
    member.wait_for_line(0, "ready 1", DEADLINE).unwrap();
    leader.kill(0, Signal::KILL).unwrap();
    let outcome = member.wait(0, DEADLINE).unwrap();
    assert!(outcome.code == Some(138) && outcome.stderr.contains("the leader is lost"), "{outcome:?}");
    member.family().wait_gone(DEADLINE).unwrap();
}

#[test]
fn a_failed_job_is_started_again_on_all_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().to_str().unwrap();
    let script = r#"
        echo "attempt $DISTRIBUTE_RESTART_COUNT $DISTRIBUTE_JOB_ID"
        if [ $DISTRIBUTE_RESTART_COUNT = 0 ] && [ $RANK = 1 ]; then kill -9 $$; fi
        if [ $DISTRIBUTE_RESTART_COUNT = 0 ]; then exec sleep 600; fi"#;
    let flags = ["-n", "2", "--max-restarts", "2", "--restart-backoff", "0", "--log-dir", logs];
    let outcomes = run_on(2, &flags, script);
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    assert!(says(&outcomes, "worker-1  ") && says(&outcomes, "restart 1 of 2"), "{outcomes:?}");
    assert!(!says(&outcomes, "has not told"), "{outcomes:?}");
    let log = |attempt: &str, task: &str| {
        fs::read_to_string(folder.path().join(attempt).join(task).join("stdout.log")).unwrap()
    };
    let attempts = ["attempt-0", "attempt-1"].map(|attempt| ["worker-0", "worker-1"].map(|task| log(attempt, task)));
    assert!(attempts.iter().all(|[one, other]| one == other) && attempts[0] != attempts[1], "{attempts:?}");
}

#[test]
fn another_launcher_takes_the_place_of_a_lost_one() {
    let address = rendezvous();
    let flags = ["--nnodes", "2", "--rendezvous", &address, "-n", "2", "--grace", "1", "--max-restarts", "1"];
    let script = "echo ready $RANK; if [ $DISTRIBUTE_RESTART_COUNT = 0 ]; then exec sleep 600; fi";
    let mut leader = launcher(&flags, script).start().unwrap();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let member = launcher(&flags, script).start().unwrap();
    member.wait_for_line(0, "ready 1", DEADLINE).unwrap();
    member.kill(0, Signal::KILL).unwrap();
    leader.wait_for_line(0, "restart 1 of 1", DEADLINE).unwrap();
    let other = launcher(&flags, script).start().unwrap().wait(0, DEADLINE).unwrap();
    let leader = leader.wait(0, DEADLINE).unwrap();
    assert!(other.success() && leader.success(), "{other:?} {leader:?}");
    assert!(other.stdout.contains("worker-1 │ ready 1"), "{other:?}");
}

/// Lets a launcher introduce itself to a leader that is this test, and returns the connection.
fn accept(door: &TcpListener) -> TcpStream {
    door.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    let stream = loop {
        match door.accept() {
            Ok((stream, _)) => break stream,
            Err(_) => assert!(begun.elapsed() < DEADLINE),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut hello = String::new();
    BufReader::new(stream.try_clone().unwrap()).read_line(&mut hello).unwrap();
    assert!(hello.starts_with(r#"{"hello""#), "{hello}");
    stream
}

#[test]
fn a_launcher_waits_for_a_leader_that_has_not_noticed_the_loss_of_its_connection() {
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = door.local_addr().unwrap().to_string();
    let flags = ["--nnodes", "2", "--rendezvous", &address, "-n", "2", "--max-restarts", "1"];
    let tell = |mut stream: &TcpStream, line: &str| stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    let (welcome, full) =
        (r#"{"welcome":{"node":1,"hosts":["a","b"]}}"#, r#"{"refused":{"reason":"it is full","for_now":true}}"#);
    let mut member = launcher(&flags, "true").start().unwrap();
    tell(&accept(&door), welcome);
    member.wait_for_line(0, "joining again", DEADLINE).unwrap();
    tell(&accept(&door), full);
    member.wait_for_line(0, "refuses this host for now: it is full", DEADLINE).unwrap();
    let link = accept(&door);
    tell(&link, welcome);
    tell(&link, r#"{"end":{"code":7,"summary":""}}"#);
    let outcome = member.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(7), "{outcome:?}");

    // One that no leader has let in is one too many.
    let mut member = launcher(&flags, "true").start().unwrap();
    tell(&accept(&door), full);
    let outcome = member.wait(0, DEADLINE).unwrap();
    assert!(outcome.code == Some(2) && outcome.stderr.contains("it is full"), "{outcome:?}");
}

#[test]
fn restarts_end_with_their_budget_and_never_follow_a_wrong_configuration() {
    let run = |flags: &[&str], script: &str| launcher(flags, script).start().unwrap().wait(0, DEADLINE).unwrap();
    let flags = ["-n", "1", "--max-restarts", "2", "--restart-backoff", "0"];
    let outcome = run(&flags, "exit 5");
    assert_eq!(outcome.code, Some(5), "{outcome:?}");
    assert_eq!(outcome.stderr.matches("error: worker-0").count(), 3, "{outcome:?}");
    assert!(outcome.stderr.contains("it was started again 2 times"), "{outcome:?}");
    let outcome = run(&flags, "exit 2");
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.contains("which a restart does not change"), "{outcome:?}");
    // An interrupt is never a failure.
    let mut job = launcher(&flags, "echo ready; exec sleep 600").start().unwrap();
    job.wait_for_line(0, "ready", DEADLINE).unwrap();
    job.kill(0, Signal::INT).unwrap();
    assert_eq!(job.wait(0, DEADLINE).unwrap().code, Some(130));
}

#[test]
fn an_interrupt_on_any_host_stops_all_of_them() {
    let address = rendezvous();
    let flags = ["--nnodes", "2", "--rendezvous", &address, "-n", "2"];
    let script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.1; done";
    let leader = launcher(&flags, script).start().unwrap();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let member = launcher(&flags, script).start().unwrap();
    leader.wait_for_line(0, "ready", DEADLINE).unwrap();
    member.wait_for_line(0, "ready", DEADLINE).unwrap();
    member.kill(0, Signal::TERM).unwrap();
    let outcomes = [member, leader].map(|mut job| job.wait(0, DEADLINE).unwrap());
    for outcome in &outcomes {
        assert!(outcome.code == Some(143) && outcome.stdout.contains("saved"), "{outcome:?}");
    }
    assert!(says(&outcomes, "was sent SIGTERM"), "{outcomes:?}");
}

/// Starts a leader and a member with the same command, which differs from `flags` by the hosts.
fn pair(flags: &[&str], script: &str) -> [Job; 2] {
    let address = rendezvous();
    let flags = [&["--nnodes", "2", "--rendezvous", &address, "-n", "2"], flags].concat();
    let leader = launcher(&flags, script).start().unwrap();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    [leader, launcher(&flags, script).start().unwrap()]
}

#[test]
fn a_signal_to_any_host_ends_a_job_that_pauses_and_a_request_to_the_program_does_not() {
    for signalled in [0, 1] {
        let jobs = pair(&["--max-restarts", "1", "--restart-backoff", "600"], "exit 5");
        jobs[0].wait_for_line(0, "starting the job again", DEADLINE).unwrap();
        jobs[signalled].kill(0, Signal::USR2).unwrap();
        jobs[signalled].kill(0, Signal::USR1).unwrap();
        jobs[signalled].kill(0, Signal::TERM).unwrap();
        let outcomes = jobs.map(|mut job| job.wait(0, DEADLINE).unwrap());
        assert!(outcomes.iter().all(|outcome| outcome.code == Some(143)), "{outcomes:?}");
    }
}

#[test]
fn requests_to_the_program_do_not_end_launchers_that_wait_for_others() {
    let address = rendezvous();
    let flags = ["--nnodes", "3", "--rendezvous", &address, "-n", "3"];
    let start = || launcher(&flags, "true").start().unwrap();
    let leader = start();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let early = start();
    for job in [&leader, &early] {
        // A signal before the launcher handles it would end it.
        let handled = || fs::read_to_string(format!("/proc/{}/status", job.pid(0).unwrap())).unwrap();
        let begun = Instant::now();
        while !handled().lines().any(|line| line.starts_with("SigCgt:") && handles_usr(line)) {
            assert!(begun.elapsed() < DEADLINE);
            std::thread::sleep(Duration::from_millis(10));
        }
        job.kill(0, Signal::USR1).unwrap();
        job.kill(0, Signal::USR2).unwrap();
    }
    let outcomes = [leader, early, start()].map(|mut job| job.wait(0, DEADLINE).unwrap());
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
}

/// Returns whether a line of /proc/PID/status says that SIGUSR2 is handled.
fn handles_usr(line: &str) -> bool {
    let signals = line.split_whitespace().nth(1).and_then(|signals| u64::from_str_radix(signals, 16).ok());
    signals.unwrap() >> (12 - 1) & 1 == 1
}

#[test]
fn a_signal_is_kept_while_a_host_has_not_told_how_its_tasks_ended() {
    // A process that has left the group of worker 1 holds its output open, for which its launcher waits.
    let folder = tempfile::tempdir().unwrap();
    let apart = folder.path().join("apart").display().to_string();
    let script = r#"
        if [ $DISTRIBUTE_RESTART_COUNT != 0 ]; then exit 0; fi
        if [ $RANK = 1 ]; then
            setsid sh -c 'touch "APART"; exec sleep 3' & until [ -e "APART" ]; do sleep 0.02; done; exit 7
        fi
        trap 'exit 143' TERM; while :; do sleep 0.05; done"#;
    let jobs = pair(&["--max-restarts", "1", "--restart-backoff", "0"], &script.replace("APART", &apart));
    jobs[0].wait_for_line(0, "worker-1 ended with exit code 7", DEADLINE).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    jobs[0].kill(0, Signal::TERM).unwrap();
    let outcomes = jobs.map(|mut job| job.wait(0, DEADLINE).unwrap());
    assert!(outcomes.iter().all(|outcome| outcome.code == Some(7)), "{outcomes:?}");
    assert!(!says(&outcomes, "starting the job again"), "{outcomes:?}");
}

#[test]
fn a_launcher_that_was_told_to_end_looks_for_no_other_leader() {
    let script = "trap 'echo stopping; sleep 0.5; exit 143' TERM; echo ready; while :; do sleep 0.05; done";
    let [leader, mut member] = pair(&["--max-restarts", "1"], script);
    member.wait_for_line(0, "ready", DEADLINE).unwrap();
    leader.kill(0, Signal::KILL).unwrap();
    member.wait_for_line(0, "stopping", DEADLINE).unwrap();
    member.wait_for_line(0, "the leader is lost", DEADLINE).unwrap();
    member.kill(0, Signal::TERM).unwrap();
    let outcome = member.wait(0, DEADLINE).unwrap();
    assert!(outcome.code == Some(143) && !outcome.stderr.contains("joining again"), "{outcome:?}");
}

#[test]
fn a_launcher_that_takes_a_place_is_not_asked_about_the_lost_tasks() {
    let address = rendezvous();
    let flags = ["--nnodes", "2", "--rendezvous", &address, "-n", "2", "--max-restarts", "1"];
    let script = r#"
        if [ $DISTRIBUTE_RESTART_COUNT != 0 ]; then exit 0; fi
        trap 'sleep 0.8; exit 143' TERM; echo ready; while :; do sleep 0.05; done"#;
    let start = || launcher(&flags, script).start().unwrap();
    let mut leader = start();
    leader.wait_for_line(0, "this host leads the job", DEADLINE).unwrap();
    let member = start();
    [&leader, &member].into_iter().for_each(|job| drop(job.wait_for_line(0, "ready", DEADLINE).unwrap()));
    member.kill(0, Signal::KILL).unwrap();
    leader.wait_for_line(0, "is lost", DEADLINE).unwrap();
    let outcomes = [start().wait(0, DEADLINE).unwrap(), leader.wait(0, DEADLINE).unwrap()];
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    assert!(!says(&outcomes, "has not told"), "{outcomes:?}");
}

/// Writes a stand-in for ssh, which runs the command on this host and writes down what it was given.
fn fake_ssh(folder: &Path) -> String {
    let path = folder.join("fake ssh");
    let script = "host=$1; shift; echo \"$host: $*\" >> \"$(dirname \"$0\")/calls\"\n\
                  if [ \"$host\" = nowhere ]; then echo \"no route to $host\" >&2; exit 255; fi\n\
                  sh -c \"$*\"; code=$?; (sleep 0.4; echo \"last words of $host\") & exit $code\n";
    fs::write(&path, script).unwrap();
    format!("sh '{}'", path.display())
}

#[test]
fn launchers_are_started_on_listed_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let ssh = format!("--ssh={}", fake_ssh(folder.path()));
    let flags = ["--hosts", "127.0.0.1,localhost", &ssh, "--workers-per-node", "2"];
    let job = launcher(&flags, r#"echo "$RANK of $WORLD_SIZE in $(pwd)'"; echo "$DISTRIBUTE_JOB_SECRET_FILE""#);
    let job = job.env("DISTRIBUTE_JOB_SECRET_FILE", "/a secret").env("DISTRIBUTE_JOB_SECRET", "not on command lines");
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    let here = std::env::current_dir().unwrap();
    for rank in 0..4 {
        let line = format!("worker-{rank} │ {rank} of 4 in {}'\n", here.display());
        assert!(outcome.stdout.contains(&line), "{outcome:?}");
    }
    assert_eq!(outcome.stdout.matches("last words of ").count(), 2, "{outcome:?}");
    let calls = fs::read_to_string(folder.path().join("calls")).unwrap();
    assert!(calls.contains("127.0.0.1: ") && calls.contains("localhost: "), "{calls}");
    // Of the secret, other hosts get the path; without one, it is said that the job is open.
    assert_eq!(calls.matches("'DISTRIBUTE_JOB_SECRET_FILE=/a secret'").count(), 2, "{calls}");
    assert!(!calls.contains("not on command lines"), "{calls}");
    assert_eq!(outcome.stdout.matches("│ /a secret\n").count(), 4, "{outcome:?}");
    assert!(!outcome.stderr.contains("the job has no secret"), "{outcome:?}");

    // Nothing is started where the page cannot be served.
    fs::remove_file(folder.path().join("calls")).unwrap();
    let refused = launcher(&[&flags[..], &["--status", "192.0.2.1:1"]].concat(), "true");
    let outcome = refused.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.code == Some(2) && outcome.stderr.contains("the status page"), "{outcome:?}");
    assert!(!fs::exists(folder.path().join("calls")).unwrap());

    let failing = ["--hosts", "127.0.0.1,nowhere", &ssh, "-n", "2"];
    let open = launcher(&failing, "true").without_env("DISTRIBUTE_JOB_SECRET_FILE");
    let outcome = open.start().unwrap().wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(138), "{outcome:?}");
    assert!(outcome.stderr.contains("the job has no secret"), "{outcome:?}");
    assert!(outcome.stderr.contains("cannot start the launcher on nowhere"), "{outcome:?}");
    assert!(outcome.stderr.contains("no route to nowhere"), "{outcome:?}");
}

#[test]
fn a_command_that_ends_late_does_not_fail_the_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fake ssh");
    // The first one for the lost host ends when the second one has been started, which runs nothing before that.
    let script = "here=$(dirname \"$0\"); host=$1; shift\n\
                  if [ \"$host\" != localhost ]; then exec sh -c \"$*\"; fi\n\
                  if mkdir \"$here/first\" 2>/dev/null; then\n\
                  sh -c \"$*\"; until [ -e \"$here/second\" ]; do sleep 0.05; done; touch \"$here/ended\"; exit 255\n\
                  fi\n\
                  touch \"$here/second\"; until [ -e \"$here/ended\" ]; do sleep 0.05; done; sleep 0.5\n\
                  exec sh -c \"$*\"\n";
    fs::write(&path, script).unwrap();
    let ssh = format!("--ssh=sh '{}'", path.display());
    let flags = ["--hosts", "127.0.0.1,localhost", &ssh, "-n", "2", "--max-restarts", "1", "--restart-backoff", "0"];
    let script = r#"
        if [ $DISTRIBUTE_RESTART_COUNT != 0 ]; then exit 0; fi
        if [ $RANK = 1 ]; then kill -9 $PPID; fi; exec sleep 600"#;
    let flags = [&flags[..], &["--grace", "1"]].concat();
    let outcome = launcher(&flags, script).start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    assert!(outcome.stderr.contains("restart 1 of 1") && folder.path().join("ended").exists(), "{outcome:?}");
}

#[test]
fn tasks_are_pinned_to_cores_of_their_own() {
    let outcome = launcher(
        &["-n", "1", "--cpus-per-worker", "1"],
        r#"grep Cpus_allowed_list /proc/self/status; echo $RAYON_NUM_THREADS"#,
    );
    let outcome = outcome.start().unwrap().wait(0, DEADLINE).unwrap();
    let lines = lines_of(std::slice::from_ref(&outcome), "worker-0");
    let list = lines[0].rsplit(char::is_whitespace).next().unwrap();
    assert!(list.parse::<u32>().is_ok() && lines[1] == "1", "{outcome:?}");
    let many = launcher(&["-n", "3", "--cpus-per-worker", "1024"], "true").start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(many.code == Some(2) && many.stderr.contains("lower --cpus-per-worker"), "{many:?}");
}

#[test]
fn an_evaluator_has_no_rank_in_the_training() {
    let script = r#"echo "${RANK-none} ${WORLD_SIZE-none}"; echo "$TF_CONFIG""#;
    let job = launcher(&["-n", "2", "--evaluator", "1"], script).env("RANK", "9");
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    let lines = lines_of(std::slice::from_ref(&outcome), "evaluator-0");
    assert_eq!(lines[0], "none none");
    assert!(lines[1].contains(r#""type":"evaluator""#) && !lines[1].contains(r#""evaluator":["#), "{lines:?}");
    assert_eq!(lines_of(std::slice::from_ref(&outcome), "worker-1")[0], "1 2");
}

#[test]
fn the_sentence_in_a_task_error_file_is_shown() {
    let script = r#"printf '{"message": "the disk is full", "timestamp": 1}' > "$TORCHELASTIC_ERROR_FILE"; exit 1"#;
    let outcome = launcher(&["-n", "1"], script).start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.stderr.contains("said      the disk is full"), "{outcome:?}");
}

#[test]
fn the_tasks_of_all_hosts_report_to_one_status_page() {
    let outcomes = run_on(2, &["-n", "2", "--status", "0"], r#"echo "$DISTRIBUTE_STATUS_ADDR""#);
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    let addresses = ["worker-0", "worker-1"].map(|task| lines_of(&outcomes, task)[0]);
    assert!(addresses[0] == addresses[1] && addresses[0].starts_with("127.0.0.1:"), "{addresses:?}");
    let pages = outcomes.iter().filter(|outcome| outcome.stderr.contains("status page: http://")).count();
    assert_eq!(pages, 1, "the leader's: {outcomes:?}");
}

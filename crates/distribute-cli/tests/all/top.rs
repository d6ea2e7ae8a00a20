//! `distribute top` on a running job. The tasks are this test program, in another role: they sum values in a group of
//! their own, and one of them stays away.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_testkit::{Job, JobBuilder, Signal};
use distribute_train::progress::{CallSource, Form, Options, Progress};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable by which this program is a task; its value says what the second worker does at step 3.
const ROLE: &str = "DISTRIBUTE_TEST_TOP_TASK";

/// Sums with the others until it is stopped.
#[test]
#[ignore = "a process that other tests start"]
fn task() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let rank: u64 = std::env::var("RANK").unwrap().parse().unwrap();
    let group = ProcessGroup::from_env().unwrap();
    let options = Options {
        title: "toy".into(),
        task: format!("worker:{rank}"),
        is_chief: rank == 0,
        calls: CallSource::of_process(),
        ..Options::default()
    };
    let mut progress = Progress::new(options, Form::Off).unwrap();
    progress.epoch(1);
    for step in 1.. {
        if rank == 1 && step == 4 {
            match role.as_str() {
                "sleeps" => slow_preprocessing(2 * DEADLINE),
                "prints" => println!("at step 4"),
                _ => {}
            }
        }
        std::thread::sleep(Duration::from_millis(5));
        let mut values = vec![1.0f32; 1024];
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        progress.step(step, 32, &[]);
    }
}

/// The function in which a rank hangs.
#[inline(never)]
fn slow_preprocessing(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::thread::sleep(Duration::from_millis(500));
    }
    panic!("this task is not stopped");
}

/// A folder for sockets, and the jobs that leave theirs there.
struct Jobs(tempfile::TempDir);

impl Jobs {
    fn new() -> Jobs {
        Jobs(tempfile::tempdir().unwrap())
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join("jobs")
    }

    /// Returns a job of workers; the second one does what `role` says.
    fn job(&self, workers: &str, role: &str, flags: &[&str]) -> JobBuilder {
        let program = std::env::current_exe().unwrap();
        let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).args(["run", "-n", workers]).args(flags).arg("--");
        let job = job.arg(program.to_str().unwrap()).args(["top::task", "--exact", "--ignored", "--nocapture"]);
        let folder = self.folder().to_str().unwrap().to_owned();
        job.env(ROLE, role).env("DISTRIBUTE_JOBS_DIR", folder).without_env("DISTRIBUTE_FLIGHT_DIR")
    }

    fn top(&self, args: &[&str]) -> Output {
        top_in(&self.folder(), args)
    }

    /// Asks until the text satisfies a condition.
    fn wait_for(&self, args: &[&str], condition: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let output = self.top(args);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if output.status.success() && condition(&text) {
                return text;
            }
            assert!(begun.elapsed() < DEADLINE, "{text}{}", String::from_utf8_lossy(&output.stderr));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Asks and returns the error.
    fn refused(&self, args: &[&str]) -> String {
        let output = self.top(args);
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

fn top_in(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distribute"));
    command.arg("top").args(args).env("DISTRIBUTE_JOBS_DIR", folder).output().unwrap()
}

#[test]
fn a_rank_that_sleeps_is_named_with_the_operation_the_time_and_its_stack() {
    let jobs = Jobs::new();
    let job = jobs.job("4", "sleeps", &["--quiet"]).start().unwrap();
    let text = jobs.wait_for(&["--once"], |text| text.contains("rank 1 (worker:1)") && text.contains("entered 3 of 4"));
    assert!(
        text.contains("all_reduce #3 of 1024 f32, sum (4.0 KiB) of group world: 3 ranks have waited for up to"),
        "{text}"
    );
    assert!(text.contains("entered 3 of 4: ranks 0, 2-3"), "{text}");
    assert!(text.contains("missing 1:\n    rank 1 (worker:1) · training · "), "{text}");
    assert!(text.contains("finished all_reduce #2 of 1024 f32, sum ") && text.contains("last heard"), "{text}");
    assert!(text.starts_with("toy · training · "), "{text}");

    let launcher = job.pid(0).unwrap().to_string();
    let socket = std::fs::metadata(jobs.folder().join(format!("{launcher}.sock"))).unwrap();
    let folder = std::fs::metadata(jobs.folder()).unwrap();
    let mode = |found: std::fs::Metadata| std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o777;
    assert_eq!((mode(socket), mode(folder)), (0o600, 0o700), "for its user only");
    let json = jobs.top(&["--json", "--pid", &launcher]);
    let view: Value = serde_json::from_slice(&json.stdout).unwrap();
    let collective = &view["collectives"][0];
    assert_eq!((&collective["operation"], &collective["sequence"]), (&"all_reduce".into(), &3.into()), "{view:#}");
    assert_eq!((&collective["group"], &collective["world_size"]), (&"world".into(), &4.into()));
    assert_eq!(collective["waiting"], serde_json::json!([0, 2, 3]));
    assert_eq!(collective["missing"][0]["task"], "worker:1");
    assert!(collective["waiting_s"].as_f64().unwrap() >= 2.0, "{view:#}");
    // The answer is fresh: its tasks were asked.
    for task in view["tasks"].as_array().unwrap() {
        assert!(task["heard_s"].as_f64().unwrap() < 0.6, "{task:#}");
    }

    // The rank that the others wait for is the one whose stack is shown.
    let stacks = jobs.top(&["--stacks"]);
    let text = String::from_utf8_lossy(&stacks.stdout);
    assert!(stacks.status.success() && text.contains("stacks of worker:1\nprocess "), "{stacks:?}");
    assert!(!text.contains("stacks of worker:0"), "{text}");
    let is_refused = text.contains("no frames: ");
    assert!(is_refused || text.contains("slow_preprocessing"), "{text}");
    if cfg!(all(feature = "stacks", target_os = "linux", target_arch = "x86_64")) && !is_refused {
        // The thread that reports while all others are held up, and one that waits in the collective.
        assert!(text.contains("thread \"pulse\""), "{text}");
        let waiting = jobs.top(&["--stacks", "worker-0"]);
        let waiting = String::from_utf8_lossy(&waiting.stdout);
        assert!(waiting.contains("ProcessGroup") && waiting.contains("all_reduce"), "{waiting}");
    }
    // It runs on as before.
    jobs.wait_for(&["--once"], |text| text.contains("rank 1 (worker:1)"));
    let refusal = jobs.refused(&["--stacks", "worker:9"]);
    assert!(refusal.contains("the job has no task \"worker:9\"; its tasks are worker:0"), "{refusal}");
    let refusal = jobs.refused(&["--stacks", "worker:1/../x"]);
    assert!(refusal.contains("is not the name of a task"), "{refusal}");

    // The end removes the socket.
    job.kill(0, Signal::INT).unwrap();
    job.kill(0, Signal::INT).unwrap();
    let begun = Instant::now();
    while std::fs::read_dir(jobs.folder()).unwrap().count() > 0 {
        assert!(begun.elapsed() < DEADLINE);
        std::thread::sleep(Duration::from_millis(20));
    }
    let refusal = jobs.refused(&["--once"]);
    assert!(refusal.contains("no job of this user runs on this host"), "{refusal}");
}

#[test]
fn a_rank_that_is_stopped_is_missing_and_its_silence_is_shown() {
    let jobs = Jobs::new();
    let mut job = jobs.job("3", "prints", &["--quiet", "--status", "0"]).start().unwrap();
    let address = job.wait_for_line(0, "status page: http://", DEADLINE).unwrap();
    let address = address.split_once("http://").unwrap().1.trim().to_owned();
    let fetch = |args: &[&str]| -> Value { serde_json::from_slice(&jobs.top(args).stdout).unwrap_or_default() };
    let trains = |view: &Value| view["tasks"][1]["steps"].as_u64() >= Some(5);
    let begun = Instant::now();
    let view = loop {
        let view = fetch(&["--json"]);
        if trains(&view) {
            break view;
        }
        assert!(begun.elapsed() < DEADLINE, "{view:#}");
        std::thread::sleep(Duration::from_millis(50));
    };
    let pid = view["tasks"][1]["pid"].to_string();
    assert!(Command::new("kill").args(["-STOP", &pid]).status().unwrap().success());
    // By the page's address, which anybody may read.
    let text = jobs.wait_for(&[&address], |text| text.contains("missing 1:") && text.contains("rank 1 (worker:1)"));
    let missing = text.lines().find(|line| line.contains("rank 1 (worker:1)")).unwrap();
    assert!(missing.contains("last heard ") && !missing.contains("last heard 0 s"), "{text}");
    let refusal = jobs.refused(&[&address, "--stacks"]);
    assert!(refusal.contains("on its own host only"), "{refusal}");
    // A stopped process can be looked at, and stays stopped.
    let stacks = jobs.top(&["--stacks"]);
    let stacks = String::from_utf8_lossy(&stacks.stdout);
    assert!(stacks.contains("stacks of worker:1") && stacks.contains("is stopped by a signal"), "{stacks}");
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    assert_eq!(state.rsplit_once(')').unwrap().1.split_whitespace().next(), Some("T"));
    // It continues once it may.
    let stuck = fetch(&["--json"])["tasks"][1]["steps"].as_u64();
    assert!(Command::new("kill").args(["-CONT", &pid]).status().unwrap().success());
    let begun = Instant::now();
    while fetch(&["--json"])["tasks"][1]["steps"].as_u64() <= stuck {
        assert!(begun.elapsed() < DEADLINE);
        std::thread::sleep(Duration::from_millis(50));
    }
    job.kill(0, Signal::INT).unwrap();
    job.kill(0, Signal::INT).unwrap();
    let _ = job.wait(0, DEADLINE).unwrap();
}

#[test]
fn what_cannot_be_asked_is_a_sentence() {
    let jobs = Jobs::new();
    let refusal = jobs.refused(&[]);
    assert!(refusal.contains("no job of this user runs on this host") && refusal.contains("jobs"), "{refusal}");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let refusal = jobs.refused(&[&closed, "--once"]);
    assert!(refusal.contains("no job answers at 127.0.0.1:"), "{refusal}");
    let refusal = jobs.refused(&["nonsense"]);
    assert!(refusal.contains("not the address of a status page"), "{refusal}");
    let own = std::process::id().to_string();
    let refusal = jobs.refused(&["--pid", &own]);
    assert!(refusal.contains("is not a launcher that can be asked"), "{refusal}");
    let refusal = jobs.refused(&["--pid", "4194304"]);
    assert!(refusal.contains("no process has the id 4194304"), "{refusal}");
    // A server of something else.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = listener.local_addr().unwrap().to_string();
    let serve = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = std::io::Read::read(&mut stream, &mut [0; 1024]);
        std::io::Write::write_all(&mut stream, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").unwrap();
    });
    let refusal = jobs.refused(&[&other]);
    assert!(refusal.contains("something else than the state of a job"), "{refusal}");
    serve.join().unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn a_folder_that_others_can_enter_is_refused_and_the_job_runs() {
    use std::os::unix::fs::PermissionsExt;

    let jobs = Jobs::new();
    std::fs::create_dir(jobs.folder()).unwrap();
    std::fs::set_permissions(jobs.folder(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).args(["run", "-n", "1", "--", "true"]);
    let job = job.env("DISTRIBUTE_JOBS_DIR", jobs.folder().to_str().unwrap());
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    assert!(outcome.stderr.contains("distribute top cannot ask this job"), "{outcome:?}");
    assert!(outcome.stderr.contains("set its mode to 0700"), "{outcome:?}");
}

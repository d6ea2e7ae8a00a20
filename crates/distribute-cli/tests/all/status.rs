//! `distribute run --status` as a browser sees it. The tasks are this test program, in another role.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Signal};
use distribute_train::progress::{Form, Options, Progress, WaitSource, Waits};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable by which this program is a task that trains.
const ROLE: &str = "DISTRIBUTE_TEST_STATUS_TASK";

/// Trains until it is stopped. The second of three workers computes three times as long as the others, which wait for
/// it, as in a collective.
#[test]
#[ignore = "a process that other tests start"]
fn task() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let rank: u64 = std::env::var("RANK").unwrap().parse().unwrap();
    let waited = Arc::new(AtomicU64::new(0));
    let total = waited.clone();
    let waits = move || {
        let collectives = Duration::from_millis(total.load(Ordering::Relaxed));
        Some(Waits { collectives, ..Waits::default() })
    };
    let options = Options {
        title: "toy · <script>alert(1)</script>".into(),
        task: format!("worker:{rank}"),
        is_chief: rank == 0,
        steps_per_epoch: Some(1_000_000),
        waits: WaitSource::new(waits),
        ..Options::default()
    };
    let mut progress = Progress::new(options, Form::Off).unwrap();
    progress.epoch(1);
    let begun = Instant::now();
    for step in 1.. {
        assert!(begun.elapsed() < 2 * DEADLINE, "this task is not stopped");
        let wait = if rank == 1 { 0 } else { 20 };
        std::thread::sleep(Duration::from_millis(30 - wait));
        std::thread::sleep(Duration::from_millis(wait));
        waited.fetch_add(wait, Ordering::Relaxed);
        progress.step(step, 32, &[("loss", 1.0 / step as f64)]);
    }
}

fn launcher(flags: &[&str]) -> JobBuilder {
    let program = std::env::current_exe().unwrap();
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("run").args(flags).args(["--status", "0", "--"]);
    job.arg(program.to_str().unwrap()).args(["status::task", "--exact", "--ignored", "--nocapture"]).env(ROLE, "1")
}

/// Returns the address of the page, which the launcher prints once.
fn address(job: &mut Job) -> String {
    let line = job.wait_for_line(0, "status page: http://", DEADLINE).unwrap();
    line.split_once("http://").unwrap().1.trim().to_owned()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    body.to_owned()
}

/// Waits for a state of the job that satisfies a condition.
fn wait_for(address: &str, condition: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let view: Value = serde_json::from_str(&get(address, "/status.json")).unwrap();
        if condition(&view) {
            return view;
        }
        assert!(Instant::now() < deadline, "{view:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_slow_worker_is_marked_and_a_lost_one_named() {
    let mut job = launcher(&["-n", "3", "--quiet"]).start().unwrap();
    let address = address(&mut job);
    let marked = |view: &Value| view["stragglers"].as_array().is_some_and(|all| !all.is_empty());
    let has_steps = |view: &Value| view["tasks"].as_array().unwrap().iter().all(|task| task["own_s"].is_number());
    let view = wait_for(&address, |view| marked(view) && has_steps(view));
    assert_eq!(view["stragglers"], serde_json::json!(["worker:1"]), "{view:#}");
    assert_eq!(view["job"]["title"], "toy · <script>alert(1)</script>");
    assert_eq!((&view["job"]["state"], &view["job"]["epoch"]), (&"training".into(), &1.into()));
    for (rank, task) in view["tasks"].as_array().unwrap().iter().enumerate() {
        assert_eq!(task["task"], format!("worker:{rank}"));
        assert_eq!((&task["role"], &task["state"]), (&"worker".into(), &"training".into()), "{task:#}");
        assert!(task["pid"].as_u64().unwrap() > 1 && task["memory_bytes"].as_u64().unwrap() > 1 << 16, "{task:#}");
        let (own_s, step_s) = (task["own_s"].as_f64().unwrap(), task["step_s"]["p50"].as_f64().unwrap());
        assert!(own_s > 0.0 && own_s <= step_s && step_s >= 0.03, "{task:#}");
    }
    let waits = |rank: usize| view["tasks"][rank]["peer_wait_s"].as_f64().unwrap();
    assert!(waits(0) >= 0.02 && waits(1) == 0.0 && waits(2) >= 0.02, "{view:#}");

    let metrics = get(&address, "/metrics");
    assert!(metrics.contains("task=\"worker:1\",role=\"worker\"} 1"), "{metrics}");
    assert!(get(&address, "/").contains("status.json"));

    // The task fails by itself: the launcher has not signalled it.
    let pid = view["tasks"][2]["pid"].to_string();
    assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(137), "{outcome:?}");
    assert_eq!(outcome.stderr.matches("status page").count(), 1, "{outcome:?}");
}

#[test]
fn the_end_of_tasks_is_shown_with_their_last_words() {
    let script = r#"
        if [ $RANK = 1 ]; then sleep 0.2; echo 'error: the disk is full' >&2; exit 7; fi
        trap 'sleep 30; exit 143' TERM; echo "$DISTRIBUTE_STATUS_ADDR"; while :; do sleep 0.1; done"#;
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).args(["run", "-n", "2", "--status", "127.0.0.1:0", "--"]);
    let mut job = job.args(["sh", "-c", script]).start().unwrap();
    let address = address(&mut job);
    let view = wait_for(&address, |view| view["errors"][0]["text"].as_str().is_some_and(|text| text.contains("disk")));
    assert_eq!(view["errors"][0]["text"], "exit code 7: error: the disk is full");
    assert_eq!(view["errors"].as_array().unwrap().len(), 1);
    let (first, second) = (&view["tasks"][0], &view["tasks"][1]);
    assert_eq!((&second["state"], &second["ended"]), (&"failed".into(), &"exit code 7".into()));
    assert_eq!((&first["state"], &first["ended"]), (&"starting".into(), &Value::Null));
    // Interrupted twice, since the task is slow to stop.
    job.kill(0, Signal::INT).unwrap();
    job.kill(0, Signal::INT).unwrap();
    assert_eq!(job.wait(0, DEADLINE).unwrap().code, Some(7));
}

#[test]
fn an_address_that_cannot_be_used_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for given in [taken.as_str(), "nonsense"] {
        let job =
            Job::builder(env!("CARGO_BIN_EXE_distribute")).args(["run", "-n", "1", "--status", given, "--", "true"]);
        let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(
            outcome.stderr.contains("cannot serve the status page") && outcome.stderr.contains(given),
            "{outcome:?}"
        );
    }
}

//! `distribute data-service`, with data workers that are killed.

use std::process::Command;
use std::time::Duration;

use distribute_data_service::{DataWorker, ServiceOptions, dataset};
use distribute_input::{Array, Dataset};
use distribute_testkit::{Job, JobBuilder, Signal};

const LIMIT: Duration = Duration::from_secs(30);

fn numbers() -> Dataset<Array<i64>> {
    Dataset::range(0..50).shuffle(10, 5)
}

/// The program of the data workers.
#[test]
#[ignore = "a process that other tests start"]
fn a_data_worker() {
    println!("process {} serves", std::process::id());
    DataWorker::builder().dataset("train", &numbers()).serve().unwrap();
}

fn service(args: &[&str]) -> JobBuilder {
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("data-service").args(args);
    job.env("DISTRIBUTE_DATA_SERVICE_ID", format!("cli-{}", std::process::id())).without_env("DISTRIBUTE_DATA_SERVICE")
}

/// Returns the address that the service prints.
fn address(job: &Job) -> String {
    let line = job.wait_for_line(0, "DISTRIBUTE_DATA_SERVICE=", LIMIT).unwrap();
    line.strip_prefix("DISTRIBUTE_DATA_SERVICE=").unwrap().to_owned()
}

#[test]
fn a_killed_data_worker_is_started_again_and_a_signal_ends_all() {
    let own = std::env::current_exe().unwrap();
    let program = [own.to_str().unwrap(), "data_service::a_data_worker", "--exact", "--ignored", "--nocapture"];
    let mut job = service(&[&["--workers", "1", "--"][..], &program].concat()).start().unwrap();
    let address = address(&job);
    let first = job.wait_for_line(0, "serves", LIMIT).unwrap();
    let process = first.split_once("process ").unwrap().1.split(' ').next().unwrap().to_owned();
    let id = distribute_cluster::JobId::new(format!("cli-{}", std::process::id())).unwrap();
    let options = ServiceOptions::new("train").dispatcher(address).identity(id).splits(2);
    let data: Dataset<Array<i64>> = dataset(options).unwrap();
    let read = |data: &Dataset<Array<i64>>| {
        let mut all: Vec<i64> = data.iter().map(|item| item.unwrap().as_slice()[0]).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(read(&data), (0..50).collect::<Vec<_>>());
    assert!(Command::new("kill").args(["-9", &process]).status().unwrap().success());
    job.wait_for_line(0, "starting it again in 1 s (1 of 3)", LIMIT).unwrap();
    assert_eq!(read(&data), (0..50).collect::<Vec<_>>());
    job.kill(0, Signal::TERM).unwrap();
    let outcome = job.wait(0, LIMIT).unwrap();
    assert!(outcome.success() && outcome.stderr.matches("stopping").count() == 1, "{outcome:?}");
    job.family().wait_gone(LIMIT).unwrap();
}

#[test]
fn the_exit_code_is_that_of_the_data_worker_that_failed_first() {
    // The name of a data worker is a part of the name of its file for errors.
    let script = r#"case "$TORCHELASTIC_ERROR_FILE" in *-1.json) exit 3;; *) sleep 0.5; exit 4;; esac"#;
    let service = service(&["--workers", "2", "--max-restarts", "0", "--", "sh", "-c", script]);
    let outcome = service.start().unwrap().wait(0, LIMIT).unwrap();
    assert_eq!(outcome.code, Some(3), "{outcome:?}");
}

#[test]
fn a_service_at_all_addresses_prints_one_that_can_be_connected_to() {
    let mut job = service(&["--bind", "0.0.0.0:0"]).start().unwrap();
    let shown: std::net::SocketAddr = address(&job).parse().unwrap();
    assert!(!shown.ip().is_unspecified(), "{shown}");
    std::net::TcpStream::connect_timeout(&shown, LIMIT).unwrap();
    job.kill(0, Signal::TERM).unwrap();
    assert!(job.wait(0, LIMIT).unwrap().success());
}

#[test]
fn the_dispatcher_alone_ends_by_a_signal_and_wrong_flags_are_refused() {
    let mut job = service(&["--bind", "127.0.0.1:0"]).start().unwrap();
    let taken = address(&job);
    let refused = |args: &[&str], words: &str| {
        let outcome = service(args).start().unwrap().wait(0, LIMIT).unwrap();
        assert!(outcome.code == Some(2) && outcome.stderr.contains(words), "{outcome:?}");
    };
    refused(&["--bind", &taken], "cannot listen at");
    refused(&["--bind", "here"], "cannot listen at here");
    refused(&["--id", "two words"], "1 to 128 printable ASCII characters");
    refused(&["--workers", "2"], "PROGRAM");
    job.kill(0, Signal::TERM).unwrap();
    assert!(job.wait(0, LIMIT).unwrap().success());
}

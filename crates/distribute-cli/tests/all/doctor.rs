//! `distribute doctor` as users and programs see it.

#[cfg(feature = "pjrt")]
mod pjrt;

use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Outcome};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// Builds `distribute doctor FLAGS`, without variables of the environment that would affect the report.
fn doctor(flags: &[&str]) -> JobBuilder {
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("doctor").args(flags);
    ["TF_CONFIG", "RANK", "WORLD_SIZE", "SLURM_JOB_ID"].iter().fold(job, |job, name| job.without_env(*name))
}

fn outcome(job: JobBuilder) -> Outcome {
    job.start().unwrap().wait(0, DEADLINE).unwrap()
}

fn json(outcome: &Outcome) -> Vec<Value> {
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    report["checks"].as_array().unwrap().clone()
}

fn of<'a>(checks: &'a [Value], topic: &str) -> &'a Value {
    checks.iter().find(|check| check["topic"] == topic).unwrap_or_else(|| panic!("no {topic} in {checks:#?}"))
}

#[test]
fn json_has_the_keys_that_programs_rely_on() {
    let outcome = outcome(doctor(&["--json"]));
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let checks = json(&outcome);
    for check in &checks {
        let object = check.as_object().unwrap();
        assert!(["topic", "status", "found", "why", "remedy"].iter().all(|key| object.contains_key(*key)), "{check}");
        assert!(["ok", "warn", "fail", "skipped"].contains(&check["status"].as_str().unwrap()), "{check}");
    }
    for topic in ["distribute", "system", "cpu", "memory", "devices", "/dev/shm", "network", "transport tcp", "cluster"]
    {
        of(&checks, topic);
    }
    assert_eq!(of(&checks, "cluster")["found"], "no variable describes a job: this process is alone");
}

#[test]
fn a_broken_tf_config_fails_with_the_resolvers_own_sentence() {
    let config = r#"{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 3}}"#;
    let outcome = outcome(doctor(&["--json"]).env("TF_CONFIG", config));
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let checks = json(&outcome);
    let cluster = of(&checks, "cluster");
    assert_eq!(cluster["status"], "fail");
    let sentence = format!("{}{}", cluster["found"], cluster["why"]);
    assert!(sentence.contains("TF_CONFIG: ") && sentence.contains("index 3"), "{cluster}");
    assert!(cluster["remedy"].is_string(), "{cluster}");
}

#[test]
fn a_job_and_its_leader_are_described() {
    let config = r#"{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}"#;
    let checks = json(&outcome(doctor(&["--json"]).env("TF_CONFIG", config).env("LOCAL_WORLD_SIZE", "2")));
    assert_eq!(of(&checks, "cluster")["found"], "TF_CONFIG: this is worker:1, rank 1 of 2");
    assert!(of(&checks, "leader")["found"].as_str().unwrap().starts_with("worker:0 at 127.0.0.1:1"));
    assert!(of(&checks, "network")["why"].as_str().unwrap().contains("others come to 127.0.0.1"));
    assert_eq!(of(&checks, "threads")["status"], "warn");
}

#[test]
fn a_pipe_gets_plain_lines_and_an_issue_a_table() {
    let lines = outcome(doctor(&[]));
    assert!(lines.stdout.chars().all(|c| c == '\n' || !c.is_control()), "{lines:?}");
    assert!(lines.stdout.lines().any(|line| line.starts_with("ok ") && line.contains("transport tcp")), "{lines:?}");
    assert!(lines.stdout.lines().last().unwrap().contains(" ok, "), "{lines:?}");
    let table = outcome(doctor(&["--markdown", "--verbose"]));
    assert!(table.stdout.contains("\n| | topic | found | remedy |\n|---|---|---|---|\n| "), "{table:?}");
    let both = outcome(doctor(&["--markdown", "--json"]));
    assert_eq!(both.code, Some(2), "{both:?}");
}

#[test]
fn few_open_files_are_warned_about() {
    let program = env!("CARGO_BIN_EXE_distribute");
    let limited = Job::builder("sh").args(["-c", &format!("ulimit -n 200 && exec '{program}' doctor --json")]);
    let checks = json(&outcome(limited));
    let files = of(&checks, "open files");
    assert_eq!(files["status"], "warn", "{files}");
    assert!(files["remedy"].as_str().unwrap().contains("nofile=1024"), "{files}");
}

#[test]
fn a_job_of_two_processes_passes_over_every_transport() {
    // Flags of the launcher by which it would write files, and an option that is not under test.
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("logs");
    let job = doctor(&["--json", "--run", "-n", "2"]);
    let job = job
        .env("DISTRIBUTE_LOG_DIR", logs.to_str().unwrap())
        .env("DISTRIBUTE_TRANSPORT", "tcp")
        .env("CLICOLOR_FORCE", "1");
    let begun = Instant::now();
    let mut job = job.start().unwrap();
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(begun.elapsed() < Duration::from_secs(20));
    let checks = json(&outcome);
    for transport in ["shm", "tcp", "grpc"] {
        let run = of(&checks, &format!("run {transport}"));
        assert_eq!(run["status"], "ok", "{run}");
        assert!(run["found"].as_str().unwrap().contains("busbw "), "{run}");
    }
    assert_eq!(of(&checks, "self test")["status"], "ok");
    assert!(!logs.exists());
    job.family().wait_gone(DEADLINE).unwrap();
}

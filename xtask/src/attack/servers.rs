//! Attacks on a job of parameter servers: a chief, two servers and two workers.

mod call;

use std::time::{Duration, Instant};

use distribute_testkit::{Job, Signal};

use super::stage::{Stage, Task, addresses, start};
use super::strangers::Strangers;
use super::verdict::{
    CONFIGURATION, DONE, Held, PERMANENT, RETRYABLE, Verdict, accuracy, all_done, ended, error_line, says, text,
};

/// By rank.
const TASKS: [(&str, usize); 5] = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)];

/// Less than three epochs reach with asynchronous updates, in whatever order these come.
const REACHED: f64 = 88.0;

fn tasks(stage: &Stage, addresses: &[String], epochs: &str) -> Vec<Task> {
    let task = |(kind, index): (&str, usize)| {
        let (chief, ps, workers) = (&addresses[..1], &addresses[1..3], &addresses[3..]);
        let cluster = format!(r#"{{"chief": {chief:?}, "ps": {ps:?}, "worker": {workers:?}}}"#);
        let config = format!(r#"{{"cluster": {cluster}, "task": {{"type": "{kind}", "index": {index}}}}}"#);
        stage.parameter_server(&["--epochs", epochs]).env("TF_CONFIG", config)
    };
    TASKS.into_iter().map(task).collect()
}

/// A job that trains.
fn training(stage: &Stage, addresses: &[String], epochs: &str) -> Result<Job, String> {
    let job = start(tasks(stage, addresses, epochs))?;
    job.wait_for_line(0, "epoch=1/", stage.left()).map_err(text)?;
    Ok(job)
}

fn undisturbed(stage: &Stage, job: &mut Job) -> Result<f64, String> {
    let outcomes = job.wait_all(stage.left()).map_err(text)?;
    all_done(&outcomes)?;
    let accuracy = accuracy(&outcomes[0].stdout)?;
    match accuracy >= REACHED {
        true => Ok(accuracy),
        false => Err(format!("test accuracy {accuracy:.2} %, expected at least {REACHED} %")),
    }
}

pub(super) fn strangers(stage: &Stage) -> Verdict {
    let addresses = addresses(TASKS.len())?;
    let mut job = training(stage, &addresses, "12")?;
    let (mut count, mut open) = (0, Vec::new());
    for (task, address, service) in [("ps:0", &addresses[1], "ParameterServer"), ("worker:0", &addresses[3], "Worker")]
    {
        for job in ["", "00000000000000000000000000000000 another-job"] {
            for _ in 0..10 {
                call::attend(address, service, task, job)?;
                count += 1;
            }
        }
        let others = Strangers::all_kinds(address, 100)?;
        count += others.count();
        open.push(others);
    }
    let accuracy = undisturbed(stage, &mut job)?;
    Held::yes(format!("{count} strangers at a server and a worker; all tasks ended with 0, accuracy {accuracy:.2} %"))
}

/// Another chief that was told of the same servers, and of workers that are not there.
pub(super) fn other_job(stage: &Stage) -> Verdict {
    let own = addresses(TASKS.len())?;
    let mut job = training(stage, &own, "12")?;
    let mut other = addresses(TASKS.len())?;
    other[1..3].clone_from_slice(&own[1..3]);
    let chief = tasks(stage, &other, "1").remove(0).env("DISTRIBUTE_TIMEOUT", "8");
    let outcome = stage.outcomes(vec![chief])?.remove(0);
    ended("the other job's chief", &outcome, &[PERMANENT, CONFIGURATION])?;
    says(error_line(&outcome)?, &["ps:", "DISTRIBUTE_JOB_ID"])?;
    let accuracy = undisturbed(stage, &mut job)?;
    Held::yes(format!("refused with {}; the job's accuracy {accuracy:.2} %", outcome.code.unwrap_or_default()))
}

/// Without checkpoints its variables are lost, so the chief ends and says that a restart helps; the others wait for the
/// restarted one.
pub(super) fn killed(stage: &Stage) -> Verdict {
    let addresses = addresses(TASKS.len())?;
    let mut job = training(stage, &addresses, "1000")?;
    std::thread::sleep(Duration::from_secs_f64(0.3 * stage.random()));
    job.kill(1, Signal::KILL).map_err(text)?;
    let killed = Instant::now();
    let chief = job.wait(0, stage.left()).map_err(text)?;
    let took = killed.elapsed().as_secs_f64();
    ended("the chief", &chief, &[RETRYABLE])?;
    says(error_line(&chief)?, &["ps:0"])?;
    let mut again = start(tasks(stage, &addresses, "3").into_iter().take(2).collect())?;
    let accuracy = undisturbed(stage, &mut again)?;
    for rank in 2..5 {
        let outcome = job.wait(rank, stage.left()).map_err(text)?;
        ended(&format!("task {rank}"), &outcome, &[DONE])?;
    }
    Held::yes(format!(
        "the chief ended with 138 after {took:.2} s; chief and ps:0 started again: all ended with 0, accuracy \
        {accuracy:.2} %: {}",
        error_line(&chief)?
    ))
}

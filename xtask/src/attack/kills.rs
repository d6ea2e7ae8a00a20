//! Workers that vanish, and workers that stand still.

use std::time::{Duration, Instant};

use distribute_testkit::Signal;

use super::stage::{Stage, start};
use super::verdict::{Held, RETRYABLE, Verdict, ended, error_line, says, text};

const ENDLESS: [&str; 2] = ["--epochs", "1000000"];

pub(super) fn worker(stage: &Stage) -> Verdict {
    kill(stage, 1)
}

pub(super) fn chief(stage: &Stage) -> Verdict {
    kill(stage, 0)
}

/// Three workers, one of which is killed; the others end within a second and name it.
fn kill(stage: &Stage, victim: u32) -> Verdict {
    let (tasks, _) = stage.workers(&[&ENDLESS[..]; 3])?;
    let mut job = start(tasks)?;
    job.wait_for_line(0, "epoch=1/", stage.left()).map_err(text)?;
    std::thread::sleep(Duration::from_secs_f64(0.3 * stage.random()));
    job.kill(victim, Signal::KILL).map_err(text)?;
    let killed = Instant::now();
    let mut slowest = Duration::ZERO;
    for survivor in (0..3).filter(|rank| *rank != victim) {
        let outcome = job.wait(survivor, stage.left()).map_err(text)?;
        slowest = slowest.max(killed.elapsed());
        ended(&format!("worker:{survivor}"), &outcome, &[RETRYABLE])?;
        says(error_line(&outcome)?, &[&format!("worker:{victim}")])?;
    }
    let slowest = slowest.as_secs_f64();
    match slowest < 1.0 {
        true => Held::yes(format!("both survivors ended with 138 within {slowest:.2} s (promised: 1 s)")),
        false => Err(format!("the survivors took {slowest:.2} s, expected less than 1 s")),
    }
}

/// A frozen process keeps its connections; the deadline of the operation ends the wait before heartbeats do.
pub(super) fn stopped(stage: &Stage) -> Verdict {
    let (tasks, _) = stage.workers(&[&ENDLESS[..]; 2])?;
    let mut job = start(tasks.into_iter().map(|task| task.env("DISTRIBUTE_TIMEOUT", "4")).collect())?;
    job.wait_for_line(0, "epoch=1/", stage.left()).map_err(text)?;
    job.kill(1, Signal::STOP).map_err(text)?;
    let stopped = Instant::now();
    let outcome = job.wait(0, stage.left()).map_err(text)?;
    let took = stopped.elapsed().as_secs_f64();
    ended("worker:0", &outcome, &[RETRYABLE])?;
    says(error_line(&outcome)?, &["worker:1"])?;
    job.kill(1, Signal::CONT).map_err(text)?;
    let woken = job.wait(1, stage.left()).map_err(text)?;
    ended("worker:1, woken,", &woken, &[RETRYABLE])?;
    match took < 6.0 {
        true => {
            Held::yes(format!("the survivor ended with 138 after {took:.1} s, and so did the other when it was woken"))
        }
        false => Err(format!("the survivor took {took:.1} s, expected at most 6 s")),
    }
}

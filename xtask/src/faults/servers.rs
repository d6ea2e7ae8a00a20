//! Jobs with parameter servers: a chief, two servers and two workers.

use std::time::Duration;

use super::cells::{Fault, Kind};
use super::crew::{Line, Member, last_words, now, until, until_ended};
use super::in_step::{begin, heal};
use super::row::Measured;
use super::stage::{LIMIT, Stage, until_step};

/// By place in the job.
const TASKS: [(&str, usize); 5] = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)];
/// Where each is if there are hosts.
const HOSTS: [usize; 5] = [0, 0, 0, 1, 2];
const CHIEF: usize = 0;
const SERVER: usize = 1;
const WORKER: usize = 4;
/// Examples of each step.
const BATCH: u64 = 48;

pub(super) fn measure(stage: &Stage, fault: Fault) -> Result<Measured, String> {
    let addresses = stage.addresses(&HOSTS)?;
    let start = |at: usize, restarts: u32| task(stage, &addresses, at, restarts);
    let present = if fault == Fault::Join { WORKER } else { TASKS.len() };
    let mut members = (0..present).map(|at| start(at, 0)).collect::<Result<Vec<_>, _>>()?;
    until_step(&mut members, stage.moment())?;
    let victim = match fault {
        Fault::KillChief | Fault::DiskFull | Fault::DiskReadOnly => CHIEF,
        Fault::KillServer => SERVER,
        _ => WORKER,
    };
    let mut measured = Measured::default();
    let began = now();
    if fault == Fault::Join {
        measured.join_ms = Some(joined(&mut members, start(WORKER, 0)?, began)?);
        return finish(stage, members, measured);
    }
    begin(stage, fault, &members[victim], HOSTS[victim])?;
    let last = members[CHIEF].last_step().map_or(0, |(step, _)| step);
    match fault {
        Fault::KillWorker | Fault::Terminate => {
            measured.recover_ms = Some(next(&mut members, began, last)?);
            ended(&mut members, WORKER)?;
            let restarted = now();
            measured.join_ms = Some(joined(&mut members, start(WORKER, 1)?, restarted)?);
        }
        Fault::Reset => measured.recover_ms = Some(next(&mut members, began, last + 4)?),
        Fault::SlowLink => {
            measured.recover_ms = Some(next(&mut members, began, last)?);
            std::thread::sleep(Duration::from_secs(1));
            heal(stage, fault, &members[victim], HOSTS[victim])?;
        }
        Fault::Freeze | Fault::Cut | Fault::CutOneWay => {
            // The steps in line before the one that is frozen do not count.
            let other = members[WORKER - 1].lines().len();
            until(&mut members, LIMIT, "the other worker's steps", |members| {
                (members[WORKER - 1].lines().len() > other).then_some(())
            })?;
            measured.recover_ms = Some(next(&mut members, began, last + 4)?);
            let woken = now();
            heal(stage, fault, &members[victim], HOSTS[victim])?;
            measured.join_ms = Some(works(&mut members, WORKER, woken)?);
        }
        Fault::KillServer => {
            ended(&mut members, SERVER)?;
            members[SERVER] = start(SERVER, 1)?;
            let outcome = until(&mut members, LIMIT, "the next step", |members| {
                let ended = members[CHIEF].has_ended();
                members[CHIEF].step_after(began, last + 4).map(Some).or(ended.then_some(None))
            })?;
            match outcome {
                Some(at) => measured.recover_ms = Some(at.saturating_sub(began)),
                None => restart_chief(&mut members, &mut measured, (began, last), &start)?,
            }
        }
        Fault::KillChief => restart_chief(&mut members, &mut measured, (began, last), &start)?,
        _ => {
            until_ended(&mut members, LIMIT)?;
            measured.end_ms = members.iter().map(|member| member.ended_at.saturating_sub(began)).max();
            measured.codes = members.iter().filter_map(Member::code).collect();
            heal(stage, fault, &members[victim], HOSTS[victim])?;
            let again = (0..TASKS.len()).map(|at| start(at, 1)).collect::<Result<Vec<_>, _>>()?;
            members = again;
            let codes = std::mem::take(&mut measured.codes);
            let done = finish(stage, members, measured)?;
            return Ok(Measured { codes, ..done });
        }
    }
    finish(stage, members, measured)
}

fn task(stage: &Stage, addresses: &[String], at: usize, restarts: u32) -> Result<Member, String> {
    let (kind, index) = TASKS[at];
    let (chief, ps, workers) = (&addresses[..1], &addresses[1..3], &addresses[3..]);
    let cluster = format!(r#"{{"chief": {chief:?}, "ps": {ps:?}, "worker": {workers:?}}}"#);
    let config = format!(r#"{{"cluster": {cluster}, "task": {{"type": "{kind}", "index": {index}}}}}"#);
    let folder = stage.checkpoints();
    let task = stage.task(&format!("{kind}:{index}"), Kind::Servers, HOSTS[at], stage.steps, Some(&folder));
    Member::start(task.env("TF_CONFIG", config).env("DISTRIBUTE_RESTART_COUNT", restarts.to_string()))
}

/// Waits until a task has ended, and its port is free.
fn ended(members: &mut [Member], at: usize) -> Result<(), String> {
    let what = format!("the end of {}:{}", TASKS[at].0, TASKS[at].1);
    until(members, LIMIT, &what, |members| members[at].has_ended().then_some(()))
}

/// Returns the milliseconds until the next step.
fn next(members: &mut [Member], began: u64, last: u64) -> Result<u64, String> {
    let at = until(members, LIMIT, "the next step", |members| members[CHIEF].step_after(began, last))?;
    Ok(at.saturating_sub(began))
}

/// Puts a worker in its place; returns the milliseconds until it has its first function.
fn joined(members: &mut Vec<Member>, worker: Member, began: u64) -> Result<u64, String> {
    members.truncate(WORKER);
    members.push(worker);
    works(members, WORKER, began)
}

/// Returns the milliseconds until a worker has a function to run.
fn works(members: &mut [Member], at: usize, began: u64) -> Result<u64, String> {
    let function = |members: &mut [Member]| {
        members[at].lines().into_iter().find_map(|line| match line {
            Line::Works { at } if at >= began => Some(at),
            _ => None,
        })
    };
    Ok(until(members, LIMIT, "the worker's first function", function)?.saturating_sub(began))
}

/// Has another coordinator continue from the newest checkpoint.
fn restart_chief(
    members: &mut [Member],
    measured: &mut Measured,
    (began, last): (u64, u64),
    start: &dyn Fn(usize, u32) -> Result<Member, String>,
) -> Result<(), String> {
    ended(members, CHIEF)?;
    measured.end_ms = Some(members[CHIEF].ended_at.saturating_sub(began));
    if let Some(code) = members[CHIEF].code().filter(|code| *code >= 0) {
        let printed = members[CHIEF].printed();
        let error = printed.lines().rfind(|line| line.starts_with("error: ")).unwrap_or_default();
        measured.note = format!("the chief ended with {code}, and was started again: {error}");
        if code != 138 {
            return Err(measured.note.clone());
        }
    }
    members[CHIEF] = start(CHIEF, 1)?;
    let (step, at) = until(members, LIMIT, "the next step", |members| members[CHIEF].first_step())?;
    measured.recover_ms = Some(at.saturating_sub(began));
    measured.steps_lost = (last + 1).saturating_sub(step);
    Ok(())
}

fn finish(stage: &Stage, mut members: Vec<Member>, mut measured: Measured) -> Result<Measured, String> {
    ended(&mut members, CHIEF)?;
    until_ended(&mut members, Duration::from_secs(30))?;
    measured.codes = members.iter().filter_map(Member::code).collect();
    let end = members[CHIEF].end().ok_or_else(|| format!("no end; {}", last_words(&members)))?;
    measured.examples_lost = (stage.steps * BATCH) as i64 - end.seen[0] as i64;
    Ok(measured)
}

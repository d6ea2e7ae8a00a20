//! Jobs whose workers are lost and join while the others train.

use std::time::Duration;

use super::cells::{Fault, Kind};
use super::crew::{End, Line, Member, last_words, now, until, until_ended};
use super::in_step::{begin, heal};
use super::row::Measured;
use super::stage::{LIMIT, Stage, ends, until_step};

const WORKERS: usize = 3;

pub(super) fn measure(stage: &Stage, fault: Fault) -> Result<Measured, String> {
    let expected = stage.calm(WORKERS)?[0].clone();
    let mut members = start_all(stage, fault)?;
    let together = |members: &mut [Member]| {
        let all = members.iter().all(|one| one.standing().is_some_and(|(count, _)| count as usize == WORKERS));
        all.then_some(())
    };
    until(&mut members, LIMIT, "a generation of all workers", together)?;
    let made = members.iter().filter_map(Member::last_step).map(|(step, _)| step).max().unwrap_or_default();
    until_step(&mut members, made + 5 + stage.below(30))?;
    let is_chief = |member: &Member| member.standing().is_some_and(|(_, chief)| chief);
    let candidates: Vec<usize> =
        (0..WORKERS).filter(|at| is_chief(&members[*at]) == (fault == Fault::KillChief)).collect();
    let drawn = candidates.get(stage.below(candidates.len() as u64) as usize);
    let victim = *drawn.ok_or_else(|| format!("no worker to disturb; {}", last_words(&members)))?;
    let mut measured = Measured::default();

    let began = now();
    if fault == Fault::Join {
        measured.join_ms = Some(joiner(stage, fault, &mut members)?);
    } else {
        begin(stage, fault, &members[victim], victim)?;
    }
    if fault.is_of_disk() {
        return disk(members, began);
    }
    let last = members.iter().filter_map(|member| member.last_step()).filter(|(_, at)| *at <= began);
    let last = last.map(|(step, _)| step).max().unwrap_or_default();
    let changes = !matches!(fault, Fault::SlowLink);
    let at = until(&mut members, LIMIT, "the next step", |members| {
        let others = members.iter().enumerate().filter(|(at, _)| *at != victim || !changes);
        others.filter_map(|(_, member)| next_step(member, began, last, changes)).min()
    })?;
    measured.recover_ms = Some(at.saturating_sub(began));
    let others = || members.iter().enumerate().filter(|(at, _)| *at != victim).map(|(_, member)| member);
    let first = others().filter_map(|member| member.noticed(began)).min();
    measured.detect_ms = first.map(|at| at.saturating_sub(began));

    match fault {
        Fault::KillWorker | Fault::KillChief => measured.join_ms = Some(joiner(stage, fault, &mut members)?),
        Fault::Freeze | Fault::Cut | Fault::CutOneWay => {
            let healed = now();
            heal(stage, fault, &members[victim], victim)?;
            let back = until(&mut members, LIMIT, "the lost worker's return", |members| {
                members[victim].step_after(healed, last + 1)
            })?;
            measured.join_ms = Some(back.saturating_sub(healed));
        }
        Fault::SlowLink => {
            std::thread::sleep(Duration::from_secs(2));
            heal(stage, fault, &members[victim], victim)?;
        }
        _ => {}
    }
    until_ended(&mut members, LIMIT)?;
    let lost = |at: usize| at == victim && matches!(fault, Fault::KillWorker | Fault::KillChief | Fault::Terminate);
    measured.codes =
        members.iter().enumerate().filter(|(at, _)| !lost(*at)).filter_map(|(_, member)| member.code()).collect();
    if fault == Fault::Terminate && members[victim].code() != Some(143) {
        return Err(format!("the worker that was told to stop: {:?}, expected 143", members[victim].code()));
    }
    let all: Vec<End> = members.iter().filter_map(Member::end).collect();
    let end = all.first().ok_or_else(|| format!("no worker reached the end; {}", last_words(&members)))?;
    if let Some(other) = all.iter().find(|other| *other != end) {
        return Err(format!("workers end differently: {end:?} and {other:?}"));
    }
    measured.examples_lost = expected.seen[0] as i64 - end.seen[0] as i64;
    measured.steps_lost = expected.steps.saturating_sub(end.steps);
    if measured.examples_lost == 0 && end.seen != expected.seen {
        return Err(format!("the examples were others: {:?} instead of {:?}", end.seen, expected.seen));
    }
    let phases = phases(&members);
    measured.equal = Some(replayed(stage, &phases)? == end.weights);
    measured.note = format!(
        "members: {}",
        phases.iter().map(|(count, until)| format!("{count} to step {until}")).collect::<Vec<_>>().join(", ")
    );
    Ok(measured)
}

/// Returns when a worker has made a step after a fault: in a new generation, if the fault changes the members.
fn next_step(member: &Member, since: u64, last: u64, changes: bool) -> Option<u64> {
    let lines = member.lines();
    let is_new = |line: &Line| matches!(line, Line::Joined { at, .. } if *at >= since);
    let from = if changes { lines.iter().position(is_new)? } else { 0 };
    lines[from..].iter().find_map(|line| match line {
        Line::Step { step, at, .. } if *at >= since && *step > last => Some(*at),
        _ => None,
    })
}

/// With hosts they decide by majority at the addresses of TF_CONFIG, because a folder that all reach outlives any cut;
/// else by a register, as `distribute run --elastic` has it.
fn start_all(stage: &Stage, fault: Fault) -> Result<Vec<Member>, String> {
    if stage.hosts.is_some() {
        let folder = stage.checkpoints();
        return stage.workers(Kind::Elastic, WORKERS, stage.steps, &folder, 0);
    }
    (0..WORKERS).map(|index| start(stage, fault, index)).collect()
}

fn start(stage: &Stage, fault: Fault, index: usize) -> Result<Member, String> {
    let folder = stage.checkpoints();
    let folder = fault.is_of_disk().then_some(folder.as_path());
    let mut task = stage.task(&format!("worker:{index}"), Kind::Elastic, index, stage.steps, folder);
    let register = stage.folder().join("generations");
    task = task.env("DISTRIBUTE_GENERATIONS", format!("file:{}", register.display()));
    for (name, value) in [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")] {
        task = task.env(name, value);
    }
    Member::start(task)
}

/// Starts another worker; returns the milliseconds until its first step.
fn joiner(stage: &Stage, fault: Fault, members: &mut Vec<Member>) -> Result<u64, String> {
    let began = now();
    members.push(start(stage, fault, members.len())?);
    let step = |members: &mut [Member]| members.last().and_then(|joiner| joiner.step_after(began, 0));
    Ok(until(members, LIMIT, "the joiner's first step", step)?.saturating_sub(began))
}

/// The chief's error ends all.
fn disk(mut members: Vec<Member>, began: u64) -> Result<Measured, String> {
    until_ended(&mut members, LIMIT)?;
    let noticed = members.iter().filter_map(|member| member.noticed(began)).min();
    Ok(Measured {
        detect_ms: noticed.map(|at| at.saturating_sub(began)),
        end_ms: members.iter().map(|member| member.ended_at.saturating_sub(began)).max(),
        codes: members.iter().filter_map(Member::code).collect(),
        ..Measured::default()
    })
}

/// Returns the numbers of members that made steps one after another, with the last step of each.
fn phases(members: &[Member]) -> Vec<(u32, u64)> {
    let mut steps: Vec<(u64, u32)> = members
        .iter()
        .flat_map(Member::lines)
        .filter_map(|line| match line {
            Line::Step { step, members, .. } => Some((step, members)),
            _ => None,
        })
        .collect();
    steps.sort_unstable();
    steps.dedup_by_key(|(step, _)| *step);
    let mut phases: Vec<(u32, u64)> = Vec::new();
    for (step, members) in steps {
        match phases.last_mut() {
            Some((of, until)) if *of == members => *until = step,
            _ => phases.push((members, step)),
        }
    }
    phases
}

/// Trains without faults, with as many workers as in each phase, from checkpoint to checkpoint; returns the weights.
fn replayed(stage: &Stage, phases: &[(u32, u64)]) -> Result<String, String> {
    let calm = stage.without_faults()?;
    let mut weights = String::new();
    for (members, until) in phases {
        let mut members = calm.workers(Kind::Workers, *members as usize, *until, &calm.checkpoints(), 0)?;
        weights = ends(&mut members)?.swap_remove(0).weights;
    }
    Ok(weights)
}

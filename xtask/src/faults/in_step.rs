//! Jobs whose workers end together, and are started again from the newest checkpoint.

use std::time::Duration;

use distribute_testkit::Signal;

use super::cells::Fault;
use super::crew::{End, Member, now, until, until_ended};
use super::harm::reset_connections;
use super::row::Measured;
use super::stage::{LIMIT, Stage, ends, until_step};

const WORKERS: usize = 3;

/// Kilobits a second of a slow link; a step sends several megabits.
const SLOW: u32 = 20_000;

pub(super) fn measure(stage: &Stage, fault: Fault) -> Result<Measured, String> {
    let calm = stage.calm(WORKERS)?;
    let folder = stage.checkpoints();
    let mut members = stage.workers(stage.kind, WORKERS, stage.steps, &folder, 0)?;
    until_step(&mut members, stage.moment())?;
    // The chief is the one whose disk and whose control port the others need.
    let victim = match fault {
        Fault::KillChief => 0,
        fault if fault.is_of_disk() => 0,
        _ => 1 + stage.below(WORKERS as u64 - 1) as usize,
    };
    let began = now();
    begin(stage, fault, &members[victim], victim)?;
    if fault == Fault::SlowLink {
        return slow(stage, members, victim, began, &calm);
    }
    let mut measured = Measured::default();
    let is_alive = |at: usize| at != victim || fault.is_of_disk() || matches!(fault, Fault::Reset | Fault::Terminate);
    let limit = Duration::from_millis(stage.silence_ms()) + Duration::from_secs(30);
    until(&mut members, limit, "the end of the others", |members| {
        let mut ended = true;
        members.iter_mut().enumerate().filter(|(at, _)| is_alive(*at)).for_each(|(_, one)| ended &= one.has_ended());
        ended.then_some(())
    })?;
    let others: Vec<&Member> = members.iter().enumerate().filter(|(at, _)| is_alive(*at)).map(|(_, one)| one).collect();
    measured.codes = others.iter().filter_map(|member| member.code()).collect();
    measured.end_ms = others.iter().map(|member| member.ended_at.saturating_sub(began)).max();
    let first = others.iter().filter_map(|member| member.noticed(began)).min();
    measured.detect_ms = first.map(|at| at.saturating_sub(began));
    let last = members.iter().filter_map(|member| member.last_step()).map(|(step, _)| step).max().unwrap_or_default();
    heal(stage, fault, &members[victim], victim)?;
    if matches!(fault, Fault::Freeze | Fault::Cut | Fault::CutOneWay) {
        until_ended(&mut members, LIMIT)?;
        measured.codes.extend(members[victim].code());
    }
    drop(members);

    let mut again = stage.workers(stage.kind, WORKERS, stage.steps, &folder, 1)?;
    until_step(&mut again, last.min(stage.steps - 1) + 1)?;
    let first = again.iter().filter_map(Member::first_step).min();
    let (step, at) = first.ok_or("no step after the restart")?;
    measured.recover_ms = Some(at.saturating_sub(began));
    measured.steps_lost = (last + 1).saturating_sub(step);
    compare(&mut measured, &mut again, &calm)?;
    Ok(measured)
}

/// Compares the end of a training with that of one without faults.
fn compare(measured: &mut Measured, members: &mut [Member], calm: &[End]) -> Result<(), String> {
    let ends = ends(members)?;
    let (end, expected) = (&ends[0], &calm[0]);
    measured.examples_lost = expected.seen[0] as i64 - end.seen[0] as i64;
    if measured.examples_lost == 0 && end.seen != expected.seen {
        return Err(format!("the examples were others: {:?} instead of {:?}", end.seen, expected.seen));
    }
    measured.equal = Some(ends.iter().map(|end| &end.weights).eq(calm.iter().map(|end| &end.weights)));
    Ok(())
}

/// Begins a fault.
pub(super) fn begin(stage: &Stage, fault: Fault, victim: &Member, host: usize) -> Result<(), String> {
    let hosts = || stage.hosts.as_ref().ok_or("no hosts");
    let disk = || stage.disk.as_ref().ok_or("no disk");
    match fault {
        Fault::KillWorker | Fault::KillChief | Fault::KillServer => victim.signal(Signal::KILL),
        Fault::Freeze => victim.signal(Signal::STOP),
        Fault::Terminate => victim.signal(Signal::TERM),
        Fault::Cut => hosts()?.connect(host, "down"),
        Fault::CutOneWay => hosts()?.mute(host, true),
        Fault::SlowLink => hosts()?.throttle(host, Some(SLOW)),
        Fault::Reset => match reset_connections(victim)? {
            0 => Err("the task has no TCP connection".to_owned()),
            _ => Ok(()),
        },
        Fault::DiskFull => disk()?.fill(),
        Fault::DiskReadOnly => disk()?.remount("ro"),
        Fault::Join => Ok(()),
    }
}

/// Ends a fault that does not end by itself.
pub(super) fn heal(stage: &Stage, fault: Fault, victim: &Member, host: usize) -> Result<(), String> {
    let hosts = || stage.hosts.as_ref().ok_or("no hosts");
    let disk = || stage.disk.as_ref().ok_or("no disk");
    match fault {
        Fault::Freeze => victim.signal(Signal::CONT),
        Fault::Cut => hosts()?.connect(host, "up"),
        Fault::CutOneWay => hosts()?.mute(host, false),
        Fault::SlowLink => hosts()?.throttle(host, None),
        Fault::DiskFull => disk()?.empty(),
        Fault::DiskReadOnly => disk()?.remount("rw"),
        _ => Ok(()),
    }
}

/// A link that is slow for two seconds ends nothing.
fn slow(stage: &Stage, mut members: Vec<Member>, victim: usize, began: u64, calm: &[End]) -> Result<Measured, String> {
    let last = members.iter().filter_map(|member| member.last_step()).map(|(step, _)| step).max().unwrap_or_default();
    let next = |members: &mut [Member]| members.iter().filter_map(|member| member.step_after(began, last)).min();
    let at = until(&mut members, LIMIT, "the next step", next)?;
    std::thread::sleep(Duration::from_secs(2));
    heal(stage, Fault::SlowLink, &members[victim], victim)?;
    let mut measured = Measured { recover_ms: Some(at.saturating_sub(began)), ..Measured::default() };
    compare(&mut measured, &mut members, calm)?;
    measured.codes = members.iter().filter_map(Member::code).collect();
    Ok(measured)
}

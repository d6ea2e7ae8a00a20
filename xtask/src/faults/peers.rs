//! The same faults under torchft and under torch's DistributedDataParallel, for a table in one run.

use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use distribute_testkit::{Ports, Signal};
use rustix::process::{Pid, kill_process};

use super::crew::{Line, Member, Task, now, parse, until};
use super::row::{Measured, Row};
use super::stage::{EVERY, LIMIT, PAUSE_MS};
use crate::bench::peers::{TORCH, installed};
use crate::error::text;

/// Who is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// Two groups of torchft with Gloo, and its lighthouse.
    Torchft,
    /// Three workers of DistributedDataParallel with Gloo, under torchrun.
    Ddp,
}

const PYTHON: &str = "target/peers/venv/bin/python";
/// How long a task of a peer is frozen, and how long steps are awaited after a coordinator was killed.
const PATIENCE: Duration = Duration::from_secs(8);
/// Peers start slowly.
const START: Duration = Duration::from_secs(90);

impl Peer {
    fn set_up(self) -> String {
        let torch = TORCH.set_up();
        match self {
            Peer::Torchft => format!(
                "{torch} opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http && \
                 target/peers/venv/bin/pip install --no-deps torchft-nightly"
            ),
            Peer::Ddp => torch,
        }
    }

    /// Measures the faults that a peer has in common with ours, and prints a row for each.
    pub(super) fn compare(self, only: Option<&str>, seed: u64, json: bool) -> Result<(), String> {
        let (module, system) = match self {
            Peer::Torchft => ("torchft", "torchft"),
            Peer::Ddp => ("torch", "torch DDP"),
        };
        if !installed(Path::new(PYTHON), module) {
            println!("skipped: {module} is not installed ({})", self.set_up());
            return Ok(());
        }
        for fault in ["kill-worker", "freeze", "kill-chief"] {
            if only.is_some_and(|only| !fault.contains(only)) {
                continue;
            }
            let measured = match self {
                Peer::Torchft => torchft(fault),
                Peer::Ddp => ddp(fault),
            };
            let row = match measured {
                Ok(measured) => Row { examples_lost: None, ..Row::new(fault, system, seed, "measured", measured) },
                Err(problem) => Row::without(fault, system, seed, "failed", problem),
            };
            row.print(json)?;
        }
        Ok(())
    }
}

fn task(name: &str, command: &[&str]) -> Task {
    let env =
        [("OMP_NUM_THREADS", "1"), ("MASTER_ADDR", "127.0.0.1"), ("GLOO_SOCKET_IFNAME", "lo"), ("RUST_LOG", "error")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    Task { name: name.to_owned(), command: command.iter().map(|word| (*word).to_owned()).collect(), env }
}

fn free_port() -> Result<String, String> {
    Ok(Ports::reserve(1).map_err(text)?.release()[0].to_string())
}

/// Returns the steps after a moment, with their times.
fn steps_since(member: &Member, since: u64) -> Vec<(u64, u64)> {
    let step = |line| if let Line::Step { step, at, .. } = line { Some((step, at)) } else { None };
    member.lines().into_iter().filter_map(step).filter(|(_, at)| *at > since).collect()
}

fn torchft(fault: &str) -> Result<Measured, String> {
    let port = free_port()?;
    let bind = format!("127.0.0.1:{port}");
    let lighthouse = ["target/peers/venv/bin/torchft_lighthouse", "--bind", &bind, "--min_replicas", "1"];
    let lighthouse = Member::start(task("lighthouse", &[&lighthouse[..], &["--join_timeout_ms", "1000"]].concat()))?;
    std::thread::sleep(Duration::from_secs(1));
    let start = |group: &str| {
        let task =
            task(group, &[PYTHON, "xtask/peers/torchft_faults.py", group, "300"]).env("MASTER_PORT", free_port()?);
        let task = task.env("TORCHFT_LIGHTHOUSE", format!("http://127.0.0.1:{port}")).env("RANK", "0");
        Member::start(task.env("WORLD_SIZE", "1"))
    };
    let mut groups = vec![start("0")?, start("1")?];
    let both = |groups: &mut [Member]| {
        let lines = groups[0].lines();
        lines.iter().any(|line| matches!(line, Line::Step { members: 2, .. })).then_some(())
    };
    until(&mut groups, START, "a step of two groups", both)?;
    std::thread::sleep(Duration::from_secs(2));
    let began = now();
    let mut measured = Measured::default();
    if fault == "kill-chief" {
        lighthouse.signal(Signal::KILL)?;
        std::thread::sleep(PATIENCE);
        let after = groups.iter().map(|group| steps_since(group, began + 100).len()).max().unwrap_or_default();
        measured.note = format!("the lighthouse killed: {after} steps in the {} s afterwards", PATIENCE.as_secs());
        return Ok(measured);
    }
    groups[1].signal(if fault == "freeze" { Signal::STOP } else { Signal::KILL })?;
    // Steps in flight at the moment of the fault are printed as made with two.
    let alone = |groups: &mut [Member]| {
        let lines = groups[0].lines();
        lines.into_iter().find_map(|line| match line {
            Line::Step { members: 1, at, .. } if at > began => Some(at),
            _ => None,
        })
    };
    let at = until(&mut groups, LIMIT, "a step of the group that is left", alone)?;
    measured.recover_ms = Some(at.saturating_sub(began));
    let dropped = |line: &&Line| matches!(line, Line::Dropped { at: when } if *when >= began && *when <= at);
    measured.steps_lost = groups[0].lines().iter().filter(dropped).count() as u64;
    let back = now();
    match fault {
        "freeze" => groups[1].signal(Signal::CONT)?,
        _ => groups[1] = start("1")?,
    }
    let joined = |groups: &mut [Member]| {
        groups[1].lines().into_iter().find_map(|line| match line {
            Line::Step { members: 2, at, .. } if at > back => Some(at),
            _ => None,
        })
    };
    measured.join_ms = until(&mut groups, LIMIT, "the return", joined).ok().map(|at| at.saturating_sub(back));
    if measured.join_ms.is_none() {
        measured.note = format!("the frozen group did not make a step within {LIMIT:?} after it was woken");
    }
    Ok(measured)
}

fn ddp(fault: &str) -> Result<Measured, String> {
    let folder = tempfile::tempdir().map_err(text)?;
    let file = folder.path().join("checkpoint").to_string_lossy().into_owned();
    let (port, every, pause) = (free_port()?, EVERY.to_string(), PAUSE_MS.to_string());
    let run = [PYTHON, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "3", "--max-restarts", "3"];
    let own = ["--master-addr", "127.0.0.1", "--master-port", &port, "xtask/peers/ddp_faults.py", "1000000", &every];
    let command = [&run[..], &own, &[&file, &pause]].concat();
    let mut job = vec![Member::start(task("torchrun", &command))?];
    let trains = |job: &mut [Member]| job[0].last_step().filter(|(step, _)| *step > 2 * EVERY).map(|_| ());
    until(&mut job, START, "the training", trains)?;
    let victim = pid_of(&job[0].printed(), 1).ok_or("no process id of worker 1")?;
    let began = now();
    let mut measured = Measured::default();
    if fault == "kill-chief" {
        // torchrun itself; its workers are in its process group, and are to be left alone.
        let torchrun = i32::try_from(job[0].pid()?).ok().and_then(Pid::from_raw).ok_or("no process id")?;
        kill_process(torchrun, Signal::KILL).map_err(text)?;
        std::thread::sleep(PATIENCE);
        let after = steps_since(&job[0], began + 100).len() / 3;
        measured.note = format!(
            "torchrun killed: {after} steps in the {} s afterwards, with no process that watches them",
            PATIENCE.as_secs()
        );
        return Ok(measured);
    }
    kill_process(victim, if fault == "freeze" { Signal::STOP } else { Signal::KILL }).map_err(text)?;
    std::thread::sleep(Duration::from_millis(100));
    let last = job[0].last_step().map_or(0, |(step, _)| step);
    if fault == "freeze" {
        std::thread::sleep(PATIENCE);
        if steps_since(&job[0], began + 1000).is_empty() {
            measured.note = format!("no step and no error in the {} s of the freeze; all wait", PATIENCE.as_secs());
        }
        let back = now();
        kill_process(victim, Signal::CONT).map_err(text)?;
        let next = until(&mut job, LIMIT, "the next step", |job| steps_since(&job[0], back).first().copied())?;
        measured.recover_ms = Some(next.1.saturating_sub(began));
        return Ok(measured);
    }
    measured.detect_ms = until(&mut job, LIMIT, "an error", |job| job[0].noticed(began)).ok().map(|at| at - began);
    // The workers are started again by torchrun, and begin again after the newest checkpoint.
    let again = |job: &mut [Member]| {
        let lines = job[0].lines();
        let restart = lines.iter().position(|line| matches!(line, Line::Begins { at } if *at > began))?;
        lines[restart..].iter().find_map(|line| match line {
            Line::Step { step, at, .. } => Some((*step, *at)),
            _ => None,
        })
    };
    let (step, at) = until(&mut job, START, "the next step", again)?;
    measured.recover_ms = Some(at.saturating_sub(began));
    measured.steps_lost = (last + 1).saturating_sub(step);
    Ok(measured)
}

/// Returns the process id that a worker has printed last.
fn pid_of(printed: &str, worker: u32) -> Option<Pid> {
    let words = format!(" worker {worker} pid ");
    let begins = |line: &&str| parse(line).is_some_and(|line| matches!(line, Line::Begins { .. }));
    let line = printed.lines().filter(begins).rfind(|line| line.contains(&words))?;
    Pid::from_raw(line.split_once(&words)?.1.split(' ').next()?.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_of_torchrun_is_found_by_the_process_id_that_it_prints() {
        let printed =
            "begins after step 0 worker 0 pid 71 at 5\nbegins after step 0 worker 1 pid 72 at 5\nstep 1 at 9\n";
        assert_eq!(pid_of(printed, 1), Pid::from_raw(72));
        assert_eq!(pid_of(printed, 2), None);
    }
}

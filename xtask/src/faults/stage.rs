//! The means of a cell: programs, folders, disks, hosts, and the moments that a seed chooses.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use distribute_testkit::Ports;

use super::cells::{Fault, Kind};
use super::crew::{End, Member, Task, until, until_ended};
use super::harm::Disk;
use crate::error::text;
use crate::hosts::{Hosts, address};

/// Steps between checkpoints.
pub(super) const EVERY: u64 = 20;
/// Milliseconds that each step takes at least.
pub(super) const PAUSE_MS: u64 = 5;
/// Longest time of anything that a cell waits for.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// The data that all cells share.
pub(super) struct Plan {
    pub(super) programs: PathBuf,
    pub(super) seed: u64,
    /// Steps of each training.
    pub(super) steps: u64,
    /// Milliseconds of silence after which a task counts as lost.
    pub(super) silence_ms: u64,
    /// The ends of trainings without faults.
    pub(super) calm: RefCell<HashMap<Training, Vec<End>>>,
}

/// Strategy, number of tasks, steps, and whether by TCP: they decide how a training without faults ends.
type Training = (&'static str, usize, u64, bool);

/// The means of one cell.
pub(super) struct Stage<'p> {
    pub(super) plan: &'p Plan,
    pub(super) kind: Kind,
    random: Cell<u64>,
    folder: tempfile::TempDir,
    /// The steps of its training.
    pub(super) steps: u64,
    /// Milliseconds that each step takes at least.
    pause_ms: u64,
    /// Whether the tasks exchange by TCP, which orders sums otherwise than shared memory does.
    is_tcp: bool,
    pub(super) hosts: Option<Hosts>,
    pub(super) disk: Option<Disk>,
}

impl<'p> Stage<'p> {
    /// Makes the disk or the hosts that a fault needs.
    pub(super) fn new(plan: &'p Plan, kind: Kind, fault: Option<Fault>) -> Result<Stage<'p>, String> {
        let folder = tempfile::tempdir().map_err(text)?;
        let needs = |what: fn(Fault) -> bool| fault.is_some_and(what);
        let hosts = if needs(Fault::is_of_network) { Some(Hosts::create(3)?) } else { None };
        let disk = if needs(Fault::is_of_disk) { Some(Disk::mount(&folder.path().join("disk"))?) } else { None };
        let cell = fault.map_or(0, |fault| fault as u64 + 1) * 100 + kind as u64;
        let random = Cell::new(fastrand::Rng::with_seed(plan.seed ^ (cell << 32)).u64(..));
        // These train while others start or are away.
        let is_away = matches!(fault, Some(Fault::Freeze | Fault::Cut | Fault::CutOneWay));
        let longer_ms = if is_away { plan.silence_ms + 4000 } else { 2000 };
        let more = match kind {
            Kind::Elastic => longer_ms / PAUSE_MS,
            // By two workers at once.
            Kind::Servers => 2 * longer_ms / PAUSE_MS,
            _ => 0,
        };
        let is_tcp = needs(Fault::is_of_network) || fault == Some(Fault::Reset);
        Ok(Stage { plan, kind, random, folder, steps: plan.steps + more, pause_ms: PAUSE_MS, is_tcp, hosts, disk })
    }

    /// Returns a stage of the same training without faults.
    pub(super) fn without_faults(&self) -> Result<Stage<'p>, String> {
        Ok(Stage { steps: self.steps, pause_ms: 0, is_tcp: self.is_tcp, ..Stage::new(self.plan, self.kind, None)? })
    }

    /// Returns a number below a bound.
    pub(super) fn below(&self, bound: u64) -> u64 {
        let mut random = fastrand::Rng::with_seed(self.random.get());
        let number = random.u64(0..bound.max(1));
        self.random.set(random.u64(..));
        number
    }

    /// Returns the step after which the fault occurs: in the first half, after the first checkpoint.
    pub(super) fn moment(&self) -> u64 {
        EVERY + 5 + self.below((self.plan.steps / 2).saturating_sub(EVERY + 5))
    }

    pub(super) fn checkpoints(&self) -> PathBuf {
        let folder = self.disk.as_ref().map_or(self.folder.path(), |disk| disk.folder());
        folder.join("checkpoints")
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn silence_ms(&self) -> u64 {
        self.plan.silence_ms
    }

    /// Returns a task of the ledger, on a host if there are any.
    pub(super) fn task(&self, name: &str, kind: Kind, host: usize, steps: u64, checkpoints: Option<&Path>) -> Task {
        let silence = (self.plan.silence_ms as f64 / 1000.0).to_string();
        let program = self.plan.programs.join("ledger").to_string_lossy().into_owned();
        let (steps, every, pause) = (steps.to_string(), EVERY.to_string(), self.pause_ms.to_string());
        let flags = ["--strategy", kind.name(), "--steps", &steps, "--every", &every, "--pause", &pause];
        let flags = flags.into_iter().chain(["--silence", &silence, "--most", "8"]).map(str::to_owned);
        let folder = checkpoints.map(|folder| folder.to_string_lossy().into_owned());
        let folder = folder.into_iter().flat_map(|folder| ["--checkpoints".to_owned(), folder]);
        let command = std::iter::once(program).chain(flags).chain(folder).collect();
        let env = [
            ("RAYON_NUM_THREADS", "1"),
            ("DISTRIBUTE_TIMEOUT", "30"),
            ("DISTRIBUTE_PROGRESS", "off"),
            ("DISTRIBUTE_JOB_ID", "ledger"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let mut task = Task { name: name.to_owned(), command, env };
        if let Some(hosts) = &self.hosts {
            task = task.within(&["ip", "netns", "exec", hosts.name(host)]);
            task = task.env("DISTRIBUTE_HOST_ID", hosts.name(host));
        }
        if self.is_tcp {
            task = task.env("DISTRIBUTE_TRANSPORT", "tcp");
        }
        match &self.disk {
            Some(disk) => task.within(&disk.enter().each_ref().map(String::as_str)),
            None => task,
        }
    }

    /// Returns addresses for tasks, each on its host.
    pub(super) fn addresses(&self, on: &[usize]) -> Result<Vec<String>, String> {
        let first = 29_500 + self.below(1000);
        Ok(match &self.hosts {
            Some(_) => (first..).zip(on).map(|(port, host)| format!("{}:{port}", address(*host))).collect(),
            None => Ports::reserve(on.len()).map_err(text)?.addresses(),
        })
    }

    /// Starts workers that do not change.
    pub(super) fn workers(
        &self,
        kind: Kind,
        count: usize,
        steps: u64,
        checkpoints: &Path,
        restarts: u32,
    ) -> Result<Vec<Member>, String> {
        let addresses = self.addresses(&(0..count).collect::<Vec<_>>())?;
        let start = |index| {
            let task = self.task(&format!("worker:{index}"), kind, index, steps, Some(checkpoints));
            let config = format!(
                r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {{"type": "worker", "index": {index}}}}}"#
            );
            Member::start(task.env("TF_CONFIG", config).env("DISTRIBUTE_RESTART_COUNT", restarts.to_string()))
        };
        (0..count).map(start).collect()
    }

    /// Returns how the same training ends without faults; it is made once.
    pub(super) fn calm(&self, count: usize) -> Result<Vec<End>, String> {
        let key = (self.kind.name(), count, self.steps, self.is_tcp);
        if let Some(ends) = self.plan.calm.borrow().get(&key) {
            return Ok(ends.clone());
        }
        let stage = self.without_faults()?;
        let kind = if self.kind == Kind::Elastic { Kind::Workers } else { self.kind };
        let mut members = stage.workers(kind, count, self.steps, &stage.checkpoints(), 0)?;
        let ends = ends(&mut members)?;
        self.plan.calm.borrow_mut().insert(key, ends.clone());
        Ok(ends)
    }
}

/// Waits for the end of trainings that succeed.
pub(super) fn ends(members: &mut [Member]) -> Result<Vec<End>, String> {
    until_ended(members, LIMIT)?;
    members
        .iter()
        .map(|member| match (member.code(), member.end()) {
            (Some(0), Some(end)) => Ok(end),
            _ => Err(format!("a training failed; {}", super::crew::last_words(members))),
        })
        .collect()
}

/// Waits for a step of the first task.
pub(super) fn until_step(members: &mut [Member], step: u64) -> Result<(), String> {
    let reached = |members: &mut [Member]| {
        let ended = members.iter_mut().any(|member| member.has_ended() && member.code() != Some(0));
        let made = members.iter().any(|member| member.last_step().is_some_and(|(made, _)| made >= step));
        (ended || made).then_some(made)
    };
    match until(members, LIMIT, &format!("step {step}"), reached)? {
        true => Ok(()),
        false => Err(format!("a task ended early; {}", super::crew::last_words(members))),
    }
}

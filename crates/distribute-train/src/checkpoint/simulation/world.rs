//! The run and its processes, step by step, and what must hold at each.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

use super::super::disk::Disk;
use super::super::draft::SaveOptions;
use super::super::folder::{self, Retention};
use super::super::run::{RunId, act_as};
use super::super::stored::Stored;
use super::super::survey::Survey;
use super::super::{MODEL, Snapshot, read, restore, write};
use super::disk::{Simulated, Turns};
use super::oracle::{Contents, differs, tensors};
use super::scenario::{Action, Fault, Scenario};
use super::volume::{Defect, Volume};
use crate::{Error, Result};

mod others;

/// The folder of the checkpoints.
const ROOT: &str = "/disk/checkpoints";

/// A defect of the program; the simulation finds each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plant {
    Disk(Defect),
    /// Checkpoints are restored without a look at their checksums.
    NoChecksums,
    /// Damaged checkpoints count as those that are kept.
    DamagedKept,
    /// A run that begins takes a folder for its own whatever is in it.
    NoClaim,
}

/// The result of a scenario.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    pub(super) saved: u64,
    pub(super) crashes: u64,
    pub(super) operations: u64,
    /// Restarts that found a checkpoint.
    pub(super) restored: u64,
}

pub(super) struct World<'a> {
    scenario: &'a Scenario,
    plant: Option<Plant>,
    volume: Arc<Mutex<Volume>>,
    root: PathBuf,
    /// The number of the process, and of the next one.
    process: u64,
    processes: u64,
    /// The run, once it is known to the process, and whether the process has claimed the folder.
    run: Option<RunId>,
    /// How many operations had failed when the process started.
    calm_since: u64,
    claimed: bool,
    damaged: Vec<u64>,
    step: u64,
    number: u64,
    /// The number of the newest save that has returned without an error.
    floor: Option<u64>,
    /// The step of each number.
    steps: BTreeMap<u64, u64>,
    outcome: Outcome,
}

/// Why an action did not succeed.
enum Stop {
    /// The process is at its end.
    Killed,
    /// A fault made an operation fail.
    Failed,
    Wrong(String),
}

type Step<T> = std::result::Result<T, Stop>;

fn wrong<T>(problem: impl Into<String>) -> Step<T> {
    Err(Stop::Wrong(problem.into()))
}

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario, plant: Option<Plant>) -> World<'a> {
        let mut volume = Volume::new(scenario.seed, &scenario.faults, &scenario.after_renames);
        (volume.ordered, volume.exchanges) = (scenario.ordered, scenario.exchanges);
        if let Some(Plant::Disk(defect)) = plant {
            volume.defect = Some(defect);
        }
        World {
            scenario,
            plant,
            volume: Arc::new(Mutex::new(volume)),
            root: PathBuf::from(ROOT),
            process: 1,
            processes: 1,
            run: None,
            calm_since: 0,
            claimed: false,
            damaged: Vec::new(),
            step: 0,
            number: 0,
            floor: None,
            steps: BTreeMap::new(),
            outcome: Outcome::default(),
        }
    }

    /// Runs the scenario, and then all that is left without faults.
    pub(super) fn run(mut self) -> std::result::Result<Outcome, String> {
        let outcome = self.run_all();
        let volume = self.volume.lock();
        self.outcome.operations = volume.count;
        outcome.map(|()| self.outcome).map_err(|problem| {
            let log = volume.log.iter().rev().take(60).rev().map(|line| format!("\n    {line}")).collect::<String>();
            format!("{problem}\nthe last operations:{log}")
        })
    }

    fn run_all(&mut self) -> std::result::Result<(), String> {
        self.restart_until_done()?;
        for action in &self.scenario.actions {
            match self.act(*action) {
                // A process that cannot restore ends, and is started again.
                Err(Stop::Failed) if *action == Action::Restart => self.restart_until_done()?,
                Ok(()) | Err(Stop::Failed) => {}
                Err(Stop::Killed) => self.restart_until_done()?,
                Err(Stop::Wrong(problem)) => return Err(format!("{action:?}: {problem}")),
            }
            if matches!(action, Action::Rivals | Action::Twins) {
                return Ok(());
            }
        }
        // Without faults all is well again.
        self.volume.lock().calm();
        self.restart_until_done()?;
        for _ in 0..2 {
            self.calm(Action::Save { steps: 1 })?;
            self.calm(Action::Restart)?;
        }
        Ok(())
    }

    fn calm(&mut self, action: Action) -> std::result::Result<(), String> {
        match self.act(action) {
            Ok(()) => Ok(()),
            Err(Stop::Wrong(problem)) => Err(format!("{action:?} without faults: {problem}")),
            Err(_) => Err(format!("{action:?} fails without faults")),
        }
    }

    fn act(&mut self, action: Action) -> Step<()> {
        match action {
            Action::Save { steps } => self.save(steps, false),
            Action::SaveAmidReads { steps } => self.save(steps, true),
            Action::Restart => self.restart(),
            Action::Stranger => self.stranger(),
            Action::SetAside => self.set_aside(),
            Action::Rot => self.rot(),
            Action::Rivals => self.at_once(false),
            Action::Twins => self.at_once(true),
        }
    }

    fn disk(&self) -> Disk {
        Simulated::disk(&self.volume, None)
    }

    fn contents(&self) -> Contents {
        Contents::of(&self.volume.lock(), &self.root)
    }

    /// Returns the end of an action by an error, which is wrong if no fault has caused it.
    fn stopped(&self, before: u64, error: &Error) -> Stop {
        let volume = self.volume.lock();
        match (volume.ended, volume.troubles > before) {
            (Some(_), _) => Stop::Killed,
            (None, true) => Stop::Failed,
            (None, false) => Stop::Wrong(format!("an error without a fault: {error}")),
        }
    }

    fn troubles(&self) -> u64 {
        self.volume.lock().troubles
    }

    fn restart_until_done(&mut self) -> std::result::Result<(), String> {
        // Each crash and each error uses up a fault, or a part of the time for which the disk is full.
        for _ in 0..1000 {
            match self.restart() {
                Ok(()) => return Ok(()),
                Err(Stop::Wrong(problem)) => return Err(format!("a restart: {problem}")),
                Err(_) => {}
            }
        }
        Err("the run never starts again".to_owned())
    }

    /// Starts the run's process again, which restores the newest checkpoint.
    fn restart(&mut self) -> Step<()> {
        {
            let mut volume = self.volume.lock();
            self.outcome.crashes += u64::from(volume.ended == Some(Fault::Power));
            volume.restart();
        }
        self.processes += 1;
        self.process = self.processes;
        act_as(self.process);
        (self.run, self.claimed, self.damaged) = (None, false, Vec::new());
        let before = self.troubles();
        self.calm_since = before;
        // What is there, before the process changes anything.
        let there = self.contents();
        if let Some(floor) = self.floor
            && !there.whole.iter().any(|whole| whole.number >= floor)
        {
            return wrong(format!("number {floor} was saved, and is no longer there: {there:?}"));
        }
        let restored = match self.restored() {
            Ok(restored) => restored,
            Err(error @ Error::NoneWhole { .. }) if self.volume.lock().ended.is_none() => {
                return match there.whole.first() {
                    // A file that cannot be read counts as damaged.
                    _ if self.troubles() > before => Err(Stop::Failed),
                    Some(newest) => wrong(format!("{error}, although there is {newest:?}")),
                    // All that is left is damaged: the user has to decide. Here, for a new folder.
                    None => self.give_up_folder(),
                };
            }
            Err(error) => return Err(self.stopped(before, &error)),
        };
        let failed = self.troubles() > before;
        match (restored, there.whole.first()) {
            (None, None) => self.run = folder::claimed_by(&self.disk(), &self.root),
            (None, Some(_)) if failed => return Err(Stop::Failed),
            (None, Some(newest)) => return wrong(format!("nothing is restored, although there is {newest:?}")),
            (Some((snapshot, damaged)), newest) => {
                let number = self.check(&snapshot, &there)?;
                match newest {
                    Some(newest) if newest.number == number || failed => {}
                    newest => return wrong(format!("number {number} is restored, and the newest is {newest:?}")),
                }
                (self.run, self.damaged, self.step) = (snapshot.run(), damaged, snapshot.step());
                self.outcome.restored += 1;
            }
        }
        if self.volume.lock().ended.is_some() { Err(Stop::Killed) } else { Ok(()) }
    }

    /// Restores as a process does that starts; returns the sequence numbers that were found damaged, too.
    fn restored(&self) -> Result<Option<(Snapshot, Vec<u64>)>> {
        let disk = &self.disk();
        folder::clear(disk, &self.root)?;
        let (found, damaged) = self.newest(disk)?;
        Ok(found.map(|snapshot| (snapshot, damaged)))
    }

    fn newest(&self, disk: &Disk) -> Result<(Option<Snapshot>, Vec<u64>)> {
        match (self.plant, self.scenario.streams) {
            (Some(Plant::NoChecksums), _) => folder::newest(disk, &self.root, |path| self.unchecked(path)),
            (_, false) => folder::newest(disk, &self.root, |path| read::read(disk, path)),
            (_, true) => folder::newest(disk, &self.root, |path| {
                let survey = Survey::of(disk, path)?;
                let mut snapshot = Snapshot { run: Some(survey.found.run), ..Snapshot::new(survey.found.step) };
                snapshot.state.clone_from(&survey.found.state);
                for (group, tensors) in &survey.found.tensors {
                    for (name, place) in tensors {
                        let bytes = place.shape.iter().product::<usize>() * place.dtype.size_bytes();
                        let bytes = survey.read(disk, group, name, 0..bytes)?;
                        let stored = Stored { dtype: place.dtype, shape: place.shape.clone(), bytes };
                        snapshot.files.entry(group.clone()).or_default().insert(name.clone(), stored);
                    }
                }
                Ok(snapshot)
            }),
        }
    }

    /// Reads a checkpoint without a look at checksums, as a defect.
    fn unchecked(&self, path: &Path) -> Result<Snapshot> {
        use super::super::manifest::{MANIFEST, Manifest};
        use super::super::stored::tensors_of;
        let volume = self.volume.lock();
        let damaged = |problem: &str| Error::Damaged { path: path.to_owned(), problem: problem.to_owned() };
        let read = |name: &str| {
            let found = volume.find(&path.join(name)).ok().and_then(|id| volume.bytes(id).map(<[u8]>::to_vec));
            found.ok_or_else(|| damaged(name))
        };
        let manifest = Manifest::from_text(&read(MANIFEST)?).map_err(|_| damaged("manifest"))?;
        let mut snapshot = Snapshot { run: Some(manifest.run), ..Snapshot::new(manifest.step) };
        let state: Value = serde_json::from_slice(&read("state.json")?).map_err(|_| damaged("state"))?;
        snapshot.state.insert("program".to_owned(), state["state"]["program"].clone());
        for name in manifest.files.keys().filter(|name| name.ends_with(".safetensors")) {
            let tensors = tensors_of(&read(name)?).map_err(|problem| damaged(&problem))?;
            snapshot.files.entry(MODEL.to_owned()).or_default().extend(tensors);
        }
        Ok(snapshot)
    }

    /// Checks that what was restored is what was saved; returns its number.
    fn check(&self, snapshot: &Snapshot, there: &Contents) -> Step<u64> {
        let Ok(number) = snapshot.program::<u64>() else { return wrong("a checkpoint without a number is restored") };
        if self.steps.get(&number) != Some(&snapshot.step()) {
            return wrong(format!("number {number} is restored at step {}, and was not saved there", snapshot.step()));
        }
        if let Some(problem) = differs(snapshot, number, self.scenario.tensor_bytes) {
            return wrong(format!("number {number} is restored, and is damaged: {problem}; there is {there:?}"));
        }
        Ok(number)
    }

    /// Begins in a new folder, since nothing in this one is whole.
    fn give_up_folder(&mut self) -> Step<()> {
        if self.floor.is_some() {
            return wrong(format!("nothing is whole, although number {:?} was saved", self.floor));
        }
        self.root = PathBuf::from(format!("{ROOT}-{}", self.processes));
        self.run = None;
        Ok(())
    }

    fn snapshot(&mut self, run: RunId, step: u64) -> Snapshot {
        self.number += 1;
        self.steps.insert(self.number, step);
        snapshot_of(run, step, self.number, self.scenario.tensor_bytes)
    }

    fn settings(&self, run: RunId) -> (SaveOptions, Retention) {
        let options =
            SaveOptions { max_shard_bytes: self.scenario.max_shard_bytes, run, backup: false, keep_every: None };
        let damaged = if self.plant == Some(Plant::DamagedKept) { Vec::new() } else { self.damaged.clone() };
        (options, Retention { run, backup: false, count: self.scenario.keep, damaged })
    }

    /// Makes the folder this run's, before the process saves for the first time.
    fn claim(&mut self) -> Step<RunId> {
        if let Some(run) = self.run.filter(|_| self.claimed) {
            return Ok(run);
        }
        let before = self.troubles();
        let claimed = folder::claim(&self.disk(), &self.root, self.run, false);
        let run = claimed.map_err(|error| self.stopped(before, &error))?;
        (self.run, self.claimed) = (Some(run), true);
        Ok(run)
    }

    fn save(&mut self, steps: u64, amid_reads: bool) -> Step<()> {
        let run = self.claim()?;
        let step = self.step.max(1) + steps;
        let (there, before) = (self.contents(), self.troubles());
        let snapshot = self.snapshot(run, step);
        let number = self.number;
        let (options, keep) = self.settings(run);
        let outcome = match amid_reads {
            false => write::save(&self.disk(), &self.root, &snapshot, &options, &keep),
            true => self.save_amid_reads(&snapshot, &options, &keep, &there)?,
        };
        match outcome {
            Ok(_) => {}
            Err(error) => return Err(self.stopped(before, &error)),
        }
        if self.volume.lock().ended.is_some() {
            // It had returned before.
            self.saved(step, number);
            return Err(Stop::Killed);
        }
        self.saved(step, number);
        self.check_kept(run, &there, before)
    }

    fn saved(&mut self, step: u64, number: u64) {
        (self.step, self.floor) = (step, Some(number));
        self.outcome.saved += 1;
    }

    /// Checks what a save has left.
    fn check_kept(&self, run: RunId, before: &Contents, troubles: u64) -> Step<()> {
        let now = self.contents();
        let newest = now.of_run(run).next();
        if newest.map(|newest| newest.number) != self.floor {
            return wrong(format!("number {:?} was saved, and the newest is {newest:?}", self.floor));
        }
        let good = |contents: &Contents| contents.of_run(run).map(|whole| whole.step).collect::<Vec<u64>>();
        let (had, has) = (good(before), good(&now));
        let replaced = had.contains(&self.step);
        let least = self.scenario.keep.min(had.len() + usize::from(!replaced));
        if has.len() < least && self.rotted_unseen(&now) == 0 {
            return wrong(format!("steps {had:?} and {} were whole, and {has:?} are kept", self.step));
        }
        if self.troubles() == troubles {
            // What other processes have left, and this one could not remove, goes with the next start.
            let own = format!("{:016x}-", self.process);
            let left = |name: &&String| name.contains(&own) || self.troubles() == self.calm_since;
            if let Some(left) = now.temporary.iter().find(left) {
                return wrong(format!("a save without a fault leaves {left}"));
            }
            // One that could not be read for a moment is not counted.
            if has.len() > self.scenario.keep + self.damaged.len() {
                return wrong(format!("{} are to be kept, and {has:?} are", self.scenario.keep));
            }
        }
        Ok(())
    }

    /// Returns how many checkpoints are damaged without the process's knowledge, which count as whole for it.
    fn rotted_unseen(&self, now: &Contents) -> usize {
        let known = if self.plant == Some(Plant::DamagedKept) { self.damaged.len() } else { 0 };
        (now.folders - now.whole.len()).saturating_sub(known)
    }

    fn save_amid_reads(
        &self,
        snapshot: &Snapshot,
        options: &SaveOptions,
        keep: &Retention,
        there: &Contents,
    ) -> Step<Result<PathBuf>> {
        let turns = Turns::new(2, self.scenario.seed ^ self.number);
        let (process, floor, before) = (self.process, self.floor, self.troubles());
        let read = || {
            act_as(process + 1_000_000);
            let disk = Simulated::disk(&self.volume, Some((turns.clone(), 1)));
            let seen: Vec<Result<Option<Snapshot>>> = (0..2).map(|_| restore::newest(&disk, &self.root)).collect();
            turns.end(1);
            seen
        };
        let (outcome, seen) = std::thread::scope(|scope| {
            let reader = scope.spawn(read);
            let disk = Simulated::disk(&self.volume, Some((turns.clone(), 0)));
            let outcome = write::save(&disk, &self.root, snapshot, options, keep);
            turns.end(0);
            (outcome, reader.join())
        });
        let Ok(seen) = seen else { return wrong("a reader panics") };
        let (failed, ended) = (self.troubles() > before, self.volume.lock().ended.is_some());
        for seen in seen {
            match seen {
                Ok(Some(snapshot)) => {
                    let number = self.check(&snapshot, there)?;
                    if floor.is_some_and(|floor| number < floor) && !failed {
                        return wrong(format!("a reader finds number {number}, after {floor:?} was saved"));
                    }
                }
                Ok(None) if there.whole.is_empty() || failed || ended => {}
                Ok(None) => return wrong("a reader finds nothing while a checkpoint is replaced"),
                Err(_) if failed || ended || there.whole.is_empty() => {}
                Err(error) => return wrong(format!("a reader fails: {error}")),
            }
        }
        Ok(outcome)
    }
}

fn snapshot_of(run: RunId, step: u64, number: u64, bytes: usize) -> Snapshot {
    let mut snapshot = Snapshot { run: Some(run), ..Snapshot::new(step) };
    for (name, stored) in tensors(number, bytes) {
        snapshot.files.entry(MODEL.to_owned()).or_default().insert(name.to_owned(), stored);
    }
    snapshot.state.insert("program".to_owned(), Value::from(number));
    snapshot
}

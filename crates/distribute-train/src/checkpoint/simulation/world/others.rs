//! Changes to the folder of a run that others make: other runs, another process of the same one, and decay.

use super::super::super::draft::SaveOptions;
use super::super::super::run::{RunId, act_as};
use super::super::super::{folder, write};
use super::super::disk::{Simulated, Turns};
use super::super::oracle::{Contents, Whole, files};
use super::super::scenario::Fault;
use super::{Plant, Step, Stop, World, snapshot_of, wrong};
use crate::{Error, Result};

impl World<'_> {
    /// Begins another run in the folder, by another process.
    pub(super) fn stranger(&mut self) -> Step<()> {
        let (there, before) = (self.contents(), self.troubles());
        self.processes += 1;
        act_as(self.processes);
        // It would be told by the first save at the latest.
        let claimed = match self.plant {
            Some(Plant::NoClaim) => Ok(RunId::draw()),
            _ => folder::claim(&self.disk(), &self.root, None, false),
        };
        let outcome = match claimed {
            Ok(run) if there.folders > 0 && self.plant == Some(Plant::NoClaim) => {
                self.number += 1;
                let snapshot = snapshot_of(run, self.step + 1, self.number, self.scenario.tensor_bytes);
                let (options, keep) = self.settings(run);
                let mut snapshot = snapshot;
                snapshot.run = there.whole.first().map(|whole| whole.run).or(snapshot.run);
                let options = SaveOptions { run: snapshot.run.unwrap_or(run), ..options };
                drop(write::save(&self.disk(), &self.root, &snapshot, &options, &keep));
                Ok(())
            }
            Ok(_) if there.folders > 0 => wrong("another run begins in the folder of this one"),
            Ok(_) => Ok(()),
            Err(Error::OtherRun { .. }) if there.folders > 0 => Ok(()),
            Err(error) => Err(self.stopped(before, &error)),
        };
        act_as(self.process);
        let now = self.contents();
        if outcome.is_ok() && now.whole != there.whole {
            return wrong(format!("another run changes {there:?} to {now:?}"));
        }
        // The run's own process continues, unless it was killed with the other.
        outcome
    }

    /// Begins a new run that sets this one aside.
    pub(super) fn set_aside(&mut self) -> Step<()> {
        // Only what is known to be on the disk; a run that was never saved has nothing to lose.
        let there = self.contents();
        let numbers: Vec<u64> = there.whole.iter().map(|whole| whole.number).collect();
        let run = loop {
            self.processes += 1;
            self.process = self.processes;
            act_as(self.process);
            let before = self.troubles();
            self.calm_since = before;
            let claimed = folder::claim(&self.disk(), &self.root, None, true);
            match claimed {
                Ok(run) => break run,
                Err(error) => match self.stopped(before, &error) {
                    Stop::Wrong(problem) => return wrong(problem),
                    _ => {
                        let mut volume = self.volume.lock();
                        self.outcome.crashes += u64::from(volume.ended == Some(Fault::Power));
                        volume.restart();
                    }
                },
            }
        };
        let left = self.contents();
        if left.folders > 0 {
            return wrong(format!("a run is set aside, and {left:?} are left"));
        }
        let mut aside: Vec<Whole> = Vec::new();
        {
            let volume = self.volume.lock();
            let names = volume.find(&self.root).and_then(|id| volume.names(id)).unwrap_or_default();
            for name in names.iter().filter(|name| name.to_string_lossy().starts_with("run-")) {
                aside.extend(Contents::of(&volume, &self.root.join(name)).whole);
            }
        }
        // A crash takes back what was not promised, so only the newest saved one must be there.
        let kept = |number: u64| aside.iter().any(|whole| whole.number == number);
        let promised = numbers.iter().max().filter(|number| self.floor.is_some_and(|floor| **number == floor));
        if let Some(lost) = promised.filter(|number| !kept(**number)) {
            return wrong(format!("number {lost} was set aside, and is lost: {aside:?}"));
        }
        (self.run, self.claimed, self.damaged, self.floor) = (Some(run), true, Vec::new(), None);
        Ok(())
    }

    /// Changes a bit of a file of a checkpoint.
    pub(super) fn rot(&mut self) -> Step<()> {
        let mut volume = self.volume.lock();
        let files = files(&volume, &self.root);
        if !files.is_empty() {
            let file = files[volume.draw(files.len() as u64) as usize].clone();
            if volume.rot(&file) {
                // What was saved is no longer promised.
                self.floor = None;
                volume.note("a bit changes in", &file);
            }
        }
        Ok(())
    }

    /// Two processes save in the folder at the same time: of two runs, or of one.
    pub(super) fn at_once(&mut self, twins: bool) -> Step<()> {
        let (there, before) = (self.contents(), self.troubles());
        let run = self.run.filter(|_| twins || !there.whole.is_empty());
        let turns = Turns::new(2, self.scenario.seed);
        let numbers = [self.number + 1, self.number + 2];
        let steps = [self.step + 1, self.step + if self.volume.lock().draw(2) == 0 { 1 } else { 2 }];
        let other = if twins { run } else { None };
        let settings: Vec<_> = [self.process, self.processes + 1].into_iter().zip([run, other]).zip(0..).collect();
        let work = |((process, run), place): ((u64, Option<RunId>), usize)| {
            act_as(process);
            let disk = Simulated::disk(&self.volume, Some((turns.clone(), place)));
            let save = || {
                let run = folder::claim(&disk, &self.root, run, false)?;
                let snapshot = snapshot_of(run, steps[place], numbers[place], self.scenario.tensor_bytes);
                let (options, keep) = self.settings(run);
                write::save(&disk, &self.root, &snapshot, &options, &keep)?;
                Ok::<RunId, Error>(run)
            };
            let outcome = save();
            turns.end(place);
            outcome
        };
        let outcomes: Vec<Option<Result<RunId>>> = std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = settings.into_iter().map(|setting| scope.spawn(move || work(setting))).collect();
            threads.into_iter().map(|thread| thread.join().ok()).collect()
        });
        for place in 0..2 {
            self.steps.insert(numbers[place], steps[place]);
        }
        self.volume.lock().restart();
        let now = self.contents();
        for (place, outcome) in outcomes.iter().enumerate() {
            match outcome {
                None => return wrong("a process panics"),
                Some(Ok(run)) => {
                    // A twin may have replaced or removed it by a newer one, and one of the same step by its own.
                    let kept = now.of_run(*run).any(|whole| {
                        whole.number == numbers[place]
                            || twins && (whole.number >= numbers[0] || whole.step > steps[place])
                    });
                    if !kept {
                        return wrong(format!(
                            "number {} was saved by one of two, and is lost: {now:?}",
                            numbers[place]
                        ));
                    }
                }
                Some(Err(_)) => {}
            }
        }
        self.processes += 2;
        act_as(self.processes);
        self.volume.lock().calm();
        match self.restored() {
            Ok(Some((snapshot, _))) => {
                let number = self.check(&snapshot, &now)?;
                let runs: Vec<RunId> = now.whole.iter().map(|whole| whole.run).collect();
                if runs.iter().any(|run| Some(*run) != snapshot.run()) {
                    return wrong(format!("number {number} is restored, and the folder has several runs: {now:?}"));
                }
            }
            Ok(None) if now.whole.is_empty() => {}
            Ok(None) => return wrong("nothing is restored after two have saved at once"),
            // In words, so that nothing is lost.
            Err(Error::SeveralRuns { .. }) => {}
            Err(Error::NoneWhole { .. })
                if now.whole.is_empty() && (self.floor.is_none() || self.troubles() > before) => {}
            Err(error) => return wrong(format!("after two have saved at once: {error}; {now:?}")),
        }
        Ok(())
    }
}

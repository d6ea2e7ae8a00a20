//! Starts the tasks that a [`Revival`] decides for, and tells it of their ends.

use std::time::{Duration, Instant};

use super::{Action, Newest, Revival, Start};
use crate::cores::Place;
use crate::error::Error;
use crate::host::{Host, TICK};
use crate::hosts::Last;
use crate::job::Task;
use crate::local::{Event, Local};
use crate::outcome::{Outcome, tells_of_another};
use crate::process;
use crate::status::Status;

/// Variables for a start of a task; one without a value is removed.
pub(crate) type Environment = Vec<(&'static str, Option<String>)>;

/// Tasks of this host that are started again one by one.
pub(crate) struct Runner<'a, E> {
    host: &'a Host,
    tasks: &'a [Task],
    revival: Revival,
    grace: Duration,
    places: Vec<Option<Place>>,
    environment: E,
    /// Returns the newest generation of an elastic job.
    newest: Option<&'a dyn Fn() -> Option<Newest>>,
    status: Option<&'a mut Status>,
    begun: Instant,
    /// The newest start of each task.
    locals: Vec<Option<Local<'a>>>,
    /// The error of the first task that could not be started.
    failure: Option<Error>,
}

/// The end of all tasks.
#[derive(Debug)]
pub(crate) struct Ended {
    /// With the newest end of each task.
    pub(crate) revival: Revival,
    /// One element per task, like the other one.
    pub(crate) pids: Vec<Option<i32>>,
    pub(crate) lasts: Vec<Last>,
}

impl<'a, E: FnMut(&Task, Start) -> Result<Environment, Error>> Runner<'a, E> {
    /// Prepares tasks, which all belong to this host; `environment` returns the variables of a task for a start.
    ///
    /// # Errors
    /// [`Error::Cores`] if there are too few.
    pub(crate) fn new(
        host: &'a Host,
        tasks: &'a [Task],
        revival: Revival,
        grace: Duration,
        environment: E,
    ) -> Result<Self, Error> {
        let (places, locals) = (host.places(tasks.len())?, tasks.iter().map(|_| None).collect());
        let (newest, status, begun, failure) = (None, None, Instant::now(), None);
        Ok(Self { host, tasks, revival, grace, places, environment, newest, status, begun, locals, failure })
    }

    /// Shows the tasks on the job's page.
    pub(crate) fn with_status(self, status: &'a mut Status) -> Self {
        Self { status: Some(status), ..self }
    }

    /// Asks for the newest generation of the elastic job that the tasks are.
    pub(crate) fn with_newest(self, newest: &'a dyn Fn() -> Option<Newest>) -> Self {
        Self { newest: Some(newest), ..self }
    }

    /// Runs the tasks until none is left and none is started again.
    ///
    /// # Errors
    /// If a task cannot be started; the others have been stopped then.
    pub(crate) fn run(mut self) -> Result<Ended, Error> {
        loop {
            self.reap();
            self.revival.handle_timeout(self.begun.elapsed());
            while let Some(action) = self.revival.poll_action() {
                self.act(action);
            }
            if let Some(status) = &mut self.status {
                status.poll();
            }
            if self.revival.is_done() {
                return self.finish();
            }
            let timeout = self.revival.poll_timeout().map(|at| at.saturating_sub(self.begun.elapsed()));
            if let Ok(signal) = self.host.signals().recv_timeout(timeout.unwrap_or(TICK).min(TICK)) {
                self.revival.handle_signal(signal, self.begun.elapsed());
            }
        }
    }

    fn finish(self) -> Result<Ended, Error> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let of_task = |(rank, local): (usize, &Option<Local<'_>>)| {
            let local = local.as_ref();
            let pid = local.and_then(|local| local.pids().next()).map(|(_, pid)| pid);
            let last = local.and_then(|local| local.lasts().pop()).unwrap_or(Last { rank, ..Last::default() });
            (pid, last)
        };
        let (pids, lasts) = self.locals.iter().enumerate().map(of_task).unzip();
        Ok(Ended { revival: self.revival, pids, lasts })
    }

    fn reap(&mut self) {
        while let Some((pid, exit)) = process::reap() {
            let event = self.locals.iter_mut().flatten().find_map(|local| local.ended(pid, exit));
            if let Some(Event::Exit { rank, exit, leftover }) = event {
                if let Some(status) = &mut self.status {
                    status.ended(rank, exit);
                }
                self.look();
                self.revival.handle_exit(rank, exit, leftover, self.begun.elapsed());
            }
        }
        for event in self.locals.iter_mut().flatten().flat_map(Local::gone) {
            if let Event::Gone { rank } = event {
                self.revival.handle_gone(rank);
            }
        }
    }

    /// Looks at the generations, which members that live may have changed.
    fn look(&mut self) {
        if let Some(newest) = self.newest {
            self.revival.handle_newest(newest());
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start { rank, start } => {
                // None is started after one that could not be.
                if self.failure.is_none() {
                    self.failure = self.start(rank, start).err();
                }
                if self.failure.is_some() {
                    self.revival.handle_unstarted(rank, self.begun.elapsed());
                }
            }
            Action::Signal { rank, signal } => {
                if let Some(status) = &mut self.status {
                    status.signalled(rank, signal);
                }
                self.signal(rank, signal, false);
            }
            Action::SignalLeader { rank, signal } => self.signal(rank, signal, true),
            Action::Note(note) => self.host.note(note.text(self.tasks, self.grace)),
        }
    }

    fn start(&mut self, rank: usize, start: Start) -> Result<(), Error> {
        let task = &self.tasks[rank];
        let env = (self.environment)(task, start)?;
        self.look();
        self.revival.handle_start(rank);
        // The lines of its last start come before those of the next one.
        if let Some(last) = &self.locals[rank] {
            last.wait_for_streams(|_| true);
        }
        let local = self.host.start_alone(task, start.attempt, env, self.places[rank].as_ref())?;
        if let Some(status) = &mut self.status {
            local.tails().for_each(|(rank, pid, tail)| status.started(rank, pid, Some(tail)));
        }
        self.locals[rank] = Some(local);
        Ok(())
    }

    fn signal(&self, rank: usize, signal: i32, leader_only: bool) {
        if let Some(local) = &self.locals[rank] {
            local.signal(rank, signal, leader_only);
        }
    }
}

impl Ended {
    /// Returns the newest end of each task, with what its output says of others.
    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        let mut outcomes = self.revival.outcomes();
        for (outcome, last) in outcomes.iter_mut().zip(&self.lasts) {
            outcome.told = tells_of_another(&last.lines);
        }
        outcomes
    }
}

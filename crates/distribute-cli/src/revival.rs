//! Decides for tasks that are started again one by one: which starts when, and which are stopped.
//!
//! It takes ends of tasks, signals and the time since the launcher began, and returns actions. It does no input or
//! output. The processes of each start have a [`Supervisor`] of their own.

mod newest;
mod note;
mod runner;

use std::collections::VecDeque;
use std::time::Duration;

use signal_hook::consts::SIGTERM;

pub(crate) use self::newest::Newest;
pub(crate) use self::note::Note;
pub(crate) use self::runner::{Ended, Environment, Runner};
use crate::outcome::{Exit, Outcome, Verdict};
use crate::restart::{Budget, Decision};
use crate::signals::Signal;
use crate::supervisor::{self, SETTLE, Supervisor};

/// The consequence of an end for the other tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rules {
    /// The tasks do not need each other. One that fails is started again, whatever its exit code.
    Independent,
    /// The tasks train together as long as `min` of them are left. A lost one is started again, and a failure that a
    /// restart would not change stops all.
    Elastic { min: usize },
}

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start a task.
    Start { rank: usize, start: Start },
    /// Send a signal to the process group of a task.
    Signal { rank: usize, signal: i32 },
    /// Send a signal to the first process of a task only.
    SignalLeader { rank: usize, signal: i32 },
    /// Show a message to the user.
    Note(Note),
}

/// A start of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    /// Counts all starts of the task from 0.
    pub(crate) attempt: u32,
    /// Counts the jobs of the tasks from 0. If none runs any more that has what they had in common, it is lost, and the
    /// next start begins another job.
    pub(crate) job: u32,
    /// Counts the starts of the task in this job from 0.
    pub(crate) in_job: u32,
}

/// The state of the tasks.
#[derive(Debug)]
pub(crate) struct Revival {
    rules: Rules,
    tasks: Vec<Task>,
    phase: Phase,
    grace: Duration,
    interrupted: Option<i32>,
    /// The task after whose end fewer were left than the rules ask for.
    too_few: Option<usize>,
    /// How often the state of a job was lost with its tasks.
    jobs_lost: u32,
    /// The newest generation of the job, as far as it is known.
    newest: Option<Newest>,
    actions: VecDeque<Action>,
}

#[derive(Debug)]
struct Task {
    budget: Budget,
    /// In all jobs, and in the present one.
    starts: u32,
    starts_in_job: u32,
    /// The processes of the newest start, as long as one of them is left.
    supervisor: Option<Supervisor>,
    plan: Plan,
    /// The number of the newest generation when it was started: its process can only be in later ones.
    begun_after: u64,
    /// Whether it is being stopped, since its job is lost, and is started again in the next one.
    is_stranded: bool,
    /// The newest end.
    outcome: Option<Outcome>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// It is started at this time, once no process of its last start is left.
    Start(Duration),
    Run,
    /// It has ended, and is not started again.
    Rest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// One of an elastic job has ended well, so that the others are about to.
    Ending,
    /// After the end of `rank` the others are stopped, unless they end by themselves before.
    Settling {
        until: Duration,
        rank: usize,
    },
    Stopping,
}

/// The meaning of an end in an elastic job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Done,
    /// It was told to stop, as by SIGTERM.
    Told,
    /// It was killed, or has lost the others; a restart may help.
    Lost,
    /// A restart would not help.
    Failed,
}

impl Kind {
    fn of(exit: Exit) -> Kind {
        match exit {
            Exit::Code(0) => Kind::Done,
            exit if exit.answers(SIGTERM) => Kind::Told,
            Exit::Signal(_) | Exit::Lost | Exit::Code(128..) => Kind::Lost,
            Exit::Code(_) => Kind::Failed,
        }
    }
}

impl Revival {
    /// Creates tasks that start at once, each with this budget of restarts, and with `grace` to stop when they are
    /// asked to.
    pub(crate) fn new(tasks: usize, rules: Rules, budget: &Budget, grace: Duration) -> Self {
        let task = |_| Task {
            budget: budget.clone(),
            starts: 0,
            starts_in_job: 0,
            supervisor: None,
            plan: Plan::Start(Duration::ZERO),
            begun_after: 0,
            is_stranded: false,
            outcome: None,
        };
        let tasks = (0..tasks).map(task).collect();
        let (phase, interrupted, too_few, newest, actions) = (Phase::Running, None, None, None, VecDeque::new());
        Self { rules, tasks, phase, grace, interrupted, too_few, jobs_lost: 0, newest, actions }
    }

    /// Handles the end of a task's first process; `leftover` tells whether others of its group live.
    pub(crate) fn handle_exit(&mut self, rank: usize, exit: Exit, leftover: bool, now: Duration) {
        let task = &mut self.tasks[rank];
        let Some(supervisor) = task.supervisor.as_mut().filter(|_| task.plan == Plan::Run) else { return };
        supervisor.handle_exit(0, exit, leftover, now);
        task.outcome = supervisor.outcomes().first().copied();
        task.plan = Plan::Rest;
        if std::mem::take(&mut task.is_stranded) && self.phase == Phase::Running {
            task.plan = Plan::Start(now);
            self.forgive(rank, true);
            return self.collect();
        }
        match self.rules {
            Rules::Independent => self.follow_alone(rank, exit, now),
            Rules::Elastic { min } => self.follow_in_job(rank, exit, min, now),
        }
        self.collect();
    }

    /// Handles the end of the last process in a task's group.
    pub(crate) fn handle_gone(&mut self, rank: usize) {
        if let Some(supervisor) = &mut self.tasks[rank].supervisor {
            supervisor.handle_gone(0);
        }
        self.collect();
    }

    /// Handles a task that could not be started: the others are stopped.
    pub(crate) fn handle_unstarted(&mut self, rank: usize, now: Duration) {
        let task = &mut self.tasks[rank];
        (task.supervisor, task.plan) = (None, Plan::Rest);
        self.stop(now);
    }

    /// Handles a signal to the launcher.
    pub(crate) fn handle_signal(&mut self, signal: impl Into<Signal>, now: Duration) {
        let signal = signal.into();
        if let Signal::End(signal) = signal
            && self.phase != Phase::Stopping
        {
            (self.interrupted, self.phase) = (Some(signal), Phase::Stopping);
            let tasks = self.living();
            self.note(supervisor::Note::Interrupted { signal, tasks });
            self.cancel();
        }
        for supervisor in self.tasks.iter_mut().filter_map(|task| task.supervisor.as_mut()) {
            supervisor.handle_signal(signal, now);
        }
        self.collect();
    }

    /// Handles the passage of time.
    pub(crate) fn handle_timeout(&mut self, now: Duration) {
        if let Phase::Settling { until, rank } = self.phase
            && until <= now
        {
            self.stop_after(rank, now);
        }
        for supervisor in self.tasks.iter_mut().filter_map(|task| task.supervisor.as_mut()) {
            supervisor.handle_timeout(now);
        }
        self.collect();
        for (rank, task) in self.tasks.iter_mut().enumerate() {
            if self.phase == Phase::Running
                && task.supervisor.is_none()
                && matches!(task.plan, Plan::Start(at) if at <= now)
            {
                let start = Start { attempt: task.starts, job: self.jobs_lost, in_job: task.starts_in_job };
                self.actions.push_back(Action::Start { rank, start });
                (task.supervisor, task.plan) = (Some(Supervisor::new(1, self.grace)), Plan::Run);
                (task.starts, task.starts_in_job) = (task.starts + 1, task.starts_in_job + 1);
            }
        }
    }

    /// Returns the next action.
    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) has something to do.
    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        let settling = match self.phase {
            Phase::Settling { until, .. } => Some(until),
            Phase::Running | Phase::Ending | Phase::Stopping => None,
        };
        let next = self.tasks.iter().filter_map(|task| match (&task.supervisor, task.plan) {
            (Some(supervisor), _) => supervisor.poll_timeout(),
            (None, Plan::Start(at)) => Some(at),
            (None, Plan::Run | Plan::Rest) => None,
        });
        next.chain(settling).min()
    }

    /// Returns whether no process of any task is left, and none is started again.
    pub(crate) fn is_done(&self) -> bool {
        self.tasks.iter().all(|task| task.supervisor.is_none() && task.plan == Plan::Rest)
    }

    /// Returns the newest end of each task, once all are done.
    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        let unstarted = Outcome { exit: Exit::Lost, at: Duration::ZERO, stopped: true, forgiven: false, told: false };
        self.tasks.iter().map(|task| task.outcome.unwrap_or(unstarted)).collect()
    }

    /// Returns how often each task was started.
    pub(crate) fn starts(&self) -> Vec<u32> {
        self.tasks.iter().map(|task| task.starts).collect()
    }

    /// Returns the signal that stopped the tasks without a failure.
    pub(crate) fn interrupted(&self) -> Option<i32> {
        self.interrupted
    }

    /// Returns whether fewer tasks were left than the rules ask for.
    pub(crate) fn was_too_few(&self) -> bool {
        self.too_few.is_some()
    }

    /// Returns the outcome of an elastic job from the [`outcomes`](Self::outcomes) of its tasks: it succeeds if all
    /// that are left have ended with 0.
    pub(crate) fn verdict(&self, outcomes: &[Outcome]) -> Verdict {
        match (Verdict::of(outcomes, self.interrupted), self.too_few, self.interrupted) {
            (_, Some(rank), _) => Verdict::Cause(rank),
            // All that ran were lost before, and would have been started again.
            (Verdict::Success, None, Some(signal)) if !outcomes.iter().any(|outcome| outcome.exit.is_success()) => {
                Verdict::Interrupted(signal)
            }
            (verdict, ..) => verdict,
        }
    }

    /// Decides what follows the end of a task that no other needs.
    fn follow_alone(&mut self, rank: usize, exit: Exit, now: Duration) {
        if self.phase != Phase::Stopping && !exit.is_success() {
            self.revive(rank, exit, now);
        }
    }

    /// Decides what follows the end of a task of an elastic job.
    fn follow_in_job(&mut self, rank: usize, exit: Exit, min: usize, now: Duration) {
        let kind = Kind::of(exit);
        if self.phase != Phase::Stopping && matches!(kind, Kind::Told | Kind::Lost) {
            self.forgive(rank, true);
            self.strand(rank, exit);
        }
        let lost = match (self.phase, kind) {
            (Phase::Stopping, _) | (Phase::Settling { .. }, Kind::Done | Kind::Told | Kind::Lost) => None,
            (Phase::Settling { .. }, Kind::Failed) if exit.may_blame_others() && self.too_few.is_none() => None,
            (_, Kind::Failed) => {
                self.fail(rank, exit, now);
                None
            }
            (_, Kind::Done) => self.end(rank),
            (_, Kind::Told) => Some(self.leave(rank, exit, now, "it was told to stop".to_owned())),
            (Phase::Ending, Kind::Lost) => Some(self.leave(rank, exit, now, "the job is ending".to_owned())),
            (Phase::Running, Kind::Lost) => Some(self.revive(rank, exit, now)),
        };
        if let Some(lost) = lost.filter(|_| self.left() < min) {
            self.stop_too_few(lost, kind, min, now);
        } else if self.phase == Phase::Running && self.training() == 0 {
            self.begin_another(now);
        }
    }

    /// Stops all after a failure that a restart would not change.
    fn fail(&mut self, rank: usize, exit: Exit, now: Duration) {
        if let Some(told) = self.too_few.take() {
            self.forgive(told, true);
        }
        if exit.may_blame_others() {
            // Of two such codes either may be the cause, and its message is lost if it is stopped now.
            self.phase = Phase::Settling { until: now + self.grace.min(SETTLE), rank };
        } else {
            self.stop_after(rank, now);
        }
    }

    /// Stops those that are left, since they are too few.
    fn stop_too_few(&mut self, rank: usize, kind: Kind, min: usize, now: Duration) {
        self.forgive(rank, false);
        self.too_few = Some(rank);
        let (left, running, waits) = (self.left(), self.living(), kind == Kind::Told);
        self.actions.push_back(Action::Note(Note::TooFew { left, min, running, waits }));
        if waits {
            // Workers that stop together end one after another, and a second signal could end one that is saving.
            self.phase = Phase::Settling { until: now + self.grace, rank };
        } else {
            self.stop(now);
        }
    }

    /// Lets a task start again after a pause, if its budget allows it; returns the task.
    fn revive(&mut self, rank: usize, exit: Exit, now: Duration) -> usize {
        match self.tasks[rank].budget.after(exit, now) {
            Decision::Restart { pause, count, of } => {
                self.tasks[rank].plan = Plan::Start(now + pause);
                let others = self.others();
                self.actions.push_back(Action::Note(Note::Again { rank, exit, at: now, pause, count, of, others }));
                rank
            }
            Decision::GiveUp(why) => self.leave(rank, exit, now, why),
        }
    }

    /// Does without a task from now on; returns the task.
    fn leave(&mut self, rank: usize, exit: Exit, now: Duration, why: String) -> usize {
        let others = self.others();
        self.actions.push_back(Action::Note(Note::Left { rank, exit, at: now, why, others }));
        rank
    }

    /// Handles a good end in an elastic job: what starts from now on would find no others. Returns a task that is not
    /// started again therefore.
    fn end(&mut self, rank: usize) -> Option<usize> {
        if self.phase != Phase::Running {
            return None;
        }
        self.phase = Phase::Ending;
        let paused = |(rank, task): (usize, &Task)| matches!(task.plan, Plan::Start(_)).then_some(rank);
        let ranks: Vec<usize> = self.tasks.iter().enumerate().filter_map(paused).collect();
        self.cancel();
        let first = ranks.first().copied();
        if first.is_some() {
            self.actions.push_back(Action::Note(Note::Ending { rank, ranks }));
        }
        first
    }

    /// Stops all after a failure that a restart would not change.
    fn stop_after(&mut self, rank: usize, now: Duration) {
        let others = self.living();
        if let Some(Outcome { exit, at, .. }) = self.tasks[rank].outcome {
            self.note(supervisor::Note::Failed { rank, exit, at, others });
        }
        self.stop(now);
    }

    fn stop(&mut self, now: Duration) {
        self.phase = Phase::Stopping;
        self.cancel();
        // What a task that has ended left behind is on its way already.
        for task in self.tasks.iter_mut().filter(|task| task.plan == Plan::Run) {
            if let Some(supervisor) = &mut task.supervisor {
                supervisor.stop(SIGTERM, now);
            }
        }
        self.collect();
    }

    /// Starts none again of those that pause.
    fn cancel(&mut self) {
        for task in self.tasks.iter_mut().filter(|task| matches!(task.plan, Plan::Start(_))) {
            task.plan = Plan::Rest;
        }
    }

    /// Passes on the actions of the supervisors, and dismisses those whose processes are gone.
    fn collect(&mut self) {
        let (mut unstopped, mut on_request) = (Vec::new(), Vec::new());
        for (rank, task) in self.tasks.iter_mut().enumerate() {
            let Some(supervisor) = &mut task.supervisor else { continue };
            while let Some(action) = supervisor.poll_action() {
                let note = match action {
                    // Only supervisors of whole jobs start tasks.
                    supervisor::Action::Start { .. } => continue,
                    supervisor::Action::Signal { signal, .. } => {
                        self.actions.push_back(Action::Signal { rank, signal });
                        continue;
                    }
                    supervisor::Action::SignalLeader { signal, .. } => {
                        self.actions.push_back(Action::SignalLeader { rank, signal });
                        continue;
                    }
                    supervisor::Action::Note(note) => note,
                };
                match note {
                    // One note for all is shown.
                    supervisor::Note::Interrupted { .. }
                    | supervisor::Note::Failed { .. }
                    | supervisor::Note::Again { .. }
                    | supervisor::Note::GivenUp { .. }
                    | supervisor::Note::Forgiven { .. } => {}
                    supervisor::Note::Killing { asked: false, .. } => unstopped.push(rank),
                    supervisor::Note::Killing { asked: true, .. } => on_request.push(rank),
                    supervisor::Note::Leftover { .. } => {
                        self.actions.push_back(Action::Note(Note::Common(supervisor::Note::Leftover { rank })));
                    }
                    supervisor::Note::Stuck { .. } => {
                        self.actions.push_back(Action::Note(Note::Common(supervisor::Note::Stuck { rank })));
                    }
                }
            }
            if supervisor.is_done() {
                if task.plan == Plan::Run {
                    // Not even SIGKILL has ended it.
                    task.outcome = supervisor.outcomes().first().copied();
                    task.plan = Plan::Rest;
                }
                task.supervisor = None;
            }
        }
        for (ranks, asked) in [(unstopped, false), (on_request, true)] {
            if !ranks.is_empty() {
                self.note(supervisor::Note::Killing { ranks, asked });
            }
        }
    }

    fn note(&mut self, note: supervisor::Note) {
        self.actions.push_back(Action::Note(Note::Common(note)));
    }

    fn forgive(&mut self, rank: usize, forgiven: bool) {
        if let Some(outcome) = &mut self.tasks[rank].outcome {
            outcome.forgiven = forgiven;
        }
    }

    /// Returns how many tasks run.
    fn living(&self) -> usize {
        self.tasks.iter().filter(|task| task.plan == Plan::Run).count()
    }

    /// Returns whether other tasks of the same job run.
    fn others(&self) -> bool {
        self.rules != Rules::Independent && self.training() > 0
    }

    /// Returns how many tasks run, are started again, or have ended well.
    fn left(&self) -> usize {
        let is_left = |task: &&Task| match task.plan {
            Plan::Start(_) | Plan::Run => true,
            Plan::Rest => task.outcome.is_some_and(|outcome| outcome.exit.is_success()),
        };
        self.tasks.iter().filter(is_left).count()
    }
}

#[cfg(test)]
mod tests;

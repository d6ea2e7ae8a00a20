//! Decides which tasks are stopped when; the caller acts on it.
//!
//! It takes ends of tasks, signals and the time since the job began, and returns actions. It does no input or output.

use std::collections::VecDeque;
use std::time::Duration;

use signal_hook::consts::{SIGCONT, SIGINT, SIGKILL, SIGQUIT, SIGTERM};

use crate::outcome::{Exit, Outcome};
use crate::restart::{Budget, Decision};
use crate::signals::Signal;

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start a task again; `count` is the number of its restarts so far.
    Start { rank: usize, count: u32 },
    /// Send a signal to the process group of a task.
    Signal { rank: usize, signal: i32 },
    /// Send a signal to the first process of a task only.
    SignalLeader { rank: usize, signal: i32 },
    /// Show a message to the user.
    Note(Note),
}

/// A message to the user while the job runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Note {
    /// A task failed, and `others` are being stopped.
    Failed { rank: usize, exit: Exit, at: Duration, others: usize },
    /// A task failed, and the job continues without it.
    Forgiven { rank: usize, exit: Exit, at: Duration },
    /// A task failed, and is started again after a pause while the others wait for it.
    Again { rank: usize, exit: Exit, at: Duration, pause: Duration, count: u32, of: u32 },
    /// A task failed, and is not started again, for this reason.
    GivenUp { rank: usize, why: String },
    /// The launcher was signalled, and forwards the signal.
    Interrupted { signal: i32, tasks: usize },
    /// These tasks did not stop within the grace and are killed, or the user has interrupted again.
    Killing { ranks: Vec<usize>, asked: bool },
    /// A task has ended, but processes that it started have not.
    Leftover { rank: usize },
    /// Not even SIGKILL ended a task; it is left to the kernel.
    Stuck { rank: usize },
}

/// The state of a job's tasks.
#[derive(Debug)]
pub(crate) struct Supervisor {
    tasks: Vec<Task>,
    phase: Phase,
    grace: Duration,
    /// The signal that stopped the tasks.
    interrupted: Option<i32>,
    /// The first signal that asked to end the job; it may arrive while the tasks are being stopped.
    asked: Option<i32>,
    /// The task that is started again alone, and how often.
    revivable: Option<(usize, Budget)>,
    actions: VecDeque<Action>,
}

#[derive(Debug, Default)]
struct Task {
    /// When it is started again, and how it has ended.
    revival: Option<(Duration, Outcome)>,
    restarts: u32,
    outcome: Option<Outcome>,
    /// Whether the others can continue without it, as long as one such task is left.
    expendable: bool,
    /// Whether no process of its group is left.
    gone: bool,
    /// Signals that the launcher sent it before its end.
    sent: Vec<i32>,
    /// The next step if it does not end.
    next: Option<(Duration, Step)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Ask the remaining processes of a finished task to end.
    Stop,
    Kill,
    /// Give up waiting, since the kernel holds it.
    GiveUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// A task says, or may say, that another one failed. That one gets a moment to end by itself: if it were stopped
    /// now, it would end by the launcher's signal, and its error message would be lost.
    Settling {
        until: Duration,
        rank: usize,
    },
    Stopping,
}

impl Supervisor {
    /// Creates a running job of `tasks` tasks, which get `grace` to stop when they are asked to.
    pub(crate) fn new(tasks: usize, grace: Duration) -> Self {
        let tasks = (0..tasks).map(|_| Task::default()).collect();
        let (phase, interrupted, revivable) = (Phase::Running, None, None);
        Self { tasks, phase, grace, interrupted, asked: None, revivable, actions: VecDeque::new() }
    }

    /// Lets a task be started again alone if it is lost, as often as the budget says.
    pub(crate) fn with_revivable(self, rank: usize, budget: Budget) -> Self {
        Self { revivable: Some((rank, budget)), ..self }
    }

    /// Returns the rest of the budget of the task that may be started again alone.
    pub(crate) fn take_budget(&mut self) -> Option<Budget> {
        self.revivable.take().map(|(_, budget)| budget)
    }

    /// Marks tasks that the others can do without, as long as one of them is left.
    pub(crate) fn with_expendable(mut self, ranks: impl IntoIterator<Item = usize>) -> Self {
        ranks.into_iter().for_each(|rank| self.tasks[rank].expendable = true);
        self
    }

    /// Handles the end of a task's first process; `leftover` tells whether others of its group live.
    pub(crate) fn handle_exit(&mut self, rank: usize, exit: Exit, leftover: bool, now: Duration) {
        let lives = |task: &Task| task.expendable && task.outcome.is_none();
        let forgiven = self.phase == Phase::Running
            && !exit.is_success()
            && self.tasks[rank].expendable
            && self.tasks.iter().enumerate().any(|(other, task)| other != rank && lives(task));
        if self.tasks[rank].outcome.is_some() || self.revive(rank, exit, leftover, now) {
            return;
        }
        let task = &mut self.tasks[rank];
        let stopped = task.sent.iter().any(|signal| exit.answers(*signal));
        task.outcome = Some(Outcome { exit, at: now, stopped, forgiven, told: false });
        task.gone = !leftover;
        if task.next.is_none() {
            // For example the far end of a pipe that is still writing.
            task.next = Some((now + self.grace.min(LINGER), Step::Stop));
        }
        match self.phase {
            Phase::Stopping => {}
            _ if exit.is_success() => {}
            _ if forgiven => self.actions.push_back(Action::Note(Note::Forgiven { rank, exit, at: now })),
            Phase::Running if exit.may_blame_others() => {
                self.phase = Phase::Settling { until: now + self.grace.min(SETTLE), rank };
            }
            Phase::Settling { .. } if exit.blames_others() => {}
            // Of two such codes either may be the cause.
            Phase::Settling { rank: first, .. } if exit.may_blame_others() && !self.blames_others(first) => {}
            Phase::Running | Phase::Settling { .. } => self.stop_after(rank, now),
        }
    }

    /// Plans another start of a task that was lost, if its budget allows one; returns whether it does.
    fn revive(&mut self, rank: usize, exit: Exit, leftover: bool, now: Duration) -> bool {
        let is_lost = matches!(exit, Exit::Signal(_) | Exit::Lost | Exit::Code(128..)) && !exit.answers(SIGTERM);
        let Some((_, budget)) = self.revivable.as_mut().filter(|(revivable, _)| *revivable == rank) else {
            return false;
        };
        if self.phase != Phase::Running || !is_lost {
            return false;
        }
        match budget.after(exit, now) {
            Decision::Restart { pause, count, of } => {
                let outcome = Outcome { exit, at: now, stopped: false, forgiven: false, told: false };
                let task = &mut self.tasks[rank];
                (task.revival, task.gone) = (Some((now + pause, outcome)), !leftover);
                // What it has left behind must not call as it any more.
                task.next = leftover.then_some((now, Step::Stop));
                self.actions.push_back(Action::Note(Note::Again { rank, exit, at: now, pause, count, of }));
                true
            }
            Decision::GiveUp(why) => {
                if !why.is_empty() {
                    self.actions.push_back(Action::Note(Note::GivenUp { rank, why }));
                }
                false
            }
        }
    }

    /// Handles the end of the last process in a task's group.
    pub(crate) fn handle_gone(&mut self, rank: usize) {
        self.tasks[rank].gone = true;
    }

    /// Handles a signal to the launcher.
    pub(crate) fn handle_signal(&mut self, signal: impl Into<Signal>, now: Duration) {
        match signal.into() {
            Signal::Child => {}
            Signal::Request(signal) => {
                // It would only kill a shell around the program.
                let living = self.tasks.iter().enumerate().filter(|(_, task)| task.outcome.is_none());
                self.actions.extend(living.map(|(rank, _)| Action::SignalLeader { rank, signal }));
            }
            Signal::End(signal) => self.end(signal, now),
        }
    }

    /// Handles a signal that asks to end the job.
    fn end(&mut self, signal: i32, now: Duration) {
        self.asked.get_or_insert(signal);
        if self.phase != Phase::Stopping {
            self.interrupted = Some(signal);
            let tasks = self.tasks.iter().filter(|task| !task.gone).count();
            self.actions.push_back(Action::Note(Note::Interrupted { signal, tasks }));
            self.stop(signal, now);
        } else if [SIGINT, SIGQUIT].contains(&signal) {
            self.kill(|_| true, true, now);
        } else {
            // A closed terminal is reported more than once, so a repetition is not a request to kill.
            self.send(signal);
        }
    }

    /// Handles the passage of time.
    pub(crate) fn handle_timeout(&mut self, now: Duration) {
        if let Phase::Settling { until, rank } = self.phase
            && until <= now
        {
            self.stop_after(rank, now);
        }
        for rank in 0..self.tasks.len() {
            let task = &mut self.tasks[rank];
            if self.phase == Phase::Running && task.gone && task.revival.is_some_and(|(at, _)| at <= now) {
                let count = task.restarts + 1;
                *task = Task { restarts: count, expendable: task.expendable, ..Task::default() };
                self.actions.push_back(Action::Start { rank, count });
            }
            match task.next {
                Some((at, Step::Stop)) if !task.gone && at <= now => {
                    task.next = Some((now + self.grace, Step::Kill));
                    self.actions.push_back(Action::Note(Note::Leftover { rank }));
                    self.actions.push_back(Action::Signal { rank, signal: SIGTERM });
                }
                Some((at, Step::GiveUp)) if !task.gone && at <= now => {
                    task.gone = true;
                    let killed =
                        Outcome { exit: Exit::Signal(SIGKILL), at: now, stopped: true, forgiven: false, told: false };
                    task.outcome.get_or_insert(killed);
                    self.actions.push_back(Action::Note(Note::Stuck { rank }));
                }
                _ => {}
            }
        }
        self.kill(|task| task.next.is_some_and(|(at, step)| step == Step::Kill && at <= now), false, now);
    }

    /// Stops all tasks, with the grace after which they are killed.
    pub(crate) fn stop(&mut self, signal: i32, now: Duration) {
        self.phase = Phase::Stopping;
        for task in &mut self.tasks {
            if let Some((_, outcome)) = task.revival.take() {
                task.outcome = Some(outcome);
            }
            task.next = Some((now + self.grace, Step::Kill));
        }
        self.send(signal);
        // A stopped task, for example in a debugger, must be continued to be able to end.
        let living = self.tasks.iter().enumerate().filter(|(_, task)| !task.gone);
        self.actions.extend(living.map(|(rank, _)| Action::Signal { rank, signal: SIGCONT }));
    }

    /// Returns the next action.
    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) has something to do.
    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        let settling = match self.phase {
            Phase::Settling { until, .. } => Some(until),
            Phase::Running | Phase::Stopping => None,
        };
        let next = self.tasks.iter().filter(|task| !task.gone).filter_map(|task| Some(task.next?.0));
        let starts = self.tasks.iter().filter(|task| task.gone).filter_map(|task| Some(task.revival?.0));
        next.chain(starts).chain(settling).min()
    }

    /// Returns whether no process of any task is left.
    pub(crate) fn is_done(&self) -> bool {
        self.tasks.iter().all(|task| task.gone && task.revival.is_none())
    }

    /// Returns how often each task was started again.
    pub(crate) fn restarts(&self) -> Vec<u32> {
        self.tasks.iter().map(|task| task.restarts).collect()
    }

    /// Returns the ends of all tasks, once the job is done.
    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        self.tasks.iter().filter_map(|task| task.outcome).collect()
    }

    /// Returns the signal that made the launcher stop a job without a failure.
    pub(crate) fn interrupted(&self) -> Option<i32> {
        self.interrupted
    }

    /// Returns the first signal that asked to end the job, also where a failure had stopped it before.
    pub(crate) fn asked_to_end(&self) -> Option<i32> {
        self.asked
    }

    fn blames_others(&self, rank: usize) -> bool {
        self.tasks[rank].outcome.is_some_and(|outcome| outcome.exit.blames_others())
    }

    fn stop_after(&mut self, rank: usize, now: Duration) {
        let others = self.tasks.iter().filter(|task| task.outcome.is_none() && task.revival.is_none()).count();
        if let Some(Outcome { exit, at, .. }) = self.tasks[rank].outcome {
            self.actions.push_back(Action::Note(Note::Failed { rank, exit, at, others }));
        }
        self.stop(SIGTERM, now);
    }

    fn kill(&mut self, which: impl Fn(&Task) -> bool, asked: bool, now: Duration) {
        let chosen = |(rank, task): (usize, &Task)| (!task.gone && which(task)).then_some(rank);
        let ranks: Vec<_> = self.tasks.iter().enumerate().filter_map(chosen).collect();
        if ranks.is_empty() {
            return;
        }
        for rank in &ranks {
            let task = &mut self.tasks[*rank];
            task.sent.push(SIGKILL);
            task.next = Some((now + UNKILLABLE, Step::GiveUp));
            self.actions.push_back(Action::Signal { rank: *rank, signal: SIGKILL });
        }
        self.actions.push_back(Action::Note(Note::Killing { ranks, asked }));
    }

    fn send(&mut self, signal: i32) {
        for (rank, task) in self.tasks.iter_mut().enumerate().filter(|(_, task)| !task.gone) {
            task.sent.push(signal);
            self.actions.push_back(Action::Signal { rank, signal });
        }
    }
}

/// How long processes that a finished task has left behind may continue.
const LINGER: Duration = Duration::from_secs(2);

/// How long a task that another one blames, or may blame, gets to end by itself.
pub(crate) const SETTLE: Duration = Duration::from_secs(1);

/// A killed process ends at once, unless the kernel holds it.
const UNKILLABLE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;

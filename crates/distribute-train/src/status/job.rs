//! The model of a job's state. It does no input or output, and reads no clock.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::progress::{Event, GroupCall, Message, Status, Vitals};

mod collectives;
mod peers;
mod show;

/// A job and its tasks. Times are those since the job began.
///
/// Values come from the tasks themselves, so their number and length are limited here; what is not finite or negative
/// is treated as not known.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_train::status::{End, Job, State};
///
/// let mut job = Job::new("mnist");
/// job.expect("worker:0");
/// job.start("worker:0", 4711, Duration::ZERO);
/// job.end("worker:0", End::Code(3), Duration::from_secs(5));
/// job.explain("worker:0", "disk full");
/// let view = job.view(Duration::from_secs(6));
/// assert_eq!((view.tasks[0].state, view.tasks[0].ended.as_deref()), (State::Failed, Some("exit code 3")));
/// assert_eq!(view.errors[0].text, "exit code 3: disk full");
/// ```
#[derive(Debug, Clone)]
pub struct Job {
    name: String,
    title: Option<String>,
    progress: Option<Status>,
    summary: Option<String>,
    tasks: Vec<Task>,
    /// The newest errors, oldest first.
    errors: VecDeque<Failure>,
    ended: Option<Duration>,
}

#[derive(Debug, Clone, Default)]
struct Task {
    name: String,
    process: Option<Process>,
    restarts: u32,
    /// The last report, and when it came.
    vitals: Option<(Vitals, Duration)>,
    ended: Option<End>,
    /// Why the other tasks consider this one lost.
    lost: Option<String>,
    last_error: Option<String>,
}

#[derive(Debug, Clone, Copy)]
struct Process {
    pid: u32,
    started: Duration,
}

#[derive(Debug, Clone)]
struct Failure {
    at: Duration,
    task: Option<String>,
    text: String,
}

/// The end of a task's process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It exited with a code.
    Code(i32),
    /// A signal ended it, such as SIGKILL.
    Signal(String),
    /// Its host was lost.
    Lost,
    /// The launcher stopped it, which does not count as a failure.
    Stopped,
}

impl End {
    pub(super) fn is_failure(&self) -> bool {
        !matches!(self, End::Code(0) | End::Stopped)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Code(code) => write!(f, "exit code {code}"),
            End::Signal(signal) => write!(f, "ended by {signal}"),
            End::Lost => f.write_str("lost with its host"),
            End::Stopped => f.write_str("stopped by the launcher"),
        }
    }
}

impl Job {
    /// Creates a job without tasks. The name is the label `job` of its metrics, and its title until the chief gives
    /// one.
    pub fn new(name: &str) -> Job {
        Job {
            name: short(name, NAME),
            title: None,
            progress: None,
            summary: None,
            tasks: Vec::new(),
            errors: VecDeque::new(),
            ended: None,
        }
    }

    /// Adds a task, named `job:index`. Reports of other tasks are ignored.
    pub fn expect(&mut self, task: &str) {
        if self.task(task).is_none() && self.tasks.len() < MOST_TASKS {
            self.tasks.push(Task { name: short(task, NAME), ..Task::default() });
        }
    }

    /// Records that a task's process was started; again, that it was restarted.
    pub fn start(&mut self, task: &str, pid: u32, now: Duration) {
        let Some(task) = self.task(task) else { return };
        task.restarts += u32::from(task.process.is_some());
        task.process = Some(Process { pid, started: now });
        (task.vitals, task.ended, task.lost) = (None, None, None);
        self.ended = None;
    }

    /// Takes a report of a task.
    pub fn receive(&mut self, message: &Message, now: Duration) {
        let Some(task) = self.task(&message.task) else { return };
        match &message.event {
            Event::Vitals(vitals) => {
                task.lost = None;
                let mut vitals = vitals.clone();
                vitals.calls.truncate(MOST_CALLS);
                vitals.calls.iter_mut().for_each(shorten);
                task.vitals = Some((vitals, now));
            }
            Event::Begin { title } => self.title = Some(short(title, TEXT)),
            Event::Step(status) | Event::Epoch(status) => {
                let mut status = status.clone();
                status.metrics.truncate(MOST_METRICS);
                status.metrics.iter_mut().for_each(|(name, _)| *name = short(name, NAME));
                self.progress = Some(status);
            }
            Event::End { summary } => self.summary = Some(summary.chars().take(TEXT).collect()),
        }
    }

    /// Records the end of a task's process.
    pub fn end(&mut self, task: &str, end: End, now: Duration) {
        let Some(found) = self.task(task) else { return };
        let failure = end.is_failure().then(|| end.to_string());
        found.ended = Some(end);
        if self.tasks.iter().all(|task| task.ended.is_some()) {
            self.ended = Some(now);
        }
        if let Some(failure) = failure {
            self.fail(Some(task), &failure, now);
        }
    }

    /// Adds the last words of a task that has failed to its last error. They are often read after its end is known.
    pub fn explain(&mut self, task: &str, words: &str) {
        let of_task = |failure: &&mut Failure| failure.task.as_deref() == Some(task);
        let Some(failure) = self.errors.iter_mut().rev().find(of_task) else { return };
        let text = short(&format!("{}: {}", failure.text, words.trim()), TEXT);
        failure.text.clone_from(&text);
        if let Some(task) = self.task(task) {
            task.last_error = Some(text);
        }
    }

    /// Records that the other tasks have lost one, and why.
    pub fn lose(&mut self, task: &str, reason: &str, now: Duration) {
        if let Some(found) = self.task(task)
            && found.lost.is_none()
        {
            found.lost = Some(short(reason, TEXT));
            self.fail(Some(task), reason, now);
        }
    }

    /// Adds an error of a task, or of the job as a whole.
    pub fn fail(&mut self, task: Option<&str>, text: &str, now: Duration) {
        let text = short(text, TEXT);
        if let Some(task) = task.and_then(|task| self.task(task)) {
            task.last_error = Some(text.clone());
        }
        if self.errors.len() == MOST_ERRORS {
            self.errors.pop_front();
        }
        self.errors.push_back(Failure { at: now, task: task.map(|task| short(task, NAME)), text });
    }

    /// Returns whether every task that reports, and whose process runs, has reported since a time.
    pub(super) fn has_heard_since(&self, asked: Duration) -> bool {
        let is_silent = |task: &Task| task.ended.is_none() && task.vitals.as_ref().is_some_and(|(_, at)| *at < asked);
        !self.tasks.iter().any(is_silent)
    }

    fn task(&mut self, name: &str) -> Option<&mut Task> {
        self.tasks.iter_mut().find(|task| task.name == name)
    }
}

impl Task {
    /// Returns the part before the index.
    fn role(&self) -> &str {
        self.name.split(':').next().unwrap_or_default()
    }
}

/// Limits the texts of a call.
fn shorten(call: &mut GroupCall) {
    (call.group, call.name) = (short(&call.group, NAME), short(&call.name, NAME));
    call.last = call.last.as_deref().map(|last| short(last, NAME));
    if let Some(now) = &mut call.now {
        (now.operation, now.call) = (short(&now.operation, NAME), short(&now.call, NAME));
    }
}

/// Returns the first characters of a text, in one line.
fn short(text: &str, most: usize) -> String {
    let mut chars = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = chars.by_ref().take(most).collect();
    if chars.next().is_some() {
        short.push('…');
    }
    short
}

/// Length limit of names, in characters.
const NAME: usize = 200;

/// Length limit of titles, errors and summaries, in characters.
const TEXT: usize = 2000;

const MOST_TASKS: usize = 8192;
const MOST_METRICS: usize = 100;
const MOST_CALLS: usize = 256;
const MOST_ERRORS: usize = 20;

#[cfg(test)]
mod tests;
